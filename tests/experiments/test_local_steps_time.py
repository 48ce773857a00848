"""Time to an accuracy of local steps: what is simulated and timed, the table, verdicts and figure; and a short run."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from _kept_runs import check_refused
from _ranks import run_ranks
from _runs import run_job_on_forked_ranks, succeed
from matplotlib.figure import Figure
from rich.console import Console

from experiments import validation_runs
from experiments.kept_runs import KeptRuns
from experiments.local_steps_accuracy import DILOCO, STEPS, Planned
from experiments.local_steps_time import (
    BELOW_SYNCHRONOUS,
    CELLS,
    DDP,
    DDP_FP16,
    EVALUATE,
    LENGTHS,
    OURS,
    QUICK_CELLS,
    QUICK_EVALUATE,
    STREAMED,
    STREAMED_AT_ONCE,
    Arrival,
    Contender,
    Timed,
    accuracy_to_reach,
    arrivals,
    best_of,
    contenders,
    exchange_bytes,
    formula_bytes,
    judge,
    main,
    parse,
    plan,
    plot,
    runs_until_there,
    tabulate,
)
from experiments.results import RESULTS, Row, load
from experiments.simulated_runs import QUICK_SEEDS, Run, simulate
from experiments.staleness_runs import WORKLOADS
from experiments.timed_configurations import mean_iteration
from experiments.validation_runs import Setting
from pipesgd.cli import parse as parse_training
from pipesgd.comm.native import ring_wire_bytes
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks, alone
from pipesgd.run.metrics import read_metrics
from pipesgd.run.workload import load as load_workload

pytestmark = pytest.mark.slow

ALL = contenders([4, 8])
ACCURACY = 0.875
CROSSINGS: dict[str, dict[int, Sequence[float | None]]] = {
    DDP: {1: (1000.0, 1100.0)},
    DDP_FP16: {1: (1000.0, 1120.0)},
    DILOCO: {4: (None, 1200.0), 8: (None, None)},
    OURS: {4: (1050.0, 1150.0), 8: (1700.0, 1900.0)},
    STREAMED: {4: (None, 1000.0), 8: (1500.0, 1600.0)},
    STREAMED_AT_ONCE: {4: (None, 1000.0), 8: (1500.0, 1600.0)},
}
"""Iterations after which each seed has the accuracy, by contender and H; None for one that does not get there."""
SECONDS = {DDP: 1.5, DDP_FP16: 0.8, DILOCO: 0.4, OURS: 0.08, STREAMED: 0.2, STREAMED_AT_ONCE: 0.1}


def ran(crossing: float | None, accuracy: float = 0.885) -> Run:
    """Return a run that passes the accuracy after ``crossing`` iterations, or never."""
    points = [[crossing - 10, 0.75], [crossing + 10, 1.0]] if crossing else [[10, 0.5], [20, 0.6]]
    return Run(commit="c0ffee", seconds=9.0, diverged_at=None, test_accuracy=accuracy, points=points)


def runs(planned: dict[tuple[Contender, float], list[Any]], best: float = 1.0) -> dict[str, Run]:
    """Return runs of two seeds, of which none that is shorter than ``best`` gets there, and longer ones do later."""
    found = {}
    for (one, length), of_seeds in planned.items():
        for run, crossing in zip(of_seeds, CROSSINGS[one.name][one.way.local_steps], strict=True):
            later = 0 if length == best else 100
            found[run.words] = ran(None if crossing is None or length < best else crossing + later)
    return found


def timed(planned_local_steps: int | None = 8) -> Timed:
    cells = {}
    for one in ALL:
        hidden = 0.96 if one.way.local_steps == 8 else 0.9
        seconds = [factor * SECONDS[one.name] for factor in (1.0, 1.1, 0.9)]
        cells[one.timed] = {"seconds": seconds, "hidden": hidden, "predicted_s": 0.1, "bytes": 1.0, "bytes_equal": True}
    return Timed(commit="c0ffee", planned_local_steps=planned_local_steps, cells=cells)


def rows() -> list[Row]:
    planned = plan(ALL, 2)
    reached = arrivals(planned, runs(planned), ACCURACY)
    return tabulate(CELLS, ALL, {cell.name: timed() for cell in CELLS}, reached, ACCURACY)


# ---- What is simulated and timed


def test_what_is_timed_is_what_is_simulated() -> None:
    assert {one.way.local_steps for one in contenders(STEPS) if one.name == OURS} == set(STEPS)
    pairs = [(cell, one) for cell in (CELLS[0], *QUICK_CELLS) for one in contenders(STEPS)]
    for cell, one in (*pairs, *((cell, contenders(STEPS)[-1]) for cell in CELLS[1:])):
        config = parse_training([*shlex.split(cell.words), *shlex.split(one.timed)])
        same = parse_training(shlex.split(f"{WORKLOADS[cell.workload].words} {one.way.options}"))
        assert (config.data, config.model.hidden_sizes) == (same.data, same.model.hidden_sizes)
        assert config.model.model == f"experiments.accelerators:{cell.emulation}={cell.accelerator}"
        if one.name in (DDP, DDP_FP16):
            assert config.pipeline.strategy == "ddp"
            assert (config.pipeline.ddp_hook == "fp16") == (one.name == DDP_FP16)
            assert (same.pipeline.width, same.pipeline.local_steps) == (1, 1)
        else:
            assert config.pipeline == dataclasses.replace(same.pipeline, all_reduce=one.all_reduce)
            assert config.compression == same.compression


def test_every_run_is_evaluated_at_the_ends_of_windows_of_all_lengths() -> None:
    assert all(EVALUATE % steps == 0 for steps in STEPS)
    assert QUICK_EVALUATE % STEPS[0] == 0
    planned = plan(ALL, 2)
    words = [run.words for of_seeds in planned.values() for run in of_seeds]
    assert len(set(words)) == len(words) == 2 * len(LENGTHS) * len(ALL)
    for (one, length), of_seeds in planned.items():
        for seed, run in enumerate(of_seeds):
            config = parse_training(shlex.split(run.words))
            assert (config.optimization.seed, config.run.evaluate_iterations) == (seed, EVALUATE)
            assert config.optimization.iterations == round(length * WORKLOADS["mlp"].iterations)
            assert config.compression.codec == one.way.codec


@pytest.mark.parametrize("options", ["--local-steps 2 --width 2 --codec int4", "--width 2 --codec int8"])
def test_a_simulated_run_is_evaluated_on_its_way_as_the_command_is(options: str, tmp_path: Path) -> None:
    words = "--dataset digits --hidden-sizes 20 --batch-size 16 --lr 0.1 --schedule one-cycle --iterations 10 --seed 3"
    evaluated = f"{words} {options} --evaluate-iterations 4"
    final = succeed(2, evaluated, tmp_path)["final"]["test_accuracy"]
    accuracies = {line["iteration"] + 1: line["test_accuracy"] for line in read_metrics(tmp_path / "metrics.jsonl")}
    run = simulate(evaluated, world_size=2)
    assert run.points == [[4, accuracies[4]], [8, accuracies[8]], [10, final]]
    assert len({accuracy for _, accuracy in run.points}) > 1
    without = simulate(f"{words} {options}", world_size=2)
    assert (without.points, without.test_loss) == ([], run.test_loss), "an evaluation changes nothing"


def test_the_formula_is_the_bytes_of_all_ranks() -> None:
    for ranks, numel in ((2, 9), (3, 2), (4, 10), (5, 1001)):
        assert formula_bytes("fp32", numel, ranks) == sum(ring_wire_bytes(r, ranks, numel, 4) for r in range(ranks))
        assert formula_bytes("fp16", numel, ranks) == formula_bytes("fp32", numel, ranks) / 2
    whole = formula_bytes("int4", 4 * 4096, 4)
    assert whole < formula_bytes("int4", 4 * 4096 + 1, 4)
    assert whole / formula_bytes("fp32", 4 * 4096, 4) == pytest.approx(1 / 8, rel=0.05)


def _measured(ranks: Ranks, options: list[str]) -> list[dict[str, float]]:
    found = []
    for one in options:
        config = parse_training(shlex.split(f"--dataset digits --hidden-sizes 20 --batch-size 16 {one}"))
        _, batches, model, _ = load_workload(config, ranks)
        found.append(mean_iteration(config, model, batches, ranks, 4))
    return found


def test_the_ranks_report_the_bytes_of_the_formula() -> None:
    options = [one.timed for one in contenders([2])]
    of_ranks = run_ranks(2, _measured, options, process_group=False)
    assert of_ranks[0] == of_ranks[1]
    tensors = (64 * 20, 20, 20 * 10, 10)
    for one, found in zip(contenders([2]), of_ranks[0], strict=True):
        steps = one.way.local_steps
        assert found["wire_bytes"] * steps == exchange_bytes(one.way, tensors, 2)
        assert found["communication_seconds"] > 0
        assert 0 <= found["exposed_seconds"] <= found["seconds"]


# ---- Table


def test_the_accuracy_to_reach_is_that_of_all_seeds_of_synchronous_training() -> None:
    planned = plan(ALL, 2)
    first, second = planned[ALL[0], 1.0]
    found = runs(planned) | {first.words: ran(1.0, 0.881), second.words: ran(1.0, 0.885)}
    assert accuracy_to_reach(planned, found) == pytest.approx(0.883 - BELOW_SYNCHRONOUS)
    del found[second.words]
    assert accuracy_to_reach(planned, found) is None


def test_the_shortest_length_counts_of_which_all_seeds_get_there() -> None:
    planned = plan(ALL, 2)
    for best in LENGTHS:
        found = arrivals(planned, runs(planned, best), ACCURACY)
        named = {(one.name, one.way.local_steps): arrival for one, arrival in found.items()}
        assert named == {
            (DDP, 1): Arrival(1050, best),
            (DDP_FP16, 1): Arrival(1060, best),
            (OURS, 4): Arrival(1100, best),
            (OURS, 8): Arrival(1800, best),
            (STREAMED, 8): Arrival(1550, best),
            (STREAMED_AT_ONCE, 8): Arrival(1550, best),
        }
    some = runs(planned)
    for length in LENGTHS:
        del some[planned[ALL[0], length][1].words]
    assert ALL[0] not in arrivals(planned, some, ACCURACY), "a seed is missing"


def test_no_longer_runs_are_made_of_a_contender_that_is_there() -> None:
    planned = plan(ALL, 2)
    known = runs(planned)
    calls: list[list[str]] = []

    def make(wanted: list[Planned]) -> dict[str, Run]:
        calls.append([run.words for run in wanted])
        return {words: known[words] for words in calls[-1]}

    found = runs_until_there(planned, make)
    lengths: dict[str, tuple[str, int, float]] = {}
    for (one, at), of_seeds in planned.items():
        for run in of_seeds:
            lengths.setdefault(run.words, (one.name, one.way.local_steps, at))
    first, *rest = [{lengths[words] for words in call} for call in calls]
    assert first == {(DDP, 1, 1.0)}
    every = {(one.name, one.way.local_steps) for one in ALL}
    never = {(DILOCO, 4), (DILOCO, 8), (STREAMED, 4), (STREAMED_AT_ONCE, 4)}
    assert [{one[:2] for one in call} for call in rest] == [every if length <= 1.0 else never for length in LENGTHS]
    assert [{one[2] for one in call} for call in rest] == [{length} for length in LENGTHS]
    assert arrivals(planned, found, ACCURACY) == arrivals(planned, known, ACCURACY)


def test_a_run_that_two_contenders_share_is_made_once() -> None:
    planned = plan(contenders([2]), 1)
    fragments = [run.words for (one, _), [run] in planned.items() if one.name in (STREAMED, STREAMED_AT_ONCE)]
    assert len(fragments) == 2 * len(set(fragments)) == 2 * len(LENGTHS)
    calls: list[list[str]] = []

    def make(wanted: list[Planned]) -> dict[str, Run]:
        calls.append([run.words for run in wanted])
        return {words: ran(None) for words in calls[-1]}

    runs_until_there(planned, make)
    assert all(len(call) == len(set(call)) for call in calls)
    assert set(fragments) <= set(itertools.chain.from_iterable(calls))


def test_without_synchronous_training_nothing_else_is_looked_for() -> None:
    assert runs_until_there(plan(ALL, 2), lambda wanted: {}) == {}


def test_the_time_to_the_accuracy_is_iterations_times_the_median_of_passes() -> None:
    by_name = {(row["contender"], row["local_steps"]): row for row in rows() if row["accelerator"] == "synthetic"}
    ddp, ours, diloco = by_name[DDP, 1], by_name[OURS, 4], by_name[DILOCO, 4]
    assert (ddp["iteration_s"], ddp["seconds_to_accuracy"], ddp["times_as_fast_as_ddp"]) == (1.5, 1050 * 1.5, 1)
    assert ours["seconds_to_accuracy"] == pytest.approx(1100 * 0.08)
    assert ours["times_as_fast_as_ddp"] == pytest.approx(1050 * 1.5 / (1100 * 0.08))
    assert ours["low"] == pytest.approx(ours["times_as_fast_as_ddp"]), "all passes have the same ratio"
    assert ours["passes_apart"] == pytest.approx(1.1 / 0.9 - 1)
    assert diloco["iteration_s"] == 0.4
    assert diloco["seconds_to_accuracy"] is diloco["times_as_fast_as_ddp"] is None


def test_hiding_is_judged_where_the_planner_says_so() -> None:
    targets = {(row["contender"], row["local_steps"]): row["hidden_target"] for row in rows()}
    assert targets == {**dict.fromkeys(targets, ""), (OURS, 8): "met"}
    one, none = ({CELLS[0].name: timed(planned)} for planned in (4, None))
    ours = [row["hidden_target"] for row in tabulate(CELLS, ALL, one, {}, ACCURACY) if row["contender"] == OURS]
    assert ours == ["MISSED", "met"]
    assert not any(row["hidden_target"] for row in tabulate(CELLS, ALL, none, {}, ACCURACY))


def test_the_best_number_of_local_steps_is_judged_at_25_mbit() -> None:
    table = rows()
    ours = [row for row in best_of(table) if row["contender"] == OURS]
    assert len(ours) == len(CELLS)
    assert {row["local_steps"] for row in ours} == {4}
    judged = judge(table)
    assert len(judged) == 2
    assert all("25mbit" in name for name in judged)
    assert set(judged.values()) == {"met"}  # 17.9 times
    slower = [row | {"times_as_fast_as_ddp": 14.9} for row in table]
    assert set(judge(slower).values()) == {"MISSED"}
    assert judge([row for row in table if row["mbit_per_s"] != 25]) == {}


def test_the_figure_has_a_line_for_each_contender_and_its_local_steps() -> None:
    axes = plot([row for row in rows() if row["accelerator"] == "at_least"], Figure().subplots())
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines[DDP] == [[rate, pytest.approx(1050 * 1.5 / 60)] for rate in (10, 25, 50)]
    assert lines[OURS] == [[rate, pytest.approx(1100 * 0.08 / 60)] for rate in (10, 25, 50)]
    assert lines[DILOCO] == []
    texts = [text.get_text() for text in axes.texts]
    assert texts == [*["H 4"] * 3, *["H 8"] * 6, "DiLoCo does not reach it"]
    assert axes.get_ylabel() == "time to 87.50 % (min)"


# ---- Command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "--seeds: must be a whole number of at least 1; got '0'"),
        (["--output", str(RESULTS)], "--output must name another folder"),
        (["--fresh", "--finished"], "--finished: not allowed with argument --fresh"),
    ],
)
def test_wrong_options_get_one_line(words: Sequence[str], message: str, tmp_path: Path) -> None:
    check_refused(parse, words, message, tmp_path)


def test_a_short_run_is_kept_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the links, torchrun, and the processes that simulate, which other experiments' tests have."""
    monkeypatch.setattr(Setting, "testbed", lambda setting: nullcontext())
    monkeypatch.setattr(validation_runs, "run_job", run_job_on_forked_ranks)
    words, console = ["--quick", "--output", str(tmp_path)], Console()
    with pytest.raises(UserInputError, match="--finished must find all seeds of synchronous training and a setting"):
        main([*words, "--finished"], alone(), console)
    simulated = KeptRuns(tmp_path / "local_steps_time.runs.json", Run)
    for one in itertools.chain.from_iterable(plan(contenders(STEPS[:1]), QUICK_SEEDS, quick=True).values()):
        simulated.add(one.words, simulate(one.words, test_every=one.test_every))
    main(words, alone(), console)
    assert "bytes differ from the formula in 0 of 6 rows" in capsys.readouterr().out
    table = load(tmp_path / "local_steps_time.csv")
    names = [(row["contender"], row["local_steps"]) for row in table]
    assert names == [(DDP, 1), (DDP_FP16, 1), (OURS, 2), (STREAMED, 2), (STREAMED_AT_ONCE, 2), (DILOCO, 2)]
    assert all(row["iteration_s"] > 0.02 and row["bytes"] == row["formula_bytes"] > 0 for row in table)
    assert [row["predicted_s"] is None for row in table] == [True, True, False, False, False, False]
    assert all(0 <= row["hidden"] <= 1 for row in table)
    assert (tmp_path / "local_steps_time.png").stat().st_size > 0
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("*s.json") if "manifest" not in path.name}
    assert set(kept) == {"local_steps_time.runs.json", "local_steps_time.settings.json"}
    main(words, alone(), console)
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept, "something was made again"
