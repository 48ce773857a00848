"""The formula for jitter against simulated iterations: rows of every kind of jitter, and their errors."""

from __future__ import annotations

import pytest
from rich.console import Console

from experiments.jitter import NOISES, QUICK, compute, summarize


@pytest.mark.slow
def test_every_kind_of_jitter_has_its_errors() -> None:
    rows = compute(QUICK, Console(quiet=True))
    assert len(rows) == 2 * len(NOISES)
    shown = summarize(rows)
    assert len(shown) == len(NOISES)
    assert all(row["formula"] >= 1 and row["uncertainty"] > 0 for row in rows)


def test_errors_are_those_of_the_formula() -> None:
    row = {"cv": 0.1, "persistence": 0.5, "comm_cv": 0.0, "uncertainty": 0.01, "simulated": 1.0}
    [shown] = summarize([row | {"formula": 1.01}, row | {"formula": 0.97}])
    assert (shown["mean error"], shown["worst"], shown["simulation"]) == ("2.0%", "-3.0%", "±1.0%")
