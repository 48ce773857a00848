"""Predictions against measurements: what is measured, what is made of it; and a real setting."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _obstacle import obstacle
from matplotlib.figure import Figure

from experiments.contenders import WORKLOADS
from experiments.results import REPOSITORY, RESULTS, load
from experiments.validate_timing_model import decide, parse, plot, summarize, tabulate
from experiments.validation_runs import CONFIGURATIONS, QUICK_CONFIGURATIONS, SETTINGS, Measured
from pipesgd.command_line import parse as parse_training
from pipesgd.errors import UserInputError


def cell(
    predicted: float, measured: tuple[float, float], *, codec: str = "fp32", chosen: bool = False
) -> dict[str, Any]:
    return {
        "codec": codec,
        "predicted_s": predicted,
        "low_s": predicted - 0.05,
        "high_s": predicted + 0.05,
        "chosen": chosen,
        "round_0_s": measured[0],
        "round_1_s": measured[1],
    }


def test_there_are_enough_settings_and_configurations_and_training_would_take_all_of_them() -> None:
    assert len(SETTINGS) >= 10
    assert len(set(CONFIGURATIONS)) == len(CONFIGURATIONS) >= 24
    assert {one.nodes for one in SETTINGS.values()} == {2, 3, 4, 5}
    assert {one.workload for one in SETTINGS.values()} == {"mlp", "small-mlp", "convnet"}
    rates = [one.link.rate for one in SETTINGS.values()]
    assert (min(rates), max(rates)) == (50e6, 1e9)
    for workload in {WORKLOADS[one.workload] for one in SETTINGS.values()}:
        configs = [parse_training(shlex.split(f"{workload} {words}")) for words in CONFIGURATIONS]
        assert {config.pipeline.strategy for config in configs} == {"pipelined", "ps-sync", "ddp"}
        pipelined = [config for config in configs if config.pipeline.strategy == "pipelined"]
        assert {config.pipeline.width for config in pipelined} == {1, 2, 3}
        assert {config.compression.codec for config in pipelined} == {"fp32", "bf16", "int8", "int4", "ternary"}
        all_reduces = {config.pipeline.all_reduce for config in pipelined}
        assert all_reduces == {"ring", "halving-doubling", "all-to-all", "native"}


def test_errors_coverage_regret_and_whether_a_codec_helps() -> None:
    found = {
        "helps": Measured(
            commit="c0ffee",
            cells={
                "--codec fp32": cell(1.0, (1.0, 1.0)),
                "--codec int8": cell(1.1, (0.8, 1.0), codec="int8", chosen=True),
                "--strategy ddp": cell(2.0, (2.0, 2.0)),
            },
        ),
        "tie": Measured(
            commit="c0ffee",
            cells={
                "--codec fp32": cell(1.0, (1.0, 1.0)),
                "--codec int8": cell(0.5, (0.98, 1.0), codec="int8", chosen=True),
            },
        ),
        "hurts": Measured(
            commit="c0ffee",
            cells={
                "--codec fp32": cell(1.0, (1.0, 1.0)),
                "--codec int8": cell(0.9, (1.2, 1.2), codec="int8", chosen=True),
            },
        ),
    }
    rows = tabulate(found)
    by_name = {(row["setting"], row["words"]): row for row in rows}
    int8 = by_name["helps", "--codec int8"]
    assert int8["measured_s"] == pytest.approx(0.9)
    assert int8["error"] == pytest.approx(1.1 / 0.9 - 1)
    assert int8["repeatability"] == pytest.approx(0.25)
    assert [row["covered"] for row in rows] == [2, 0, 2, 2, 0, 2, 0]
    decisions = {row["setting"]: row for row in decide(rows)}
    assert [decisions[name]["regret"] for name in found] == [0.0, 0.0, pytest.approx(0.2)]
    assert decisions["helps"]["codec_gain_measured"] == pytest.approx(1 / 0.9 - 1)
    assert decisions["helps"]["codec_gain_predicted"] == pytest.approx(1 / 1.1 - 1)
    summary = summarize(rows, list(decisions.values()))
    assert summary["cells"] == 7
    assert summary["coverage"] == 8 / 14
    assert summary["largest_regret"] == pytest.approx(0.2)
    assert summary["codecs_right"] == "0 of 2"
    axes = plot(rows, Figure().subplots())
    assert axes.get_legend_handles_labels()[1] == list(found)


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


def test_a_real_setting_is_predicted_and_then_measured(tmp_path: Path) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    words = ["-m", "experiments.validate_timing_model", "--quick", "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = load(tmp_path / "validate_timing_model.csv")
    assert [row["words"] for row in rows] == list(QUICK_CONFIGURATIONS)
    for row in rows:
        assert min(row["predicted_s"], row["round_0_s"], row["round_1_s"]) > 0
        assert row["low_s"] <= row["predicted_s"] <= row["high_s"]
    assert sum(row["chosen"] for row in rows) == 1
    assert (tmp_path / "validate_timing_model.png").exists()
    assert "2 cells: error" in done.stdout
    again = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "1 of 1 runs are there" in again.stdout
