"""Predictions compared with measurements: the cells, their evaluation, and a real setting."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _obstacle import obstacle
from matplotlib.figure import Figure

from experiments.contenders import WORKLOADS
from experiments.results import REPOSITORY, RESULTS, load
from experiments.timed_configurations import undisturbed
from experiments.validate_timing_model import decide, lines, parse, plot, summarize, tabulate
from experiments.validation_runs import (
    ALL_REDUCES,
    CONFIGURATIONS,
    EXTRAPOLATED_CONFIGURATIONS,
    PRIVATE,
    QUICK,
    QUICK_CONFIGURATIONS,
    QUICK_FINAL_PASSES,
    SETTINGS,
    Measured,
    Setting,
    known_of,
    tensors_of,
)
from pipesgd.cli import parse as parse_training
from pipesgd.errors import UserInputError
from tests.timing_model._profiles import MLP, PROFILE
from timing_model.cluster_profile import Profile
from timing_model.job import Job, support_of

pytestmark = pytest.mark.slow


def cell(
    predicted: float, measured: tuple[float, float], *, codec: str = "fp32", chosen: bool = False, drift: float = 1.0
) -> dict[str, Any]:
    """Return a cell whose time is all computation."""
    corrected = predicted * drift
    return {
        "codec": codec,
        "predicted_s": predicted,
        "low_s": predicted - 0.05,
        "high_s": predicted + 0.05,
        "chosen": chosen,
        "drift": drift,
        "corrected_s": corrected,
        "corrected_low_s": corrected - 0.05,
        "corrected_high_s": corrected + 0.05,
        "round_0_s": measured[0],
        "round_1_s": measured[1],
    }


def test_there_are_enough_settings_and_configurations_and_training_would_take_all_of_them() -> None:
    held_out = {name: one for name, one in SETTINGS.items() if not one.extrapolated}
    assert len(held_out) >= 10
    assert len(set(CONFIGURATIONS)) == len(CONFIGURATIONS) >= 24
    assert {one.nodes for one in held_out.values()} == {2, 3, 4, 5}
    assert {one.workload for one in held_out.values()} == {"mlp", "small-mlp", "convnet"}
    rates = [one.link.rate for one in held_out.values()]
    assert (min(rates), max(rates)) == (50e6, 1e9)
    for workload in {WORKLOADS[one.workload] for one in held_out.values()}:
        configs = [parse_training(shlex.split(f"{workload} {words}")) for words in CONFIGURATIONS]
        assert {config.pipeline.strategy for config in configs} == {"pipelined", "ps-sync", "ddp"}
        pipelined = [config for config in configs if config.pipeline.strategy == "pipelined"]
        assert {config.pipeline.width for config in pipelined} == {1, 2, 3}
        assert {config.compression.codec for config in pipelined} == {"fp32", "bf16", "int8", "int4", "ternary"}
        all_reduces = {config.pipeline.all_reduce for config in pipelined}
        assert all_reduces == set(ALL_REDUCES)


def test_settings_that_are_extrapolated_go_to_twice_the_ranks_and_eight_times_the_model() -> None:
    extrapolated = [one for one in SETTINGS.values() if one.extrapolated]
    assert {one.nodes for one in extrapolated if one.calibrated_nodes == 3} == {4, 5, 6}
    [larger] = (one for one in extrapolated if one.calibrated_workload is not None)
    small, large = sum(tensors_of(str(larger.calibrated_workload))), sum(tensors_of(larger.workload))
    assert large / small == pytest.approx(8, rel=1e-3)
    words = [parse_training(shlex.split(f"{WORKLOADS['small-mlp']} {words}")) for words in EXTRAPOLATED_CONFIGURATIONS]
    assert {config.pipeline.all_reduce for config in words} <= set(ALL_REDUCES)
    assert len(SETTINGS) == len({one.name for one in SETTINGS.values()})


def test_more_nodes_on_the_same_cores_compute_in_turns() -> None:
    calibrated = dataclasses.replace(PROFILE.calibrated, ranks_per_core=1.5)
    profile = dataclasses.replace(PROFILE, calibrated=calibrated)
    [compute] = profile.compute
    slow = known_of(profile, Setting(nodes=6, rate="200mbit", workload="mlp", calibrated_nodes=3))
    assert slow.forward == compute.forward.times(2)
    assert slow.late_update == compute.late_update.times(2)
    assert slow.compute_slowdown == compute.compute_slowdown
    roomy = dataclasses.replace(profile, calibrated=dataclasses.replace(calibrated, ranks_per_core=0.4))
    alone = known_of(roomy, Setting(nodes=6, rate="200mbit", workload="mlp", calibrated_nodes=3))
    assert alone == compute


def test_a_larger_model_computes_in_proportion() -> None:
    setting = Setting(nodes=3, rate="200mbit", workload="large-mlp", calibrated_workload="small-mlp")
    large = known_of(PROFILE, setting)
    assert large.tensors == tensors_of("large-mlp")
    assert large.backward.value / MLP.backward.value == pytest.approx(large.numel / MLP.numel)
    assert support_of(Job(cluster=PROFILE, compute=large, world_size=3)).kind == "extrapolated"


def test_what_the_machine_does_slower_is_in_the_raw_errors_alone() -> None:
    """All cells are exact, except that the machine has become a quarter slower."""
    cells = {"--codec fp32": cell(1.0, (1.25, 1.25), drift=1.25), "--codec int8": cell(2.0, (2.5, 2.5), drift=1.25)}
    found = {"far": Measured(commit=None, profile="", cells=cells, extrapolated=True, final={})}
    rows = tabulate(found)
    summary = summarize(rows, decide(found))
    assert summary.keys() == {"target", "extrapolated"}
    assert summary["extrapolated"]["raw"]["mean_error"] == pytest.approx(0.2)
    assert summary["extrapolated"]["raw"]["mean_signed_error"] == pytest.approx(-0.2)
    assert summary["extrapolated"]["corrected"]["mean_error"] == pytest.approx(0.0)
    assert [summary["extrapolated"][how]["coverage"] for how in ("raw", "corrected")] == [0.0, 1.0]
    said = "\n".join(lines(summary))
    assert "mean error: raw 20.0%, corrected 0.0% (target 5%: raw missed, corrected met)" in said
    assert "took 1.25 times as long" in said


def test_errors_coverage_regret_and_whether_a_codec_helps() -> None:
    found = {
        "helps": Measured(
            commit="c0ffee",
            profile="",
            cells={
                "--codec fp32": cell(1.0, (1.0, 1.0)),
                "--codec int8": cell(1.1, (0.8, 1.0), codec="int8", chosen=True),
                "--strategy ddp": cell(2.0, (2.0, 2.0)),
            },
            final={},
        ),
        "tie": Measured(
            commit="c0ffee",
            profile="",
            cells={
                "--codec fp32": cell(1.0, (1.0, 1.0)),
                "--codec int8": cell(0.5, (0.98, 1.0), codec="int8", chosen=True),
            },
            final={},
        ),
        "hurts": Measured(
            commit="c0ffee",
            profile="",
            cells={
                "--codec fp32": cell(1.0, (1.0, 1.0)),
                "--codec int8": cell(0.9, (1.2, 1.2), codec="int8", chosen=True),
            },
            final={"--codec fp32": [1.0, 1.2], "--codec int8": [1.0, 1.42]},
        ),
    }
    rows = tabulate(found)
    by_name = {(row["setting"], row["words"]): row for row in rows}
    int8 = by_name["helps", "--codec int8"]
    assert int8["measured_s"] == pytest.approx(0.9)
    assert int8["raw_error"] == pytest.approx(1.1 / 0.9 - 1)
    assert int8["repeatability"] == pytest.approx(0.25)
    assert [row["raw_covered"] for row in rows] == [2, 0, 2, 2, 0, 2, 0]
    decisions = {row["setting"]: row for row in decide(found)}
    assert [decisions[name]["regret"] for name in found] == [0.0, 0.0, pytest.approx(0.1)], "of what was measured again"
    assert decisions["helps"]["codec_gain_measured"] == pytest.approx(1 / 0.9 - 1)
    assert decisions["helps"]["codec_gain_predicted"] == pytest.approx(1 / 1.1 - 1)
    summary = summarize(rows, list(decisions.values()))
    assert summary["held out"]["cells"] == 7
    assert summary["held out"]["raw"]["coverage"] == 8 / 14
    assert summary["decisions"]["largest_regret"] == pytest.approx(0.1)
    assert summary["decisions"]["codecs_right"] == "0 of 2"
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
        assert 0.2 < row["drift"] < 5
        pair = [row["predicted_s"], row["corrected_s"]]
        assert pair == sorted(pair, reverse=row["drift"] < 1)
    assert sum(row["chosen"] for row in rows) == 1
    assert (tmp_path / "validate_timing_model.png").exists()
    assert "2 held out cells" in done.stdout
    kept = tmp_path / "validate_timing_model.runs.json"
    [run] = json.loads(kept.read_text()).values()
    (tmp_path / "kept.toml").write_text(run["profile"])
    assert Profile.load(tmp_path / "kept.toml").provenance.keys().isdisjoint(PRIVATE)
    assert str(tmp_path.parent) not in run["profile"]
    # The file is as if the run had been cut off before the choice was judged, with another cell the fastest.
    fastest = next(cell for cell in run["cells"].values() if not cell["chosen"])
    fastest |= {"round_0_s": 1e-6, "round_1_s": 1e-6}
    kept.write_text(json.dumps({QUICK.name: run | {"final": None}}))
    judged = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stderr
    assert "runs are there" not in judged.stdout
    [once_more] = json.loads(kept.read_text()).values()
    assert once_more["cells"] == run["cells"]
    passes = {words: len(seconds) for words, seconds in once_more["final"].items()}
    assert passes == dict.fromkeys(run["cells"], QUICK_FINAL_PASSES)
    [decision] = load(tmp_path / "validate_timing_model_decisions.csv")
    means = {words: sum(seconds) / QUICK_FINAL_PASSES for words, seconds in once_more["final"].items()}
    assert decision["regret"] == pytest.approx(means[decision["chosen"]] / min(means.values()) - 1)
    again = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "1 of 1 runs are there" in again.stdout


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
