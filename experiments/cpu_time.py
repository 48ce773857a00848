"""CPU time of the ranks: whether emulated accelerators have left the cores free for the network."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from pipesgd.ranks import Ranks


class Used(NamedTuple):
    """CPU time of all ranks together in an interval."""

    seconds: float
    share: float
    """Share of the time of the cores of a rank's machine: meant for ranks that are all on one machine."""


class CpuTime:
    """CPU time of all ranks from now on, with all their threads, and after each ``used``.

    The kernel's work for the network counts as far as it is done in a rank's own calls: packets that arrive are partly
    handled in nobody's name.
    """

    def __init__(self) -> None:
        self._begin = _now()

    def used(self, ranks: Ranks) -> Used:
        """Return the CPU time since the last call. Collective."""
        before, self._begin = self._begin, _now()
        cpu, wall = (after - earlier for earlier, after in zip(before, self._begin, strict=True))
        cpus, walls = zip(*ranks.all_gather_object("CPU time", (cpu, wall)), strict=True)
        return Used(sum(cpus), sum(cpus) / (max(walls) * len(os.sched_getaffinity(0))))


def _now() -> tuple[float, float]:
    """Return this process's CPU time, and the time, in seconds."""
    return time.process_time(), time.perf_counter()
