"""Loss and test accuracy over wall-clock time and over iterations, for the paper's methods and ours.

    python -m experiments.fig03_convergence                fig03_convergence.json, .png
    python -m experiments.fig03_convergence --seeds 1 --methods D-Sync "ours, int4"

Four nodes at 200 Mbit/s; MLP 784-500-500-10 on Fashion-MNIST, 128 samples a rank, four epochs, SGD with momentum 0.9.
The paper's T is truncate16 here, and its Q int8; its pipeline has no prediction. Time is the sum of the iterations,
without evaluations. A run that diverges ends where it diverges.

Finished runs are kept in fig03_convergence.runs.json in the output folder: the same command makes the missing ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from experiments import command, figures
from experiments.figures import PaperFigure
from experiments.kept_runs import KeptRuns
from experiments.results import Row, code_state
from experiments.style import method_styles
from experiments.testbed import Link, Testbed
from experiments.testbed_jobs import trained
from pipesgd.ranks import Ranks
from pipesgd.run.metrics import read_metrics
from pipesgd.run.output import METRICS_FILE, SUMMARY_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig03_convergence"
NODES, RATE = 4, 200e6
RECIPE = "--dataset fashion-mnist --model mlp --hidden-sizes 500 500 --batch-size 128 --lr 0.05 --schedule one-cycle"
QUICK_RECIPE = "--dataset digits --model mlp --hidden-sizes 64 --batch-size 16 --lr 0.05 --schedule one-cycle"
EPOCHS, SEEDS = 4, 3
METHODS = {
    "ps-sync": "--strategy ps-sync",
    "D-Sync": "--width 1",
    "D-Sync, truncate16": "--width 1 --codec truncate16",
    "D-Sync, int8": "--width 1 --codec int8",
    "pipelined": "--width 2 --prediction none",
    "pipelined, truncate16": "--width 2 --prediction none --codec truncate16",
    "pipelined, int8": "--width 2 --prediction none --codec int8",
    "ours, int4": "--width 2 --codec int4",
}
BINS = 40
"""Bins that the iterations of a run are put into; a loss is the mean of its bin."""
DEADLINE = 1800.0
LOSS_BY_TIME, LOSS_BY_ITERATION, ACCURACY_BY_TIME, ACCURACY_BY_ITERATION = (
    "loss over time",
    "loss over iterations",
    "accuracy over time",
    "accuracy over iterations",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Curves of one run, as points of (iteration, seconds, value)."""

    started: str
    commit: str | None
    failure: str | None
    losses: list[list[float]]
    accuracies: list[list[float]]


def read_curves(folder: Path, bins: int = BINS) -> tuple[list[list[float]], list[list[float]]]:
    """Return the losses, in bins, and the test accuracies of the run in ``folder``, which may have ended early."""
    lines = read_metrics(folder / METRICS_FILE)
    clock = list(accumulate(line["seconds"]["iteration"] for line in lines))
    accuracies = [line["test_accuracy"] for line in lines]
    if (folder / SUMMARY_FILE).exists():
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        accuracies[-1] = summary["final"]["test_accuracy"]
    parts = [part for part in np.array_split(np.arange(len(lines)), min(bins, len(lines))) if part.size]
    losses: list[list[float]] = [
        [float(part[-1] + 1), clock[part[-1]], float(np.mean([lines[index]["loss"] for index in part]))]
        for part in parts
    ]
    points = [[float(index + 1), clock[index], value] for index, value in enumerate(accuracies) if value is not None]
    return losses, points


def compute(
    methods: Sequence[str], seeds: int, kept: KeptRuns[Run], console: Console, *, quick: bool = False
) -> list[Row]:
    """Return a row for every panel, method and seed, with its curve; runs that are missing are made now."""
    length = "--epochs 2" if quick else f"--epochs {EPOCHS}"
    planned = {
        (method, seed): f"{QUICK_RECIPE if quick else RECIPE} {length} {METHODS[method]} --seed {seed}"
        for seed in range(seeds)
        for method in methods
    }
    done = kept.load()
    missing = {key: words for key, words in planned.items() if words not in done}
    command.say_kept(console, len(planned), len(missing))
    if missing:
        with (
            Testbed(nodes=2 if quick else NODES, link=Link(rate=RATE)) as testbed,
            command.progress(console, "convergence", len(missing)) as advance,
        ):
            for (method, seed), words in missing.items():
                run = done[words] = train(testbed, words)
                kept.add(words, run)
                advance(1, f"{method}, seed {seed}" + (f" failed: {run.failure}" if run.failure else ""))
    return tabulate({key: done[words] for key, words in planned.items()})


def train(testbed: Testbed, words: str) -> Run:
    """Train once with the arguments ``words`` and return the run."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with trained(testbed, f"{words} --timeout 300", deadline=DEADLINE, may_fail=True) as (folder, failure):
        there = (folder / METRICS_FILE).exists()
        losses, accuracies = read_curves(folder) if there else ([], [])
    return Run(started=started, commit=code_state(), failure=failure, losses=losses, accuracies=accuracies)


def tabulate(runs: Mapping[tuple[str, int], Run]) -> list[Row]:
    """Return the rows; a point is [x, y]."""
    rows = []
    for panel, column, x in (
        (LOSS_BY_TIME, "losses", 1),
        (LOSS_BY_ITERATION, "losses", 0),
        (ACCURACY_BY_TIME, "accuracies", 1),
        (ACCURACY_BY_ITERATION, "accuracies", 0),
    ):
        for (method, seed), run in runs.items():
            points = [[point[x], point[2]] for point in getattr(run, column)]
            rows.append({"panel": panel, "method": method, "seed": seed, "failure": run.failure, "points": points})
    return rows


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw one panel: the mean over seeds, where all seeds have points, and the band from the lowest to the highest."""
    panel = rows[0]["panel"]
    by_time, factor = panel.endswith("time"), 100.0 if panel.startswith("accuracy") else 1.0
    for method, look in method_styles([row["method"] for row in rows]).items():
        own = [row for row in rows if row["method"] == method and row["points"]]
        label = method + (" (diverged)" if any(row["failure"] for row in rows if row["method"] == method) else "")
        if not own:
            axes.plot([], [], label=label, **look)
            continue
        shortest = min(len(row["points"]) for row in own)
        points = np.array([row["points"][:shortest] for row in own], dtype=float)  # (seeds, points, 2)
        x, values = points[:, :, 0].mean(axis=0), factor * points[:, :, 1]
        dense = {"marker": ""} if panel.startswith("loss") else {}
        axes.plot(x, values.mean(axis=0), label=label, **(look | dense))
        axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=look["color"], alpha=0.15, linewidth=0)
    axes.set(
        title=panel,
        xlabel="time of training (s)" if by_time else "iterations",
        ylabel="test accuracy (%)" if factor > 1 else "training loss (nats)",
    )
    if by_time:
        axes.set_xscale("log")
    if panel.startswith("loss"):
        axes.set_yscale("log")
    figures.legend_below(axes, ncols=4)
    return axes


FIGURE = PaperFigure(
    name=NAME,
    title="Convergence",
    caption="Training loss and test accuracy of an MLP on Fashion-MNIST over wall-clock time and over iterations, on "
    "four nodes at 200 Mbit/s, for a parameter server, synchronous all-reduces and pipelines with and without codecs.",
    plot=plot,
    panel=(5.6, 3.6),
    abreast=2,
    columns="json",
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser(NAME, __doc__)
    add: Any = options.add_argument
    add("--methods", nargs="+", default=list(METHODS), metavar="NAME", help=f"any of {'; '.join(METHODS)} (all)")
    add("--seeds", type=command.at_least(1), help=f"number of seeds ({SEEDS}; quick: 1)")
    add("--fresh", action="store_true", help="forget the finished runs in the output folder")
    arguments = ranks.raise_together("options", lambda: figures.checked(NAME, options, words, ranks.by_torchrun))
    command.check_each_once(arguments, {"methods": METHODS})
    kept = KeptRuns(arguments.output / f"{NAME}.runs.json", Run, fresh=arguments.fresh)
    seeds = arguments.seeds or (1 if arguments.quick else SEEDS)
    rows = compute(arguments.methods, seeds, kept, console, quick=arguments.quick)
    made_with = sorted({str(one.commit) for one in kept.load().values()})
    extra = {"recipe": f"{RECIPE} --epochs {EPOCHS}", "methods": METHODS, "nodes": NODES, "rate": RATE}
    FIGURE.publish(rows, arguments, console, extra | {"made_with": made_with})


if __name__ == "__main__":
    command.run(main)
