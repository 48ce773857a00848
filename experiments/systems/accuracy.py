"""Accuracy of all systems after equal samples, and on the way: on simulated ranks where these are real ones, else real.

Simulated ranks are real ones bit for bit (tests/experiments/test_simulation.py) for what ``is_simulated`` tells. The
others train on four real ranks of this machine, without emulated links: those that wait for each other would end with
the same weights on any network, and those that do not depend on the speed of each rank, which here is that of two
shared cores. Systems that share all options with an effect on weights share a run.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments import simulated_runs
from experiments.contenders import NEVER
from experiments.kept_runs import KeptRuns
from experiments.results import code_state
from experiments.simulated_runs import DIVERGED_LOSS, Run
from experiments.systems import hogwild
from experiments.systems.catalogue import HOGWILD, NAME
from experiments.systems.workloads import Workload
from experiments.testbed_jobs import run_training
from pipesgd.cli import parse as parse_training
from pipesgd.codecs.options import DENSE_CODECS, CodecOptions
from pipesgd.config import TrainConfig
from pipesgd.errors import RunError
from pipesgd.pipeline_config import PipelineConfig
from pipesgd.run.metrics import read_metrics
from pipesgd.run.output import METRICS_FILE, SUMMARY_FILE

EVALUATIONS = 12
"""Most evaluations of a run, between two of which the crossing of a target is interpolated."""
SIMULATED_FIELDS = (
    *("width", "prediction", "local_steps", "fragments"),
    *("outer", "outer_lr", "outer_momentum", "moving_rate"),
)
"""Options of the pipeline that the simulation knows; all others must have their defaults."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a training on real ranks."""

    commit: str | None
    failure: str | None
    """Reason why there is no result; None if there is one."""
    points: list[list[float]]
    """Iterations of a rank, and the test accuracy after them; the last is that of the end."""


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
    points: list[list[float]]
    """Points as those of ``Trained``."""


def is_simulated(config: TrainConfig) -> bool:
    """Return True if simulated ranks train as real ones do, bit for bit: pipelines and windows on a ring."""
    simulated = PipelineConfig(**{name: getattr(config.pipeline, name) for name in SIMULATED_FIELDS})
    codec = config.compression
    return config.pipeline == simulated and codec == CodecOptions(codec=codec.codec) and codec.codec in DENSE_CODECS


def plan(
    workloads: Mapping[str, Workload], words_of_systems: Mapping[str, str], seeds: int
) -> dict[tuple[str, str, int], Planned]:
    """Return the training of each workload, system and seed; systems with the same words share theirs."""
    window_of = {  # after which all ranks have the same weights
        words: parse_training(shlex.split(words)).pipeline.local_steps for words in words_of_systems.values()
    }
    planned: dict[tuple[str, str, int], Planned] = {}
    by_words: dict[str, Planned] = {}
    for seed, (workload, one), (system, words) in itertools.product(
        range(seeds), workloads.items(), words_of_systems.items()
    ):
        every = window_of[words] * math.ceil(one.iterations / EVALUATIONS / window_of[words])
        length = f"--iterations {one.iterations} --evaluate-iterations {every} --seed {seed}"
        # The program of its own gets the same arguments as a plain d-sync, but is not the same training.
        key = f"{HOGWILD} " * (system == HOGWILD) + f"{one.trained} {words} {length}"
        training = Planned(workload=workload, seed=seed, words=key, test_every=1, system=system)
        planned[workload, system, seed] = by_words.setdefault(key, training)
    return planned


def finished_curves(
    planned: Mapping[tuple[str, str, int], Planned], arguments: Namespace, console: Console, *, world_size: int
) -> dict[tuple[str, str, int], Curve]:
    """Return the curves of planned trainings, as the options of ``simulated_runs.add_options`` ask for.

    They are kept in the output folder. Those that are missing are made now, unless only finished ones are wanted.
    There are ``world_size`` real ranks, and four simulated ones.
    """
    unique = {one.words: one for one in planned.values()}
    simulated = [
        one
        for words, one in unique.items()
        if not words.startswith(HOGWILD) and is_simulated(parse_training(shlex.split(words)))
    ]
    runs = simulated_runs.finished_runs(simulated, arguments, f"{NAME}.simulated", console)
    names = {one.words for one in simulated}
    really = _really_trained([one for one in unique.values() if one.words not in names], arguments, console, world_size)
    found = {words: _curve(run) for words, run in runs.items()} | {
        words: Curve(commit=one.commit, how="real", failure=one.failure, points=one.points)
        for words, one in really.items()
    }
    return {key: found[one.words] for key, one in planned.items() if one.words in found}


def _curve(run: Run) -> Curve:
    if run.test_accuracy is None:
        failure = f"diverged in iteration {run.diverged_at}"
        return Curve(commit=run.commit, how="simulated", failure=failure, points=[])
    return Curve(commit=run.commit, how="simulated", failure=None, points=run.points)


def _really_trained(
    planned: Sequence[Planned], arguments: Namespace, console: Console, world_size: int
) -> dict[str, Trained]:
    """Return these trainings on real ranks by their words; the missing ones are made now, if they are wanted.

    Raises:
        RunError: some failed, other than by diverging, which is a result.
    """
    name = f"{NAME}.real"

    def made(one: Planned) -> Trained:
        trained = (train_own_program if one.words.startswith(HOGWILD) else train)(one.words, world_size)
        if trained.failure and not has_diverged(trained.failure):
            raise RunError(trained.failure)
        return trained

    kept = KeptRuns(arguments.output / f"{name}.runs.json", Trained, fresh=arguments.fresh)
    by_words = {one.words: one for one in planned}
    return kept.complete(by_words, made, console, name, named=lambda one: one.name, finished=arguments.finished)


def has_diverged(failure: str) -> bool:
    """Return True if a training failed for the reason that its weights, gradients or losses went beyond all bounds."""
    return re.search("diverged|NaN|infinity|finite", failure) is not None


def train(words: str, world_size: int) -> Trained:
    """Train once with the arguments ``words`` of pipesgd.train on real ranks of this machine."""
    commit = code_state()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        own = [*shlex.split(words), "--checkpoint-iterations", str(NEVER), "--output", str(folder)]
        failure = run_training(own, world_size) or diverged_at(folder)
        points = read_points(folder) if failure is None else []
    return Trained(commit=commit, failure=failure, points=points)


def train_own_program(words: str, world_size: int) -> Trained:
    """Train once by the program whose name ``words`` begin with."""
    commit = code_state()
    try:
        outcome = hogwild.train(words.removeprefix(f"{HOGWILD} "), world_size)
    except RunError as failure:
        return Trained(commit=commit, failure=str(failure), points=[])
    return Trained(commit=commit, failure=None, points=[[float(at), accuracy] for at, accuracy in outcome.points])


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
