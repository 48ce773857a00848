"""Kept runs: each is made once, as soon as it is missing, and saved before the next one begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from experiments.kept_runs import KeptRuns
from experiments.testbed import TestbedFailedError
from pipesgd.errors import RunError


@dataclass(frozen=True)
class Squared:
    """A run."""

    number: int


def test_only_missing_runs_are_made_and_each_is_kept_at_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make(number: int) -> Squared:
        if number == 3:
            raise RuntimeError("stopped")
        made.append(number)
        return Squared(number * number)

    def complete(*numbers: int, fresh: bool = False, finished: bool = False) -> dict[str, Squared]:
        kept = KeptRuns(tmp_path / "runs" / "kept.json", Squared, fresh=fresh)
        planned = {str(number): number for number in numbers}
        return kept.complete(planned, make, Console(quiet=True), "squares", finished=finished)

    with pytest.raises(RuntimeError, match="stopped"):
        complete(1, 2, 3)
    assert complete(2, 1) == {"2": Squared(4), "1": Squared(1)}
    assert complete(2, 3, finished=True) == {"2": Squared(4)}
    assert made == [1, 2]
    assert complete(2, fresh=True) == {"2": Squared(4)}
    assert made == [1, 2, 2]
    assert complete(1, finished=True) == {}


@pytest.mark.parametrize("kind", [RunError, TestbedFailedError])
def test_a_run_that_fails_keeps_no_other_from_being_made_and_is_made_again(
    kind: type[Exception], tmp_path: Path
) -> None:
    fails = {2}

    def make(number: int) -> Squared:
        if number in fails:
            raise kind("a port is taken")
        return Squared(number * number)

    def complete() -> dict[str, Squared]:
        planned = {str(number): number for number in (1, 2, 3)}
        return KeptRuns(tmp_path / "kept.json", Squared).complete(planned, make, Console(quiet=True), "squares")

    with pytest.raises(RunError, match=r"^squares: 1 of 3 failed, .*; the first was 2: a port is taken$"):
        complete()
    assert KeptRuns(tmp_path / "kept.json", Squared).load() == {"1": Squared(1), "3": Squared(9)}
    fails.clear()
    assert complete() == {"1": Squared(1), "2": Squared(4), "3": Squared(9)}
