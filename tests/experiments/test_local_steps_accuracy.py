"""Accuracy of local steps: the runs, which are those of the command, the summary and its verdicts, and the figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from _kept_runs import check_refused, make_runs, ran
from _ranks import run_module
from _runs import succeed

from experiments.local_steps_accuracy import (
    ACCUMULATION,
    DILOCO,
    LOCAL_STEPS,
    MULTIPLES,
    STEPS,
    STREAMING,
    SYNCHRONOUS,
    TRAINED,
    WORKLOADS,
    Planned,
    Way,
    main,
    parse,
    plan,
    summarize,
    tabulate,
)
from experiments.results import RESULTS, Row, load
from experiments.simulated_runs import Run, simulate
from pipesgd.cli import parse as parse_training
from pipesgd.run.metrics import read_metrics
from timing_model.alternatives import FRAGMENTS_COSTS, LEAST_WINDOWS, WHOLE_COSTS

pytestmark = pytest.mark.slow

ACCURACIES = {
    (SYNCHRONOUS, 1, 1, "fp32"): (0.884, 0.886),
    (LOCAL_STEPS, 8, 1, "fp32"): (0.880, 0.882),
    (LOCAL_STEPS, 8, 2, "fp32"): (0.878, 0.878),
    (LOCAL_STEPS, 8, 1, "int4"): (0.870, 0.870),
    (LOCAL_STEPS, 8, 2, "int4"): (0.878, 0.875),
    (STREAMING, 8, 2, "fp32"): (0.881, 0.877),
    (STREAMING, 8, 2, "int4"): (0.880, 0.876),
    (LOCAL_STEPS, 32, 1, "fp32"): (0.86, 0.86),
    (LOCAL_STEPS, 32, 2, "fp32"): (0.80, 0.80),
    (LOCAL_STEPS, 32, 1, "int4"): (0.86, 0.86),
    (LOCAL_STEPS, 32, 2, "int4"): (0.80, 0.80),
    (STREAMING, 32, 2, "fp32"): (0.85, 0.85),
    (STREAMING, 32, 2, "int4"): (0.85, 0.85),
    (DILOCO, 8, 1, "fp32"): (0.5, None),
    (DILOCO, 32, 1, "fp32"): (0.7, 0.7),
}
"""Accuracy of each seed; None for one that diverges. Accumulation has 0.85, and 0.86 at twice the learning rate."""


def accuracy_of(way: Way, seed: int) -> float | None:
    if way.method == ACCUMULATION:
        return {1.0: 0.85, 2.0: 0.86, 4.0: None}[way.multiple]
    return ACCURACIES[way[:4]][seed]


def rows_of(planned: Sequence[Planned], run_of: Callable[[Planned], Run]) -> list[Row]:
    return tabulate(planned, {one.words: run_of(one) for one in planned})


def rows() -> list[Row]:
    return rows_of(plan(["mlp"], [8, 32], 2), lambda one: ran(accuracy_of(one.way, one.seed)))


def cells(rows: Sequence[Row]) -> dict[tuple[str, int, int, str], Row]:
    """Return the summary by method, local steps, width and codec."""
    return {(row["method"], row["local_steps"], row["width"], row["codec"]): row for row in summarize(rows)}


# ---- Runs


def test_every_run_is_one_that_pipesgd_makes_and_all_see_the_same_samples() -> None:
    planned = plan(TRAINED, STEPS, 2)
    assert len({one.words for one in planned}) == len(planned) == 2 * 3 * (1 + 4 * (len(MULTIPLES) + 4 + 2 + 1))
    for one in planned[::9]:  # every way to train, as 9 and their number have no common divisor
        config, iterations = parse_training(one.words.split()), WORKLOADS[one.workload].iterations
        windows, way = config.windows, one.way
        assert (config.pipeline.width, config.compression.codec) == (way.width, way.codec)
        assert (config.optimization.lr, config.optimization.seed) == (one.lr, one.seed)
        assert windows.outer == ("nesterov" if way.method == DILOCO else None)
        between = way.local_steps if way.method in (LOCAL_STEPS, STREAMING, DILOCO) else 1
        assert windows.local_steps * windows.fragments == between
        assert (windows.fragments > 1) == (way.method == STREAMING)
        assert config.optimization.accumulation == (way.local_steps if way.method == ACCUMULATION else 1)
        updates, batches = config.optimization.iterations, config.optimization.accumulation
        assert updates is not None
        assert iterations - batches < updates * batches <= iterations


@pytest.mark.parametrize(
    ("words", "close"),
    [
        ("--local-steps 3 --width 2 --codec int4 --optimizer adamw --lr 0.01", 1e-6),
        ("--local-steps 4 --width 1 --codec int4 --lr 0.1", 1e-6),
        ("--local-steps 3 --width 2 --fragments 3 --codec int4 --lr 0.1", 1e-6),
        ("--local-steps 2 --width 1 --outer nesterov --lr 0.05", 1e-6),
        ("--width 1 --accumulation 2 --lr 0.1", 1e-4),  # the simulation has no micro-batches, but their sum
    ],
)
def test_a_simulated_run_is_that_of_the_command(words: str, close: float, tmp_path: Path) -> None:
    words = f"--dataset digits --hidden-sizes 20 --batch-size 16 --schedule one-cycle --iterations 10 --seed 3 {words}"
    real, simulated = succeed(2, words, tmp_path)["final"], simulate(words, world_size=2)
    assert simulated.test_accuracy == real["test_accuracy"]
    assert simulated.test_loss == pytest.approx(real["test_loss"], rel=close)


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


def test_a_run_that_diverges_within_a_window_ends_there() -> None:
    words = "--dataset digits --hidden-sizes 20 --batch-size 16 --iterations 40 --local-steps 20 --lr 1e15"
    run = simulate(words, world_size=2)
    assert run.diverged_at is not None
    assert run.diverged_at < 20
    assert run.test_accuracy is run.test_loss is None


# ---- Summary


def test_widths_and_codecs_are_judged_by_what_they_cost_up_to_eight_local_steps() -> None:
    found = cells(rows())
    late, coded = found[LOCAL_STEPS, 8, 2, "fp32"], found[LOCAL_STEPS, 8, 2, "int4"]
    assert (late["cost_of"], late["accuracy_to_base_points"], late["target"]) == ("width", pytest.approx(-0.3), "met")
    assert (coded["cost_of"], coded["accuracy_to_base_points"]) == ("codec", pytest.approx(-0.15))
    assert coded["target"] == "MISSED"
    assert late["accuracy_to_sync_points"] == pytest.approx(-0.7)
    judged = {cell for cell, row in found.items() if row["target"]}
    assert judged == {(method, 8, 2, codec) for method in (LOCAL_STEPS, STREAMING) for codec in ("fp32", "int4")}
    streamed, both = found[STREAMING, 8, 2, "fp32"], found[STREAMING, 8, 2, "int4"]
    assert (streamed["accuracy_to_base_points"], both["accuracy_to_base_points"]) == (
        pytest.approx(-0.2),
        pytest.approx(-0.1),
    )
    assert found[LOCAL_STEPS, 32, 2, "fp32"]["accuracy_to_base_points"] == pytest.approx(-6)
    assert found[LOCAL_STEPS, 8, 1, "int4"]["accuracy_to_base_points"] == pytest.approx(-1.1)
    assert found[SYNCHRONOUS, 1, 1, "fp32"]["cost_of"] == ""


def test_accumulation_counts_at_its_best_learning_rate() -> None:
    row = cells(rows())[ACCUMULATION, 8, 1, "fp32"]
    assert (row["lr"], row["accuracy_mean"]) == (2 * WORKLOADS["mlp"].lr, pytest.approx(0.86))


def test_a_mean_is_over_all_seeds_or_there_is_none() -> None:
    diverged = cells(rows())[DILOCO, 8, 1, "fp32"]
    assert (diverged["diverged"], diverged["seeds"], diverged["accuracy_mean"]) == (1, 2, None)
    some = [row for row in rows() if (row["method"], row["local_steps"], row["seed"]) != (DILOCO, 32, 1)]
    assert (DILOCO, 32, 1, "fp32") not in cells(some)


def test_a_width_whose_runs_diverge_has_missed_its_target() -> None:
    planned = plan(["mlp"], [2], 1)
    late = Way(LOCAL_STEPS, 2, 2, "fp32", "--local-steps 2")
    found = cells(rows_of(planned, lambda one: ran(None if one.way == late else 0.9)))
    assert found[LOCAL_STEPS, 2, 2, "fp32"]["target"] == found[LOCAL_STEPS, 2, 2, "int4"]["target"] == "MISSED"


def test_a_language_model_is_judged_by_its_loss() -> None:
    losses = {(1, "fp32"): 1.0, (2, "fp32"): 1.0099, (1, "int4"): 1.0, (2, "int4"): 1.0140}

    def run(one: Planned) -> Run:
        loss = losses[one.way.width, one.way.codec] if one.way.method == LOCAL_STEPS else 1.0 + one.way.multiple
        return ran(loss / 4, loss)  # accurate where the loss is high

    planned = plan(["transformer"], [4], 1)
    rows = rows_of(planned, run)
    found = cells(rows)
    assert found[LOCAL_STEPS, 4, 2, "fp32"]["loss_to_base_percent"] == pytest.approx(0.99)
    assert found[LOCAL_STEPS, 4, 2, "fp32"]["target"] == "met"
    assert found[LOCAL_STEPS, 4, 2, "int4"]["target"] == "MISSED", "0.41 % more, where a third is allowed"
    assert found[ACCUMULATION, 4, 1, "fp32"]["lr"] == WORKLOADS["transformer"].lr


# ---- Command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workloads", "mpl"], r"--workloads must be one of .*; got 'mpl' \(did you mean mlp\?\)"),
        (["--local-steps", "1"], "--local-steps: must be a whole number of at least 2; got '1'"),
        (["--local-steps", "4", "4"], "--local-steps must name each once; got 4 twice"),
        (["--seeds", "0"], "--seeds: must be a whole number of at least 1; got '0'"),
        (["--output", str(RESULTS)], "--output must name another folder"),
        (["--fresh", "--finished"], "--finished: not allowed with argument --fresh"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: Sequence[str], message: str, tmp_path: Path) -> None:
    check_refused(parse, words, message, tmp_path)


def test_runs_are_made_kept_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--workloads", "digits", "--processes", "1", "--output", str(tmp_path)]
    options += ["--local-steps", "2"]
    make_runs(main, options)
    assert "width 2, int4" in capsys.readouterr().out
    done = run_module("experiments.local_steps_accuracy", *options, "4", "--finished")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "11 of 21 runs are there" in done.stdout
    table = load(tmp_path / "local_steps_accuracy.csv")
    assert (len(table), {row["seed"] for row in table}) == (11, {0})
    summary = load(tmp_path / "local_steps_accuracy_summary.csv")
    late = [row["target"] for row in summary if row["method"] == LOCAL_STEPS and row["width"] == 2]
    assert len(late) == 2
    assert set(late) <= {"met", "MISSED"}


@pytest.mark.parametrize(("method", "costs"), [(LOCAL_STEPS, WHOLE_COSTS), (STREAMING, FRAGMENTS_COSTS)])
def test_the_planners_prices_are_the_largest_that_were_measured(method: str, costs: dict[int, float]) -> None:
    lost: dict[int, float] = {}
    for row in load(RESULTS / "local_steps_accuracy_summary.csv"):
        workload, steps = WORKLOADS[row["workload"]], row["local_steps"]
        too_brief = workload.iterations < steps * LEAST_WINDOWS
        if (row["method"], row["width"]) == (method, 2) and not workload.judged_by_loss and not too_brief:
            lost[steps] = max(lost.get(steps, -math.inf), -row["accuracy_to_sync_points"])
    assert costs == {steps: math.ceil(10 * points) / 10 for steps, points in lost.items()}
