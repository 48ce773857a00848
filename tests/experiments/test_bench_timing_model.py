"""The timing model's benchmark: a quick run has a row for every case."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_module

from experiments.bench_timing_model import QUICK, ask, cases, parse
from experiments.results import load
from pipesgd.errors import UserInputError

pytestmark = pytest.mark.slow


def test_a_quick_run_has_a_row_for_every_case(tmp_path: Path) -> None:
    done = run_module("experiments.bench_timing_model", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = load(tmp_path / "bench_timing_model.csv")
    assert [row["case"] for row in rows] == [case.name for case in cases(**QUICK)]
    assert all(row["median_s"] > 0 for row in rows)


def test_a_command_that_fails_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="timing-model plan --world-size 0 ended with 2"):
        ask("plan --world-size 0")


def test_it_is_one_process() -> None:
    with pytest.raises(UserInputError, match="without torchrun"):
        parse([], by_torchrun=True)
