"""Accuracy of pipelined islands next to HSDP, after as many samples: real ranks, on this machine's loopback.

    torchrun --nproc-per-node 4 -m experiments.islands_accuracy          islands_accuracy.csv, .png
    torchrun --nproc-per-node 4 -m experiments.islands_accuracy --workloads alexnet --seeds 1

A transformer learns to predict the next byte of text with AdamW, and AlexNet Fashion-MNIST with SGD with momentum, on
two islands of two ranks (island_loops.py), with a learning rate that rises and falls once. Times are not measured here
(experiments.bench_islands does that), so no pass waits and no link is slow. A run of another kind sees the very samples
of HSDP's in the same order, from the same weights. The weights of each run are tested on all images of the test set, or
on every eighth window of text.

Finished runs are kept in islands_accuracy.runs.json in the output folder: the same command makes only those that are
missing.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn

from experiments import command
from experiments.island_loops import (
    HSDP,
    INSIDE,
    MEMBERS,
    WAYS,
    IslandLoop,
    IslandWorkload,
    alexnet,
    pipelined,
    transformer,
)
from experiments.kept_runs import KeptRuns
from experiments.results import Panels, Row, code_state, grouped, save
from experiments.simulated_tables import changes, column, mean_of_all
from pipesgd.config import DEFAULT_TIMEOUT
from pipesgd.data import DataSplits, evaluation_batches
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run import evaluation
from pipesgd.shards import is_dtensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "islands_accuracy"
RANKS = 2 * MEMBERS
SEEDS, QUICK_ITERATIONS = 3, 2
COMPARED = tuple(pipelined(inside, 2, "int4") for inside in INSIDE)
"""Ways that are compared with HSDP: those that bench_islands has targets for."""
MOST_LOST = 0.2
"""Most points of accuracy that they may lose, in the mean over seeds."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A workload, its length, and its optimizer."""

    workload: IslandWorkload
    iterations: int
    optimizer: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    """Options of the optimizer, "lr" being the highest learning rate."""
    test_every: int = 1
    """Distance between the samples of the test set that are tested; 1 tests all."""


TRAININGS = {
    "transformer": Training(
        workload=transformer(layers=2, batch_size=4),
        iterations=300,
        optimizer=torch.optim.AdamW,
        options={"lr": 4e-3},
        test_every=8,
    ),
    "alexnet": Training(
        workload=alexnet(batch_size=8),
        iterations=400,
        optimizer=torch.optim.SGD,
        options={"lr": 0.02, "momentum": 0.9},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of one run."""

    commit: str | None
    """Commit of the code that made the run; None where there is no repository."""
    seconds: float
    test_accuracy: float
    test_loss: float


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run to be made."""

    training: str
    way: str
    seed: int
    iterations: int

    @property
    def name(self) -> str:
        return f"{self.training}, {self.way}, {self.iterations} iterations, seed {self.seed}"


def plan(trainings: Sequence[str], seeds: int, *, quick: bool = False) -> list[Planned]:
    """Return all runs, seed by seed."""
    return [
        Planned(training=name, way=way, seed=seed, iterations=QUICK_ITERATIONS if quick else TRAININGS[name].iterations)
        for seed, name, way in itertools.product(range(seeds), trainings, (HSDP, *COMPARED))
    ]


def train(planned: Planned, data: DataSplits, ranks: Ranks) -> Run:
    """Return the result of a run. Collective."""
    begin, training = time.perf_counter(), TRAININGS[planned.training]
    workload = dataclasses.replace(training.workload, seed=planned.seed)
    model = workload.build(data)

    def optimize(one: nn.Module) -> torch.optim.Optimizer:
        return training.optimizer(one.parameters(), **training.options)

    loop = IslandLoop(WAYS[planned.way], copy.deepcopy(model), workload, ranks, optimize=optimize)
    for number, batch in enumerate(workload.batches(data, ranks, planned.iterations)):
        for group in loop.optimizer.param_groups:
            group["lr"] = training.options["lr"] * share_of_lr(number, planned.iterations)
        loop.iterate(*batch)
    loop.flush()
    loop.close()
    model.load_state_dict(whole(loop.model))
    worth = evaluated(model, data, ranks, training.test_every)
    assert worth.accuracy is not None, "cross-entropy has one"
    return Run(
        commit=code_state(),
        seconds=time.perf_counter() - begin,
        test_accuracy=worth.accuracy,
        test_loss=worth.loss,
    )


def share_of_lr(iteration: int, iterations: int) -> float:
    """Return the share of the highest learning rate: it rises over the first fifth of the iterations, then falls.

    >>> [share_of_lr(iteration, 10) for iteration in range(10)]
    [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    """
    rising = max(1, iterations // 5)
    return min((iteration + 1) / rising, (iterations - iteration) / (iterations - rising))


def whole(model: nn.Module) -> dict[str, Any]:
    """Return the whole values of ``model``, of which this rank may have a part. Collective."""
    state: dict[str, Any] = model.state_dict()
    return {name: value.full_tensor() if is_dtensor(value) else value for name, value in state.items()}


def evaluated(model: nn.Module, data: DataSplits, ranks: Ranks, test_every: int) -> evaluation.Evaluation:
    """Return the evaluation of a model that all ranks have, each of which tests a part of the samples. Collective."""
    of = {"rank": ranks.rank * test_every, "world_size": ranks.world_size * test_every}
    batches = evaluation_batches(data.test, batch_size=100, **of)
    own = evaluation.sums(model, batches, torch.device("cpu"))
    return evaluation.mean(ranks.all_gather_object("evaluation", own, within=600.0))


def make_runs(planned: Sequence[Planned], kept: KeptRuns[Run], ranks: Ranks, console: Console) -> dict[str, Run]:
    """Return the runs of the plan by their names, on rank 0; those that are missing are made now. Collective."""
    data = functools.cache(lambda training: TRAININGS[training].workload.load())
    by_name = {one.name: one for one in planned}
    return kept.complete(by_name, lambda one: train(one, data(one.training), ranks), console, NAME, ranks=ranks)


def tabulate(planned: Sequence[Planned], runs: Mapping[str, Run]) -> list[Row]:
    """Return a row for every run."""
    return [
        {
            "workload": one.training,
            "contender": one.way,
            "seed": one.seed,
            "iterations": one.iterations,
            "test_accuracy": runs[one.name].test_accuracy,
            "test_loss": runs[one.name].test_loss,
        }
        for one in planned
    ]


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return a row for every workload and way: means over seeds, and what the way loses to HSDP."""
    found = grouped(rows, "workload", "contender")
    return [_judged(own, found[workload, HSDP]) for (workload, _), own in found.items()]


def _judged(own: Sequence[Row], base: Sequence[Row]) -> Row:
    to_hsdp = changes(own, base, "hsdp")
    points = to_hsdp["accuracy_to_hsdp_points"]
    of_seeds = [100 * (one["test_accuracy"] - other["test_accuracy"]) for one, other in zip(own, base, strict=True)]
    judged = own[0]["contender"] in COMPARED
    return {
        "workload": own[0]["workload"],
        "contender": own[0]["contender"],
        "seeds": len(own),
        "accuracy_mean": mean_of_all(column(own, "test_accuracy")),
        "test_loss_mean": mean_of_all(column(own, "test_loss")),
        **to_hsdp,
        "points_least": min(of_seeds),
        "points_most": max(of_seeds),
        "target": ("met" if points >= -MOST_LOST else "MISSED") if judged else "",
    }


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw the accuracy of every run of one workload, a column of points for each way."""
    found = grouped(rows, "contender")
    for number, (name, own) in enumerate(found.items()):
        axes.plot([number] * len(own), [100 * row["test_accuracy"] for row in own], "o", label=name)
    axes.set_xticks(range(len(found)), [textwrap.fill(name, 12) for name in found])
    axes.margins(x=0.2)
    axes.set(title=rows[0]["workload"], ylabel="test accuracy of each seed (%)")
    return axes


draw = Panels(by=("workload",), plot=plot).save
"""Function that writes the figure, with a panel for every workload."""


def parse(words: Sequence[str], world_size: int) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser(NAME, __doc__)
    add = options.add_argument
    add("--workloads", nargs="+", default=list(TRAININGS), metavar="NAME", help=f"any of {', '.join(TRAININGS)}")
    add("--seeds", type=command.at_least(1), help=f"number of seeds ({SEEDS}; quick: 1, {QUICK_ITERATIONS} iterations)")
    add("--fresh", action="store_true", help="forget the finished runs in the output folder")
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"workloads": TRAININGS})
    if world_size != RANKS:
        raise UserInputError(f"{RANKS} ranks must be started (torchrun --nproc-per-node {RANKS} ...); got {world_size}")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command, as one of torchrun's ranks."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.world_size))
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    kept = KeptRuns(arguments.output / f"{NAME}.runs.json", Run, fresh=arguments.fresh and ranks.rank == 0)
    planned = plan(arguments.workloads, arguments.seeds or (1 if arguments.quick else SEEDS), quick=arguments.quick)
    runs = make_runs(planned, kept, ranks, console)
    if ranks.rank > 0:
        return
    rows = tabulate(planned, runs)
    summary = judge(rows)
    extra: dict[str, Any] = {
        "target": {"points_lost_at_most": MOST_LOST},
        "summary": summary,
        "runs_made_with": sorted({str(runs[one.name].commit) for one in planned}),
    }
    save(NAME, rows, extra=extra, folder=arguments.output)
    draw(NAME, rows, arguments.output)
    command.show("Means over seeds, and targets", [_texts(row) for row in summary])


def _texts(row: Row) -> dict[str, str]:
    return {
        "workload": row["workload"],
        "contender": row["contender"],
        "accuracy %": f"{100 * row['accuracy_mean']:.2f}",
        "to HSDP": f"{row['accuracy_to_hsdp_points']:+.2f} ({row['points_least']:+.2f} to {row['points_most']:+.2f})",
        "loss": f"{row['test_loss_mean']:.4f}",
        "to HSDP %": f"{row['loss_to_hsdp_percent']:+.2f}",
        "target": row["target"],
    }


if __name__ == "__main__":
    command.run(main)
