"""Predictions compared with measurements: the settings, the arithmetic, and a short run on a testbed."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _obstacle import obstacle
from _runs import run_job_on_forked_ranks
from matplotlib.figure import Figure
from rich.console import Console

from experiments import validation_runs
from experiments.results import RESULTS, load
from experiments.timed_configurations import undisturbed
from experiments.validate_timing_model import (
    decide,
    lines,
    main,
    parse,
    plot,
    regret,
    summarize,
    tabulate,
    words_of,
)
from experiments.validation_runs import (
    EXTRAPOLATED,
    HELD_OUT,
    OTHERS,
    PRIVATE,
    QUICK,
    QUICK_SPACE,
    SETTINGS,
    SHARED,
    SPACE,
    Measured,
    Setting,
    ask,
    known_of,
    public,
    tensors_of,
)
from pipesgd.cli import parse as parse_training
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import alone
from tests.timing_model._profiles import MLP, PROFILE
from timing_model.job import Job
from timing_model.support import support_of

pytestmark = pytest.mark.slow

ONE, TWO, THREE = (f"--width {width} --codec int4 --all-reduce ring" for width in (1, 2, 3))
FREE = Setting(nodes=2, rate="200mbit", accelerator="75ms")
SMALL = dataclasses.replace(FREE, accelerator="9ms", hidden=332)
KINDS = {
    "free": FREE,
    "far": dataclasses.replace(FREE, nodes=4, calibrated=FREE),
    "shared": Setting(nodes=2, rate="200mbit"),
}


def cell(half_0: float, half_1: float, predicted: float = 1.0, cpu_share: float = 0.5) -> dict[str, Any]:
    return {
        "predicted_s": predicted,
        "low_s": 0.9 * predicted,
        "high_s": 1.1 * predicted,
        "cpu_share": cpu_share,
        "half_0_s": half_0,
        "half_1_s": half_1,
    }


def measured(*, chose: int | None = 2, **cells: dict[str, Any]) -> Measured:
    """Return a setting with these cells by width, in which a run chose a width."""
    choices = {"width": chose, "codec": "int4", "all-reduce": "ring", "segment-bytes": 1 << 20}
    planned = {"choices": choices, "iteration_seconds": 1.03, "support": "measured", "audition_seconds": 10.0}
    named = {f"--width {name[1:]} --codec int4 --all-reduce ring": one for name, one in cells.items()}
    return Measured(
        commit="abc",
        profile="",
        calibration_s=4.0,
        cells=named,
        choice=planned if chose else None,
        began_after=20.0,
        after_s=1.02,
    )


def test_settings_cover_what_the_targets_are_about_and_training_takes_all_of_them() -> None:
    kinds = (HELD_OUT, EXTRAPOLATED, SHARED)
    free, far, shared = ([one for one in SETTINGS.values() if one.kind == kind] for kind in kinds)
    assert len(free) >= 12
    assert len(free) * len(SPACE) >= 200
    assert {one.nodes for one in free} == {2, 3, 4, 5, 6}
    rates, latencies = [one.link.rate for one in free], [one.link.latency for one in free]
    assert (min(rates), max(rates), min(latencies), max(latencies)) == (50e6, 1e9, 0, 0.02)
    assert any(one.last_rate for one in free)
    for option in ("jitter", "persistence", "slow"):
        assert any(option in str(one.accelerator) for one in free)
    assert {(one.nodes, one.calibrated.nodes) for one in far if one.calibrated} >= {(6, 3), (3, 3)}
    assert len(SETTINGS) == len({one.name for one in SETTINGS.values()})
    for setting in (QUICK, *shared):
        for words in (*SPACE, *OTHERS):
            config = parse_training([*shlex.split(setting.words), *shlex.split(words)])
            if words in SPACE:
                choices = {name: config.options()[name] for name in ("width", "codec", "all-reduce")}
                assert words_of(choices) == words


def test_a_larger_model_computes_in_proportion() -> None:
    large, small = sum(tensors_of(FREE)), sum(tensors_of(SMALL))
    assert large / small == pytest.approx(8, rel=0.01)
    grown = known_of(PROFILE, dataclasses.replace(FREE, calibrated=SMALL))
    assert grown.tensors == tensors_of(FREE)
    assert grown.backward.value / MLP.backward.value == pytest.approx(grown.numel / MLP.numel)
    assert support_of(Job(cluster=PROFILE, compute=grown, world_size=3)).kind == "extrapolated"
    answers = [ask(PROFILE, grown, 3, words).iteration.total for words in (SPACE[0], "--strategy ddp")]
    assert all(answer > 0 for answer in answers)


def test_luck_in_one_half_is_no_merit_in_the_other() -> None:
    lucky = {ONE: cell(1.0, 1.0), TWO: cell(0.9, 1.1), THREE: cell(1.1, 0.9)}
    assert regret(lucky, ONE) == pytest.approx(1.0 / 1.1 - 1)
    assert regret({ONE: cell(1.0, 1.0), TWO: cell(0.8, 0.8)}, ONE) == pytest.approx(0.25)
    assert regret({ONE: cell(1.0, 1.0), TWO: cell(0.8, 0.8)}, TWO) == 0


def test_decisions_hold_what_was_reported_and_what_it_cost() -> None:
    found = {"free": measured(w1=cell(1.1, 1.1, predicted=0.9), w2=cell(1.0, 1.0))}
    [row] = decide(found, KINDS)
    assert (row["chosen"], row["fastest"]) == (TWO, TWO)
    assert row["reported_error"] == pytest.approx(1.03 / 1.02 - 1)
    assert row["after_to_measured"] == pytest.approx(1.02)
    assert (row["regret"], row["regret_of_the_prediction"]) == (0, pytest.approx(0.1))
    assert (row["audition_s"], row["calibration_s"], row["run_s"]) == (10, 4, 2000)
    with pytest.raises(RunError, match=r"^free: the choice must be among the measured configurations; got --width 2 "):
        decide({"free": measured(w1=cell(1, 1))}, KINDS)


def test_each_kind_counts_by_itself_and_busy_cores_only_where_they_are_the_point() -> None:
    found = {
        "free": measured(w1=cell(2.0, 2.0, predicted=1.0, cpu_share=0.9), w2=cell(1.0, 1.0, predicted=1.05)),
        "far": measured(chose=None, w1=cell(0.9, 1.1, predicted=1.2)),
        "shared": measured(w1=cell(1.0, 1.0, cpu_share=0.9), w2=cell(2.0, 2.0, cpu_share=0.9)),
    }
    rows = tabulate(found, KINDS)
    assert [row["counts"] for row in rows] == [False, True, True, True, True]
    assert [row["chosen"] for row in rows] == [False, True, False, False, True]
    summary = summarize(rows, decide(found, KINDS))
    assert summary[HELD_OUT]["cells"] == 1
    assert summary[HELD_OUT]["mean_error"] == pytest.approx(0.05)
    assert summary[HELD_OUT]["coverage"] == 1
    assert summary[EXTRAPOLATED]["mean_error"] == pytest.approx(0.2)
    assert summary[EXTRAPOLATED]["coverage"] == 0
    assert summary[EXTRAPOLATED]["repeatability"] == pytest.approx(1.1 / 0.9 - 1)
    assert summary[SHARED]["mean_signed_error"] == pytest.approx(-0.25)
    assert summary[f"auto, {HELD_OUT}"]["planning_above_target"] == 0
    assert summary[f"auto, {SHARED}"]["largest_regret"] == pytest.approx(1.0)
    assert f"auto, {EXTRAPOLATED}" not in summary
    said = "\n".join(lines(summary))
    assert "mean error: 5.00% (target at most 2.00%: missed)" in said
    assert "mean error: 20.00% (target at most 4.00%: missed)" in said
    assert "largest regret: 0.00% (target at most 3.00%: met)" in said
    assert "largest regret: 100.00%\n" in said
    assert "coverage: 100.00% (target 85% to 95%: missed)" in said
    assert plot(rows, Figure().subplots()).get_legend_handles_labels()[1] == [SHARED, HELD_OUT, EXTRAPOLATED]


def test_planning_may_take_five_seconds_or_a_fiftieth_of_the_run() -> None:
    short = measured(w2=cell(0.1, 0.1))  # 14 s of 200 s
    long = measured(w2=cell(1.0, 1.0))  # 14 s of 2000 s
    summary = summarize(
        tabulate({"free": short}, KINDS), decide({"free": short}, KINDS) + decide({"shared": long}, KINDS)
    )
    assert summary[f"auto, {HELD_OUT}"]["planning_above_target"] == 1
    assert summary[f"auto, {SHARED}"]["planning_above_target"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--settings", "9 x 1mbit"], "--settings must be one of 2 x 50mbit, 75ms"),
        (["--output", str(RESULTS)], "--output must name another folder than that of the full results with --quick"),
        (["--fresh", "--finished"], "--finished: not allowed with argument --fresh"),
    ],
)
def test_wrong_options_get_one_line(words: Sequence[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError) as caught:
        parse(["--quick", "--output", str(tmp_path), *words], by_torchrun=False)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_published_profiles_do_not_name_machines_and_folders(tmp_path: Path) -> None:
    profile = dataclasses.replace(PROFILE, provenance={"hosts": "galaxy7", "command": "calibrate /x", "torch": "2"})
    text = public(profile, tmp_path / "p.toml")
    assert not any(name in text for name in (*PRIVATE, "galaxy7"))
    assert 'torch = "2"' in text


def test_a_short_run_chooses_and_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that chooses is the user's command on a testbed; a test of bench_islands has another job there."""
    if reason := obstacle():
        pytest.skip(reason)
    monkeypatch.setattr(validation_runs, "run_job", run_job_on_forked_ranks)
    main(["--quick", "--output", str(tmp_path)], alone(), Console(quiet=True))
    tables = {f"validate_timing_model{of}{end}" for of in ("", "_auto") for end in (".csv", ".manifest.json")}
    assert {path.name for path in tmp_path.iterdir()} == {*tables, "validate_timing_model.runs.json"}
    assert [row["words"] for row in load(tmp_path / "validate_timing_model.csv")] == list(QUICK_SPACE)
    before = (tmp_path / "validate_timing_model.runs.json").read_bytes()
    main(["--quick", "--output", str(tmp_path)], alone(), Console(quiet=True))
    assert (tmp_path / "validate_timing_model.runs.json").read_bytes() == before, (
        "finished settings were measured again"
    )


def test_what_was_disturbed_is_measured_once_more_after_the_others() -> None:
    """The less disturbed measurement counts, which need not be the second one."""
    order: list[str] = []

    def measured(name: str, *stolen: float) -> Callable[[], dict[str, float]]:
        left = iter(stolen)

        def measure() -> dict[str, float]:
            order.append(name)
            return {"stolen": next(left)}

        return measure

    found = undisturbed([measured("a", 0.05, 0.06), measured("b", 0.02), measured("c", 0.03, 0.0)])
    assert order == ["a", "b", "c", "a", "c"]
    assert [one["stolen"] for one in found] == [0.05, 0.02, 0.0]
