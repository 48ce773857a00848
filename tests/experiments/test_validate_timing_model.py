"""Predictions against measurements: what is measured, what is made of it; and one real cell, predicted and measured."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _obstacle import obstacle
from matplotlib.figure import Figure

from experiments.results import REPOSITORY, RESULTS, load
from experiments.validate_timing_model import (
    SETTINGS,
    WORKLOADS,
    Cell,
    _key,
    parse,
    plan,
    plot,
    summarize,
    tabulate,
)
from pipesgd.command_line import parse as parse_training
from pipesgd.errors import UserInputError


def cell(predicted: float, measured: Sequence[float], half_interval: float = 0.05) -> Cell:
    return Cell(
        commit="c0ffee",
        predicted_s=predicted,
        low_s=predicted - half_interval,
        high_s=predicted + half_interval,
        parts_s={},
        support="interpolated",
        limit="network",
        measured_s=list(measured),
        failure=None if len(measured) == 2 else "did not end within 300 s",
    )


def test_there_are_enough_cells_of_every_kind_and_training_would_take_all_of_them() -> None:
    todo = plan(list(SETTINGS.values()))
    cells = [(setting, words) for setting, of_setting in todo.items() for words in of_setting]
    assert len(cells) >= 60
    assert len({_key(*one) for one in cells}) == len(cells)
    assert {setting.nodes for setting, _ in cells} == {2, 3, 4, 5}
    assert {setting.workload for setting, _ in cells} == set(WORKLOADS) - {"digits"}
    configs = [parse_training(shlex.split(f"{WORKLOADS[setting.workload]} {words}")) for setting, words in cells]
    assert {config.pipeline.strategy for config in configs} == {"pipelined", "ps-sync", "ddp"}
    pipelined = [config for config in configs if config.pipeline.strategy == "pipelined"]
    assert {config.pipeline.width for config in pipelined} == {1, 2, 3}
    assert {config.compression.codec for config in pipelined} == {"fp32", "bf16", "int8", "int4", "ternary"}
    assert {config.pipeline.all_reduce for config in pipelined} == {"ring", "halving-doubling", "all-to-all", "native"}


def test_errors_coverage_and_repeatability() -> None:
    setting = next(iter(SETTINGS.values()))
    todo = {setting: ["a", "b", "c", "not there yet"]}
    cells = {
        _key(setting, "a"): cell(1.0, [1.0, 1.0]),
        _key(setting, "b"): cell(1.1, [0.9, 1.1]),
        _key(setting, "c"): cell(1.0, [1.0]),
    }
    rows = tabulate(todo, cells)
    assert [row["words"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["error"] == pytest.approx(0.1)
    assert rows[1]["repeatability"] == pytest.approx(1.1 / 0.9 - 1)
    assert [row["covered"] for row in rows] == [2, 1, None]
    summary = summarize(rows)
    assert (summary["cells"], summary["failed"]) == (2, 1)
    assert summary["mean_error"] == pytest.approx(0.05)
    assert summary["coverage"] == 0.75
    axes = plot(rows, Figure().subplots())
    assert axes.get_legend_handles_labels()[1] == [setting.name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--settings", "4 x 200mbit mpl"], r"--settings must be one of .*; got '4 x 200mbit mpl' \(did you mean"),
        (["--output", str(RESULTS)], "--output must name another folder"),
        (["--fresh", "--finished"], "--finished: not allowed with argument --fresh"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: Sequence[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=message) as error:
        parse(["--quick", "--output", str(tmp_path), *words], by_torchrun=False)
    assert "\n" not in str(error.value)


def test_a_real_cell_is_predicted_and_then_measured(tmp_path: Path) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    words = ["-m", "experiments.validate_timing_model", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stderr
    (row,) = load(tmp_path / "validate_timing_model.csv")
    assert row["predicted_s"] > 0
    assert row["round_0_s"] > 0
    assert row["low_s"] <= row["predicted_s"] <= row["high_s"]
    assert (tmp_path / "validate_timing_model.png").exists()
    assert "1 cells: error" in done.stdout
