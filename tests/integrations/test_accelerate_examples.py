"""Accelerate's own examples on two ranks, as they are and attached: they train, or are refused in one line.

``CLIENTS_MIRROR`` names the folder that holds a clone of Accelerate as ``huggingface+accelerate/repo``, a git
directory. The examples need the packages datasets, evaluate and schedulefree, too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MIRROR = Path(os.environ.get("CLIENTS_MIRROR", "mirror"), "huggingface+accelerate", "repo")
PACKAGES = ("accelerate", "transformers", "datasets", "evaluate", "schedulefree")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MIRROR.is_dir(), reason="needs a clone of Accelerate in CLIENTS_MIRROR"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, PACKAGES)), reason=f"needs {', '.join(PACKAGES)} installed"
    ),
]

PREPARE = re.compile(
    r"( +)model, optimizer, train_dataloader, eval_dataloader(?:, lr_scheduler)? = accelerator\.prepare\(\n[^)]*\)"
)
SCHEDULE_FREE = (
    "UserInputError: optimizer must not be schedule-free, except at width 1 without local steps: its train() and "
    "eval() change weights in place; got AdamWScheduleFree"
)
IN_NO_SYNC = (
    "UserInputError: optimizer.step() must follow a backward pass outside of no_sync(), which hands over no "
    "gradient (to step on each rank's own: attach(..., windows=Windows(local_steps=H))); got a step without a new "
    "gradient"
)
WITH_A_HOOK = "UserInputError: ddp_model must have no communication hook; got one with fp16_compress_hook"


def run_example(name: str, width: int, folder: Path, *words: str) -> tuple[int, str]:
    """Run an example attached at this width, at 0 as it is; return its exit code and what it and its ranks print."""
    show = ["git", "--git-dir", str(MIRROR), "show", f"HEAD:examples/by_feature/{name}.py"]
    text = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    if width:
        call = f"pipeline = pipesgd.accelerate.attach(accelerator, model, optimizer, width={width}, codec='int8')"
        text, count = PREPARE.subn(rf"\g<0>\n\1import pipesgd.accelerate\n\1{call}", text)
        assert count == 1
        text = text.replace("    accelerator.end_training()", "    pipeline.close()\n    accelerator.end_training()")
    (folder / "program.py").write_text("import _hub\n" + re.sub(r'"num_epochs": \d+', '"num_epochs": 1', text))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "program.py",
            "--cpu",
            *words,
        ],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("name", "words", "width", "said"),
    [
        ("gradient_accumulation", ("--gradient_accumulation_steps", "2"), 2, None),
        ("schedule_free", (), 0, None),
        ("schedule_free", (), 1, None),
        ("schedule_free", (), 2, SCHEDULE_FREE),
        ("local_sgd", ("--local_sgd_steps", "4"), 1, IN_NO_SYNC),
        ("local_sgd", ("--local_sgd_steps", "4"), 2, IN_NO_SYNC),
        ("ddp_comm_hook", ("--ddp_comm_hook", "fp16"), 2, WITH_A_HOOK),
    ],
)
def test_an_example_of_accelerate_trains_or_is_refused_in_one_line(
    name: str, words: tuple[str, ...], width: int, said: str | None, tmp_path: Path
) -> None:
    code, printed = run_example(name, width, tmp_path, *words)
    assert (code == 0) == (said is None), printed
    assert said is None or said in printed
