"""For experiments with kept runs on simulated ranks: results that are known, and what all of them refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from experiments.simulated_runs import Run
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks, alone


def ran(accuracy: float | None, loss: float = 0.5) -> Run:
    """Return a run that came to this accuracy and loss; with None, one that diverged."""
    diverged = accuracy is None
    return Run(
        commit="c0ffee",
        seconds=9.0,
        diverged_at=7 if diverged else None,
        train_loss=None if diverged else loss,
        test_loss=None if diverged else loss,
        test_accuracy=accuracy,
    )


def check_refused(parse: Callable[..., Any], words: Sequence[str], message: str, output: Path) -> None:
    """Check that ``parse`` refuses ``words`` in one line that matches ``message``, and torchrun, whatever the words."""
    with pytest.raises(UserInputError, match=message) as error:
        parse(["--quick", "--output", str(output), *words], by_torchrun=False)
    assert "\n" not in str(error.value)
    with pytest.raises(UserInputError, match="without torchrun"):
        parse([], by_torchrun=True)


def make_runs(main: Callable[[Sequence[str], Ranks, Console], None], words: Sequence[str]) -> None:
    """Run an experiment here, so that the processes it starts are forked and need not import torch first.

    A warning in one of them fails the test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.simulated_runs._start_worker", _start_strict_worker)
        main(words, alone(), Console(quiet=True))


def _start_strict_worker() -> None:
    torch.set_num_threads(1)
    for kind in (UserWarning, RuntimeWarning, FutureWarning):
        warnings.simplefilter("error", kind)
