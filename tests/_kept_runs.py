"""For experiments with kept runs on simulated ranks: results that are known, and what all of them refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.simulated_runs import Run
from pipesgd.errors import UserInputError


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
