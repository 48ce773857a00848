"""Weights guessed by the mean of half a batch, next to late gradients and a synchronous start: ACCO, simulated.

    python -m experiments.halves

ACCO (Nabli et al., 2024, "Accumulate while you communicate") exchanges twice in an iteration. While ranks compute the
gradients of the second halves of their batches, the mean of the first halves arrives. An update by it, which is undone
later, gives the weights on which the next first halves are computed, while the mean of the whole batches arrives. The
second halves are computed on the true weights: no gradient is late.

At equal bytes a batch is twice as large as that of a pipeline, and there are half as many iterations. All else is as in
experiments.accuracy, with whose finished runs on the same samples this is compared, seed by seed: its width 2 exchanges
once in an iteration, and has its default synchronous start. Rates are searched for as there, separately for each way.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from torch import Tensor, nn

from experiments import accuracy, command, simulated_runs
from experiments.accuracy_methods import LATE, SYNCHRONOUS
from experiments.accuracy_runs import (
    QUICK_LENGTHS,
    QUICK_SEEDS,
    SEARCHED,
    SEEDS,
    Cell,
    Planned,
    Rates,
    Runs,
    interval,
    rates_for,
    searched,
    seeds_of,
)
from experiments.kept_runs import KeptRuns
from experiments.results import RESULTS, Row, save
from experiments.simulated_runs import Run, simulate
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import give_gradients
from pipesgd.optim.build import build_optimizer, build_schedule
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.step import trainable_parameters
from pipesgd.ranks import Ranks

NAME = "halves"
WORKLOAD, BATCH = "transformer, bytes", "--batch-size 8 "
WAYS = {"equal bytes": 2, "twice the bytes": 1}
"""Ways to exchange halves, and their batch as a multiple of the pipeline's."""


class Halves:
    """Training on simulated ranks by means of half a batch and of whole ones.

    Args:
        model: the module that is trained.
        optimizer: its optimizer.
        clip: what is done to means before an update, also to those of halves.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: Clipping):
        self._model, self._optimizer, self._clip = model, optimizer, clip
        self._parameters = trainable_parameters(optimizer)
        self.guess = self._held()
        """Weights on which the next first halves are computed."""

    def iterate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Run an iteration on ``batches``, one a rank, of an even number of samples; return the loss of the halves."""
        middle = len(batches[0][0]) // 2
        true = self._held()
        self._hold(self.guess)
        loss, first = self._means([(inputs[:middle], labels[:middle]) for inputs, labels in batches])
        self._hold(true)
        other_loss, second = self._means([(inputs[middle:], labels[middle:]) for inputs, labels in batches])
        whole = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
        state = copy.deepcopy(self._optimizer.state_dict())
        self._update(first)
        self.guess = self._held()
        self._optimizer.load_state_dict(state)
        self._hold(true)
        self._update(whole)
        return (loss + other_loss) / 2

    def _means(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, list[Tensor]]:
        """Return the means over ``batches`` of the loss, and of the gradients on the weights that are held."""
        loss = torch.stack([simulated_runs.loss_of(self._model, one) for one in batches]).mean()
        return loss.item(), list(torch.autograd.grad(loss, self._parameters))

    def _update(self, gradients: Sequence[Tensor]) -> None:
        self._clip(gradients)
        give_gradients(self._parameters, gradients)
        self._optimizer.step()

    def _held(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def _hold(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


def train(
    config: TrainConfig, model: nn.Module, batches: simulated_runs.BatchesOfRanks, iterations: int, world_size: int
) -> Iterator[float]:
    """Train ``model`` by halves, and yield the loss of each iteration."""
    optimization = config.optimization.for_ranks(world_size)
    optimizer = build_optimizer(optimization, model)
    schedule = build_schedule(optimization, optimizer, iterations)
    halves = Halves(model, optimizer, Clipping(norm=config.updates.clip_norm, value=config.updates.clip_value))
    for of_ranks in batches:
        yield halves.iterate(of_ranks)
        schedule.step()


# ---- Runs


@dataclass(frozen=True)
class WayCell(Cell):
    """A workload at a length of experiments.accuracy, of which halves have the samples."""

    way: str

    def run(self, method: str, power: int, seed: int) -> Planned:
        times = WAYS[self.way]
        one = Cell(self.workload, self.iterations // times).run(method, power, seed)
        return dataclasses.replace(one, words=one.words.replace(BATCH, f"--batch-size {8 * times} "))


def plan(bases: Mapping[int, int], seeds: Sequence[int], runs: Runs, *, most: bool = False) -> list[Planned]:
    """Return the runs that can be told from those that are done; with ``most``, also those that cannot, at some rate.

    ``bases`` are the powers of synchronous training's best rates, by length, which are tried, too.
    """
    every = []
    for (length, base), way in itertools.product(bases.items(), WAYS):
        cell = WayCell(WORKLOAD, length, way)
        planned, power, _ = searched(cell, SYNCHRONOUS, runs, also=base)
        every += planned
        if power is not None or most:
            every += [cell.run(SYNCHRONOUS, base if power is None else power, seed) for seed in seeds]
    return list(dict.fromkeys(every))


def compared(length: int, rates: Rates, seeds: Sequence[int], known: Runs) -> dict[str, list[Run]]:
    """Return the finished runs of experiments.accuracy that halves are compared with, by what they are called."""
    found = {}
    for name, method in (("synchronous", SYNCHRONOUS), ("width_2", LATE)):
        power = rates.power(method)
        assert power is not None, "experiments.accuracy has these rates"
        found[name] = [known[Cell(WORKLOAD, length).run(method, power, seed).words] for seed in seeds]
    return found


def row_of(cell: WayCell, base: int, seeds: Sequence[int], runs: Runs, others: Mapping[str, list[Run]]) -> Row:
    """Return the row of a way at a length; with percents of the loss, paired by seed, above those of ``others``."""
    _, power, inside = searched(cell, SYNCHRONOUS, runs, also=base)
    assert power is not None, "all runs are finished"
    planned = [cell.run(SYNCHRONOUS, power, seed) for seed in seeds]
    losses = [_loss(runs[one.words]) for one in planned]
    row: Row = {"iterations": cell.iterations, "way": cell.way, "lr": planned[0].lr, "lr_is_inside": inside}
    row["seeds"] = len(seeds)
    row["test_loss_mean"] = sum(losses) / len(losses)
    for name, of_other in others.items():
        costs = [100 * (one / _loss(other) - 1) for one, other in zip(losses, of_other, strict=True)]
        row |= dict(zip((f"above_{name}", f"above_{name}_low", f"above_{name}_high"), interval(costs), strict=True))
    return row


def _loss(run: Run) -> float:
    return math.inf if run.test_loss is None else run.test_loss


def _texts(row: Row) -> dict[str, str]:
    told = {name: str(row[name]) for name in ("iterations", "way", "lr", "lr_is_inside")} | {
        "loss": f"{row['test_loss_mean']:.4f}"
    }
    for name in ("synchronous", "width_2"):
        if f"above_{name}" in row:
            mean, low, high = (row[f"above_{name}{end}"] for end in ("", "_low", "_high"))
            told[f"% above {name.replace('_', ' ')}"] = f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"
    return told


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser(NAME, __doc__)
    simulated_runs.add_options(options, seeds=len(SEEDS), quick_seeds=QUICK_SEEDS)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    command.check_alone(NAME, ranks.by_torchrun, "it simulates the ranks")
    seeds = seeds_of(arguments)
    others: dict[int, dict[str, list[Run]]] = {length: {} for length in QUICK_LENGTHS}
    bases = dict.fromkeys(QUICK_LENGTHS, 0)
    if not arguments.quick:
        known = KeptRuns(RESULTS / f"{accuracy.NAME}.runs.json", Run).load()
        rates = {length: rates_for(Cell(WORKLOAD, length), SEEDS, known)[1] for length in SEARCHED}
        others = {length: compared(length, one, seeds, known) for length, one in rates.items() if one is not None}
        bases = {length: one.best[SYNCHRONOUS] for length, one in rates.items() if one is not None}
    wanted = partial(plan, bases, seeds)
    done = simulated_runs.finished_runs(
        wanted, arguments, NAME, console, expected=partial(wanted, most=True), simulate=partial(simulate, train=train)
    )
    if any(one.words not in done for one in wanted(done)):
        raise UserInputError("--finished must find all runs; some are missing")
    cells = [WayCell(WORKLOAD, length, way) for length in bases for way in WAYS]
    rows = [row_of(cell, bases[cell.iterations], seeds, done, others[cell.iterations]) for cell in cells]
    both = [*done.values(), *(one for of_length in others.values() for own in of_length.values() for one in own)]
    versions = sorted({run.versions for run in both})
    if len(versions) > 1:
        raise UserInputError(f"runs must be of one version of torch and of Python's text; got {', '.join(versions)}")
    commits = sorted({str(run.commit) for run in both})
    extra = {"workload": WORKLOAD, "simulated": True, "runs_made_with": commits, "versions_of_runs": versions}
    save(NAME, rows, extra=extra, folder=arguments.output)
    command.show(f"Halves, {WORKLOAD}: percents of the loss, paired by seed", [_texts(row) for row in rows])


if __name__ == "__main__":
    command.run(main)
