"""Trainings on simulated ranks: one run, and all that an experiment plans, each made once and kept."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import platform
import shlex
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from experiments import command
from experiments.kept_runs import KeptRuns
from experiments.results import code_state
from experiments.simulated_options import check_simulated
from experiments.simulation import SimulatedLocalSteps, SimulatedRanks
from pipesgd.cli import parse as parse_training
from pipesgd.config import TrainConfig
from pipesgd.data import CROSS_ENTROPY, DataSplits, ShardedBatches, evaluation_batches, make_workload
from pipesgd.errors import NonFiniteGradientError, RunError, UserInputError
from pipesgd.optim.build import build_optimizer, build_schedule
from pipesgd.run import evaluation
from pipesgd.run.console import say

WORLD_SIZE = 4
SEEDS, QUICK_SEEDS, QUICK_ITERATIONS = 3, 1, 20
DIVERGED_LOSS = 20.0
"""Training loss above which a run ends, as it does if the loss is NaN; with ten classes, chance gives 2.3."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of one run."""

    commit: str | None
    """Commit of the code that made the run; None where there is no repository."""
    versions: str = ""
    """Versions of torch and Python, on which the rounding and the text of Python's library depend; "" if not kept."""
    seconds: float
    diverged_at: int | None
    """Iteration at which the loss went beyond all bounds, if it did; then there is no result below."""
    train_loss: float | None = None
    """Training loss, the mean over ranks and the last tenth of the iterations."""
    test_loss: float | None = None
    test_accuracy: float | None = None
    points: list[list[float]] = field(default_factory=list)
    """Numbers of iterations, and the test accuracy after them, if ``--evaluate-iterations`` is among the arguments: at
    every evaluation, and at the end."""


@dataclass(frozen=True, kw_only=True)
class Planned(ABC):
    """A run to be made."""

    workload: str
    seed: int
    words: str
    """Arguments of ``pipesgd.train``, all but --output."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the run for people."""

    @property
    def work(self) -> float:
        """Share of the run in the time of all, in any unit that runs of an experiment have in common."""
        return 1.0


OnePlanned = TypeVar("OnePlanned", bound=Planned)


# ---- One run


def simulate(words: str, *, world_size: int = WORLD_SIZE, train: Train | None = None) -> Run:
    """Return the result of ``pipesgd.train words`` on ``world_size`` ranks, or of these options with ``train``.

    Raises:
        UserInputError: an option is wrong, or one that simulated ranks do not follow.
    """
    begin = time.perf_counter()
    config = parse_training(shlex.split(words))
    check_simulated(config)
    made_by = functools.partial(
        Run, commit=code_state(), versions=f"torch {torch.__version__}, Python {platform.python_version()}"
    )
    iterations = config.optimization.iterations
    assert iterations is not None  # checked
    torch.manual_seed(config.optimization.seed)
    data, model = make_workload(config)
    torch.manual_seed(config.optimization.seed * world_size)
    of_ranks = (batches_of(config, data, rank, world_size) for rank in range(world_size))
    batches = itertools.islice(zip(*of_ranks, strict=True), iterations)
    train = train or (_train_by_windows if config.in_windows else _train)
    training = train(config, model, batches, iterations, world_size)
    every = config.run.evaluate_iterations
    losses: list[float] = []
    points: list[list[float]] = []
    try:
        for loss in training:
            losses.append(loss)
            if not loss <= DIVERGED_LOSS:
                return made_by(seconds=time.perf_counter() - begin, diverged_at=len(losses) - 1)
            if every and len(losses) % every == 0 and len(losses) < iterations:
                points.append([len(losses), accuracy_of(evaluated(model, data))])
    except NonFiniteGradientError as error:
        return made_by(seconds=time.perf_counter() - begin, diverged_at=error.iteration)
    worth = evaluated(model, data)
    if every:
        points.append([iterations, accuracy_of(worth)])
    return made_by(
        seconds=time.perf_counter() - begin,
        diverged_at=None,
        train_loss=float(np.mean(losses[-max(1, iterations // 10) :])),
        test_loss=worth.loss,
        test_accuracy=worth.accuracy,
        points=points,
    )


def evaluated(model: nn.Module, data: DataSplits, *, test_every: int = 1) -> evaluation.Evaluation:
    """Return the evaluation of the weights that ``model`` holds on one sample of the test set in ``test_every``."""
    batches = evaluation_batches(data.test, batch_size=100, rank=0, world_size=test_every)
    return evaluation.mean([evaluation.sums(model, batches, torch.device("cpu"))])


def accuracy_of(worth: evaluation.Evaluation) -> float:
    """Return the accuracy, which every training on cross-entropy has."""
    assert worth.accuracy is not None, "cross-entropy has one"
    return worth.accuracy


BatchesOfRanks = Iterator[tuple[tuple[Tensor, Tensor], ...]]
"""Batches of all ranks, by iteration."""
Train = Callable[[TrainConfig, nn.Module, BatchesOfRanks, int, int], Iterator[float]]
"""Function that trains a model with a number of iterations on a number of ranks, and yields the loss of each."""


def _train(
    config: TrainConfig,
    model: nn.Module,
    batches: BatchesOfRanks,
    iterations: int,
    world_size: int,
) -> Iterator[float]:
    """Train ``model`` by exchanges of gradients, and yield the mean loss of each iteration."""
    pipeline, optimization = config.pipeline, config.optimization.for_ranks(world_size)
    optimizer = build_optimizer(optimization, model)
    schedule = build_schedule(optimization, optimizer, iterations)
    ranks = SimulatedRanks(
        model,
        optimizer,
        world_size=world_size,
        width=pipeline.width,
        synchronous_start=config.updates.synchronous_start,
        prediction=config.updates.prediction,
        guard=config.updates.guard,
        clip_norm=config.updates.clip_norm,
        clip_value=config.updates.clip_value,
        codec=config.compression.chosen(),
        seed=config.optimization.seed,
    )
    for of_ranks in batches:
        yield float(np.mean(ranks.iterate(loss_of, of_ranks)))
        schedule.step()
    ranks.flush()


def _train_by_windows(
    config: TrainConfig,
    model: nn.Module,
    batches: BatchesOfRanks,
    iterations: int,
    world_size: int,
) -> Iterator[float]:
    """Train ``model`` by local steps, and yield the mean loss of each iteration after its window."""
    pipeline, optimization = config.pipeline, config.optimization.for_ranks(world_size)
    optimizers = [build_optimizer(optimization, model) for _ in range(world_size)]
    schedules = [build_schedule(optimization, optimizer, iterations) for optimizer in optimizers]
    ranks = SimulatedLocalSteps(
        model,
        optimizers,
        outer=config.windows.outer or "average",
        outer_lr=config.windows.outer_lr,
        outer_momentum=config.windows.outer_momentum,
        moving_rate=config.windows.moving_rate,
        width=pipeline.width,
        clip_norm=config.updates.clip_norm,
        clip_value=config.updates.clip_value,
        codec=config.compression.chosen(),
        seed=config.optimization.seed,
        fragments=config.windows.fragments,
    )

    def set_lr(rank: int, iteration: int) -> None:
        if iteration > 0:
            schedules[rank].step()

    while window := list(itertools.islice(batches, config.windows.local_steps)):
        for losses in ranks.run_window(loss_of, window, set_lr):
            yield float(np.mean(losses))
    ranks.flush()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    inputs, labels = batch
    return CROSS_ENTROPY(model(inputs), labels)


def batches_of(config: TrainConfig, data: DataSplits, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return this rank's batches; with accumulation, each of all micro-batches of an iteration."""
    shards = ShardedBatches(
        data.train,
        batch_size=config.samples_per_rank,
        rank=rank,
        world_size=world_size,
        seed=config.optimization.seed,
    )
    return shards.from_iteration(0)


# ---- All runs of an experiment


def add_options(options: command.Parser, *, seeds: int = SEEDS, quick_seeds: int = QUICK_SEEDS) -> None:
    """Add the options of an experiment that keeps its runs; it has this many seeds by default, and with ``--quick``."""
    add, number = options.add_argument, command.at_least
    add(
        "--seeds",
        type=number(1),
        help=f"number of seeds ({seeds}; quick: {quick_seeds}, {QUICK_ITERATIONS} iterations)",
    )
    add("--processes", type=number(1), default=os.cpu_count(), help="runs at a time (all cores)")
    one_of = options.add_mutually_exclusive_group()
    one_of.add_argument("--fresh", action="store_true", help="forget the finished runs in the output folder")
    one_of.add_argument(
        "--finished", action="store_true", help="run nothing; publish rows whose seeds are all finished"
    )


def seeds_of(arguments: Namespace, *, seeds: int = SEEDS, quick_seeds: int = QUICK_SEEDS) -> int:
    """Return the number of seeds that is given, or its default, as for ``add_options``."""
    return arguments.seeds or (quick_seeds if arguments.quick else seeds)


Plan = Callable[[Mapping[str, Run]], Sequence[OnePlanned]]
"""Function that returns the runs to be made that can be told from those that are done, by their arguments."""


def kept_runs(arguments: Namespace, name: str) -> KeptRuns[Run]:
    """Return the runs that are kept in ``name``.runs.json in the output folder, as ``add_options`` asks for them."""
    return KeptRuns(arguments.output / f"{name}.runs.json", Run, fresh=arguments.fresh)


def finished_runs(
    plan: Plan[OnePlanned],
    arguments: Namespace,
    name: str,
    console: Console,
    *,
    expected: Plan[OnePlanned] | None = None,
    simulate: Callable[[str], Run] = simulate,
) -> dict[str, Run]:
    """Return the runs of the plan by their arguments, as the options of ``add_options`` ask for.

    Those that are missing are made now, unless only finished ones are wanted. Where later runs depend on the results of
    earlier ones, ``expected`` returns all, as far as they can be told before.
    """
    kept = kept_runs(arguments, name)
    if not arguments.finished:
        processes = arguments.processes
        return make_runs(plan, expected or plan, kept, name, console, simulate, processes=processes)
    known = kept.load()
    planned = plan(known)
    done = {one.words: run for one in planned if (run := known.get(one.words))}
    say(console, f"{len(done)} of {len(planned)} runs are there")
    return done


def make_runs(
    plan: Plan[OnePlanned],
    expected: Plan[OnePlanned],
    kept: KeptRuns[Run],
    name: str,
    console: Console,
    simulate: Callable[[str], Run] = simulate,
    *,
    processes: int,
) -> dict[str, Run]:
    """Return the runs of the plan by their arguments; missing ones are made now, in its order, ``processes`` at a time.

    Raises:
        RunError: simulated ranks do not follow an option of a run. All others that can be told without it were made.
    """
    done = kept.load()
    refused: dict[str, str] = {}
    """Runs that could not be made, by their arguments, and why."""
    in_work: dict[Future[Run], OnePlanned] = {}

    def left() -> list[OnePlanned]:
        return [one for one in expected(done) if one.words not in done and one.words not in refused]

    whole = len(expected(done))
    command.say_kept(console, whole, len(left()))
    work = sum(one.work for one in left())
    context = multiprocessing.get_context("forkserver")  # a fork of this process would copy the state of its threads
    with (
        command.progress(console, name, work) as advance,
        ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker) as pool,
    ):
        try:
            while True:
                begun = {one.words for one in in_work.values()} | done.keys() | refused.keys()
                new = [one for one in plan(done) if one.words not in begun][: processes - len(in_work)]
                in_work |= {pool.submit(simulate, one.words): one for one in new}
                if not in_work:
                    break
                for future in wait(in_work, return_when=FIRST_COMPLETED).done:
                    one = in_work.pop(future)
                    came_to = _take(future, one, kept, done, refused)
                    remaining = left()
                    work = sum(other.work for other in remaining)  # may be more than before: runs depend on others
                    advance(one.work, f"{one.name}: {came_to}; {len(remaining)} runs left", left=work)
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for runs that have not begun
    if refused:
        raise RunError(f"{name}: {len(refused)} runs were refused; the first was {next(iter(refused.values()))}")
    return {one.words: done[one.words] for one in plan(done)}


def _take(future: Future[Run], one: Planned, kept: KeptRuns[Run], done: dict[str, Run], refused: dict[str, str]) -> str:
    """Note what a run came to, and return it in words."""
    try:
        run = future.result()
    except UserInputError as failure:
        refused[one.words] = f"{one.name}: {failure}"
        return "refused"
    kept.add(one.words, run)
    done[one.words] = run
    return f"{'diverged' if run.test_accuracy is None else f'{run.test_accuracy:.2%}'} in {run.seconds:.0f} s"


def _start_worker() -> None:
    torch.set_num_threads(1)
