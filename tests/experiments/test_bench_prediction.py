"""The cost of predictions: the rows of a quick run, and their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_module

from experiments.bench_prediction import NAMES, OPTIMIZERS, STEP, parse
from experiments.results import load
from pipesgd.errors import UserInputError

pytestmark = pytest.mark.slow


def test_a_quick_run_has_a_row_for_every_optimizer_and_prediction(tmp_path: Path) -> None:
    done = run_module("experiments.bench_prediction", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {(row["optimizer"], row["prediction"]): row for row in load(tmp_path / "bench_prediction.csv")}
    assert list(rows) == [(optimizer, name) for optimizer in OPTIMIZERS for name in (STEP, *NAMES)]
    # Float32: a gradient in flight, predicted weights, and the errors of guesses; by a copy also a gradient,
    # and the state: one buffer, or two and a count.
    assert rows["sgd", "local"]["bytes_per_parameter"] == 4 * 2
    assert rows["sgd", "local by a copy"]["bytes_per_parameter"] == 4 * 4
    assert rows["adamw", "eager"]["bytes_per_parameter"] == 4 * 3
    assert rows["adamw", "eager by a copy"]["bytes_per_parameter"] == pytest.approx(4 * 6, abs=0.01)
    assert rows["sgd", "spectrain"]["bytes_per_parameter"] == 2 * 4
    assert rows["sgd", "none"]["bytes_per_parameter"] == rows["sgd", STEP]["bytes_per_parameter"] == 0
    assert rows["sgd", STEP]["ratio_to_step_median"] == 1


def test_it_is_one_process() -> None:
    with pytest.raises(UserInputError, match="without torchrun"):
        parse([], by_torchrun=True)
