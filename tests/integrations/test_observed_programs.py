"""The examples without pipesgd: a plan finds in them, on one process, what two real ranks count."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from conftest import REPOSITORY

from experiments.command import torchrun
from pipesgd.observe.plan import observe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("accelerate", "transformers", "lightning"))),
        reason="needs accelerate, transformers and lightning installed",
    ),
]

WITHOUT = {
    "ddp": (),
    "nanogpt": (
        ('    state = pipesgd.ddp.compress(model, codec="int8")  # pipesgd\n', ""),
        ("    state.close()", "    pass"),
    ),
    "hf_trainer": (('    trainer.add_callback(PipesgdCallback(trainer, width=2, codec="int8"))\n', ""),),
    "lightning_digits": (('strategy=PipesgdStrategy(width=2, codec="int8")', 'strategy="ddp"'),),
    "accelerate_loop": (
        (
            'pipeline = pipesgd.accelerate.attach(\n        accelerator, model, optimizer, width=2, codec="int8", '
            "updates=pipesgd.Updates(clip_norm=1.0)\n    )\n",
            "\n",
        ),
        ("    pipeline.close()\n", ""),
    ),
}
"""Parts of each example that go, and what takes their places."""


@pytest.mark.parametrize("name", list(WITHOUT))
def test_parameters_buckets_and_passes_are_those_of_two_ranks(name: str, tmp_path: Path) -> None:
    text = (REPOSITORY / "examples" / f"{name}.py").read_text(encoding="utf-8")
    for old, new in WITHOUT[name]:
        assert old in text
        text = text.replace(old, new)
    program = tmp_path / f"{name}.py"
    program.write_text(text, encoding="utf-8")
    found = observe(program, [], [], world_size=2)
    (tmp_path / "real").mkdir()
    job = torchrun(2, str(REPOSITORY / "tests" / "observe" / "_counted.py"), str(program))
    done = subprocess.run(job, cwd=tmp_path / "real", capture_output=True, text=True, timeout=300, check=False)
    counted = [line.removeprefix("counted:") for line in done.stdout.splitlines() if line.startswith("counted:")]
    assert len(counted) == 1, done.stdout + done.stderr
    expected = json.loads(counted[0])
    assert sum(expected["tensors"]) > 1000
    print(f"{name}: {sum(found['tensors']):,} parameters, {found['buckets']} buckets, {found['passes']} passes found;")
    print(f"{sum(expected['tensors']):,}, {expected['buckets']}, {expected['passes']} counted")
    assert {one: found[one] for one in expected} == expected
