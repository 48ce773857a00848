"""Search of a plan: every configuration that works, each with its best segment size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from timing_model.all_reduce import CollectiveTime, chunks_of
from timing_model.buckets import Cut
from timing_model.checks import check_at_least, check_one_of
from timing_model.choices import LATE_TIE, TIE, Choice, Space, simplicity
from timing_model.costs import Buckets, as_measured, buckets_of, costs_of, iteration_time, pipelined_time, whole
from timing_model.iteration import IterationTime
from timing_model.job import DDP_CODECS, OWN_ALL_REDUCE, Job
from timing_model.measured import UNCOMPRESSED
from timing_model.memory import fits, rank_memory
from timing_model.schedules import SEGMENT_BYTES, segments_of
from timing_model.support import OUTSIDE, support_of

LARGEST_MEETING = 32
"""Most ranks for which an all-reduce is searched whose messages meet (other than 2^k ranks): it is slow to answer, and
it sends about twice the bytes, so others are faster. Of these, and of more ranks on links of their own, only the first
of the cuts into buckets is searched."""

MOST_SEARCHED = 2_000
"""Most segments of a gradient times ranks for which such an all-reduce is searched: about a tenth of a second."""


class Group:
    """Group of choices, of which the simplest of the fastest is chosen."""

    def __init__(self, belongs: Callable[[Job], bool]):
        self._belongs = belongs
        self._fast: list[tuple[tuple[float, ...], Choice]] = []
        """Choices in a tie with the fastest one, each with its simplicity."""
        self._fastest = math.inf

    @property
    def chosen(self) -> Choice | None:
        return self.within(math.inf)

    def within(self, most: float) -> Choice | None:
        """Return the simplest of the fastest choices whose score is at most this; None if there is none."""
        fast = [one for one in self._fast if one[1].score <= most]
        return min(fast, key=lambda one: one[0])[1] if fast else None

    def add(self, choice: Choice) -> None:
        if self._belongs(choice.job) and choice.score <= self._fastest * (1 + TIE):
            self._fastest = min(self._fastest, choice.score)
            self._fast.append((simplicity(choice.job), choice))
            self._fast = [one for one in self._fast if one[1].score <= self._fastest * (1 + TIE)]


class Search:
    """A search in progress."""

    def __init__(self, base: Job, space: Space, accuracy_cost: Mapping[str, float], extrapolate: bool):
        self._base = base.changed(
            strategy="pipelined",
            width=1,
            codec=UNCOMPRESSED,
            all_reduce="ring",
            segment_bytes=SEGMENT_BYTES,
            buckets="1",
            members=1,
        )
        self._space = space
        self._cost = accuracy_cost
        self._extrapolate = extrapolate
        for name, share in accuracy_cost.items():
            check_one_of("accuracy_cost", name, ["width", *space.codecs])
            check_at_least("accuracy_cost", share, 0)
        for codec in space.codecs:
            self._base.changed(codec=codec)  # refuses an unknown codec
        for buckets in space.buckets:
            self._base.changed(buckets=buckets)  # and what is no cut
        self._first = Cut.parse(space.buckets[0])
        for members in space.members:
            self._base.changed(members=members)  # and what are no islands
        self.all = Group(lambda job: True)
        self.synchronous = Group(lambda job: job.width == 1)
        self.uncompressed = Group(lambda job: job.codec == UNCOMPRESSED)
        self.choices: list[Choice] = []
        self.considered = 0
        self.too_large: dict[int, float] = {}
        """Least memory of a rank, in bytes, of configurations that do not fit, by the members of their islands."""

    @property
    def best(self) -> Choice | None:
        """Simplest of the fastest choices, or of the fastest without late gradients if these are nearly as fast."""
        best = self.all.chosen
        if best is None or best.job.width == 1:
            return best
        fastest = min(one.score for one in self.choices)
        return self.synchronous.within(fastest * (1 + LATE_TIE)) or best

    def ddp(self) -> Choice | None:
        """Return torch's DDP without a hook, searched or not; None if its time is not known, or it does not fit."""
        job = self._working(strategy="ddp", all_reduce=OWN_ALL_REDUCE["ddp"], parts=())
        found = next((one for one in self.choices if one.job == job), None)
        if job is None or found is not None or not fits(job):
            return found
        return self._choice(job, *iteration_time(job, costs_of(job)))

    def whole(self) -> Iterator[Job]:
        """Yield the configurations without width and segments."""
        for strategy in self._space.strategies:
            if strategy != "pipelined" and 1 in self._space.members:
                hooks = [codec for codec in self._space.codecs if codec in DDP_CODECS]
                for codec in hooks if strategy == "ddp" else (UNCOMPRESSED,):
                    job = self._working(strategy=strategy, codec=codec, all_reduce=OWN_ALL_REDUCE[strategy], parts=())
                    if job is not None:
                        self.considered += 1
                        if self._fits(job):
                            yield job

    def pairs(self) -> None:
        """Add every pair of codec and all-reduce, with every cut into buckets, between all islands, in its widths."""
        space = self._space
        if "pipelined" not in space.strategies:
            return
        for members in space.members:
            for codec, all_reduce, buckets in product(space.codecs, space.all_reduces, space.buckets):
                pair = self._working(codec=codec, all_reduce=all_reduce, buckets=buckets, members=members)
                if pair is None or not self._segments(pair):
                    continue
                widths = space.widths_of(pair.cut)
                if pair.mesh.is_one_island:  # which exchanges nothing, so that every pair and width is the same
                    self.considered += 1
                    self._add_widths(pair, [min(space.widths)])
                    break
                self.considered += len(widths) * len(self._segments(pair))
                self._add_widths(pair, widths)

    def add(self, job: Job, iteration: IterationTime, collective: CollectiveTime) -> None:
        """Keep a configuration and its times."""
        choice = self._choice(job, iteration, collective)
        self.choices.append(choice)
        for group in (self.all, self.synchronous, self.uncompressed):
            group.add(choice)

    def _choice(self, job: Job, iteration: IterationTime, collective: CollectiveTime) -> Choice:
        iteration = as_measured(job, iteration)
        score = iteration.total * self._more_iterations(job)
        return Choice(job=job, iteration=iteration, collective=collective, score=score)

    def _working(self, **options: Any) -> Job | None:
        """Return the job with these options, in the largest segments; None if they do not go together or are too far
        from what was measured."""
        try:
            job = self._base.changed(**options)
            if job.all_reduce not in (None, "native"):
                job = job.changed(segment_bytes=max(self._space.segments))
            job.check_messages()
        except ValueError:  # such as int8 with torch's own all-reduce, which is no configuration
            return None
        if job.all_reduce == "hierarchical" and job.nodes.ranks_per_node == 1:
            return None  # it would be a ring
        if job.meets and self._is_slow(job):
            return None
        return job if self._extrapolate or support_of(job).kind != OUTSIDE else None

    def _is_slow(self, job: Job) -> bool:
        """Return True if it would take too long to simulate the messages of this job, which meet."""
        placed, many = bool(job.cluster.placed), job.simulated_ranks > LARGEST_MEETING
        return (many and not placed) or (job.cut != self._first and (many or not placed))

    def _segments(self, pair: Job) -> list[int]:
        """Return the segment sizes to look at, those nearest to the default first; only one where messages meet."""
        if pair.all_reduce == "native":
            return [SEGMENT_BYTES]
        working = [one for one in self._space.segments if one >= pair.least_segment_bytes]
        working.sort(key=lambda one: abs(math.log2(one / SEGMENT_BYTES)))
        if pair.meets:
            quick = [one for one in working if pair.wire_bytes * pair.world_size <= MOST_SEARCHED * one]
            cut = _cut(pair, quick[0] if quick else max(working))
            return [one for one in working if _cut(pair, one) == cut][:1]
        return working

    def _add_widths(self, pair: Job, widths: Sequence[int]) -> None:
        """Find the best segment size, which is that of every width, and add all of ``widths`` that fit with it.

        An iteration never takes less if its collectives take more.
        """
        fitting = [width for width in widths if self._fits(pair.changed(width=width))]
        if not fitting:
            return
        times: dict[tuple[int, ...], tuple[Buckets, int]] = {}
        for segment in self._segments(pair):
            job = pair.changed(segment_bytes=segment)
            costs = costs_of(job)
            cut = _cut(job, segment)
            if cut not in times:  # segments larger than a chunk are all the same
                times[cut] = buckets_of(job, costs), segment
        fastest = min(whole(buckets).total for buckets, _ in times.values())
        # The first ones are nearest to the default.
        buckets, segment = next(one for one in times.values() if whole(one[0]).total <= fastest * (1 + TIE / 2))
        for width in fitting:
            job = pair.changed(width=width, segment_bytes=segment)
            self.add(job, pipelined_time(job, costs_of(job), buckets), whole(buckets))

    def _fits(self, job: Job) -> bool:
        """Return True if the job fits into the memory of a rank; note what it needs if not."""
        if fits(job):
            return True
        needed = rank_memory(job)
        if needed is not None:
            self.too_large[job.islands.members] = min(needed, self.too_large.get(job.islands.members, math.inf))
        return False

    def _more_iterations(self, job: Job) -> float:
        late = self._cost.get("width", 0.0) * (job.width - 1)
        return 1 + late + self._cost.get(job.codec, 0.0)


def _cut(job: Job, segment_bytes: int) -> tuple[int, ...]:
    """Return the number of messages in which a chunk of each buffer travels."""
    chunks = chunks_of(str(job.all_reduce), job.mesh.number)
    return tuple(segments_of(values / chunks, segment_bytes) for values in job.mesh.buffers(job.wire_bytes))
