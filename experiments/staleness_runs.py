"""Runs of ``experiments/staleness.py``: workloads, methods, and one run on simulated ranks."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from experiments.predictions import COMPARED
from experiments.results import code_state
from experiments.simulation import SimulatedRanks
from pipesgd.cli import parse as parse_training
from pipesgd.config import TrainConfig
from pipesgd.data import CROSS_ENTROPY, DataSplits, ShardedBatches, evaluation_batches, make_workload
from pipesgd.optim.build import build_optimizer, build_schedule
from pipesgd.pipeline.prediction import Prediction
from pipesgd.run import evaluation

WORLD_SIZE = 4


HEADLINE = ("sync", "stale", "eager", "local", "eager, width 3", "eager, int8", "eager, int4")
"""Methods that are tried at full length, at the best rate of synchronous training."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training and its length, with what is tried on it unless the command says otherwise."""

    words: str
    iterations: int
    optimizers: dict[str, float]
    """Learning rate by optimizer, near the best one of synchronous training; the others tried are multiples of it."""
    methods: tuple[str, ...] | None = None
    """Methods that are tried; None for all."""
    multiples: tuple[float, ...] | None = None
    """Multiples of the learning rate; None for all with the methods that are tried closely, 1 with the others."""
    judged_by_loss: bool = False
    """True if the test loss is judged, where accuracy is not what people look at."""
    test_every: int = 1
    """Distance between the samples of the test set that are tested; 1 tests all."""


WORKLOADS = {
    "mlp": Workload(
        words="--dataset fashion-mnist --model mlp --hidden-sizes 500 500 --batch-size 32",
        iterations=1404,
        optimizers={"sgd": 0.1},
        methods=("stale, warm-up", *HEADLINE),
        multiples=(1.0,),
    ),
    "convnet": Workload(
        words="--dataset fashion-mnist --model convnet --batch-size 32",
        iterations=468,
        optimizers={"sgd": 0.1},
        methods=HEADLINE,
        multiples=(1.0,),
    ),
    "transformer": Workload(
        words="--dataset python-stdlib --model transformer --batch-size 8",
        iterations=600,
        optimizers={"adamw": 0.008},
        methods=HEADLINE,
        multiples=(1.0,),
        judged_by_loss=True,
    ),
    "short-mlp": Workload(
        words="--dataset fashion-mnist --model mlp --hidden-sizes 200 200 --batch-size 32",
        iterations=468,
        optimizers={"sgd": 0.1, "adamw": 0.008, "adagrad": 0.04},
    ),
    "short-convnet": Workload(
        words="--dataset fashion-mnist --model convnet --batch-size 16",
        iterations=200,
        optimizers={"sgd": 0.05, "adamw": 0.008},
    ),
    "short-transformer": Workload(
        words="--dataset python-stdlib --model transformer --embedding 64 --batch-size 8",
        iterations=200,
        optimizers={"adamw": 0.008, "muon": 0.032},
        judged_by_loss=True,
    ),
    "short-resnet18": Workload(
        words="--dataset fashion-mnist --model resnet18 --batch-size 8",
        iterations=60,
        optimizers={"sgd": 0.025, "adamw": 0.001},
        methods=("sync", "stale", "eager"),
        multiples=(1.0,),
        test_every=5,
    ),
    "digits": Workload(
        words="--dataset digits --model mlp --hidden-sizes 64 --batch-size 16", iterations=100, optimizers={"sgd": 0.1}
    ),
}
"""Workloads: first those that people train, at one rate; then short ones, most with everything; the last is for
trying out. Muon's products in bfloat16 take most of an iteration of an mlp on a CPU."""
OPTIMIZERS = {
    "sgd": "--optimizer sgd --momentum 0.9",
    "adamw": "--optimizer adamw",
    "adagrad": "--optimizer adagrad",
    "muon": "--optimizer muon",
}
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
CLOSELY = ("sync", "stale", "eager", "local")
"""Methods that are tried at all multiples; the others are tried at 1 only."""
BASELINE = "sync"
"""Method that the others are compared with."""
METHODS = {
    BASELINE: "--width 1",
    "stale": "--width 2 --prediction none",
    "stale, warm-up": "--width 2 --prediction none --warmup-iterations {warmup}",
    "stale, guard": "--width 2 --prediction none --guard",
    "eager": "--width 2 --prediction eager",
    "local": "--width 2 --prediction local",
    "previous": "--width 2 --prediction previous",
    "nesterov": "--width 2 --prediction nesterov",
    "spectrain": "--width 2 --prediction spectrain",
    "dc": "--width 2 --prediction dc",
    "stale, width 3": "--width 3 --prediction none",
    "eager, width 3": "--width 3 --prediction eager",
    "local, width 3": "--width 3 --prediction local",
    "eager, int8": "--width 2 --prediction eager --codec int8",
    "eager, int4": "--width 2 --prediction eager --codec int4",
}
WARMUP = 0.1
"""Share of the iterations that a warm-up takes."""
SEEDS, QUICK_ITERATIONS = 3, 20
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


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run to be made."""

    workload: str
    optimizer: str
    method: str
    multiple: float
    lr: float
    seed: int
    words: str
    """Arguments of ``pipesgd.train``, all but --output."""
    test_every: int


def plan(
    workloads: Sequence[str],
    optimizers: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    multiples: Sequence[float] | None = None,
    seeds: int = SEEDS,
    *,
    quick: bool = False,
) -> list[Planned]:
    """Return all runs, seed by seed, with those of the optimizers that a workload has.

    None stands for what the workload, and the method, are tried with.
    """
    planned = []
    for seed, name in itertools.product(range(seeds), workloads):
        workload = WORKLOADS[name]
        iterations = QUICK_ITERATIONS if quick else workload.iterations
        chosen = [one for one in workload.optimizers if one in (optimizers or workload.optimizers)]
        for optimizer, multiple in itertools.product(chosen, multiples or workload.multiples or MULTIPLES):
            lr = workload.optimizers[optimizer] * multiple
            rest = f"{OPTIMIZERS[optimizer]} --lr {lr:g} --schedule one-cycle --iterations {iterations} --seed {seed}"
            for method in methods or workload.methods or METHODS:
                if not (multiples or workload.multiples or method in CLOSELY or multiple == 1.0):
                    continue
                how = METHODS[method].format(warmup=round(WARMUP * iterations))
                planned.append(
                    Planned(
                        workload=name,
                        optimizer=optimizer,
                        method=method,
                        multiple=multiple,
                        lr=lr,
                        seed=seed,
                        words=f"{workload.words} {how} {rest}",
                        test_every=workload.test_every,
                    )
                )
    return planned


def compared_prediction(arguments: list[str]) -> tuple[list[str], type[Prediction] | None]:
    """Return the arguments without a ``--prediction`` that ``pipesgd.train`` does not offer, and that prediction."""
    for number, (option, name) in enumerate(itertools.pairwise(arguments)):
        if option == "--prediction" and name in COMPARED:
            return arguments[:number] + arguments[number + 2 :], COMPARED[name]
    return arguments, None


def simulate(words: str, *, world_size: int = WORLD_SIZE, test_every: int = 1) -> Run:
    """Return the result of ``pipesgd.train words`` on ``world_size`` ranks, tested on one sample in ``test_every``."""
    begin = time.perf_counter()
    arguments, compared = compared_prediction(shlex.split(words))
    config = parse_training(arguments)
    optimization, pipeline = config.optimization, config.pipeline
    torch.manual_seed(optimization.seed)
    data, model = make_workload(config)
    torch.manual_seed(optimization.seed * world_size)
    optimizer = build_optimizer(optimization, model)
    iterations = optimization.iterations
    assert iterations is not None
    schedule = build_schedule(optimization, optimizer, iterations)
    ranks = SimulatedRanks(
        model,
        optimizer,
        world_size=world_size,
        width=pipeline.width,
        warmup_iterations=pipeline.warmup_iterations,
        prediction=compared or pipeline.prediction,
        guard=pipeline.guard,
        codec=config.compression.codec,
    )
    batches = zip(*(_batches(config, data, rank, world_size) for rank in range(world_size)), strict=True)
    losses: list[float] = []
    commit = code_state()
    for iteration in range(iterations):
        losses.append(float(np.mean(ranks.iterate(_loss, next(batches)))))
        schedule.step()
        if not losses[-1] <= DIVERGED_LOSS:
            return Run(commit=commit, seconds=time.perf_counter() - begin, diverged_at=iteration)
    ranks.flush()
    parts = evaluation.sums(
        model, evaluation_batches(data.test, batch_size=100, rank=0, world_size=test_every), torch.device("cpu")
    )
    worth = evaluation.mean([parts])
    return Run(
        commit=commit,
        seconds=time.perf_counter() - begin,
        diverged_at=None,
        train_loss=float(np.mean(losses[-max(1, iterations // 10) :])),
        test_loss=worth.loss,
        test_accuracy=worth.accuracy,
    )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return CROSS_ENTROPY(model(inputs), labels)


def _batches(config: TrainConfig, data: DataSplits, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    shards = ShardedBatches(
        data.train,
        batch_size=config.data.batch_size,
        rank=rank,
        world_size=world_size,
        seed=config.optimization.seed,
    )
    return shards.from_iteration(0)
