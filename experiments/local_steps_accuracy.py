"""Accuracy of local steps, next to synchronous training, accumulation by the same factor, and DiLoCo.

    python -m experiments.local_steps_accuracy            local_steps_accuracy.csv, _summary.csv
    python -m experiments.local_steps_accuracy --workloads mlp --local-steps 4 8 --seeds 1
    python -m experiments.local_steps_accuracy --finished      the same files, from the finished runs

An MLP and a convnet on Fashion-MNIST with SGD and a transformer on text with AdamW train on four ranks, which are
simulated exactly in one process (experiments/simulation.py). A run is named by the arguments that ``pipesgd.train``
would get for it. All runs of a workload see the same samples, the last few left out where H does not divide them:

- local steps: H iterations between two exchanges, width 1 and 2, fp32 and int4;
- weight streaming: the weights in F fragments, F = 4 or less, of which every H / F iterations exchange the next one.
  That is H iterations and as many bytes between two exchanges of a weight, but at width 2 a movement is late by H / F
  iterations instead of H;
- accumulation: H micro-batches an update, hence H times fewer updates. Larger batches can take larger learning rates,
  so it is tried at 1, 2 and 4 times the rate, and the best counts;
- DiLoCo: outer Nesterov with the rate 0.7 and the momentum 0.9 of its paper, width 1. The inner optimizer is that of
  the workload, where the paper has AdamW, and windows are shorter than its 500 iterations.

A run that diverges is a result as well. All runs take about three hours of two cores. Finished runs are kept in
local_steps_accuracy.runs.json in the output folder: the same command makes only those that are missing.
"""

from __future__ import annotations

import itertools
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from experiments import command, simulated_runs, simulated_tables
from experiments.results import Row
from experiments.simulated_runs import QUICK_ITERATIONS, Run
from experiments.simulated_tables import changes, column, cost_of, mean_of_all, outcome, texts_next_to_sync
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

NAME = "local_steps_accuracy"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training, its length, and its learning rate."""

    words: str
    """Arguments of ``pipesgd.train`` for data and model."""
    lr: float
    """Learning rate that suits synchronous training."""
    iterations: int
    judged_by_loss: bool = False
    """True if the test loss is judged, where accuracy is not what people look at."""


WORKLOADS = {
    "mlp": Workload(
        words="--dataset fashion-mnist --model mlp --hidden-sizes 500 500 --batch-size 32", lr=0.1, iterations=1404
    ),
    "convnet": Workload(words="--dataset fashion-mnist --model convnet --batch-size 32", lr=0.1, iterations=468),
    "transformer": Workload(
        words="--dataset python-stdlib --model transformer --batch-size 8",
        lr=0.008,
        iterations=600,
        judged_by_loss=True,
    ),
    "digits": Workload(words="--dataset digits --model mlp --hidden-sizes 64 --batch-size 16", lr=0.1, iterations=100),
}
"""Workloads; the last is for trying out."""
TRAINED, STEPS = ("mlp", "convnet", "transformer"), (2, 4, 8, 32)
SYNCHRONOUS, ACCUMULATION, LOCAL_STEPS, DILOCO = "synchronous", "accumulation", "local steps", "DiLoCo"
STREAMING, FRAGMENTS = "weight streaming", 4
"""Local steps by fragments, and how many: no more than H, as each is exchanged after at least one iteration."""
MULTIPLES = (1.0, 2.0, 4.0)
"""Multiples of the learning rate that accumulation is tried at."""
JUDGED_UP_TO = 8
"""Most iterations between two exchanges of a weight with a target."""
MOST_LOST = {"width": (0.3, 1.0), "codec": (0.1, 1 / 3)}
"""Most that width 2 may lose to width 1, and int4 to fp32 at width 2, with as many iterations between two exchanges of
a weight: points of the accuracy's mean over seeds, or percent of that of the loss, where that is judged, as much for a
point."""


class Way(NamedTuple):
    """A way to train."""

    method: str
    local_steps: int
    """Iterations between two exchanges of a weight, or micro-batches of an update."""
    width: int
    codec: str
    words: str = ""
    multiple: float = 1.0
    """Multiple of the learning rate."""
    fragments: int = 1

    @property
    def options(self) -> str:
        """Arguments of ``pipesgd.train`` for it, without those of the workload and the learning rate."""
        return f"--width {self.width} --codec {self.codec} {self.words}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Planned(simulated_runs.Planned):
    """A run to be made."""

    way: Way
    lr: float

    @property
    def name(self) -> str:
        way = self.way
        label = label_of(way.method, way.width, way.codec)
        return f"{self.workload}, H {way.local_steps}, {label}, lr {self.lr:g}, seed {self.seed}"


def label_of(method: str, width: int, codec: str) -> str:
    """Return the name of a line of the figure."""
    if method not in (LOCAL_STEPS, STREAMING):
        return method
    parts = (f"width {width}", "streaming" if method == STREAMING else "", "" if codec == "fp32" else codec)
    return ", ".join(part for part in parts if part)


def ways(steps: Sequence[int]) -> list[Way]:
    """Return all ways to train, with each of these numbers of local steps."""
    found = [Way(SYNCHRONOUS, 1, 1, "fp32")]
    for number in steps:
        accumulation, windows = f"--accumulation {number}", f"--local-steps {number}"
        found += [Way(ACCUMULATION, number, 1, "fp32", accumulation, multiple) for multiple in MULTIPLES]
        both = itertools.product((1, 2), ("fp32", "int4"))
        found += [Way(LOCAL_STEPS, number, width, codec, windows) for width, codec in both]
        fragments = math.gcd(number, FRAGMENTS)
        if fragments > 1:
            found += [streaming(number, fragments, codec) for codec in ("fp32", "int4")]
        found.append(Way(DILOCO, number, 1, "fp32", f"{windows} --outer nesterov"))
    return found


def streaming(local_steps: int, fragments: int, codec: str) -> Way:
    """Return weight streaming at width 2, with this many iterations between two exchanges of a weight."""
    words = f"--local-steps {local_steps // fragments} --fragments {fragments}"
    return Way(STREAMING, local_steps, 2, codec, words, fragments=fragments)


def plan(workloads: Sequence[str], steps: Sequence[int], seeds: int, *, quick: bool = False) -> list[Planned]:
    """Return all runs, seed by seed."""
    return [
        planned_run(name, way, seed, QUICK_ITERATIONS if quick else WORKLOADS[name].iterations)
        for seed, name, way in itertools.product(range(seeds), workloads, ways(steps))
    ]


def planned_run(name: str, way: Way, seed: int, iterations: int) -> Planned:
    """Return the run of a workload that sees the samples of this many iterations."""
    workload = WORKLOADS[name]
    updates = max(1, iterations // way.local_steps) if way.method == ACCUMULATION else iterations
    lr = workload.lr * way.multiple
    optimizer = "--optimizer adamw" if workload.judged_by_loss else "--optimizer sgd --momentum 0.9"
    rest = f"{optimizer} --lr {lr:g} --schedule one-cycle --iterations {updates} --seed {seed}"
    words = f"{workload.words} {way.options} {rest}"
    return Planned(workload=name, seed=seed, words=words, way=way, lr=lr)


def tabulate(planned: Sequence[Planned], runs: Mapping[str, Run]) -> list[Row]:
    """Return a row for every run that is there."""
    return [
        {
            "workload": one.workload,
            "method": one.way.method,
            "local_steps": one.way.local_steps,
            "width": one.way.width,
            "codec": one.way.codec,
            "lr": one.lr,
            "seed": one.seed,
            **outcome(run),
        }
        for one in planned
        if (run := runs.get(one.words)) is not None
    ]


Cell = tuple[str, str, int, int, str]
"""Workload, method, local steps, width and codec."""


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Return a row for every cell of which no seed is missing, at its best learning rate.

    It has the means over seeds, how far they are from synchronous training, what the width or the codec costs, and
    whether that meets its target.
    """
    seeds = {row["seed"] for row in rows}
    found: dict[Cell, dict[float, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        cell = (row["workload"], row["method"], row["local_steps"], row["width"], row["codec"])
        found.setdefault(cell, {}).setdefault(row["lr"], []).append(row)
    best: dict[Cell, list[Row]] = {}
    for cell, by_lr in found.items():
        whole = [own for own in by_lr.values() if len(own) == len(seeds)]
        if whole:
            best[cell] = min(whole, key=partial(_badness, cell[0]))
    return [_summary(cell, best) for cell in best]


def _summary(cell: Cell, best: Mapping[Cell, list[Row]]) -> Row:
    workload, method, steps, width, codec = cell
    own = best[cell]
    base, kind = None, ""
    if codec != "fp32":
        base, kind = best.get((workload, method, steps, width, "fp32")), "codec"
    elif width > 1:
        base, kind = best.get((workload, LOCAL_STEPS, steps, 1, codec)), "width"
    row: Row = {
        **dict(zip(("workload", "method", "local_steps", "width", "codec"), cell, strict=True)),
        "lr": own[0]["lr"],
        "seeds": len(own),
        "accuracy_mean": mean_of_all(column(own, "test_accuracy")),
        "test_loss_mean": mean_of_all(column(own, "test_loss")),
        "diverged": sum(row["diverged_at"] is not None for row in own),
        **changes(own, best.get((workload, SYNCHRONOUS, 1, 1, "fp32")), "sync"),
        "cost_of": kind,
        **changes(own, base, "base"),
    }
    judged = width > 1 and steps <= JUDGED_UP_TO and base is not None
    return row | {"target": verdict(workload, kind, row) if judged else ""}


def _badness(workload: str, rows: Sequence[Row]) -> float:
    by_loss = WORKLOADS[workload].judged_by_loss
    mean = mean_of_all(column(rows, "test_loss" if by_loss else "test_accuracy"))
    return math.inf if mean is None else mean if by_loss else -mean


def verdict(workload: str, kind: str, row: Row) -> str:
    """Return "met" or "MISSED" for what a width, or a codec, costs."""
    by_loss = WORKLOADS[workload].judged_by_loss
    cost = cost_of(row, "base", by_loss=by_loss)
    return "met" if cost is not None and cost <= MOST_LOST[kind][by_loss] else "MISSED"


def publish(rows: list[Row], summary: list[Row], runs: Mapping[str, Run], folder: Path) -> None:
    """Save the rows and their summary, and print the summary."""
    target = {"lost_at_most": MOST_LOST, "local_steps_at_most": JUDGED_UP_TO}
    simulated_tables.publish(NAME, rows, summary, runs, {"target": target}, folder)
    command.show("Means over seeds, and targets", [_texts(row) for row in summary])


def _texts(row: Row) -> dict[str, str]:
    text = partial(command.text_of, row)
    return {
        "workload": row["workload"],
        "method": label_of(row["method"], row["width"], row["codec"]),
        "H": str(row["local_steps"]),
        "lr": f"{row['lr']:g}",
        **texts_next_to_sync(row),
        "cost": f"{text('accuracy_to_base_points', '+.2f')} {text('loss_to_base_percent', '+.2f')} % {row['cost_of']}"
        if row["cost_of"]
        else "",
        "target": row["target"],
    }


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser(NAME, __doc__)
    add = options.add_argument
    add("--workloads", nargs="+", default=list(TRAINED), metavar="NAME", help=f"any of {', '.join(WORKLOADS)}")
    values = " ".join(map(str, STEPS))
    add("--local-steps", nargs="+", type=command.at_least(2), default=list(STEPS), metavar="H", help=f"({values})")
    simulated_runs.add_options(options)
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"workloads": WORKLOADS, "local_steps": None})
    command.check_alone(NAME, by_torchrun, "it simulates the ranks")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    seeds = simulated_runs.seeds_of(arguments)
    planned = plan(arguments.workloads, arguments.local_steps, seeds, quick=arguments.quick)
    done = simulated_runs.finished_runs(lambda done: planned, arguments, NAME, console)
    rows = tabulate(planned, done)
    summary = summarize(rows)
    if not summary:
        raise UserInputError("--finished must find all seeds of a way to train; there is none yet")
    publish(rows, summary, done, arguments.output)


if __name__ == "__main__":
    command.run(main)
