"""Time to an accuracy with local steps, DiLoCo and DDP, between nodes on links as slow as those of homes.

    python -m experiments.local_steps_time              local_steps_time.csv and local_steps_time.png
    python -m experiments.local_steps_time --finished   the same files, from what is finished

An MLP 784-500-500-10 (2.6 MB of gradients) trains on Fashion-MNIST with 32 samples a rank on four emulated nodes. It
must reach the accuracy of synchronous training after 1404 iterations, the mean of seeds, less half a point. With DDP at
10 Mbit/s that would take hours for every seed, so the time to the accuracy is the product of two numbers:

- the iterations to the accuracy, on simulated ranks, which train as real ones do, bit for bit (simulation.py). Every
  way to train is tried at several lengths, each with a one-cycle learning rate of its own, from the shortest on until
  all seeds reach the accuracy: the median of these seeds counts. Runs are evaluated every 64 iterations, and the
  crossing is interpolated. DDP's iterations are those of width 1, which adds up the same gradients in another
  order; with its fp16 hook, those of width 1 with fp16;
- the time of an iteration, on the testbed, in passes in which all ways to train take turns. Each rank has an emulated
  accelerator: a real model that takes at least 75 ms ("at_least"), or a wait of 75 ms ("synthetic").

DiLoCo is width 1, float32 and outer Nesterov; pipesgd is width 2 and int4. It also streams the weights, in up to four
fragments by the ring, or in two, which are nearly equal here, by an all-to-all, whose two steps pay the latency less
often than the ring's six. Its iterations are those with the ring, which rounds a sum in every step, and an all-to-all
once. H are the iterations between two exchanges of a weight. The table also has the share of the communication that
was hidden, by the reports of the ranks (1 - wait / communication), next to the share that the timing model predicts
from a calibration without local steps, to which the computation's slowdown by the communication is exposed, too, and
the fewest local steps of which its planner says that they hide all of it. Bytes are those that all ranks together
report for an iteration, next to the ring's formula, to the byte; torch does not count those of DDP, whose reports are
the formula.

Finished runs are kept in local_steps_time.runs.json, and finished settings of the testbed in
local_steps_time.settings.json, in the output folder: the same command makes only those that are missing. The runs take
about an hour of two cores, and the settings an hour and a half.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console

from experiments import command, figures, simulated_runs, style
from experiments.kept_runs import KeptRuns
from experiments.local_steps_accuracy import (
    DILOCO,
    LOCAL_STEPS,
    STEPS,
    STREAMING,
    Planned,
    Way,
    planned_run,
    streaming,
    ways,
)
from experiments.paired import median, paired_ratio
from experiments.results import Panels, Row, code_state, save
from experiments.simulated_runs import QUICK_ITERATIONS, WORLD_SIZE, Run
from experiments.simulated_tables import crossing_of, mean_of_all
from experiments.staleness_runs import OPTIMIZERS, WORKLOADS
from experiments.validate_local_steps import CALIBRATION_SECONDS, PASSES, QUICK_CALIBRATION_SECONDS, WINDOWS, ask
from experiments.validation_runs import Setting, calibrate, time_in_passes
from pipesgd.codecs.make import make_codec
from pipesgd.codecs.options import CodecOptions
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from pipesgd.strategy import hidden_share
from timing_model.cluster_profile import Profile
from timing_model.fragments import fragments_of, hiding_windows, windows_of
from timing_model.job import Job
from timing_model.predict import predict
from timing_model.schedules import split

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "local_steps_time"
DDP, DDP_FP16, OURS = "DDP", "DDP, fp16", "pipesgd, int4"
STREAMED, STREAMED_AT_ONCE = f"{OURS}, fragments", f"{OURS}, 2 fragments, all-to-all"
LOOKS = {
    DDP: "ddp",
    DDP_FP16: "ddp fp16",
    DILOCO: DILOCO,
    OURS: "width 2, int4",
    STREAMED: "width 3, int4",
    STREAMED_AT_ONCE: "width 3, int8",
}
"""Names by which contenders get their colours and lines."""
LABEL_PLACES = {OURS: (16, -3), STREAMED_AT_ONCE: (0, -14)}
"""Places of labels, in points from their markers; the others are above them."""
MINUTES = (1, 2, 5, 10, 20, 50)
"""Ticks of the figure."""
LENGTHS, QUICK_LENGTHS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0), (1.0,)
"""Lengths of runs that are tried in this order, as multiples of the workload's iterations."""
EVALUATE, QUICK_EVALUATE = 64, 4
"""Iterations between two evaluations; whole windows of all local steps."""
BELOW_SYNCHRONOUS = 0.005
"""Accuracy by which the one to reach is below that of synchronous training."""
TIMED_LR = "0.001"
"""Learning rate of timed runs, at which no real model diverges, whatever the way to train."""
JUDGED_RATE, TIMES_AS_FAST = "25mbit", 15.0
"""Rate with a target, and how many times as fast as DDP pipesgd is to be there."""
HIDDEN_AT_LEAST = 0.95
"""Share of the communication to be hidden where the planner says that the local steps hide it."""


@dataclass(frozen=True, kw_only=True)
class Cell(Setting):
    """A testbed, and the emulated accelerator with which the workload is timed on it."""

    emulation: str
    """Function of ``experiments.accelerators``: "at_least" or "synthetic"."""
    workload: str = "mlp"

    @property
    def name(self) -> str:
        return f"{super().name}, {self.emulation}"

    @property
    def words(self) -> str:
        """Arguments of pipesgd.train for the workload, with a learning rate at which it learns next to nothing."""
        model = f"--model experiments.accelerators:{self.emulation}={self.accelerator}"
        workload = WORKLOADS[self.workload].words.replace("--model mlp", model)
        return f"{workload} {OPTIMIZERS['sgd']} --lr {TIMED_LR}"


CELLS = tuple(
    Cell(nodes=WORLD_SIZE, rate=rate, latency="20ms", accelerator="75ms", emulation=emulation)
    for emulation, rate in itertools.product(("at_least", "synthetic"), ("10mbit", "25mbit", "50mbit"))
)
QUICK_CELLS = (Cell(nodes=2, rate="200mbit", accelerator="20ms", emulation="synthetic", workload="digits"),)


class Contender(NamedTuple):
    """A way to train, under a name for readers."""

    name: str
    way: Way
    """The way as it is simulated."""
    timed: str
    """Arguments of pipesgd.train with which it is timed."""
    all_reduce: str = "ring"


def contenders(steps: Sequence[int]) -> list[Contender]:
    """Return all contenders, the first of them DDP, with each of these numbers of local steps."""
    synchronous, *others = ways(steps)
    found = [
        Contender(DDP, synchronous, "--strategy ddp"),
        Contender(DDP_FP16, synchronous._replace(codec="fp16"), "--strategy ddp --ddp-hook fp16"),
    ]
    for way in others:
        if way.method == DILOCO:
            found.append(Contender(DILOCO, way, way.options))
        elif (way.method, way.width, way.codec) == (LOCAL_STEPS, 2, "int4"):
            found.append(Contender(OURS, way, way.options))
        elif (way.method, way.codec) == (STREAMING, "int4"):
            found.append(Contender(STREAMED, way, way.options))
            two, at_once = streaming(way.local_steps, 2, way.codec), "all-to-all"
            found.append(Contender(STREAMED_AT_ONCE, two, f"{two.options} --all-reduce {at_once}", at_once))
    return found


# ---- Iterations to the accuracy, on simulated ranks

Plan = dict[tuple[Contender, float], list[Planned]]
"""Runs of all seeds, by contender and length."""


def plan(all_contenders: Sequence[Contender], seeds: int, *, quick: bool = False) -> Plan:
    """Return all runs to be made."""
    name = (QUICK_CELLS if quick else CELLS)[0].workload
    iterations = QUICK_ITERATIONS if quick else WORKLOADS[name].iterations
    evaluate = f"--evaluate-iterations {QUICK_EVALUATE if quick else EVALUATE}"
    planned: Plan = {}
    for one, length in itertools.product(all_contenders, QUICK_LENGTHS if quick else LENGTHS):
        of_seeds = [planned_run(name, one.way, seed, round(length * iterations)) for seed in range(seeds)]
        planned[one, length] = [dataclasses.replace(run, words=f"{run.words} {evaluate}") for run in of_seeds]
    return planned


class Arrival(NamedTuple):
    """The shortest runs of which all seeds have the accuracy to reach."""

    iterations: float
    """Iterations to the accuracy, the median over seeds."""
    length: float
    """Length of these runs, one of ``LENGTHS``."""


def accuracy_to_reach(planned: Plan, runs: Mapping[str, Run]) -> float | None:
    """Return it; None unless all seeds of synchronous training are there, at the workload's own length."""
    [own] = [of_seeds for (one, length), of_seeds in planned.items() if one.name == DDP and length == 1.0]
    found = [runs.get(run.words) for run in own]
    mean = mean_of_all([None if run is None else run.test_accuracy for run in found])
    return None if mean is None else mean - BELOW_SYNCHRONOUS


def arrivals(planned: Plan, runs: Mapping[str, Run], accuracy: float) -> dict[Contender, Arrival]:
    """Return the contenders of which all seeds reach the accuracy at some length, with the shortest such length."""
    found: dict[Contender, Arrival] = {}
    for (one, length), of_seeds in planned.items():
        made = [runs.get(run.words) for run in of_seeds]
        crossings = [None if run is None else crossing_of(accuracy, run.points) for run in made]
        known = [crossing for crossing in crossings if crossing is not None]
        if one not in found and len(known) == len(crossings):
            found[one] = Arrival(median(known), length)
    return found


def runs_until_there(planned: Plan, make: Callable[[list[Planned]], dict[str, Run]]) -> dict[str, Run]:
    """Return the runs with which every contender arrives, or else all of its runs.

    Args:
        planned: all runs that may be needed.
        make: function that returns those of some planned runs that are there, once it has made what it can.
    """
    runs = make(next(of_seeds for (_, length), of_seeds in planned.items() if length == 1.0))  # DDP's
    accuracy = accuracy_to_reach(planned, runs)
    if accuracy is None:
        return runs
    for at in dict.fromkeys(length for _, length in planned):
        there = {one for one, arrival in arrivals(planned, runs, accuracy).items() if arrival.length < at}
        wanted = [of_seeds for (one, length), of_seeds in planned.items() if length == at and one not in there]
        # By words, since contenders that differ in the all-reduce share their runs.
        runs |= make(list({run.words: run for of_seeds in wanted for run in of_seeds}.values()))
    return runs


# ---- Time of an iteration, on the testbed


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One setting of the testbed: what was predicted, and what was measured."""

    commit: str | None
    """Commit of the code that measured it."""
    planned_local_steps: int | None
    """Fewest local steps that the planner says to hide the communication of width 2 with int4; None if none do."""
    cells: dict[str, dict[str, Any]]
    """Contenders, by the arguments with which they were timed."""


def measure(cell: Cell, all_contenders: Sequence[Contender], folder: Path, *, quick: bool) -> Timed:
    """Calibrate, predict, and then measure.

    Raises:
        RunError: a job failed.
    """
    seconds = QUICK_CALIBRATION_SECONDS if quick else CALIBRATION_SECONDS
    with cell.testbed() as testbed:
        profile = calibrate(
            testbed, f"--seconds {seconds} --codecs int4 --all-reduces ring all-to-all {cell.words}", folder
        )
    windows = 1 if quick else WINDOWS
    timed_plan = [
        {"words": f"{cell.words} {one.timed}", "iterations": windows * one.way.local_steps} for one in all_contenders
    ]
    with cell.testbed() as testbed:
        times = time_in_passes(testbed, timed_plan, PASSES, folder)
    return Timed(
        commit=code_state(),
        planned_local_steps=_planned_local_steps(profile, cell.nodes),
        cells={
            one.timed: _predicted(profile, cell.nodes, one)
            | _measured(of_passes, exchange_bytes(one.way, profile.compute[0].tensors, cell.nodes), one.way)
            for one, of_passes in zip(all_contenders, times, strict=True)
        },
    )


def _planned_local_steps(profile: Profile, nodes: int) -> int | None:
    return hiding_windows(ask(profile, nodes, None, {"width": 2, "codec": "int4", "local_steps": 1}).job, 1)


def _predicted(profile: Profile, nodes: int, one: Contender) -> dict[str, Any]:
    """Return the time of an iteration, and the hidden share, by the timing model, which is not asked about DDP."""
    if one.name in (DDP, DDP_FP16):
        return {"predicted_s": None, "predicted_hidden": None}
    [compute], way = profile.compute, one.way
    job = Job(
        cluster=profile,
        compute=compute,
        world_size=nodes,
        width=way.width,
        codec=way.codec,
        all_reduce=one.all_reduce,
    )
    windows = windows_of(job, way.local_steps // way.fragments, way.fragments)
    answers = [predict(window, extrapolate=True) for window in windows]
    return {
        "predicted_s": fmean(answer.iteration.total for answer in answers),
        "predicted_hidden": hidden_share(
            sum(answer.collective.total for answer in answers) / way.local_steps,
            fmean(answer.iteration.wire + answer.iteration.codec for answer in answers),
        ),
    }


def _measured(of_passes: Sequence[Mapping[str, float]], exchanged: int, way: Way) -> dict[str, Any]:
    """Return the seconds of an iteration in each pass, the hidden share over all of them, and the bytes."""

    def over(name: str) -> float:
        return float(np.mean([one[name] for one in of_passes]))

    steps = way.local_steps
    return {
        "seconds": [one["seconds"] for one in of_passes],
        "exchange_s": steps * over("communication_seconds"),
        "hidden": hidden_share(over("communication_seconds"), over("exposed_seconds")),
        "bytes": over("wire_bytes"),
        "formula_bytes": exchanged / steps,
        "bytes_equal": all(round(steps * one["wire_bytes"]) == exchanged for one in of_passes),
        "cpu_share": over("cpu_share"),
    }


def exchange_bytes(way: Way, tensors: Sequence[int], ranks: int) -> int:
    """Return the bytes that all ranks together send until every one of the ``tensors`` was exchanged once.

    ``tensors`` are the numbers of values of the parameters, in the model's order.
    """
    parts = fragments_of(tensors, way.fragments)
    return sum(formula_bytes(way.codec, sum(part), ranks) for part in parts)


def formula_bytes(codec: str, numel: int, ranks: int) -> int:
    """Return the bytes that all ranks together send in a ring all-reduce of ``numel`` values.

    In each of its 2(p-1) steps every one of p ranks sends another one of the p chunks. An all-to-all sends as many:
    each rank all other chunks to their owners, and its own sum to all others.

    >>> formula_bytes("fp32", 10, 4), formula_bytes("fp16", 10, 4)
    (240, 120)
    """
    wire_bytes = make_codec(CodecOptions(codec=codec)).wire_bytes
    return 2 * (ranks - 1) * sum(wire_bytes(stop - start) for start, stop in split(numel, ranks) if stop > start)


def finished_settings(
    cells: Sequence[Cell], all_contenders: Sequence[Contender], arguments: Namespace, console: Console
) -> dict[str, Timed]:
    """Return the settings by name; those that are missing are measured, unless only finished ones are wanted."""

    def made(cell: Cell) -> Timed:
        with tempfile.TemporaryDirectory() as folder:
            return measure(cell, all_contenders, Path(folder), quick=arguments.quick)

    kept = KeptRuns(arguments.output / f"{NAME}.settings.json", Timed, fresh=arguments.fresh)
    planned = {cell.name: cell for cell in cells}
    return kept.complete(planned, made, console, "settings of the testbed", finished=arguments.finished)


# ---- Table and figure


def tabulate(
    cells: Sequence[Cell],
    all_contenders: Sequence[Contender],
    settings: Mapping[str, Timed],
    reached: Mapping[Contender, Arrival],
    accuracy: float,
) -> list[Row]:
    """Return a row for every contender on every setting that is there."""
    rows: list[Row] = []
    for cell, one in itertools.product(cells, all_contenders):
        if (timed := settings.get(cell.name)) is None:
            continue
        measured, ddp = dict(timed.cells[one.timed]), all_contenders[0]
        seconds = measured.pop("seconds")
        iteration, arrival, base = median(seconds), reached.get(one), reached.get(ddp)
        faster: Row = dict.fromkeys(("times_as_fast_as_ddp", "low", "high"))
        if arrival is not None and base is not None:
            ratio = paired_ratio(timed.cells[ddp.timed]["seconds"], seconds)
            fewer = base.iterations / arrival.iterations
            values = (fewer * ratio.median, fewer * ratio.low, fewer * ratio.high)
            faster = dict(zip(faster, values, strict=True))
        planned = timed.planned_local_steps
        judged = one.name == OURS and planned is not None and one.way.local_steps >= planned
        rows.append(
            {
                "mbit_per_s": cell.link.rate / 1e6,
                "accelerator": cell.emulation,
                "contender": one.name,
                "local_steps": one.way.local_steps,
                "width": one.way.width,
                "codec": one.way.codec,
                "iteration_s": iteration,
                "passes_apart": max(seconds) / min(seconds) - 1,
                **measured,
                "planned_local_steps": planned if one.name == OURS else None,
                "hidden_target": _verdict(measured["hidden"] >= HIDDEN_AT_LEAST) if judged else "",
                "accuracy_to_reach": accuracy,
                "length": None if arrival is None else arrival.length,
                "iterations_to_accuracy": None if arrival is None else arrival.iterations,
                "seconds_to_accuracy": None if arrival is None else arrival.iterations * iteration,
                **faster,
            }
        )
    return rows


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def best_of(rows: Sequence[Row]) -> list[Row]:
    """Return, for each contender on each setting, the row of the local steps that reach the accuracy first."""
    best: dict[tuple[float, str, str], Row] = {}
    for row in rows:
        cell = (row["mbit_per_s"], row["accelerator"], row["contender"])
        if row["seconds_to_accuracy"] is not None:
            best[cell] = min(best.get(cell, row), row, key=lambda one: one["seconds_to_accuracy"])
    return list(best.values())


def judge(rows: Sequence[Row]) -> dict[str, str]:
    """Return, by setting with a target, whether pipesgd reaches the accuracy early enough."""
    found = {}
    for cell in (cell for cell in CELLS if cell.rate == JUDGED_RATE):
        where = {"mbit_per_s": cell.link.rate / 1e6, "accelerator": cell.emulation}
        own = [row for row in rows if {name: row[name] for name in where} == where]
        ours = [
            row["times_as_fast_as_ddp"]
            for row in best_of(own)
            if row["contender"] in (OURS, STREAMED, STREAMED_AT_ONCE)
        ]
        if own:
            found[cell.name] = _verdict(any(times is not None and times >= TIMES_AS_FAST for times in ours))
    return found


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Plot the time to the accuracy against the rate of the links, for one kind of accelerator."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    looks, best = style.method_styles([LOOKS[name] for name in names]), best_of(rows)
    missing: list[str] = []
    for name in names:
        line = {row["mbit_per_s"]: row for row in best if row["contender"] == name}
        if not line:
            missing.append(f"{name} does not reach it")
        minutes = [row["seconds_to_accuracy"] / 60 for row in line.values()]
        axes.plot(list(line), minutes, label=name, **looks[LOOKS[name]])
        for (rate, row), at in zip(line.items(), minutes, strict=True):
            if row["local_steps"] > 1:
                axes.annotate(
                    f"H {row['local_steps']}",
                    (rate, at),
                    xytext=LABEL_PLACES.get(name, (0, 6)),
                    textcoords="offset points",
                    ha="center",
                    fontsize="small",
                    bbox=style.OVER_LINES,
                )
    axes.text(0.02, 0.02, "\n".join(missing), transform=axes.transAxes, fontsize="small")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(sorted({row["mbit_per_s"] for row in rows}))
    axes.set_yticks(MINUTES)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    accuracy = 100 * rows[0]["accuracy_to_reach"]
    axes.set(
        title=f"accelerators: {rows[0]['accelerator']}",
        xlabel="rate of the links (Mbit/s)",
        ylabel=f"time to {accuracy:.2f} % (min)",
    )
    figures.legend_below(axes, ncols=4)
    return axes


draw = Panels(by=("accelerator",), plot=plot).save
"""Function that writes the figure, with a panel for every kind of accelerator."""


def publish(
    rows: list[Row], runs: Mapping[str, Run], settings: Mapping[str, Timed], folder: Path, console: Console
) -> None:
    """Save the rows and their figure, and print them."""
    judged = judge(rows)
    extra = {
        "world_size": WORLD_SIZE,
        "seconds_to_accuracy": "iterations to the accuracy on simulated ranks, times the iteration on the testbed",
        "target": {
            "times_as_fast_as_ddp": {JUDGED_RATE: TIMES_AS_FAST},
            "hidden_where_planned": HIDDEN_AT_LEAST,
        },
        "judged": judged,
        "runs": len(runs),
        "runs_made_with": sorted({str(run.commit) for run in runs.values()}),
        "settings_made_with": sorted({str(one.commit) for one in settings.values()}),
    }
    path = save(NAME, rows, extra=extra, folder=folder)
    draw(NAME, rows, folder)
    command.show(
        f"Time to {100 * rows[0]['accuracy_to_reach']:.2f} %: iterations on simulated ranks x time on the testbed",
        [_texts(row) for row in rows],
    )
    unequal = sum(not row["bytes_equal"] for row in rows)
    say(
        console,
        *(f"{name}: {TIMES_AS_FAST:g} times as fast as DDP: {found}" for name, found in judged.items()),
        f"bytes differ from the formula in {unequal} of {len(rows)} rows",
        f"wrote {path}",
    )


def _texts(row: Row) -> dict[str, str]:
    text = partial(command.text_of, row)
    steps = f", H {row['local_steps']}" if row["local_steps"] > 1 else ""
    return {
        "Mbit/s": f"{row['mbit_per_s']:g}",
        "accelerator": row["accelerator"],
        "contender": row["contender"] + steps,
        "ms": text("iteration_s", ".1f", 1e3),
        "predicted": text("predicted_s", ".1f", 1e3),
        "hidden": text("hidden", ".0%"),
        "by model": text("predicted_hidden", ".0%"),
        "target": row["hidden_target"],
        "kB": text("bytes", ".1f", 1e-3),
        "iterations": text("iterations_to_accuracy", ".0f"),
        "s to accuracy": text("seconds_to_accuracy", ".0f"),
        "as fast as DDP": text("times_as_fast_as_ddp", ".1f"),
    }


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser(NAME, __doc__)
    simulated_runs.add_options(options)
    arguments = command.parse(options, words)
    command.check_alone(NAME, by_torchrun, "it starts torchrun itself, on every node")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    cells, steps = (QUICK_CELLS, STEPS[:1]) if arguments.quick else (CELLS, STEPS)
    all_contenders = contenders(steps)
    planned = plan(all_contenders, simulated_runs.seeds_of(arguments), quick=arguments.quick)
    of_runs = copy.copy(arguments)

    def make(wanted: list[Planned]) -> dict[str, Run]:
        found = simulated_runs.finished_runs(wanted, of_runs, NAME, console)
        of_runs.fresh = False  # what comes next is added to these
        return found

    runs = runs_until_there(planned, make)
    settings = finished_settings(cells, all_contenders, arguments, console)
    accuracy = accuracy_to_reach(planned, runs)
    if accuracy is None or not settings:
        raise UserInputError("--finished must find all seeds of synchronous training and a setting; they are missing")
    rows = tabulate(cells, all_contenders, settings, arrivals(planned, runs, accuracy), accuracy)
    publish(rows, runs, settings, arguments.output, console)


if __name__ == "__main__":
    command.run(main)
