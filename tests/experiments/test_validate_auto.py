"""The validation of ``--width auto``: its arithmetic, and a short run on a testbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _obstacle import obstacle
from rich.console import Console

from experiments.validate_auto import (
    QUICK,
    SETTINGS,
    Measured,
    configurations,
    decisions,
    main,
    parse,
    regret,
    summarize,
    tabulate,
    words_of,
)
from pipesgd.cli import parse as parse_training
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import alone

ONE, TWO, THREE = (f"--width {width} --codec int4 --all-reduce ring" for width in (1, 2, 3))


def cell(half_0: float, half_1: float, predicted: float = 1.0, cpu_share: float = 0.5) -> dict[str, Any]:
    return {
        "predicted_s": predicted,
        "low_s": 0.9 * predicted,
        "high_s": 1.1 * predicted,
        "cpu_share": cpu_share,
        "half_0_s": half_0,
        "half_1_s": half_1,
    }


def measured(choice: dict[str, Any] | None = None, **cells: dict[str, Any]) -> Measured:
    chosen = {"width": 2, "codec": "int4", "all-reduce": "ring", "segment-bytes": 1 << 20}
    planned = {"choices": chosen, "iteration_seconds": 1.03, "support": "measured", "audition": {"cost": 10.0}}
    named = {f"--width {name[1:]} --codec int4 --all-reduce ring": one for name, one in cells.items()}
    return Measured(
        commit="abc", choice=planned | (choice or {}), calibration_s=4.0, began_after=20.0, profile="", cells=named
    )


def test_luck_in_one_half_is_no_merit_in_the_other() -> None:
    lucky = {ONE: cell(1.0, 1.0), TWO: cell(0.9, 1.1), THREE: cell(1.1, 0.9)}
    assert regret(lucky, ONE) == pytest.approx(1.0 / 1.1 - 1)
    assert regret({ONE: cell(1.0, 1.0), TWO: cell(0.8, 0.8)}, ONE) == pytest.approx(0.25)
    assert regret({ONE: cell(1.0, 1.0), TWO: cell(0.8, 0.8)}, TWO) == 0


def test_decisions_hold_what_was_reported_and_what_it_cost() -> None:
    found = {"a": measured(w1=cell(1.1, 1.1, predicted=0.9), w2=cell(1.0, 1.0))}
    [row] = decisions(found)
    assert (row["chosen"], row["fastest"]) == (TWO, TWO)
    assert row["reported_error"] == pytest.approx(0.03)
    assert (row["regret"], row["regret_of_the_prediction"]) == (0, pytest.approx(0.1))
    assert row["audition_share"] == pytest.approx(10 / 2000)
    with pytest.raises(RunError, match=r"^a: the choice must be among the measured configurations; got --width 2 "):
        decisions({"a": measured(w1=cell(1, 1))})


def test_only_cells_that_leave_the_cores_free_count_for_the_model() -> None:
    found = {"a": measured(w1=cell(2.0, 2.0, predicted=1.0, cpu_share=0.9), w2=cell(1.0, 1.0, predicted=1.05))}
    summary = summarize(decisions(found), tabulate(found))
    assert summary["cells_below_60_percent_cpu"] == 1
    assert summary["mean_error_of_those"] == pytest.approx(0.05)
    assert summary["covered_of_those"] == 1


def test_every_setting_and_configuration_is_one_that_the_trainer_takes() -> None:
    assert len(SETTINGS) >= 12
    for words in configurations():
        config = parse_training([*QUICK.words.split(), *words.split()])
        choices = {name: config.options()[name] for name in ("width", "codec", "all-reduce")}
        assert words_of(choices) == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--settings", "9 x 1mbit"], "--settings must be one of 2 x 50mbit, 75ms"),
        (["--quick"], "--output must name another folder than that of the full results with --quick"),
    ],
)
def test_wrong_options_get_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError) as caught:
        parse(words, by_torchrun=False)
    assert str(caught.value).startswith(message)


@pytest.mark.slow
def test_a_short_run_chooses_and_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    monkeypatch.setattr("experiments.validate_auto.ITERATIONS", 20)  # too few for an audition
    main(["--quick", "--output", str(tmp_path)], alone(), Console(quiet=True))
    assert {path.name for path in tmp_path.iterdir()} == {
        "validate_auto.csv",
        "validate_auto.manifest.json",
        "validate_auto.png",
        "validate_auto.runs.json",
        "validate_auto_cells.csv",
        "validate_auto_cells.manifest.json",
    }
