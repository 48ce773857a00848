"""The example with nanoGPT's loop: three lines away from DistributedDataParallel, and it trains as well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from _ranks import run_as_ranks
from _runs import EXAMPLES
from conftest import REPOSITORY

pytestmark = pytest.mark.slow

TEXT = (EXAMPLES / "nanogpt.py").read_text(encoding="utf-8")
COMPRESSED = 'state = pipesgd.ddp.compress(model, codec="int8")'
ATTACHED = (
    'state = pipesgd.ddp.attach(model, optimizer, width=2, codec="int8", updates=pipesgd.Updates(clip_norm=grad_clip))'
)


def plain() -> str:
    """Return the program without the lines that are marked as those of pipesgd."""
    return "".join(line for line in TEXT.splitlines(keepends=True) if not line.endswith("# pipesgd\n"))


def losses(program: str, folder: Path) -> list[float]:
    """Run a program for a few iterations on two ranks; return its losses on the part of the text that is held out."""
    folder.mkdir()
    names = "max_iters, eval_interval, eval_iters"
    short, count = re.subn(rf"^{names} = .*$", f"{names} = 60, 20, 8", program, flags=re.MULTILINE)
    assert count == 1
    (folder / "program.py").write_text(short, encoding="utf-8")
    printed = run_as_ranks(2, folder / "program.py", folder)
    return [float(loss) for loss in re.findall(r"^step \d+: .* val loss ([\d.]+)$", printed, re.MULTILINE)]


def test_three_lines_are_all_that_it_has_of_pipesgd() -> None:
    assert TEXT.count("\n") - plain().count("\n") == 3
    assert "pipesgd" not in plain().partition('"""\n\n')[2]


def test_the_readme_shows_these_lines() -> None:
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\+ (.*)$", page.partition("```diff\n")[2].partition("```")[0], re.MULTILINE)
    marked = [line.removesuffix("# pipesgd").strip() for line in TEXT.splitlines() if line.endswith("# pipesgd")]
    assert shown == marked


def test_it_trains_as_with_ddp_compressed_and_attached(tmp_path: Path) -> None:
    assert COMPRESSED in TEXT
    programs = {"ddp": plain(), "compress": TEXT, "attach": TEXT.replace(COMPRESSED, ATTACHED)}
    found = {name: losses(program, tmp_path / name) for name, program in programs.items()}
    for name, own in found.items():
        assert len(own) == 4
        assert own[-1] < own[0] - 2.0
        assert own[0] == found["ddp"][0]
        assert abs(own[-1] - found["ddp"][-1]) < (0.02 if name == "compress" else 0.15)
        checkpoint = torch.load(tmp_path / name / "ckpt.pt")
        assert checkpoint["iter_num"] == 60
        weights = checkpoint["model"]
        assert weights["wte.weight"].data_ptr() == weights["lm_head.weight"].data_ptr(), "tied"
