"""Cost of late gradients by layer: which layers must not be late for a training to be as good as a synchronous one?

    python -m experiments.lateness                        lateness.csv, lateness_summary.csv and lateness.png
    python -m experiments.lateness --workloads transformer-6 --seeds 1
    python -m experiments.lateness --finished             the same files, from the finished runs

At width 2 with ``eager``, the gradients of some layers are late and those of the others are not: those of one layer
alone, or of a layer and all after it. Four ranks are simulated exactly in one process (experiments/simulation.py).
``pipesgd.train`` has no option for it: there, all layers are late.

A training at width 2 is as good as a synchronous one if its mean loss is at most 1 % higher, or its mean accuracy at
most 0.3 points lower (experiments.staleness has tighter bounds). Finished runs are kept in lateness.runs.json in the
output folder: the same command makes only those that are missing. All runs take an hour and a half of two cores.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from torch import nn

from experiments import command, figures, simulated_runs, simulated_tables, style
from experiments.late_layers import layers_of, share_of
from experiments.results import Panels, Row, grouped
from experiments.simulated_runs import QUICK_ITERATIONS, Run
from experiments.simulated_tables import changes, column, cost_of, mean_of_all, outcome, texts_next_to_sync
from experiments.staleness_runs import OPTIMIZERS, Workload
from pipesgd.cli import parse as parse_training
from pipesgd.data import make_workload
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "lateness"
SYNCHRONOUS, ALONE, ONWARDS = "none", "one layer", "it and all after it"
"""Layers that may be late: none, one alone, or one and the rest."""
NO_LAYER = "-"
MOST_LOST = (0.3, 1.0)
"""Points of accuracy, and percent of the loss, that late gradients may cost."""


TEXT = "--dataset python-stdlib --model transformer --embedding 64 --batch-size 8"
WORKLOADS = {
    "transformer-2": Workload(words=TEXT, optimizers={"adamw": 0.008}, iterations=200, judged_by_loss=True),
    "transformer-6": Workload(
        words=f"{TEXT} --layers 6", optimizers={"adamw": 0.002}, iterations=200, judged_by_loss=True
    ),
    "transformer-2, muon": Workload(words=TEXT, optimizers={"muon": 0.032}, iterations=200, judged_by_loss=True),
    "mlp, adagrad": Workload(
        words="--dataset fashion-mnist --model mlp --hidden-sizes 200 200 200 200 --batch-size 32",
        optimizers={"adagrad": 0.04},
        iterations=468,
    ),
    "convnet, adamw": Workload(
        words="--dataset fashion-mnist --model convnet --batch-size 16", optimizers={"adamw": 0.008}, iterations=200
    ),
    "digits": Workload(
        words="--dataset digits --model mlp --hidden-sizes 64 --batch-size 16", optimizers={"sgd": 0.1}, iterations=100
    ),
}
"""Workloads, at learning rates where ``eager`` loses something; the last is for trying out."""
MEASURED = tuple(name for name in WORKLOADS if name != "digits")


@dataclass(frozen=True, kw_only=True)
class Planned(simulated_runs.Planned):
    """A run to be made."""

    late: str
    """One of ``SYNCHRONOUS``, ``ALONE`` and ``ONWARDS``."""
    layer: str
    number: int
    """Name and number of the layer, from 0; ``NO_LAYER`` and -1 if none is late."""
    late_share: float
    """Share of the model's values whose gradients are late."""

    @property
    def name(self) -> str:
        what = {SYNCHRONOUS: "none", ALONE: self.layer, ONWARDS: f"{self.layer} and after it"}[self.late]
        return f"{self.workload}, late: {what}, seed {self.seed}"


def plan(workloads: Sequence[str], seeds: int, *, quick: bool = False) -> list[Planned]:
    """Return all runs, seed by seed."""
    models = {name: _model(WORKLOADS[name].words) for name in workloads}
    planned = []
    for seed, name in itertools.product(range(seeds), workloads):
        workload, names = WORKLOADS[name], layers_of(models[name])
        iterations = QUICK_ITERATIONS if quick else workload.iterations
        [(optimizer, lr)] = workload.optimizers.items()
        how = f"{OPTIMIZERS[optimizer]} --lr {lr:g} --schedule one-cycle"
        words = f"{workload.words} {how} --iterations {iterations} --seed {seed}"
        ways = [(SYNCHRONOUS, NO_LAYER, -1, "--width 1")]
        for number, layer in enumerate(names):
            ways.append((ONWARDS, layer, number, f"--width 2 --synchronous-start 0 --late {','.join(names[number:])}"))
            if number + 1 < len(names):  # of the last layer, that would be the same
                ways.append((ALONE, layer, number, f"--width 2 --synchronous-start 0 --late {layer}"))
        for late, layer, number, of_way in ways:
            late_ones = {SYNCHRONOUS: [], ALONE: [layer], ONWARDS: names[number:]}[late]
            planned.append(
                Planned(
                    workload=name,
                    seed=seed,
                    words=f"{words} {of_way}",
                    test_every=workload.test_every,
                    late=late,
                    layer=layer,
                    number=number,
                    late_share=share_of(late_ones, models[name]),
                )
            )
    return planned


def _model(words: str) -> nn.Module:
    _, model = make_workload(parse_training(words.split()))
    return model


def tabulate(planned: Sequence[Planned], runs: Mapping[str, Run]) -> list[Row]:
    """Return a row for every run that is there."""
    return [
        {
            "workload": one.workload,
            "late": one.late,
            "layer": one.layer,
            "number": one.number,
            "late_share": one.late_share,
            "seed": one.seed,
            **outcome(run),
        }
        for one in planned
        if (run := runs.get(one.words)) is not None
    ]


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Return a row for every workload and lateness of which no seed is missing, with what it costs in the mean."""
    seeds = {row["seed"] for row in rows}
    found = grouped(sorted(rows, key=lambda run: run["seed"]), "workload", "late", "layer", "number")
    whole = {cell: own for cell, own in found.items() if len(own) == len(seeds)}
    summary = []
    for cell, own in whole.items():
        base = whole.get((cell[0], SYNCHRONOUS, NO_LAYER, -1))
        row: Row = {
            **dict(zip(("workload", "late", "layer", "number"), cell, strict=True)),
            "late_share": own[0]["late_share"],
            "accuracy_mean": mean_of_all(column(own, "test_accuracy")),
            "test_loss_mean": mean_of_all(column(own, "test_loss")),
            **changes(own, base, "sync"),
            "seeds": len(own),
            "diverged": sum(one["diverged_at"] is not None for one in own),
        }
        row["as_good"] = "" if base is None or cell[1] == SYNCHRONOUS else _judge(row)
        summary.append(row)
    return summary


def _cost_of(row: Row) -> float | None:
    return cost_of(row, "sync", by_loss=WORKLOADS[row["workload"]].judged_by_loss)


def _judge(row: Row) -> str:
    cost, most = _cost_of(row), MOST_LOST[WORKLOADS[row["workload"]].judged_by_loss]
    return "yes" if cost is not None and cost <= most else "no"


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Plot what late gradients cost in one workload, against the layer that is late."""
    summary = summarize(rows)
    workload = rows[0]["workload"]
    by_loss = WORKLOADS[workload].judged_by_loss
    for late, colour, marker in ((ONWARDS, style.BLUE, "o"), (ALONE, style.ORANGE, "s")):
        line = {row["number"]: cost for row in summary if row["late"] == late and (cost := _cost_of(row)) is not None}
        axes.plot(list(line), list(line.values()), color=colour, marker=marker, label=f"late: {late}")
    axes.axhline(MOST_LOST[by_loss], color=style.GREY, linewidth=1, linestyle="--", label="as good up to here")
    layers = {row["number"]: str(row["layer"]) for row in summary if row["late"] != SYNCHRONOUS}
    axes.set_xticks(list(layers), list(layers.values()), rotation=45, ha="right")
    unit = "% of the test loss" if by_loss else "points of test accuracy"
    axes.set(title=workload, xlabel="layer", ylabel=f"cost, {unit}")
    figures.legend_below(axes, ncols=3)
    return axes


draw = Panels(by=("workload",), plot=plot, panel=(4.6, 4.0), abreast=3).save
"""Function that writes the figure, with a panel for every workload."""


def publish(rows: list[Row], summary: list[Row], runs: Mapping[str, Run], folder: Path) -> None:
    """Save the rows, their summary and their figure, and print the summary."""
    simulated_tables.publish(NAME, rows, summary, runs, {"as_good_up_to": MOST_LOST}, folder, draw)
    command.show("Cost of late gradients, means over seeds", [_texts(row) for row in summary])


def _texts(row: Row) -> dict[str, str]:
    return {
        "workload": row["workload"],
        "late": row["late"],
        "layer": row["layer"],
        "values late": f"{row['late_share']:.0%}",
        **texts_next_to_sync(row),
        "as good": row["as_good"],
    }


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser(NAME, __doc__)
    names = ", ".join(WORKLOADS)
    options.add_argument(
        "--workloads", nargs="+", default=list(MEASURED), metavar="NAME", help=f"any of {names} (all but the last)"
    )
    simulated_runs.add_options(options)
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"workloads": WORKLOADS})
    command.check_alone(NAME, by_torchrun, "it simulates the ranks")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    planned = plan(arguments.workloads, simulated_runs.seeds_of(arguments), quick=arguments.quick)
    done = simulated_runs.finished_runs(planned, arguments, NAME, console)
    rows = tabulate(planned, done)
    summary = summarize(rows)
    if not summary:
        raise UserInputError("--finished must find all seeds of a lateness; there is none yet")
    publish(rows, summary, done, arguments.output)


if __name__ == "__main__":
    command.run(main)
