"""What one rank does in an all-reduce, in order. Integers only: no tensors, no communication.

An algorithm is a function that gives each rank its ``Schedule``: the buffer is cut into chunks, and a rank encodes,
sends and receives chunks. It must keep to this:

- A chunk is encoded when it holds what is to be sent next, and sent as it was encoded or received last.
- Two ranks name the messages between them in the same order.
- A rank sends chunks to a peer in the order in which it receives them itself, those that it need not receive first.
  So a message can go as soon as its segment has come, and order is kept nevertheless.
"""

from __future__ import annotations

from dataclasses import dataclass


def split(numel: int, parts: int) -> list[tuple[int, int]]:
    """``parts`` adjoining (start, stop) that cover ``numel`` elements, sizes differing by one at most.

    >>> split(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    return [(numel * i // parts, numel * (i + 1) // parts) for i in range(parts)]


@dataclass(frozen=True, slots=True)
class Encode:
    """Turn a chunk's values into bytes."""

    chunk: int
    holders: int = 1
    """Ranks that hold the same values, aligned to a multiple of this number, and encode them to the same bytes: the
    error that is made once, they share."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a chunk's bytes to ``peer``."""

    chunk: int
    peer: int
    step: int
    """For people: of the algorithm's steps."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive a chunk from ``peer``, and add it up or take it instead of one's own."""

    chunk: int
    peer: int
    step: int
    reduce: bool


Operation = Encode | Send | Receive


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One rank's part in an all-reduce of ``chunks`` chunks."""

    chunks: int
    operations: tuple[Operation, ...]

    @property
    def sends(self) -> list[Send]:
        return [operation for operation in self.operations if isinstance(operation, Send)]

    @property
    def receives(self) -> list[Receive]:
        return [operation for operation in self.operations if isinstance(operation, Receive)]
