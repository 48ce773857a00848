"""Trainings on simulated ranks: one run, and all that an experiment plans, each made once and kept."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shlex
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from experiments import command
from experiments.kept_runs import KeptRuns
from experiments.late_layers import late_layers, not_in
from experiments.predictions import COMPARED
from experiments.results import code_state
from experiments.simulated_options import check_simulated
from experiments.simulation import SimulatedLocalSteps, SimulatedRanks
from pipesgd.cli import parse as parse_training
from pipesgd.config import TrainConfig
from pipesgd.data import CROSS_ENTROPY, DataSplits, ShardedBatches, evaluation_batches, make_workload
from pipesgd.errors import NonFiniteGradientError
from pipesgd.optim.build import build_optimizer, build_schedule
from pipesgd.pipeline.prediction import Prediction
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
    test_every: int
    """Distance between the samples of the test set that are tested; 1 tests all."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the run for people."""


# ---- One run


def simulate(words: str, *, world_size: int = WORLD_SIZE, test_every: int = 1) -> Run:
    """Return the result of ``pipesgd.train words`` on ``world_size`` ranks, tested on one sample in ``test_every``.

    Raises:
        UserInputError: an option is wrong, or one that simulated ranks do not follow.
    """
    begin = time.perf_counter()
    arguments, compared = compared_prediction(shlex.split(words))
    arguments, late = late_layers(arguments)
    config = parse_training(arguments)
    check_simulated(config, late)
    commit = code_state()
    iterations = config.optimization.iterations
    assert iterations is not None  # checked
    torch.manual_seed(config.optimization.seed)
    data, model = make_workload(config)
    torch.manual_seed(config.optimization.seed * world_size)
    of_ranks = (batches_of(config, data, rank, world_size) for rank in range(world_size))
    batches = itertools.islice(zip(*of_ranks, strict=True), iterations)
    if config.in_windows:
        assert compared is None, "each rank predicts with its own movement"
        training = _train_by_windows(config, model, batches, iterations, world_size)
    else:
        training = _train(config, model, batches, iterations, world_size, compared, late)
    every = config.run.evaluate_iterations
    losses: list[float] = []
    points: list[list[float]] = []
    try:
        for loss in training:
            losses.append(loss)
            if not loss <= DIVERGED_LOSS:
                return Run(commit=commit, seconds=time.perf_counter() - begin, diverged_at=len(losses) - 1)
            if every and len(losses) % every == 0 and len(losses) < iterations:
                points.append([len(losses), accuracy_of(evaluated(model, data, test_every))])
    except NonFiniteGradientError as error:
        return Run(commit=commit, seconds=time.perf_counter() - begin, diverged_at=error.iteration)
    worth = evaluated(model, data, test_every)
    if every:
        points.append([iterations, accuracy_of(worth)])
    return Run(
        commit=commit,
        seconds=time.perf_counter() - begin,
        diverged_at=None,
        train_loss=float(np.mean(losses[-max(1, iterations // 10) :])),
        test_loss=worth.loss,
        test_accuracy=worth.accuracy,
        points=points,
    )


def evaluated(model: nn.Module, data: DataSplits, test_every: int) -> evaluation.Evaluation:
    """Return the evaluation of the weights that ``model`` holds on one sample of the test set in ``test_every``."""
    batches = evaluation_batches(data.test, batch_size=100, rank=0, world_size=test_every)
    return evaluation.mean([evaluation.sums(model, batches, torch.device("cpu"))])


def accuracy_of(worth: evaluation.Evaluation) -> float:
    """Return the accuracy, which every training on cross-entropy has."""
    assert worth.accuracy is not None, "cross-entropy has one"
    return worth.accuracy


def compared_prediction(arguments: list[str]) -> tuple[list[str], type[Prediction] | None]:
    """Return the arguments without a ``--prediction`` that ``pipesgd.train`` does not offer, and that prediction."""
    for number, (option, name) in enumerate(itertools.pairwise(arguments)):
        if option == "--prediction" and name in COMPARED:
            return arguments[:number] + arguments[number + 2 :], COMPARED[name]
    return arguments, None


_Batches = Iterator[tuple[tuple[Tensor, Tensor], ...]]
"""Batches of all ranks, by iteration."""


def _train(
    config: TrainConfig,
    model: nn.Module,
    batches: _Batches,
    iterations: int,
    world_size: int,
    compared: type[Prediction] | None,
    late: list[str] | None,
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
        prediction=compared or config.updates.prediction,
        guard=config.updates.guard,
        clip_norm=config.updates.clip_norm,
        clip_value=config.updates.clip_value,
        codec=config.compression.chosen(),
        seed=config.optimization.seed,
        fresh=() if late is None else not_in(late, model),
    )
    for of_ranks in batches:
        yield float(np.mean(ranks.iterate(loss_of, of_ranks)))
        schedule.step()
    ranks.flush()


def _train_by_windows(
    config: TrainConfig,
    model: nn.Module,
    batches: _Batches,
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


def add_options(options: command.Parser) -> None:
    """Add the options of an experiment that keeps its runs."""
    add, number = options.add_argument, command.at_least
    add(
        "--seeds",
        type=number(1),
        help=f"number of seeds ({SEEDS}; quick: {QUICK_SEEDS}, {QUICK_ITERATIONS} iterations)",
    )
    add("--processes", type=number(1), default=os.cpu_count(), help="runs at a time (all cores)")
    one_of = options.add_mutually_exclusive_group()
    one_of.add_argument("--fresh", action="store_true", help="forget the finished runs in the output folder")
    one_of.add_argument(
        "--finished", action="store_true", help="run nothing; publish rows whose seeds are all finished"
    )


def seeds_of(arguments: Namespace) -> int:
    """Return the number of seeds that is given, or its default."""
    return arguments.seeds or (QUICK_SEEDS if arguments.quick else SEEDS)


def finished_runs(planned: Sequence[Planned], arguments: Namespace, name: str, console: Console) -> dict[str, Run]:
    """Return the runs of the plan by their arguments, as the options of ``add_options`` ask for.

    They are kept in ``name``.runs.json in the output folder. Those that are missing are made now, unless only finished
    ones are wanted.
    """
    kept = KeptRuns(arguments.output / f"{name}.runs.json", Run, fresh=arguments.fresh)
    if not arguments.finished:
        return make_runs(planned, kept, name, console, processes=arguments.processes)
    known = kept.load()
    done = {one.words: run for one in planned if (run := known.get(one.words))}
    say(console, f"{len(done)} of {len(planned)} runs are there")
    return done


def make_runs(
    planned: Sequence[Planned], kept: KeptRuns[Run], name: str, console: Console, *, processes: int
) -> dict[str, Run]:
    """Return the runs of the plan by their arguments; those that are missing are made now, ``processes`` at a time."""
    done = kept.load()
    missing = [one for one in planned if one.words not in done]
    command.say_kept(console, len(planned), len(missing))
    context = multiprocessing.get_context("forkserver")  # a fork of this process would copy the state of its threads
    with (
        command.progress(console, name, len(missing)) as advance,
        ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker) as pool,
    ):
        futures = {pool.submit(simulate, one.words, test_every=one.test_every): one for one in missing}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                one, run = futures[future], future.result()
                kept.add(one.words, run)
                done[one.words] = run
                came_to = "diverged" if run.test_accuracy is None else f"{run.test_accuracy:.2%}"
                advance(1, f"{number}/{len(missing)} {one.name}: {came_to} in {run.seconds:.0f} s")
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for runs that have not begun
    return {one.words: done[one.words] for one in planned}


def _start_worker() -> None:
    torch.set_num_threads(1)
