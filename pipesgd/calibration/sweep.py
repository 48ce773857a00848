"""Times of the all-reduces themselves, over sizes and numbers of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipesgd.calibration.groups import Part
from pipesgd.calibration.options import RING, SMALLEST_BYTES
from pipesgd.calibration.robust_fit import Floats
from pipesgd.codecs.floats import Uncompressed
from pipesgd.comm.all_reduce import AllReduce, ScheduledAllReduce
from pipesgd.comm.headers import Headers
from pipesgd.comm.native import NativeAllReduce
from pipesgd.comm.transport import TorchTransport, communication_group
from pipesgd.flat_buffer import are_finite, take_mean
from pipesgd.ranks import Ranks
from timing_model.schedules import SCHEDULES

GROWTH = 4
"""Factor from one size to the next."""
BLOCK_SECONDS, MOST_CALLS = 4e-3, 32
"""Seconds of a block, and most calls in it. Short all-reduces follow each other without a pause until a block has taken
this long: ranks that start some tens of microseconds apart then do not show."""
LEAST_LAPS, LAPS, MOST_LAPS = 3, 8, 30
"""Fewest, planned and most laps. Each times every cell: a slow phase of the cluster then slows some blocks of each."""
LEAST_COUNTED = 2
"""Fewest quiet laps to count alone: the jackknife over them needs two."""
WARM_UP = 4
"""The largest gradient of a lap over that which every all-reduce sums first: connections that were idle start slowly.
On a link of 100 Mbit/s and 5 ms that cost a tenth of an all-reduce's time."""
MOST_BLOCKS = 6
"""Most blocks of one cell in a lap."""
LONG_SECONDS = 0.05
"""Seconds from which on an all-reduce's first call, which allocates its memory, is timed, too."""
LEAST_SIZES = 3
"""Fewest sizes, if the gradient has that many: where latency decides, the small ones are left out, which take as long
as the smallest."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Measured times of one algorithm, for one size and one number of ranks."""

    all_reduce: str
    world_size: int
    nbytes: int
    seconds: Floats
    """Seconds of one call, once for each block."""

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


class Sizes(NamedTuple):
    """Sizes of gradients to measure, in bytes."""

    in_laps: list[int]
    once: list[int]
    """Size of the largest gradient if it is timed only once, before the laps; empty if it is in them, or if once would
    take longer than all laps."""
    largest_seconds: float
    """Estimated time of a ring of the largest gradient, in s."""


class Sweep:
    """All-reduces of one rank in each group that it is in, over ``transport``. All ranks create one together."""

    def __init__(
        self,
        ranks: Ranks,
        transport: TorchTransport,
        groups: Sequence[Sequence[int]],
        all_reduces: Sequence[str],
        *,
        uneven: Callable[[str, int], bool],
        timeout: float,
    ):
        """Create the all-reduces; ``uneven`` tells where, among this many ranks, some have less to do than others."""
        self._ranks = ranks
        self._uneven = uneven
        self._groups = groups
        self._names = all_reduces
        self._all_reduces: list[dict[str, AllReduce]] = []
        for members in groups:
            own: dict[str, AllReduce] = {}
            for name in all_reduces:
                group = communication_group(ranks, timeout, None, members) if name == "native" else None
                if ranks.rank not in members:
                    continue
                part = Part(transport, members)
                if group is not None:
                    announce = partial(compare_headers, Headers(part))
                    own[name] = NativeAllReduce([group], part.rank, part.world_size, timeout, before=announce)
                    continue
                schedule = SCHEDULES[name](part.rank, part.world_size)
                own[name] = ScheduledAllReduce(part, schedule, Uncompressed())
            self._all_reduces.append(own)

    @property
    def ring(self) -> AllReduce:
        """Ring all-reduce of all ranks."""
        return self._all_reduces[-1][RING]

    def choose_sizes(self, largest_bytes: int, seconds: float) -> Sizes:
        """Return sizes, the smallest among them, for which there is time in all groups; the same on all ranks.
        Collective.

        Args:
            largest_bytes: bytes of the largest gradient.
            seconds: duration of all laps.
        """
        most = seconds / ((LEAST_LAPS + 1) * len(self._names) * len(self._groups))
        everybody, flat = len(self._groups) - 1, torch.ones(largest_bytes // 4, dtype=torch.float32)
        nbytes, largest = SMALLEST_BYTES, flat.nbytes
        times: dict[int, float] = {}
        while True:
            self._block(everybody, RING, flat[: nbytes // 4], 1)  # makes its memory
            own = self._block(everybody, RING, flat[: nbytes // 4], 1)
            times[nbytes] = max(self._ranks.all_gather_object("time of an all-reduce", own))
            larger = [min(factor * nbytes, largest) for factor in (GROWTH, GROWTH // 2)]
            within = [one for one in larger if one > nbytes and one / nbytes * times[nbytes] <= most]
            if not within:
                break
            nbytes = within[0]
        # Codecs send parts of the largest gradient: from it, go down.
        sizes = [SMALLEST_BYTES]
        while (size := nbytes // GROWTH ** (len(sizes) - 1) // 4 * 4) > GROWTH // 2 * SMALLEST_BYTES:
            sizes.insert(1, size)

        def seconds_of(size: int) -> float:
            return float(np.interp(size, list(times), list(times.values())))

        while len(sizes) > LEAST_SIZES and sum(map(seconds_of, sizes)) > most:
            del sizes[1]
        ring_seconds = largest / nbytes * times[nbytes]
        fits = ring_seconds * len(self._names) * len(self._groups) <= seconds
        return Sizes(sizes, [largest] if fits and nbytes < largest else [], ring_seconds)

    def run(
        self,
        *,
        sizes: Sizes,
        seconds: float,
        between: Callable[[float], None],
        quiet: Callable[[], bool],
        advance: Callable[[float], None],
    ) -> tuple[list[Cell], list[int]]:
        """Measure every cell; return the same cells on all ranks, and the numbers of the laps that count. Collective.

        The quiet laps count, unless there are fewer than ``LEAST_COUNTED``: then all of them do.

        Args:
            sizes: what ``choose_sizes`` returned.
            seconds: approximate duration, including what is done between laps.
            between: called after each lap, with its seconds: for other work that is to be spread over the time.
            quiet: called at the end of each lap; True if nothing disturbed it, as all ranks agree. To reach
                ``LEAST_LAPS`` of them the sweep takes up to half as long again.
            advance: called with the share that is done.
        """
        end = time.perf_counter() + seconds
        # 1. Run all groups once, which makes their memory and connections.
        every_size = [*sizes.in_laps, *sizes.once]
        flat = torch.ones(max(every_size) // 4, dtype=torch.float32)
        cells = [
            (group, name, size) for group in range(len(self._groups)) for name in self._names for size in every_size
        ]
        warm_up = flat[: max(sizes.in_laps) // 4 // WARM_UP]

        def timed(cell: tuple[int, str, int], calls: int, blocks: int) -> list[float]:
            group, name, size = cell
            if size == every_size[0]:
                self._block(group, name, warm_up, 1)
            return [self._block(group, name, flat[: size // 4], calls) / calls for _ in range(blocks)]

        first = [timed(cell, 1, 1)[0] for cell in cells]
        # 2. Agree on how often each cell is run.
        agreed = [float(one) for one in np.max(self._ranks.all_gather_object("first times", first), axis=0)]
        left = max(min(self._ranks.all_gather_object("time left", end - time.perf_counter())), 0.0)
        plans = [
            (1, 0) if size in sizes.once else plan(once, left / LAPS / len(cells) / 2)
            for (_, _, size), once in zip(cells, agreed, strict=True)
        ]
        # 3. Run lap after lap, until one of the ranks sees no time for most of another one.
        laps: list[list[list[float]]] = []
        were_quiet: list[bool] = []
        for _ in range(MOST_LAPS):
            begin = time.perf_counter()
            lap: list[list[float]] = []
            for cell, (calls, blocks) in zip(cells, plans, strict=True):
                lap.append(timed(cell, calls, blocks))
                advance(min(1.0, 1 - (end - time.perf_counter()) / seconds))
            between(time.perf_counter() - begin)
            laps.append(lap)
            were_quiet.append(quiet())
            now = time.perf_counter()
            last = end if sum(were_quiet) >= LEAST_LAPS else end + seconds / 2
            over = torch.full((self._ranks.world_size,), float(now + (now - begin) / 2 > last), dtype=torch.float32)
            self.ring(over)
            if len(laps) >= LEAST_LAPS and over[0] > 0:
                break
        counted = [number for number, was_quiet in enumerate(were_quiet) if was_quiet]
        if len(counted) < LEAST_COUNTED:
            counted = list(range(len(laps)))
        times = [
            [once] if long >= LONG_SECONDS or size in sizes.once else []
            for (_, _, size), once, long in zip(cells, first, agreed, strict=True)
        ]
        for lap_number in counted:
            for own, further in zip(times, laps[lap_number], strict=True):
                own += further
        everybody = self._ranks.all_gather_object("times of all-reduces", times)
        measured = [
            Cell(
                all_reduce=name,
                world_size=len(self._groups[group]),
                nbytes=size,
                # Early ranks include waiting time, so take the median over ranks.
                seconds=np.median([everybody[rank][index] for rank in self._groups[group]], axis=0),
            )
            for index, (group, name, size) in enumerate(cells)
        ]
        return measured, counted

    def _block(self, group: int, all_reduce: str, flat: Tensor, calls: int) -> float:
        """Return the seconds of this many calls of this rank; 0 if it takes no part."""
        own = self._all_reduces[group]
        if not own:
            return 0.0
        p = len(self._groups[group])
        function, finish = own[all_reduce], partial(finish_part, p)
        if self._uneven(all_reduce, p):
            function(flat, finish=finish)  # a rank with less to do begins the next one earlier, as in training
        else:
            own[RING](torch.ones(p, dtype=torch.float32))  # no rank has its sum before all have begun
        begin = time.perf_counter()
        for _ in range(calls):
            function(flat, finish=finish)
        return time.perf_counter() - begin


def compare_headers(headers: Headers) -> None:
    """Send and await a header, as training does before every sum of torch's own: it takes as long as a message.

    Other all-reduces send it together with their first messages, so it takes no time of theirs.
    """
    headers.begin("step", 0)
    headers.check()


def finish_part(world_size: int, part: Tensor) -> None:
    """Take the mean of a sum and check that it is finite, as training does with every sum."""
    take_mean(part, world_size)
    are_finite([part])


def plan(once: float, seconds: float) -> tuple[int, int]:
    """Return calls in a block, and blocks in a lap, of an all-reduce that takes ``once`` s, for ``seconds`` in a lap.

    >>> plan(1e-3, seconds=0.01), plan(1.0, seconds=0.01)
    ((4, 2), (1, 1))
    """
    calls = int(np.clip(np.ceil(BLOCK_SECONDS / once), 1, MOST_CALLS))
    return calls, int(np.clip(seconds / (calls * once), 1, MOST_BLOCKS))
