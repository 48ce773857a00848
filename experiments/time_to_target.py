"""Time to a target accuracy: late, compressed gradients next to DDP with fp16, for a transformer at 200 Mbit/s.

    python -m experiments.time_to_target

Iterations to the target are those of simulated ranks (experiments/simulation.py), a median over seeds; in place of DDP
they sum synchronously with fp16 in every hop of a ring, and bucketed contenders have the trainings of those without. A
target is one point below the mean accuracy that the reference ends with, and counts as reached if every seed crosses it
and ends no lower. Rates are the best of four on a seed of their own, separately for each schedule, of the reference
and of width 2; where the reference's seeds spread, a lower one that all have at most. Iterations are timed on four
nodes, in turns in one job, with an accelerator of 75 ms on each, which is emulated, as the link is; those of the
synchronous start are timed apart. The time to the target is calculated from both. Its intervals are of the times of
iterations alone.

Finished trainings, and the times of iterations, are kept in time_to_target.runs.json and time_to_target.times.runs.json
in the output folder: the same command makes only what is missing.
"""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from experiments import command, simulated_runs
from experiments.kept_runs import KeptRuns
from experiments.paired import median, paired_ratio, ratio_columns
from experiments.results import Row, code_state, save
from experiments.simulated_runs import QUICK_ITERATIONS, Run
from experiments.systems.accuracy import Curve, Planned, curve_of
from experiments.systems.table import accuracy_of, target_of
from experiments.systems.workloads import ACCELERATOR, QUICK_ACCELERATOR, TIMED_LR, WORKLOADS
from experiments.testbed import Link, Testbed
from experiments.validation_runs import time_in_passes
from pipesgd.cli import parse as parse_training
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks
from pipesgd.strategies import start_iterations

NAME = "time_to_target"
LINK, NODES = Link(rate=200e6), 4
ITERATIONS, EVALUATIONS = 600, 6
RATES, RATE_SEED, STEADY = (0.002, 0.004, 0.008, 0.016), 100, 0.03
"""Rates that are tried, the seed that is for that alone, and the share of their mean by which accuracies of the
reference may spread at its rate."""
WORDS = WORKLOADS["transformer"].words.partition(" --schedule")[0]
RECIPE = "--batch-size 8 --optimizer adamw --betas 0.9 0.95 --weight-decay 0.1 --clip-norm 1"
"""AdamW as language models are trained with it."""
SCHEDULES = {"cosine after a tenth": "--schedule cosine --lr-warmup {tenth}", "one-cycle": "--schedule one-cycle"}
"""Schedules: the rate rises over a tenth of the iterations, and over three tenths."""
ALONE, REFERENCE = "--strategy local", "DDP fp16"
"""Arguments for computing alone, and the method that the others are compared with."""
ROUNDS, BLOCK, QUICK_ROUNDS, QUICK_BLOCK = 8, 20, 1, 2


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to exchange gradients, by arguments of ``pipesgd.train``."""

    trained: str
    timed: str
    start: str
    """Arguments for iterations of the synchronous start."""
    rate_of: str
    """Name of the method whose rate it takes, perhaps its own."""


def _late(codec: str, buckets: int = 1) -> Method:
    more = f"--codec {codec} --buckets {buckets}"
    return Method(
        trained=f"--width 2 --codec {codec}", timed=f"--width 2 {more}", start=f"--width 1 {more}", rate_of="int8"
    )


def _in_time(codec: str, buckets: int) -> Method:
    words = f"--width 1 --codec {codec}"
    timed = f"{words} --buckets {buckets}"
    return Method(trained=words, timed=timed, start=timed, rate_of=REFERENCE)


_DDP = "--strategy ddp --ddp-hook fp16"
METHODS = {
    REFERENCE: Method(trained="--width 1 --codec fp16", timed=_DDP, start=_DDP, rate_of=REFERENCE),
    "int8": _late("int8"),
    "int8, 4 buckets": _late("int8", 4),
    "int4": _late("int4"),
    "int4, 4 buckets": _late("int4", 4),
    "width 1, int8, 4 buckets": _in_time("int8", 4),
    "width 1, int4, 4 buckets": _in_time("int4", 4),
}


# ---- Iterations to the target


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of all that is timed, in the same rounds."""

    commit: str | None
    seconds: dict[str, list[float]]
    """Seconds of an iteration in each round, by arguments of ``pipesgd.train``."""


Runs = Mapping[str, Run]
"""Finished trainings by their arguments."""


def training(schedule: str, method: str, lr: float, seed: int, iterations: int) -> Planned:
    """Return the training of a method, which those that are timed differently have in common."""
    rises = SCHEDULES[schedule].format(tenth=max(1, iterations // 10))
    length = f"--iterations {iterations} --evaluate-iterations {max(1, iterations // EVALUATIONS)} --seed {seed}"
    words = f"{WORDS} --model transformer {RECIPE} {METHODS[method].trained} --lr {lr:g} {rises} {length}"
    return Planned(workload=f"transformer, {schedule}", system=method, words=words, seed=seed)


def search(schedule: str, method: str, iterations: int) -> list[Planned]:
    """Return the trainings that the rate of ``method`` is chosen by."""
    return [training(schedule, METHODS[method].rate_of, lr, RATE_SEED, iterations) for lr in RATES]


def best_rate(schedule: str, method: str, iterations: int, runs: Runs) -> float | None:
    """Return the rate with the best accuracy at the end; None until it is known."""
    planned = search(schedule, method, iterations)
    if any(one.words not in runs for one in planned):
        return None
    worth = {lr: runs[one.words].test_accuracy or 0.0 for lr, one in zip(RATES, planned, strict=True)}
    return max(worth, key=lambda lr: worth[lr])


def steady(schedule: str, iterations: int, seeds: int, runs: Runs) -> tuple[list[Planned], float | None]:
    """Return the trainings that say which rate all methods have at most, and that; None until it is known."""
    best = best_rate(schedule, REFERENCE, iterations, runs)
    every: list[Planned] = []
    for lr in sorted((one for one in RATES if best is not None and one <= best), reverse=True):
        planned = [training(schedule, REFERENCE, lr, seed, iterations) for seed in range(seeds)]
        every += planned
        if any(one.words not in runs for one in planned):
            return every, None
        ends = [runs[one.words].test_accuracy or 0.0 for one in planned]
        if max(ends) - min(ends) <= STEADY * sum(ends) / len(ends) or lr == RATES[0]:
            return every, math.inf if lr == best else lr
    return every, None


def rate_of(schedule: str, method: str, iterations: int, seeds: int, runs: Runs) -> float | None:
    """Return the rate of a method; None until it is known."""
    best, (_, most) = best_rate(schedule, method, iterations, runs), steady(schedule, iterations, seeds, runs)
    return None if best is None or most is None else min(best, most)


def plan(iterations: int, seeds: int, runs: Runs, *, most: bool = False) -> list[Planned]:
    """Return the trainings that can be told from those that are done; with ``most``, at any rate where it cannot be."""
    every = []
    for schedule in SCHEDULES:
        for method in METHODS:
            every += search(schedule, method, iterations)
            if method == REFERENCE:
                every += steady(schedule, iterations, seeds, runs)[0]
            lr = rate_of(schedule, method, iterations, seeds, runs)
            if lr is not None or most:
                every += [training(schedule, method, lr or RATES[0], seed, iterations) for seed in range(seeds)]
    return list({one.words: one for one in every}.values())


def curves(schedule: str, method: str, lr: float, iterations: int, seeds: int, runs: Runs) -> list[Curve]:
    """Return the accuracies on the way of each seed."""
    return [curve_of(runs[training(schedule, method, lr, seed, iterations).words]) for seed in range(seeds)]


# ---- Time of an iteration


def time_iterations(*, quick: bool) -> Times:
    """Return the times of an iteration.

    Raises:
        RunError: the job failed.
    """
    accelerator = QUICK_ACCELERATOR if quick else ACCELERATOR
    emulated = f"--lr {TIMED_LR} --model experiments.accelerators:synthetic={accelerator},model=transformer"
    every = dict.fromkeys([ALONE, *(words for one in METHODS.values() for words in (one.timed, one.start))])
    asked = [
        {"words": f"{WORDS} {emulated} {RECIPE} {words}", "iterations": QUICK_BLOCK if quick else BLOCK}
        for words in every
    ]
    with tempfile.TemporaryDirectory() as folder, Testbed(nodes=NODES, link=LINK) as testbed:
        rounds = time_in_passes(testbed, asked, QUICK_ROUNDS if quick else ROUNDS, Path(folder))
    found = {words: [one["seconds"] for one in of_rounds] for words, of_rounds in zip(every, rounds, strict=True)}
    return Times(commit=code_state(), seconds=found)


# ---- Both


def rows_of(schedule: str, iterations: int, seeds: int, runs: Runs, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return a row for every method with a schedule."""
    rates = {name: rate_of(schedule, name, iterations, seeds, runs) for name in METHODS}
    of_methods = {
        name: curves(schedule, name, lr, iterations, seeds, runs) for name, lr in rates.items() if lr is not None
    }
    target, rows = target_of(of_methods[REFERENCE]), []
    base = times[METHODS[REFERENCE].timed]
    of_alone = _ratios(base, times[ALONE])
    seconds_of_reference: list[float] = []
    for name, method in METHODS.items():
        lr = rates[name]
        assert lr is not None, "all trainings are finished"
        found = accuracy_of(of_methods[name], of_methods[REFERENCE], target)
        config = parse_training(shlex.split(training(schedule, name, lr, 0, iterations).words))
        start, reached = start_iterations(config, iterations), found["iterations_to_target"]
        seconds = []
        if reached is not None:
            first = min(start, reached)
            each = zip(times[method.timed], times[method.start], strict=True)
            seconds = [(reached - first) * late + first * at_start for late, at_start in each]
        if name == REFERENCE:
            seconds_of_reference = seconds
        both = seconds and seconds_of_reference
        gains = _ratios(seconds_of_reference, seconds) if both else []
        rows.append(
            {
                "schedule": schedule,
                "method": name,
                "lr": lr,
                "lr_is_inside": min(RATES) < lr < max(RATES),
                "lr_lowered": lr != best_rate(schedule, name, iterations, runs),
                **found,
                "start_iterations": start,
                "iteration_s": median(times[method.timed]),
                "start_iteration_s": median(times[method.start]),
                "time_to_target_s": median(seconds) if seconds else None,
                **ratio_columns("times_as_fast", paired_ratio(seconds_of_reference, seconds) if both else None),
                "alone_times_as_fast": median(of_alone),
                **ratio_columns("share_of_alone", paired_ratio(gains, of_alone) if gains else None),
                "rounds": len(base),
            }
        )
    return rows


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(one, other, strict=True)]


def _texts(row: Row) -> dict[str, str]:
    text = partial(command.text_of, row)
    return {
        "schedule": row["schedule"],
        "method": row["method"],
        "lr": f"{row['lr']:g}",
        "accuracy %": text("accuracy_mean", ".2f", 100),
        "iterations to target": text("iterations_to_target", ".0f", missing=row["not_reached"]),
        "ms": f"{row['iteration_s'] * 1e3:.1f}, {row['start_iteration_s'] * 1e3:.1f} in the start",
        "s to target": text("time_to_target_s", ".1f"),
        "times as fast": f"{text('times_as_fast_median', '.2f')} ({text('times_as_fast_low', '.2f')} to "
        f"{text('times_as_fast_high', '.2f')})",
        "of computing alone's": text("share_of_alone_median", ".2f"),
    }


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser(NAME, __doc__)
    simulated_runs.add_options(options)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    command.check_alone(NAME, ranks.by_torchrun, "it starts its own ranks")
    iterations = QUICK_ITERATIONS if arguments.quick else ITERATIONS
    seeds = simulated_runs.seeds_of(arguments)
    wanted = partial(plan, iterations, seeds)
    done = simulated_runs.finished_runs(wanted, arguments, NAME, console, expected=partial(wanted, most=True))
    if any(one.words not in done for one in wanted(done)):
        raise UserInputError("--finished must find all trainings; some are missing")
    kept = KeptRuns(arguments.output / f"{NAME}.times.runs.json", Times, fresh=arguments.fresh)
    timed = kept.complete(
        {"all": arguments.quick},
        lambda quick: time_iterations(quick=quick),
        console,
        "iteration times",
        finished=arguments.finished,
    )
    if not timed:
        raise UserInputError("--finished must find the times of iterations; there are none")
    times = timed["all"]
    rows = [row for schedule in SCHEDULES for row in rows_of(schedule, iterations, seeds, done, times.seconds)]
    commits = sorted({str(run.commit) for run in done.values()})
    extra = {"rate": LINK.rate, "nodes": NODES, "accelerator": ACCELERATOR, "runs_made_with": commits}
    save(NAME, rows, extra={**extra, "timed_at": times.commit}, folder=arguments.output)
    command.show(f"Transformer at 200 Mbit/s, {NODES} nodes (all emulated)", [_texts(row) for row in rows])


if __name__ == "__main__":
    command.run(main)
