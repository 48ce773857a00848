"""The example of a training loop of one's own, killed in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from _ranks import start_module
from _runs import run_example
from conftest import REPOSITORY

from experiments.command import torchrun

PROGRAM = REPOSITORY / "examples" / "own_loop.py"


def kill_a_rank(launcher: int) -> None:
    """Kill one of the ranks that torchrun, the process ``launcher``, has started; torchrun then ends the others."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = [child for child in children if PROGRAM.name in Path(f"/proc/{child}/cmdline").read_text()]
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGKILL)


@pytest.mark.slow
def test_a_loop_that_is_killed_and_started_again_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    output = run_example(PROGRAM.name, tmp_path / "whole")
    assert [line.partition(":")[0] for line in output.splitlines()] == [f"epoch {number}" for number in range(6)]
    assert float(output.split()[-1]) > 0.9

    killed, printed = tmp_path / "killed", tmp_path / "printed"
    printed.mkdir()
    os.mkfifo(printed / "stdout")
    process = start_module(*torchrun(2, str(PROGRAM))[2:], folder=killed, printed=printed)
    assert process.pid is not None
    try:
        with (printed / "stdout").open() as lines:
            for line in lines:
                if line.startswith("epoch 2"):
                    kill_a_rank(process.pid)
        process.join(60)
        assert process.exitcode not in (None, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert not (killed / "digits.pt").exists()
    again = run_example(PROGRAM.name, killed)
    assert again
    assert again in output  # the last epochs alone, with the same accuracies
    assert again != output

    one, other = (torch.load(tmp_path / name / "digits.pt") for name in ("whole", "killed"))
    assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one | other)
