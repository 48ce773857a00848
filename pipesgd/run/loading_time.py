"""Time that this rank waits for its batches, and the worker processes that would hide it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

SHOWN_SHARE = 0.03
"""Smallest share of a run spent waiting for batches that is worth a hint."""


class ExposedLoading(NamedTuple):
    """Exposed loading of one rank."""

    share: float
    """Share of the rank's time in which it waited for its batches."""
    hidden_by: int | None
    """Smallest number of worker processes that would hide it on this machine's cores; None if none would."""


@dataclass(kw_only=True)
class LoadingTimes:
    """Times of a rank's iterations and of loading their batches."""

    workers: int
    """Worker processes of this rank; with 0, the rank loads its batches itself."""
    _iterations: int = field(default=0, init=False)
    _seconds: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0), init=False)

    def add(self, iteration: float, wait: float, load: float) -> None:
        """Add the seconds of an iteration, of its wait for the batch, and of loading that batch in one process."""
        self._iterations += 1
        if self._iterations > 1:  # workers start in the first
            former = self._seconds
            self._seconds = (former[0] + iteration, former[1] + wait, former[2] + load)

    def summarize(self, ranks_on_machine: int) -> ExposedLoading | None:
        """Return the exposed loading without the first iteration, in which workers start; None if there is no other."""
        if self._iterations < 2:
            return None
        iteration, wait, load = (total / (self._iterations - 1) for total in self._seconds)
        free = (usable_cores() - ranks_on_machine * torch.get_num_threads()) // ranks_on_machine
        enough = workers_that_hide(load, iteration - wait)
        helps = enough is not None and self.workers < enough <= free
        return ExposedLoading(share=wait / iteration, hidden_by=enough if helps else None)


def workers_that_hide(load: float, iteration: float) -> int | None:
    """Return the number of processes that load a batch in ``load`` s each as fast as iterations of ``iteration`` s use
    them; None if iterations take no time."""
    return max(1, math.ceil(load / iteration)) if iteration > 0 else None


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def hint(exposed: Sequence[ExposedLoading | None], numbers: Sequence[int]) -> str | None:
    """Return a line on more loader workers, if they would hide what the rank that waits longest waits for.

    Ranks have these ``numbers``.
    """
    known = [(one.share, rank, one.hidden_by) for rank, one in zip(numbers, exposed, strict=True) if one is not None]
    share, rank, workers = max(known, default=(0.0, 0, None))
    if share < SHOWN_SHARE or workers is None:
        return None
    return (
        f"hint: rank {rank} spent {share:.0%} of its time waiting for batches; its machine has free cores, and "
        f"--loader-workers {workers} loads them during computation"
    )
