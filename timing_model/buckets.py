"""Buckets of a gradient: how they are cut, and when in the backward pass each of them is complete.

The trainer cuts gradients by this module, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from timing_model.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A cut of gradients into ``count`` buckets of about equal size, or into buckets of at most ``nbytes``."""

    count: int | None = None
    nbytes: float | None = None

    @classmethod
    def parse(cls, text: str) -> Cut:
        """Return the cut that ``text`` describes: a number of buckets, or the largest size of one, such as 1MiB.

        Raises ``ValueError`` in one line for anything else.

        >>> Cut.parse("4"), Cut.parse("1MiB")
        (Cut(count=4, nbytes=None), Cut(count=None, nbytes=1048576.0))
        """
        if re.fullmatch(r"[-+]?[0-9]{1,18}", text):
            if int(text) < 1:
                raise ValueError(f"buckets must be at least 1; got {text}")
            return cls(count=int(text))
        try:
            nbytes = parse_bytes("buckets", text)
        except ValueError as failure:
            raise ValueError(str(failure).replace("must", "must be a whole number, or", 1)) from None
        if nbytes < 1:
            raise ValueError(f"buckets must have at least 1B; got {text}")
        return cls(nbytes=nbytes)

    def __call__(self, sizes: Sequence[float]) -> list[range]:
        """Return the buckets of gradients of these sizes, as consecutive ranges of their numbers.

        A gradient is never split: one that is larger than ``nbytes`` is a bucket of its own.

        Args:
            sizes: bytes of each parameter's gradient, in the order in which the backward pass completes them.

        Raises ``ValueError`` if there are fewer gradients than buckets.

        >>> Cut(count=2)([1, 2, 3, 4]), Cut(nbytes=4)([1, 2, 3, 4])
        ([range(0, 3), range(3, 4)], [range(0, 2), range(2, 3), range(3, 4)])
        """
        return self._by_count(sizes, self.count) if self.count is not None else self._by_size(sizes)

    def _by_count(self, sizes: Sequence[float], count: int) -> list[range]:
        if count > len(sizes):
            raise ValueError(f"buckets must be at most the number of parameters, {len(sizes)}; got {count}")
        buckets, start = [], 0
        for left in range(count, 0, -1):
            share = sum(sizes[start:]) / left
            stop, held = start + 1, sizes[start]
            most = len(sizes) - left + 1  # each of the other buckets needs a gradient
            while stop < most and (left == 1 or abs(held + sizes[stop] - share) <= abs(held - share)):
                held += sizes[stop]
                stop += 1
            buckets.append(range(start, stop))
            start = stop
        return buckets

    def _by_size(self, sizes: Sequence[float]) -> list[range]:
        assert self.nbytes is not None
        buckets: list[range] = []
        held = 0.0
        for number, size in enumerate(sizes):
            held += size
            if buckets and held <= self.nbytes:
                buckets[-1] = range(buckets[-1].start, number + 1)
            else:
                buckets.append(range(number, number + 1))
                held = size
        return buckets


WHOLE = Cut(count=1)
"""The whole gradient as one bucket, which is not cut."""


def by_bytes(nbytes: Sequence[float]) -> list[float]:
    """Return the share of the backward pass after which each gradient is complete, if a pass takes as long as it has
    bytes: that holds for dense layers, while convolutions compute more per byte.

    Args:
        nbytes: bytes of each parameter's gradient, in the order of the forward pass; the backward pass reverses it.

    >>> by_bytes([10.0, 20.0, 10.0])
    [1.0, 0.75, 0.25]
    """
    from_last = list(itertools.accumulate(reversed(nbytes)))
    return [done / from_last[-1] if from_last[-1] else 1.0 for done in reversed(from_last)]


def completed(
    cut: Cut, nbytes: Sequence[float], apart: Collection[int] = (), released: Sequence[float] = ()
) -> list[tuple[float, float]]:
    """Return, for each bucket, the share of the backward pass after which it is complete, and its bytes.

    Args:
        cut: the way in which the gradient is cut.
        nbytes: bytes of each parameter's gradient, in the order of the forward pass; the backward pass reverses it.
        apart: numbers of the parameters that are in none of the buckets. Where the gradient is not cut, its one bucket
            is complete at the end of the backward pass all the same.
        released: share of the backward pass after which each gradient is complete; by default ``by_bytes``.

    Raises ``ValueError`` as ``Cut`` does.

    >>> completed(Cut(count=2), [10.0, 20.0, 10.0])
    [(0.75, 30.0), (1.0, 10.0)]
    >>> completed(Cut(count=2), [10.0, 20.0, 10.0], apart=[0])
    [(0.25, 10.0), (0.75, 20.0)]
    """
    order = [number for number in reversed(range(len(nbytes))) if number not in apart]
    shares = released or by_bytes(nbytes)
    buckets: list[tuple[float, float]] = []
    complete = 1.0 if cut == WHOLE else 0.0
    for part in cut([nbytes[number] for number in order]) if order else []:
        numbers = order[part.start : part.stop]
        complete = max(complete, *(shares[number] for number in numbers))  # a bucket waits for those before it
        buckets.append((complete, sum(nbytes[number] for number in numbers)))
    return buckets
