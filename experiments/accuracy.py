"""Accuracy of late and coded gradients next to synchronous training, with the methods as people get them.

    python -m experiments.accuracy                              accuracy.csv and accuracy.png
    python -m experiments.accuracy --workloads "transformer, bytes" --lengths 200
    python -m experiments.accuracy --finished                   the same files, from the finished runs

Each workload trains on four ranks, which are simulated exactly in one process (experiments/simulation.py), with a
warm-up of a tenth of the iterations and a cosine; width 2 has its defaults. A run is named by the arguments of
``pipesgd.train``. Rates of synchronous training, of width 2 and of low rank are searched for on seeds of their own,
until the best of at least three has a worse one on each side, and for the others synchronous training's best is tried,
too; int8 and int4 take that of their width, and low rank at width 1 that of width 2. Where synchronous seeds spread too
far, its rate is halved, and no method has a higher one. Methods are compared with synchronous training after the same
samples, seed by seed, on the whole test set; where the verdict is open, both sides get more seeds (a second look, which
the intervals do not count), and where a method misses its bound, other ways are tried. 3,000 iterations have the rates
of 600. Low rank is left out for LoRA, whose matrices are too small for factors.

The command says first how long all runs take; Ctrl-C ends it, and finished runs are kept in accuracy.runs.json in the
output folder: the same command makes only those that are missing. The table in experiments/results is always that of
all workloads, lengths and seeds, with "not run" where something is missing.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from experiments import command, figures, simulated_runs, style
from experiments.accuracy_methods import LOW_RANK, METHODS, SYNCHRONOUS, TRAINED, WORKLOADS, named
from experiments.accuracy_runs import (
    LONG,
    QUICK_LENGTHS,
    QUICK_SEEDS,
    RATE_SEEDS,
    SEARCHED,
    SEEDS,
    STEADY,
    Cell,
    Planned,
    Rates,
    Runs,
    final,
    methods_of,
    plan,
    rates_for,
    seeds_of,
    spread,
    ways_of,
)
from experiments.figures import PaperFigure
from experiments.results import Row, save
from experiments.simulated_runs import WORLD_SIZE, Plan
from experiments.simulated_tables import mean_of_all
from pipesgd.errors import UserInputError
from pipesgd.planning.accuracy import MEASURED
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "accuracy"
NOT_RUN = "not run"


def tabulate(workloads: Sequence[str], lengths: Sequence[int], seeds: Sequence[int], runs: Runs) -> list[Row]:
    """Return a row for every workload, length and method; "not run" is the verdict of those that are not finished."""
    rows = []
    for workload in workloads:
        for iterations in lengths:
            cell = Cell(workload, iterations)
            _, rates = rates_for(cell, seeds, runs)
            methods = [*METHODS, *ways_of(cell, rates, seeds, runs)]
            rows += [_row(cell, method, rates, seeds, runs) for method in methods]
    return rows


def _row(cell: Cell, method: str, rates: Rates | None, seeds: Sequence[int], runs: Runs) -> Row:
    """Return the row of a method, whose differences are above 0 where it is worse than synchronous training."""
    by_loss = WORKLOADS[cell.workload].by_loss
    row: Row = {
        "workload": cell.workload,
        "iterations": cell.iterations,
        "method": method,
        **dict.fromkeys(("lr", "lr_is_inside", "lr_halved", "seeds", "diverged")),
        **dict.fromkeys(("test_loss_mean", "accuracy_mean", "spread_percent")),
        "unit": "% of the loss" if by_loss else "points",
        "bound": None if method == SYNCHRONOUS else named(method).bounds[0 if by_loss else 1],
        **dict.fromkeys(("cost", "cost_low", "cost_high")),
        "verdict": NOT_RUN,
    }
    power = None if rates is None else rates.power(method)
    if rates is None or power is None or (method in METHODS and method not in methods_of(cell)):
        return row
    found = None if method == SYNCHRONOUS else final(cell, method, rates, seeds, runs)
    own = [cell.run(method, power, seed) for seed in (found.seeds if found else seeds)]
    if any(one.words not in runs for one in own):
        return row
    finished = [runs[one.words] for one in own]
    row |= {
        "lr": own[0].lr,
        "lr_is_inside": rates.inside[named(method).rate_of],
        "lr_halved": rates.halved(method),
        "seeds": len(own),
        "diverged": sum(run.diverged_at is not None for run in finished),
        "test_loss_mean": mean_of_all([run.test_loss for run in finished]),
        "accuracy_mean": mean_of_all([run.test_accuracy for run in finished]),
        "spread_percent": _finite(spread(cell, finished)),
        "verdict": "",
    }
    if found is not None:
        ends = {"cost": found.mean, "cost_low": found.low, "cost_high": found.high}
        row |= {name: _finite(value) for name, value in ends.items()} | {"verdict": found.verdict}
    return row


def _finite(value: float) -> float | None:
    """Return the value, rounded for those at a bound's edge; None if a seed diverged."""
    return round(value, 6) if math.isfinite(value) else None


# ---- Figure

COLOURS = (style.GREY, style.SKY, style.BLUE, style.INDIGO)
LENGTH_COLOURS = dict(zip((*QUICK_LENGTHS, *SEARCHED, LONG), COLOURS, strict=True))
SET_OFF = "width 2, int8"
SHOWN = 5.0
"""Bounds up to which the axis goes; what is beyond has an arrow at its end."""


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Plot what each method costs in one workload, at each length, over a bar from minus to plus its bound."""
    methods = [name for name in METHODS if name != SYNCHRONOUS]
    least = min(row["bound"] for row in rows if row["bound"] is not None)
    for place, method in enumerate(methods):
        own = [row for row in rows if row["method"] == method and row["verdict"] != NOT_RUN]
        if own:
            bound = own[0]["bound"]
            axes.barh(place, 2 * bound, left=-bound, height=0.8, color=style.GREY, alpha=0.3, linewidth=0)
        for number, row in enumerate(own):
            at, colour = place + 0.27 * (number - (len(own) - 1) / 2), LENGTH_COLOURS[row["iterations"]]
            if row["cost"] is not None and abs(row["cost"]) <= SHOWN * least:
                axes.plot([row["cost_low"], row["cost_high"]], [at, at], color=colour, linewidth=1.5)
                axes.plot([row["cost"]], [at], color=colour, marker="o", markersize=4, linestyle="")
                continue
            better = row["cost"] is not None and row["cost"] < 0
            axes.annotate(
                "diverges" if row["cost"] is None else f"{'< ' * better}{row['cost']:+.1f}{' >' * (not better)}",
                (0.01 if better else 0.99, at),
                xycoords=("axes fraction", "data"),
                ha="left" if better else "right",
                va="center",
                fontsize="small",
                color=colour,
            )
    axes.axvline(0, color=style.BLACK, linewidth=0.8)
    axes.set_xlim(-SHOWN * least, SHOWN * least)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set(title=rows[0]["workload"], xlabel=f"worse than synchronous, {rows[0]['unit']}")
    axes.grid(visible=False, axis="y")
    for iterations in dict.fromkeys(row["iterations"] for row in rows if row["cost"] is not None):
        axes.plot([], [], color=LENGTH_COLOURS[iterations], marker="o", label=f"{iterations:,} iterations")
    axes.barh(0, 0, color=style.GREY, alpha=0.3, label="within the bound")
    figures.legend_below(axes, ncols=4)
    return axes


def message(rows: list[Row]) -> str:
    """Return what width 2 with int8 costs, and low rank at most, over all workloads and lengths."""
    costs: dict[str, list[float]] = {}
    for row in rows:
        if row["cost"] is not None:
            costs.setdefault(row["method"], []).append(row["cost"])
    late, low_rank = (costs.get(method) for method in (SET_OFF, LOW_RANK))
    if not (late and low_rank):
        return "Cost next to synchronous training after the same samples"
    return (
        f"On simulated ranks, {SET_OFF} costs {min(late):+.1f} to {max(late):+.1f} (% of loss, or points), "
        f"low rank up to {max(low_rank):+.1f}"
    )


FIGURE = PaperFigure(
    name=NAME,
    title="Accuracy of late and coded gradients",
    caption="Cost of late and of coded gradients next to synchronous training after the same samples, means paired by "
    "seed with their 95 % intervals, on simulated ranks; grey: within the bound.",
    message=message,
    plot=plot,
    height=4.4,
    abreast=2,
    by=("workload",),
    has=lambda row: row["method"] != SYNCHRONOUS and row["verdict"] != NOT_RUN,
    share_y=True,
)


# ---- Command


def shipped(rows: list[Row]) -> list[Row]:
    """Return what ``pipesgd`` itself knows of the rows, for the line at the end of a run."""
    columns = ("workload", "iterations", "method", "seeds", "cost", "cost_low", "cost_high")
    return [
        {**{name: row[name] for name in columns}, "of_loss": row["unit"] != "points"}
        for row in rows
        if row["cost_high"] is not None
    ]


def publish(rows: list[Row], runs: Runs, folder: Path) -> None:
    """Save the rows and their figure, and print the rows."""
    extra = {
        "world_size": WORLD_SIZE,
        "simulated": True,
        "seeds_of_rates": RATE_SEEDS,
        "synchronous_seeds_spread_at_most_percent": STEADY,
        "runs": len(runs),
        "runs_made_with": sorted({str(run.commit) for run in runs.values()}),
        "versions_of_runs": sorted({run.versions for run in runs.values()}),
    }
    save(NAME, rows, extra=extra, folder=folder)
    if any(map(FIGURE.has, rows)):
        FIGURE.save(rows, folder)
    if command.is_published(folder):
        MEASURED.write_text(json.dumps(shipped(rows), indent=1) + "\n", encoding="utf-8")
    command.show(
        "Cost next to synchronous training after the same samples, paired by seed, with 95 % intervals",
        [_texts(row) for row in rows],
    )


def _texts(row: Row) -> dict[str, str]:
    text = partial(command.text_of, row)
    halved = f", halved {row['lr_halved']} x at the edge of stability" if row["lr_halved"] else ""
    return {
        "workload": row["workload"],
        "iterations": str(row["iterations"]),
        "method": row["method"],
        "lr": f"{text('lr', 'g')}{'' if row['lr_is_inside'] in (True, None) else ' (at an end)'}{halved}",
        "loss": text("test_loss_mean", ".4f"),
        "accuracy %": text("accuracy_mean", ".2f", 100),
        "cost": f"{text('cost', '+.2f')} ({text('cost_low', '+.2f')} to {text('cost_high', '+.2f')}) {row['unit']}",
        "verdict": row["verdict"],
    }


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser(NAME, __doc__)
    add, at_least = options.add_argument, command.at_least
    lengths = (*SEARCHED, LONG)
    add("--workloads", nargs="+", default=list(TRAINED), metavar="NAME", help=f"any of {'; '.join(WORKLOADS)}")
    add("--lengths", nargs="+", type=at_least(1), metavar="N", help=f"iterations, any of {lengths} (all)")
    simulated_runs.add_options(options, seeds=len(SEEDS), quick_seeds=QUICK_SEEDS)
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"workloads": WORKLOADS, "lengths": None})
    known = QUICK_LENGTHS if arguments.quick else lengths
    arguments.lengths = arguments.lengths or list(known)
    for length in arguments.lengths:
        if length not in known:
            raise UserInputError(f"--lengths must be among {', '.join(map(str, known))}; got {length}")
    arguments.seeds = seeds_of(arguments)
    is_part = arguments.seeds != SEEDS or not set(arguments.workloads) <= set(TRAINED)
    if is_part and command.is_published(arguments.output):
        raise UserInputError(
            "--output must name another folder than that of the full results with fewer seeds, or with digits"
        )
    command.check_alone(NAME, by_torchrun, "it simulates the ranks")
    return arguments


def say_how_long(expected: Plan[Planned], arguments: Namespace, console: Console) -> None:
    """Say how long the ``expected`` runs that are not finished take."""
    kept = simulated_runs.kept_runs(arguments, NAME).load()
    left = [one for one in expected(kept) if one.words not in kept]
    took = timedelta(seconds=round(sum(one.work for one in left) / arguments.processes))
    say(
        console,
        f"{len(left)} runs take about {took} h on {arguments.processes} cores; more where a best rate is at an end, "
        f"rates are halved, or a verdict is open",
    )


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    wanted = partial(plan, arguments.workloads, arguments.lengths, arguments.seeds)
    if not arguments.finished:
        say_how_long(partial(wanted, most=True), arguments, console)
    done = simulated_runs.finished_runs(wanted, arguments, NAME, console, expected=partial(wanted, most=True))
    if command.is_published(arguments.output):
        arguments.workloads, arguments.lengths = TRAINED, (*SEARCHED, LONG)
        arguments.finished, arguments.fresh = True, False
        done = simulated_runs.finished_runs(
            partial(plan, arguments.workloads, arguments.lengths, SEEDS), arguments, NAME, console
        )
    rows = tabulate(arguments.workloads, arguments.lengths, arguments.seeds, done)
    if all(row["verdict"] == NOT_RUN for row in rows):
        raise UserInputError("--finished must find all seeds of a method at its rate; there is none yet")
    publish(rows, done, arguments.output)


if __name__ == "__main__":
    command.run(main)
