"""The table of all systems: its times, its rows, its pictures."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from experiments import footprint, validation_runs
from experiments.results import REPOSITORY, RESULTS, load
from experiments.simulated_tables import crossing_of
from experiments.systems import pictures, table, times
from experiments.systems.catalogue import HOGWILD
from experiments.systems.times import (
    BLOCK,
    Setting,
    block_of,
    measure,
    planned_cells,
    predicted,
)
from experiments.systems.workloads import CORES, PLACES, WORKLOADS
from tests.experiments._systems import KEYS, SYSTEMS, TITLES, cell, config_of, curve
from tests.timing_model._profiles import PROFILE

pytestmark = pytest.mark.slow


# ---- Times


def test_a_round_has_whole_windows_in_which_every_fragment_has_its_turn() -> None:
    blocks = {name: block_of(config_of(name), quick=False) for name in SYSTEMS}
    others = {name: block for name, block in blocks.items() if block != BLOCK}
    assert others == {"diloco": 30, "theano-easgd": 8, "theano-easgd-async": 8, "caffe-streaming": 8}


NOT_MODELLED = {
    "diloco": "outer must be left out",
    "local": "the timing model has no strategy local",
    "pmls-ssp": "the timing model has no strategy ps-async",
    "pmls-structure-aware": "reduce must be matrix",
    "ps-async": "the timing model has no strategy ps-async",
    "theano-awagd": "average-state must be left out",
    "theano-easgd": "outer must be left out",
    "theano-easgd-async": "the timing model has no strategy easgd-async",
}


def test_a_system_is_predicted_or_there_is_a_reason() -> None:
    found = {name: predicted(config_of(name), one.words, PROFILE, 4) for name, one in SYSTEMS.items()}
    assert {name for name, one in found.items() if "reason" in one} == NOT_MODELLED.keys()
    for name, reason in NOT_MODELLED.items():
        assert reason in found[name]["reason"]
    seconds = {name: one["seconds"] for name, one in found.items() if name not in NOT_MODELLED}
    assert all(found[name]["low"] < value < found[name]["high"] for name, value in seconds.items())
    assert seconds["ddp-fp16"] < seconds["ddp"] < seconds["ps-sync"]
    assert seconds["pipesgd-int8"] < seconds["pipesgd"] < seconds["pmls-wait-free"] < seconds["d-sync"]
    assert seconds["pmls-wait-free"] <= seconds["pmls-managed"]
    assert seconds["caffe-streaming"] < seconds["pipesgd"], "of a part of the weights"


def test_each_system_has_its_own_times_whatever_the_order_of_a_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(testbed: object, line: str, folder: Path, *, deadline: float) -> None:
        assert deadline == times.DEADLINE
        plan_file, times_file = map(Path, line.split()[1:])
        passes = json.loads(plan_file.read_text("utf-8"))
        assert passes[0] == passes[1][::-1]
        found = [  # of each pass
            [{"seconds": len(one["words"]) + 100.0 * number} for one in of_pass]
            for number, of_pass in enumerate(passes)
        ]
        times_file.write_text(json.dumps(found), "utf-8")

    monkeypatch.setattr(Setting, "testbed", lambda setting: nullcontext())
    monkeypatch.setattr(times, "calibrate", lambda testbed, words, folder: PROFILE)
    monkeypatch.setattr(validation_runs, "run", run)
    words = [SYSTEMS[name].words for name in ("d-sync", "ddp", "diloco")]
    workload = WORKLOADS["mlp"]
    for rate, computes in PLACES:
        cell = measure(Setting(workload="mlp", rate=rate, computes=computes), workload, words, own_program=False)
        assert (cell.rate, cell.computes) == (rate, computes)
        model = "mlp" if computes == CORES else "experiments.accelerators:synthetic=75ms,model=mlp"
        base = f"{workload.words} --lr 0.0001 --model {model}"
        assert cell.rounds == {
            one: [{"seconds": len(f"{base} {one}") + 100.0 * number} for number in range(times.ROUNDS)] for one in words
        }
        assert cell.predictions.keys() == set(words)


def test_a_system_that_sends_factors_is_timed_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(testbed: object, line: str, folder: Path, *, deadline: float) -> None:
        plan_file, times_file = map(Path, line.split()[1:])
        passes = json.loads(plan_file.read_text("utf-8"))
        times_file.write_text(json.dumps([[{"seconds": 1.0} for _ in one] for one in passes]), "utf-8")

    monkeypatch.setattr(Setting, "testbed", lambda setting: nullcontext())
    monkeypatch.setattr(times, "calibrate", lambda testbed, words, folder: PROFILE)
    monkeypatch.setattr(validation_runs, "run", run)
    names = ("ddp", "pmls-structure-aware")
    keys = {name: SYSTEMS[name].words for name in names}
    measured = {
        (rate, computes): measure(
            Setting(workload="mlp", rate=rate, computes=computes), WORKLOADS["mlp"], keys.values(), own_program=False
        )
        for rate, computes in PLACES
    }
    for (_, computes), one in measured.items():
        assert (keys["pmls-structure-aware"] in one.rounds) is (computes == CORES)
    cells = {("mlp", *place): one for place, one in measured.items()}
    cells = {place: replace(one, rounds=with_figures(one.rounds)) for place, one in cells.items()}
    curves = {("mlp", name, 0, 1.0): curve(0.5, 0.8) for name in names}
    for row in table.rows_of(dict.fromkeys(names, "A title."), cells, keys, curves):
        timed = row["system"] == "ddp" or row["computes"] == CORES
        assert (row["iteration_s"] is not None) is timed
        assert row["not_measured"].startswith("" if timed else "time: a synthetic accelerator has no activations")
        assert (row["times_as_fast_as_ddp"] == 1.0) is timed


def with_figures(rounds: dict[str, list[dict[str, float]]]) -> dict[str, list[dict[str, float]]]:
    figures = dict.fromkeys(("communication_seconds", "exposed_seconds"), 0.1)
    figures |= {"wire_bytes": 1e6, "memory_bytes": 2e6, "cpu_share": 0.5}
    figures |= {"fastest_seconds": 0.1, "slowest_seconds": 0.2}
    return {words: [one | figures for one in of_rounds] for words, of_rounds in rounds.items()}


def test_cells_of_other_systems_or_lengths_are_other_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"ddp": SYSTEMS["ddp"].words}
    found = planned_cells(WORKLOADS, keys, quick=False)
    assert len(found) == len(WORKLOADS) * len(PLACES)
    assert planned_cells({"mlp": WORKLOADS["mlp"]}, keys, quick=False).keys() < found.keys(), "one workload at a time"
    assert not found.keys() & planned_cells(WORKLOADS, keys | {HOGWILD: HOGWILD}, quick=False).keys()
    monkeypatch.setattr(times, "ROUNDS", 2)
    assert not found.keys() & planned_cells(WORKLOADS, keys, quick=False).keys()


def test_memory_that_was_freed_counts_again() -> None:
    for _ in range(2):
        peak = footprint.PeakMemory()
        before = peak.nbytes()
        values = torch.ones(20_000_000)
        del values
        assert 75e6 < peak.nbytes() - before < 100e6


# ---- Rows

CURVES = {
    ("mlp", "d-sync", 0, 1.0): curve(0.5, 0.7, 0.8),
    ("mlp", "d-sync", 1, 1.0): curve(0.6, 0.79, 0.82),
    ("mlp", "ddp", 0, 1.0): curve(0.5, 0.6, 0.9),
    ("mlp", "ddp", 1, 1.0): curve(0.5, 0.5, 0.7),
    ("mlp", "ddp-fp16", 0, 1.0): curve(0.5, 0.7, 0.8),
    ("mlp", "ddp-fp16", 1, 1.0): curve(0.5, 0.7, 0.82),
    ("mlp", "theano-easgd", 0, 1.0): curve(failure="diverged in iteration 3"),
    ("mlp", "theano-easgd", 1, 1.0): curve(0.5, 0.7, 0.9),
    ("mlp", HOGWILD, 0, 1.0): curve(0.2, 0.8, 0.8),
    ("mlp", HOGWILD, 1, 1.0): curve(0.6, 0.9, 0.8),
}


def rows() -> dict[str, dict[str, Any]]:
    found = table.rows_of(TITLES, {("mlp", "1gbit", "75ms"): cell()}, KEYS, CURVES)
    return {row["system"]: row for row in found}


def test_times_are_medians_and_ratios_are_of_the_same_rounds() -> None:
    ddp, ours = rows()["ddp"], rows()["d-sync"]
    assert (ddp["iteration_s"], ddp["iteration_lowest_s"], ddp["iteration_highest_s"]) == (0.4, 0.3, 0.5)
    assert ddp["prediction_error"] == pytest.approx(0.1)
    assert ours["times_as_fast_as_ddp"] == pytest.approx(2.0), "of 2, 1 and 2"
    assert ours["times_as_fast_as_fp16"] == pytest.approx(1.0), "of 1, 0.83 and 1"
    assert (ours["hidden_share"], ours["wire_bytes"]) == (pytest.approx(0.1), 1e6)


def test_iterations_of_a_synchronous_start_hide_nothing() -> None:
    before = rows()["d-sync"]
    assert (before["start_iterations"], before["hidden_s"]) == (0, pytest.approx(0.01))
    starts = {("mlp", "d-sync"): 2, ("mlp", "ddp"): 1000}
    found = table.rows_of(TITLES, {("mlp", "1gbit", "75ms"): cell()}, KEYS, CURVES, starts)
    after = {row["system"]: row for row in found}
    assert after["d-sync"]["time_to_target_s"] == pytest.approx(before["time_to_target_s"] + 2 * 0.01)
    reached, one = after["ddp"]["iterations_to_target"], after["ddp"]
    if reached is not None:
        assert one["time_to_target_s"] == pytest.approx(reached * (one["iteration_s"] + one["hidden_s"]))


def test_the_share_of_the_cores_is_left_out_where_not_all_processes_are_counted() -> None:
    name, of_ddp = "theano-loading", KEYS["ddp"]
    words = SYSTEMS[name].words
    both = cell().rounds | {words: cell().rounds[of_ddp]}
    one = replace(cell(), rounds=both, predictions=cell().predictions | {words: {"reason": "none"}})
    found = table.rows_of(
        {"ddp": "", name: ""},
        {("mlp", "1gbit", "75ms"): one},
        KEYS | {name: words},
        CURVES | {("mlp", name, 0, 1.0): curve(0.9)},
    )
    assert [row["cpu_share"] for row in found] == [0.5, None]
    assert found[1]["not_measured"] == "share of the cores: it has processes that are not counted"


def test_the_target_is_below_what_synchronous_training_ends_with_and_every_seed_must_cross_it() -> None:
    found = rows()
    assert found["d-sync"]["target_accuracy"] == pytest.approx(0.80)
    # Seed 0 reaches 0.80 with its last evaluation, seed 1 a third of the way from 0.79 to 0.82.
    assert found["d-sync"]["iterations_to_target"] == pytest.approx((300 + 200 + 100 / 3) / 2)
    assert found["d-sync"]["time_to_target_s"] == pytest.approx(0.25 * found["d-sync"]["iterations_to_target"])
    assert (found["ddp"]["iterations_to_target"], found["ddp"]["not_reached"]) == (
        None,
        "reached and kept by 1 of 2 seeds",
    )
    assert found["theano-easgd"]["accuracy_mean"] is None
    assert found["theano-easgd"]["failures"] == "seed 0: diverged in iteration 3"


def test_a_target_that_was_crossed_counts_only_if_the_end_is_no_lower() -> None:
    crossed, lower = curve(0.5, 0.9, 0.8), curve(0.5, 0.9, 0.79)
    found = table.accuracy_of([crossed], [crossed], 0.8)
    assert (found["iterations_to_target"], found["not_reached"]) == (pytest.approx(175), "")
    found = table.accuracy_of([crossed, lower], [crossed, crossed], 0.8)
    assert found["iterations_to_target"] is None
    assert found["not_reached"] == "reached and kept by 1 of 2 seeds"


def test_a_crossing_is_interpolated_between_evaluations_or_not_known() -> None:
    assert crossing_of(0.8, [[10.0, 0.7], [20.0, 0.85]]) == pytest.approx(10 + 10 * 0.1 / 0.15)
    assert crossing_of(0.8, [[4.0, 0.7], [6.0, 0.9], [20.0, 0.7]]) == pytest.approx(5.0)
    assert crossing_of(0.8, [[10.0, 0.7], [40.0, 0.8]]) == 40.0
    assert crossing_of(0.8, [[1.0, 0.7]]) is crossing_of(0.8, []) is None
    assert crossing_of(0.75, [[10, 0.8], [20, 0.7], [30, 0.9]]) is None, "crossed before anybody looked"


def test_no_cell_is_empty_without_a_reason() -> None:
    ratios = {f"times_as_fast_as_{over}{end}" for over in ("ddp", "fp16") for end in ("", "_low", "_high")}
    of_ranks = {"fastest_rank_s", "slowest_rank_s"}
    timed = {"iteration_s", "iteration_lowest_s", "iteration_highest_s", "wire_bytes", "hidden_s"}
    of_trainings = {f"accuracy_{end}" for end in ("mean", "difference", "lowest", "highest")}
    reasons = {
        "not_predicted": {"predicted_s", "predicted_low_s", "predicted_high_s", "prediction_error"},
        "not_measured": {"hidden_share", "memory_bytes", "cpu_share"} | timed | of_ranks | ratios,
        "failures": {"share_of_lr", "trained_on"} | of_trainings,
        "not_reached": {"iterations_to_target", "time_to_target_s"},
    }
    for row in [*rows().values(), *load(RESULTS / "systems.csv")]:
        empty = {column for column, value in row.items() if value in (None, "")} - reasons.keys()
        for reason, columns in reasons.items():
            assert bool(empty & columns) == bool(row[reason]), (row["system"], reason)
            empty -= columns
        assert empty == set(), row["system"]
    assert rows()[HOGWILD]["times_as_fast_as_ddp"] is None
    assert rows()[HOGWILD]["not_measured"].endswith("no rounds with it"), "one host"


def test_reasons_are_said_once() -> None:
    lines = table.reasons([*rows().values(), *rows().values()])
    assert len(set(lines)) == len(lines)
    assert "local: hidden share: nothing is exchanged" in lines
    assert "theano-easgd: not predicted: none" in lines
    assert "mlp, theano-easgd: seed 0: diverged in iteration 3" in lines
    assert "mlp, ddp: reached and kept by 1 of 2 seeds" in lines
    assert not any(line.startswith("ddp: ") for line in lines)


def test_a_target_needs_synchronous_training() -> None:
    titles = {name: TITLES[name] for name in ("ddp", "local")}
    curves = CURVES | {("mlp", "d-sync", 1, 1.0): curve(failure="diverged in iteration 3")}
    [row, _] = table.rows_of(titles, {("mlp", "1gbit", "75ms"): cell()}, KEYS, curves)
    assert row["target_accuracy"] is row["iterations_to_target"] is None
    assert row["not_reached"].startswith("no target: ")


def test_the_picture_has_the_speed_of_some_systems_at_each_rate_and_their_accuracy() -> None:
    slow = [row | {"rate": "200mbit", "computes": "75ms"} for row in rows().values()]
    fast = [row | {"rate": "1gbit", "times_as_fast_as_ddp": 1.5, "system": row["system"]} for row in slow]
    fast = [row | {"times_as_fast_as_ddp_low": 1.4, "times_as_fast_as_ddp_high": 1.6} for row in fast]
    shown = [row for row in (*slow, *fast) if pictures.SPEEDUPS.has(row)]
    axes = pictures.plot_speedups(shown, Figure().subplots())
    # Synchronous training ends with 81 %, DDP with 80. No training is no system, and HogWild has no rounds with DDP.
    names = ["pipesgd, width 1 (synchronous)", "DDP", "DDP, fp16 hook"]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert [text.get_text() for text in axes.texts] == ["+0.0", "-1.0", "+0.0"]
    marks = [line for line in axes.get_lines() if line.get_marker() == "o" and len(line.get_xydata())]
    assert [(*line.get_xydata()[0].tolist(), line.get_fillstyle()) for line in marks] == [
        (pytest.approx(ratio), place, fill)
        for place, of_rates in enumerate(((2.0, 1.5), (1.0, 1.5), (2.0, 1.5)))
        for ratio, fill in zip(of_rates, ("full", "none"), strict=True)
    ]
    low, high = axes.get_xlim()
    assert low < 1.0 < 2.0 < high
    assert not pictures.SPEEDUPS.has(slow[0] | {"computes": "cores"})


def test_the_message_on_speeds_is_of_all_workloads_at_each_rate() -> None:
    found = [
        {"system": "pipesgd-int8", "rate": rate, "times_as_fast_as_ddp": ratio}
        for rate, ratios in {"200mbit": (2.2, 4.0, 3.0), "1gbit": (1.0, 1.6)}.items()
        for ratio in ratios
    ]
    assert pictures.speedups_message([*found, found[0] | {"system": "local", "times_as_fast_as_ddp": 9.0}]) == (
        "pipesgd, int8 (width 2) is 2.2 to 4.0 times as fast as DDP at 200 Mbit/s, "
        "1.0 to 1.6 times as fast as DDP at 1 Gbit/s (emulated links and accelerators)"
    )


def test_curves_are_over_iterations_and_over_the_time_that_these_take_on_the_slow_link() -> None:
    found = [row | {"rate": rate, "computes": computes} for row in rows().values() for rate, computes in PLACES]
    curves = pictures.curve_rows(found, CURVES)
    assert {row["system"] for row in curves} == {"d-sync", "ddp"}, "the paper's and ours alone"
    assert [row["panel"] for row in curves] == ["mlp"] * 4 + ["mlp, 200mbit"] * 4
    axes = pictures.plot_curves(curves[:4], Figure().subplots())
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines["pipesgd, width 1 (synchronous)"] == [
        [100, pytest.approx(55)],
        [200, pytest.approx(74.5)],
        [300, pytest.approx(81)],
    ]
    assert axes.get_ylim() == (pytest.approx(0.75 * 81), pytest.approx(1.01 * 81))
    low = [row | {"points": [[at, accuracy / 3] for at, accuracy in row["points"]]} for row in curves[2:4]]
    low_axes = pictures.plot_curves([*curves[:2], *low], Figure().subplots())
    assert low_axes.get_ylim()[0] == pytest.approx(0.95 * 80 / 3), "no curve ends below the axis"
    axes = pictures.plot_curves(curves[4:], Figure().subplots())
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in axes.get_lines()}
    assert [x for x, _ in lines["pipesgd, width 1 (synchronous)"]] == pytest.approx([25, 50, 75]), "0.25 s an iteration"
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "calculated time of training (s)")


def test_the_message_on_curves_compares_whole_trainings() -> None:
    ends = {"ddp": (100, 0.8), "d-sync": (110, 0.82), "pipesgd-int4": (20, 0.81), "pipe-sgd": (90, 0.78)}
    found = [
        {"panel": panel, "system": system, "points": [[1, 0.1], [seconds * factor, accuracy]]}
        for panel, factor in (("mlp, 200mbit", 1), ("convnet, 200mbit", 1))
        for system, (seconds, accuracy) in ends.items()
    ]
    found += [row | {"panel": "alexnet, 200mbit", "points": [[9, row["points"][-1][1] / 2]]} for row in found[:4]]
    assert pictures.convergence_message(found) == (
        "pipesgd, int4 runs 1.0 to 5.0 times as fast as DDP (emulated, 200 Mbit/s); "
        "Pipe-SGD without warm-up and prediction ends 2 to 4 points lower"
    )
    without_ddp = [row for row in found if row["system"] != "ddp"]
    assert pictures.convergence_message(without_ddp) == "Test accuracy over the calculated time of training"


def test_a_curve_whose_seeds_have_diverged_is_named_without_a_line() -> None:
    diverged = CURVES | {("mlp", "ddp", 0, 1.0): curve(failure="diverged in iteration 3")}
    curves = pictures.curve_rows(list(rows().values()), diverged)
    axes = pictures.plot_curves(curves[:4], Figure().subplots())
    [ddp] = [line for line in axes.get_lines() if line.get_label() == "DDP"]
    assert len(ddp.get_xydata()) == 0


def test_the_page_explains_columns_of_the_table() -> None:
    page = (REPOSITORY / "docs" / "systems.md").read_text(encoding="utf-8")
    columns = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert len(columns) > 5
    assert set(columns) <= rows()["ddp"].keys()
