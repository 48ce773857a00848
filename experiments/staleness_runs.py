"""Runs of ``experiments/staleness.py``: workloads, methods, and all of their combinations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from experiments import simulated_runs
from experiments.simulated_runs import QUICK_ITERATIONS, SEEDS

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
    "stale": "--width 2 --synchronous-start 0 --prediction none",
    "stale, warm-up": "--width 2 --prediction none --synchronous-start {warmup}",
    "stale, guard": "--width 2 --synchronous-start 0 --prediction none --guard",
    "eager": "--width 2 --synchronous-start 0 --prediction eager",
    "local": "--width 2 --synchronous-start 0 --prediction local",
    "previous": "--width 2 --synchronous-start 0 --prediction previous",
    "nesterov": "--width 2 --synchronous-start 0 --prediction nesterov",
    "spectrain": "--width 2 --synchronous-start 0 --prediction spectrain",
    "dc": "--width 2 --synchronous-start 0 --prediction dc",
    "stale, width 3": "--width 3 --synchronous-start 0 --prediction none",
    "eager, width 3": "--width 3 --synchronous-start 0 --prediction eager",
    "local, width 3": "--width 3 --synchronous-start 0 --prediction local",
    "eager, int8": "--width 2 --synchronous-start 0 --prediction eager --codec int8",
    "eager, int4": "--width 2 --synchronous-start 0 --prediction eager --codec int4",
}
WARMUP = 0.1
"""Share of the iterations that a warm-up takes."""


@dataclass(frozen=True, kw_only=True)
class Planned(simulated_runs.Planned):
    """A run to be made."""

    optimizer: str
    method: str
    multiple: float
    lr: float

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.optimizer}, lr {self.lr:g}, {self.method}"


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

    None stands for what the workload, and the method, are tried with, if ``quick`` at one learning rate.
    """
    planned, rates = [], (1.0,) if quick else MULTIPLES
    for seed, name in itertools.product(range(seeds), workloads):
        workload = WORKLOADS[name]
        iterations = QUICK_ITERATIONS if quick else workload.iterations
        chosen = [one for one in workload.optimizers if one in (optimizers or workload.optimizers)]
        for optimizer, multiple in itertools.product(chosen, multiples or workload.multiples or rates):
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
