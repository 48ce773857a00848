"""Record of the ranks that have trained: which samples each of them takes in an iteration, also where ranks change."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self


def former_ranks(before: int, rank: int, world_size: int) -> range:
    """Return the former ranks, of ``before``, whose state this rank of ``world_size`` ranks takes over.

    >>> [list(former_ranks(5, rank, 3)) for rank in range(3)]
    [[0, 3], [1, 4], [2]]
    >>> list(former_ranks(1, 1, 2))
    []
    """
    return range(rank, before, world_size)


class Slices(NamedTuple):
    """Iterations from ``first`` on, in which the same ranks train."""

    first: int
    """First iteration."""
    ranks: int
    """Number of ranks."""
    given: int
    """Number of slices that the iterations before it have given out, but for those given back."""
    given_back: tuple[int, ...] = ()
    """Slices that ranks had when they were lost, which are given out first."""


@dataclass(frozen=True)
class Record:
    """Slices of the samples, by iteration and rank.

    A slice has the samples of one rank in one iteration. Slices are numbered through all epochs, and are given out in
    this order: each iteration takes the next ones, one for each of its ranks. So no slice is lost or given out twice
    where the number of ranks changes, and each epoch is completed. An iteration may then begin in one epoch and end in
    the next one.

    >>> record = Record.begun(length=6, ranks=3).changed(1, ranks=2)
    >>> [[record.slice_of(iteration, rank) for rank in range(2)] for iteration in (1, 2)]
    [[(0, 3), (0, 4)], [(0, 5), (1, 0)]]
    """

    length: int
    """Number of slices in an epoch."""
    spans: tuple[Slices, ...]
    """Spans in the order of their iterations; the first one begins with iteration 0."""

    @classmethod
    def begun(cls, length: int, ranks: int) -> Self:
        """Return the record of a training that this many ``ranks`` begin, with epochs of ``length`` slices."""
        return cls(length, (Slices(0, ranks, 0),))

    def changed(self, iteration: int, ranks: int) -> Self:
        """Return the record in which this many ``ranks`` train from ``iteration`` on; itself if they do so already."""
        newest = self.spans[-1]
        if newest.first <= iteration and newest.ranks == ranks:
            return self
        return self.followed_by(self.next_span(iteration, ranks))

    def next_span(self, iteration: int, ranks: int) -> Slices:
        """Return the span in which this many ``ranks`` take what the iterations before ``iteration`` leave."""
        before = self._span(iteration)
        rest = before.given_back[(iteration - before.first) * before.ranks :]
        return Slices(iteration, ranks, self.given(iteration), rest)

    def followed_by(self, span: Slices) -> Self:
        """Return the record in which ``span`` follows what is before it."""
        earlier = itertools.takewhile(lambda one: one.first < span.first, self.spans)
        return replace(self, spans=(*earlier, span))

    def given(self, iteration: int) -> int:
        """Return the number of slices that the iterations before ``iteration`` have given out."""
        span = self._span(iteration)
        return span.given + max(0, (iteration - span.first) * span.ranks - len(span.given_back))

    def slice_of(self, iteration: int, rank: int) -> tuple[int, int]:
        """Return the epoch and the number in that epoch of the slice that ``rank`` takes in ``iteration``."""
        span = self._span(iteration)
        number = (iteration - span.first) * span.ranks + rank
        back = len(span.given_back)
        return divmod(span.given_back[number] if number < back else span.given + number - back, self.length)

    def epoch(self, iteration: int) -> int:
        """Return the epoch in which ``iteration`` begins."""
        return self.slice_of(iteration, 0)[0]

    def iterations(self, slices: int) -> int:
        """Return the number of iterations from the first one on that give out this many ``slices``, or a few more."""
        for span in reversed(self.spans):
            again = [place + 1 for place, number in enumerate(span.given_back) if number < slices]
            left = len(span.given_back) + slices - span.given if span.given <= slices else max(again, default=0)
            if left > 0 or span.given <= slices:
                break
        return span.first - -left // span.ranks

    def progress(self, iteration: int) -> float:
        """Return the iterations in which the first ranks would have given out the slices before ``iteration``."""
        return self.given(iteration) / self.spans[0].ranks

    def state_dict(self) -> dict[str, Any]:
        """Return the spans, which are the same on all ranks."""
        return {"spans": [[*span[:3], list(span.given_back)] for span in self.spans]}

    def continued(self, state: Mapping[str, Any]) -> Self:
        """Return the record with these epochs and the spans of a ``state_dict``."""
        spans = [Slices(first, ranks, given, tuple(*back)) for first, ranks, given, *back in state["spans"]]
        return replace(self, spans=tuple(spans))

    def _span(self, iteration: int) -> Slices:
        return next(span for span in reversed(self.spans) if span.first <= iteration)
