"""Times of the all-reduces themselves, over sizes and numbers of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pipesgd.calibration.fit import Floats
from pipesgd.calibration.groups import Part
from pipesgd.calibration.options import SMALLEST_BYTES
from pipesgd.codecs.floats import Uncompressed
from pipesgd.collectives.base import AllReduce
from pipesgd.collectives.native import NativeAllReduce
from pipesgd.collectives.ring import ring
from pipesgd.collectives.scheduled import ScheduledAllReduce
from pipesgd.collectives.transport import TorchTransport, communication_group
from pipesgd.gradients import are_finite, take_mean
from pipesgd.launch import Ranks

ALL_REDUCES = ("ring", "native")
GROWTH = 4
"""From one size to the next."""
BLOCK_SECONDS, MOST_CALLS = 4e-3, 32
"""Short all-reduces follow each other without a pause until a block of them has taken so long: that the ranks do not
begin in the same moment, by some tens of microseconds, does not show then."""
LEAST_BLOCKS, MOST_BLOCKS = 3, 40
LARGEST_SHARE = 0.75
"""Of the time that there is, what the least number of blocks of the largest size may take."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One size, one number of ranks, one algorithm."""

    all_reduce: str
    world_size: int
    nbytes: int
    seconds: Floats
    """Of one call, once for each block."""

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


@dataclass(frozen=True)
class _Planned:
    group: int
    all_reduce: str
    nbytes: int
    calls: int
    blocks: int
    seconds: float
    """Of one block, about."""


class Sweep:
    """The all-reduces of one rank in each group that it is in. All ranks make one together, after a process group."""

    def __init__(self, ranks: Ranks, groups: Sequence[Sequence[int]], *, timeout: float):
        self._ranks = ranks
        self._groups = groups
        self.transport = TorchTransport([communication_group(ranks, timeout, "gloo")], timeout)
        self._all_reduces: list[dict[str, AllReduce]] = []
        for members in groups:
            group = communication_group(ranks, timeout, None, members)
            own: dict[str, AllReduce] = {}
            if ranks.rank in members:
                schedule = ring(members.index(ranks.rank), len(members))
                own["ring"] = ScheduledAllReduce(Part(self.transport, members), schedule, Uncompressed())
                own["native"] = NativeAllReduce(group, timeout)
            self._all_reduces.append(own)

    @property
    def ring(self) -> AllReduce:
        """Of all ranks."""
        return self._all_reduces[-1]["ring"]

    def run(self, *, largest_bytes: int, seconds: float, advance: Callable[[float], None]) -> list[Cell]:
        """Every cell, the same on all ranks. Collective.

        Args:
            largest_bytes: of a gradient; less if the largest would take too much of the time that there is.
            seconds: that it takes, about.
            advance: told what share is done.
        """
        begin = time.perf_counter()
        # 1. Sizes, until one takes too long; all groups once, which makes their memory and connections.
        flat = torch.ones(largest_bytes // 4)
        sizes = self._sizes(flat, seconds)
        first: dict[tuple[int, str, int], float] = {}
        for group in range(len(self._groups)):
            for all_reduce in ALL_REDUCES:
                for nbytes in sizes:
                    first[group, all_reduce, nbytes] = self._block(group, all_reduce, flat[: nbytes // 4], 1)
        # 2. How often each, agreed upon.
        agreed = np.max(self._ranks.exchange("first times", list(first.values())), axis=0)
        left = max(seconds - (time.perf_counter() - begin), 0.0)
        plans = plan(list(first), [float(one) for one in agreed], left)
        # 3. In turns, so that whatever slows the cluster down for a while slows down a block of each.
        times: list[list[float]] = [[] for _ in plans]
        rounds = max(one.blocks for one in plans)
        total, done = sum(one.blocks * one.seconds for one in plans), 0.0
        for number in range(rounds):
            for one, own in zip(plans, times, strict=True):
                if (number + 1) * one.blocks // rounds > number * one.blocks // rounds:
                    taken = self._block(one.group, one.all_reduce, flat[: one.nbytes // 4], one.calls)
                    own.append(taken / one.calls)
                    done += one.seconds
            advance(done / total)
        everybody = self._ranks.exchange("times of all-reduces", times)
        return [
            Cell(
                all_reduce=one.all_reduce,
                world_size=len(self._groups[one.group]),
                nbytes=one.nbytes,
                # A rank that begins a block early waits in it for the last one: the median rank.
                seconds=np.median([everybody[rank][index] for rank in self._groups[one.group]], axis=0),
            )
            for index, one in enumerate(plans)
        ]

    def _sizes(self, flat: Tensor, seconds: float) -> list[int]:
        """From the smallest, as long as there is time for the next one in all groups. Collective."""
        blocks = (LEAST_BLOCKS + 1) * len(ALL_REDUCES) * len(self._groups)
        most = LARGEST_SHARE * seconds / blocks
        everybody = len(self._groups) - 1
        sizes: list[int] = []
        nbytes, largest = SMALLEST_BYTES, flat.nbytes
        while True:
            self._block(everybody, "ring", flat[: nbytes // 4], 1)  # makes its memory
            own = self._block(everybody, "ring", flat[: nbytes // 4], 1)
            slowest = max(self._ranks.exchange("time of an all-reduce", own))
            sizes.append(nbytes)
            larger = [min(factor * nbytes, largest) for factor in (GROWTH, GROWTH // 2)]
            within = [one for one in larger if one > nbytes and one / nbytes * slowest <= most]
            if not within:
                return sizes
            nbytes = within[0]

    def _block(self, group: int, all_reduce: str, flat: Tensor, calls: int) -> float:
        """Seconds of so many calls of this rank; 0 if it takes no part."""
        own = self._all_reduces[group]
        if not own:
            return 0.0
        p = len(self._groups[group])
        function, finish = own[all_reduce], partial(finish_part, p)
        own["ring"](torch.ones(p))  # nobody has its sum before all have begun
        begin = time.perf_counter()
        for _ in range(calls):
            function(flat, finish=finish)
        return time.perf_counter() - begin


def finish_part(world_size: int, part: Tensor) -> None:
    """What training does with every sum."""
    take_mean(part, world_size)
    are_finite([part])


def plan(cells: Sequence[tuple[int, str, int]], first: Sequence[float], seconds: float) -> list[_Planned]:
    """How often each cell (group, algorithm, bytes) that took ``first`` s is timed, for ``seconds`` in all, about."""
    planned = []
    for (group, all_reduce, nbytes), once in zip(cells, first, strict=True):
        calls = int(np.clip(np.ceil(BLOCK_SECONDS / once), 1, MOST_CALLS))
        blocks = int(np.clip(seconds / len(cells) / (calls * once), LEAST_BLOCKS, MOST_BLOCKS))
        planned.append(_Planned(group, all_reduce, nbytes, calls, blocks, calls * once))
    return planned
