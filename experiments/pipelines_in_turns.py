"""Pipelines that train in turns in the same processes, on an emulated accelerator for each rank, and their times.

In a round every pipeline trains some iterations, and is flushed. The round's time of a pipeline is that of the slowest
rank; times of one round are compared.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import pipesgd
from experiments import accelerators, command
from experiments.paired import interleave_here
from experiments.results import REPOSITORY
from experiments.testbed import Link, Testbed
from experiments.testbed_jobs import last_words, run_job
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks

BATCH = 32
WARM_UP = 2
JOB_SECONDS = 1800.0


@dataclass(frozen=True)
class Effort:
    """Rounds, and iterations of each pipeline in a round."""

    rounds: int
    iterations: int


FULL, QUICK = Effort(60, 10), Effort(3, 3)


@dataclass(frozen=True)
class Samples:
    """Inputs and targets that this rank trains on, the same in each iteration of every pipeline."""

    inputs: torch.Tensor = field(default_factory=lambda: torch.randn(BATCH, 1, 28, 28))
    targets: torch.Tensor = field(default_factory=lambda: torch.randint(0, 10, (BATCH,)))

    def seconds(self, trained: pipesgd.Pipelined, iterations: Iterable[Any]) -> float:
        """Return the seconds of an iteration of ``trained`` for each of ``iterations``, and a flush."""
        start = time.perf_counter()
        for _ in iterations:
            cross_entropy(trained.module(self.inputs), self.targets).backward()
            trained.step()
        trained.flush()
        return time.perf_counter() - start


def pipeline(accelerator: str, ranks: Ranks, *, codec: str, transport: str) -> pipesgd.Pipelined:
    """Return a pipeline of width 2 for an MLP of 1.8 million parameters, which begins with the same weights always."""
    torch.manual_seed(0)
    model = accelerators.synthetic(
        accelerator,
        sample_shape=(1, 28, 28),
        num_classes=10,
        hidden_sizes=(1000, 1000),
        seed=ranks.rank,  # of gradients, which must not be those of other ranks
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wire = pipesgd.Wire(transport=transport)
    return pipesgd.Pipelined(model, optimizer, width=2, codec=codec, wire=wire, ranks=ranks)


def of_slowest(ranks: Ranks, contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return each contender's times in ``rounds`` rounds, after a warm-up: those of the slowest rank. Collective."""

    def together(one: Callable[[], float]) -> float:
        ranks.all_gather_object("turn", None)  # what ranks were apart before is nobody's time
        return one()

    turns = {name: partial(together, one) for name, one in contenders.items()}
    of_ranks = ranks.all_gather_object("times", interleave_here(turns, rounds, warm_up=WARM_UP))
    return {name: [max(times) for times in zip(*(one[name] for one in of_ranks), strict=True)] for name in contenders}


def times_of(module: str, words: Sequence[str], ranks: int, link: Link | None) -> dict[str, list[float]]:
    """Return what rank 0 of ``python -m module --job words file`` writes to that file, on the testbed or loopback.

    Raises:
        RunError: the job failed.
    """
    with tempfile.TemporaryDirectory() as name:
        file, log = Path(name) / "times.json", Path(name) / "log"
        job = ["-m", module, "--job", *words, str(file)]
        if link is None:
            done = subprocess.run(
                command.torchrun(ranks, *job),
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                check=False,
                timeout=JOB_SECONDS,
            )
            failure = last_words(done.stdout + done.stderr) if done.returncode else None
        else:
            with Testbed(nodes=ranks, link=link) as testbed:
                failure = run_job(testbed, job, log, deadline=JOB_SECONDS)
        if failure is not None:
            raise RunError(f"the pipelines of {module} must train; got {failure}")
        times: dict[str, list[float]] = json.loads(file.read_text(encoding="utf-8"))
    return times
