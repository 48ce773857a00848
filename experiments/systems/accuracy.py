"""Accuracy of all systems after equal samples, and on the way: on simulated ranks where these are real ones, else real.

Simulated ranks are real ones bit for bit (tests/experiments/test_simulation.py) for what ``is_simulated`` tells. The
others train on four real ranks of this machine, without emulated links: those that wait for each other would end with
the same weights on any network, and those that do not depend on the speed of each rank, which here is that of two
shared cores. Systems that share all options with an effect on weights share a run. Those whose gradients are the sums
of synchronous training, added up in another order, train on real ranks with one seed, and all others with every seed.

The learning rate is one that suits synchronous training. Late gradients without a prediction, and ranks that are moved
by an elastic force or by an outer momentum, may diverge at it, so systems with these are trained at a quarter of it,
too, and the better of both counts.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments import simulated_runs
from experiments.kept_runs import KeptRuns
from experiments.results import code_state
from experiments.simulated_runs import DIVERGED_LOSS, Run
from experiments.systems import hogwild
from experiments.systems.catalogue import HOGWILD, NAME
from experiments.systems.workloads import NODES, Workload
from experiments.testbed_jobs import NEVER, run_training
from pipesgd.cli import parse as parse_training
from pipesgd.codecs.options import DENSE_CODECS
from pipesgd.config import TrainConfig, options_of
from pipesgd.errors import RunError
from pipesgd.run.metrics import read_metrics
from pipesgd.run.output import METRICS_FILE, SUMMARY_FILE

EVALUATIONS = 6
"""Most evaluations of a run, between two of which the crossing of a target is interpolated."""
SHARES = (1.0, 0.25)
"""Shares of a workload's learning rate with which systems are trained that may need a lower one."""
Key = tuple[str, str, int, float]
"""Key of a training: workload, system, seed, and share of the workload's learning rate."""
SIMULATED_OPTIONS = (
    *("width", "codec", "prediction", "local-steps", "fragments"),
    *("outer", "outer-lr", "outer-momentum", "moving-rate"),
)
"""Options of the exchange that the simulation knows; all others must have their defaults."""


@dataclass(frozen=True, kw_only=True)
class Planned(simulated_runs.Planned):
    """A training to be made."""

    system: str
    """Name of the first system that it is for."""

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.system}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Accuracy of one training."""

    commit: str | None
    how: str
    """Ranks that trained: "simulated" or "real"."""
    failure: str | None
    """Reason why there is no result; None if there is one."""
    points: list[list[float]]
    """Iterations of a rank, and the test accuracy after them; the last is that of the end."""

    @property
    def end(self) -> float | None:
        """Test accuracy at the end; None if there is no result."""
        return None if self.failure else self.points[-1][1]


def is_simulated(config: TrainConfig) -> bool:
    """Return True if simulated ranks train as real ones do, bit for bit: pipelines and windows on a ring."""
    options = options_of(config.pipeline, config.wire, config.windows, config.compression)
    defaults = TrainConfig().options()
    others = {name for name, value in options.items() if value != defaults[name]} - {*SIMULATED_OPTIONS}
    return not others and not config.updates.guard and config.compression.codec in DENSE_CODECS


def is_synchronous(config: TrainConfig) -> bool:
    """Return True if the gradients are the sums of synchronous training, whatever the order in which they add up."""
    pipeline = config.pipeline
    if pipeline.strategy == "pipelined":
        return pipeline.width == 1 and not config.in_windows and config.compression.codec == "fp32"
    return pipeline.strategy == "ps-sync" or (pipeline.strategy == "ddp" and pipeline.ddp_hook == "none")


def may_need_less(config: TrainConfig) -> bool:
    """Return True if training may diverge at a learning rate that suits synchronous training.

    Gradients are applied to other weights than those that they were computed with, unpredicted, or something other than
    a mean moves the weights of ranks that train by themselves.
    """
    pipeline = config.pipeline
    if pipeline.strategy == "pipelined":
        stale = pipeline.width > 1 and config.updates.prediction == "none"
        return stale or config.windows.outer in ("elastic", "nesterov")
    return pipeline.strategy in ("ps-async", "easgd-async")


def plan(workloads: Mapping[str, Workload], words_of_systems: Mapping[str, str], seeds: int) -> dict[Key, Planned]:
    """Return the trainings of each workload and system; systems with the same words share theirs.

    Raises:
        UserInputError: a system cannot train on one of the workloads.
    """
    planned: dict[Key, Planned] = {}
    by_words: dict[str, Planned] = {}
    for (workload, one), (system, words) in itertools.product(workloads.items(), words_of_systems.items()):
        config, own_program = parse_training(shlex.split(f"{one.trained()} {words}")), system == HOGWILD
        if config.pipeline.strategy == "local":
            continue
        window = config.windows.local_steps  # after which all ranks have the same weights
        every = window * math.ceil(one.iterations / EVALUATIONS / window)
        shares = SHARES if own_program or may_need_less(config) else SHARES[:1]
        once = is_synchronous(config) and not is_simulated(config)
        for seed, share in itertools.product(range(1 if once else seeds), shares):
            length = f"--iterations {one.iterations} --evaluate-iterations {every} --seed {seed}"
            # The program of its own gets the same arguments as a plain d-sync, but is not the same training.
            key = f"{HOGWILD} " * own_program + f"{one.trained(share)} {words} {length}"
            training = Planned(workload=workload, seed=seed, words=key, system=system)
            planned[workload, system, seed, share] = by_words.setdefault(key, training)
    return planned


def best_curves(curves: Mapping[Key, Curve]) -> dict[tuple[str, str], tuple[float, list[Curve]]]:
    """Return, for each workload and system, the share of the learning rate that ends best, and its curves by seed.

    The best is that with the highest mean of all seeds, of which none has failed; the whole rate if there is no such.
    """
    by_share: dict[tuple[str, str], dict[float, list[Curve]]] = {}
    for (workload, system, _, share), curve in sorted(curves.items(), key=lambda item: item[0][2]):
        by_share.setdefault((workload, system), {}).setdefault(share, []).append(curve)

    def mean_end(of_share: tuple[float, list[Curve]]) -> float:
        return statistics.fmean(-math.inf if curve.end is None else curve.end for curve in of_share[1])

    return {key: max(own.items(), key=mean_end) for key, own in by_share.items()}


def finished_curves(planned: Mapping[Key, Planned], arguments: Namespace, console: Console) -> dict[Key, Curve]:
    """Return the curves of planned trainings, as the options of ``simulated_runs.add_options`` ask for.

    They are kept in the output folder. Those that are missing are made now, unless only finished ones are wanted.
    """
    unique = {one.words: one for one in planned.values()}
    simulated = [
        one
        for words, one in unique.items()
        if not words.startswith(HOGWILD) and is_simulated(parse_training(shlex.split(words)))
    ]
    runs = simulated_runs.finished_runs(lambda done: simulated, arguments, f"{NAME}.simulated", console)
    names = {one.words for one in simulated}
    really = _really_trained([one for one in unique.values() if one.words not in names], arguments, console)
    found = {words: curve_of(run) for words, run in runs.items()} | really
    return {key: found[one.words] for key, one in planned.items() if one.words in found}


def curve_of(run: Run) -> Curve:
    """Return the accuracy of a training on simulated ranks."""
    if run.test_accuracy is None:
        failure = f"diverged in iteration {run.diverged_at}"
        return Curve(commit=run.commit, how="simulated", failure=failure, points=[])
    return Curve(commit=run.commit, how="simulated", failure=None, points=run.points)


def _really_trained(planned: Sequence[Planned], arguments: Namespace, console: Console) -> dict[str, Curve]:
    """Return these trainings on real ranks by their words; the missing ones are made now, if they are wanted.

    Raises:
        RunError: some failed, other than by diverging, which is a result.
    """
    name = f"{NAME}.real"

    def made(one: Planned) -> Curve:
        trained = (train_own_program if one.words.startswith(HOGWILD) else train)(one.words)
        if trained.failure and not has_diverged(trained.failure):
            raise RunError(trained.failure)
        return trained

    kept = KeptRuns(arguments.output / f"{name}.runs.json", Curve, fresh=arguments.fresh)
    by_words = {one.words: one for one in planned}
    return kept.complete(by_words, made, console, name, named=lambda one: one.name, finished=arguments.finished)


def has_diverged(failure: str) -> bool:
    """Return True if a training failed for the reason that its weights, gradients or losses went beyond all bounds."""
    return re.search("diverged in iteration|NaN|infinity|not finite", failure) is not None


def train(words: str) -> Curve:
    """Train once with the arguments ``words`` of pipesgd.train on real ranks of this machine."""
    commit = code_state()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        own = [*shlex.split(words), "--checkpoint-iterations", str(NEVER), "--output", str(folder)]
        failure = run_training(own, NODES) or diverged_at(folder)
        points = read_points(folder) if failure is None else []
    return Curve(commit=commit, how="real", failure=failure, points=points)


def train_own_program(words: str) -> Curve:
    """Train once by the program whose name ``words`` begin with."""
    commit = code_state()
    try:
        outcome = hogwild.train(words.removeprefix(f"{HOGWILD} "), NODES)
    except RunError as failure:
        return Curve(commit=commit, how="real", failure=str(failure), points=[])
    points = [[float(at), accuracy] for at, accuracy in outcome.points]
    return Curve(commit=commit, how="real", failure=None, points=points)


def diverged_at(folder: Path) -> str | None:
    """Return when rank 0's loss of the run in ``folder`` went beyond the bound of simulated runs, if it did."""
    for index, line in enumerate(read_metrics(folder / METRICS_FILE)):
        if line["loss"] is None or line["loss"] > DIVERGED_LOSS:
            return f"diverged in iteration {index}"
    return None


def read_points(folder: Path) -> list[list[float]]:
    """Return the points of the run in ``folder``; the last is that of all updates, those in flight included."""
    lines = read_metrics(folder / METRICS_FILE)
    accuracies = [line["test_accuracy"] for line in lines]
    accuracies[-1] = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["final"]["test_accuracy"]
    return [[float(index + 1), value] for index, value in enumerate(accuracies) if value is not None]
