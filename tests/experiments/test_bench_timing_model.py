"""The timing model's benchmark: a quick run has a row for every case."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench_timing_model import QUICK, ask, cases, parse
from experiments.results import REPOSITORY, load
from pipesgd.errors import UserInputError

pytestmark = pytest.mark.slow


def test_a_quick_run_has_a_row_for_every_case(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "experiments.bench_timing_model", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, check=False)
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
