"""Every all-reduce of this project, as integers: which rank encodes, sends and receives which chunk, in which order.

This is the only definition. ``pipesgd.comm.all_reduce`` plays a schedule with tensors and a codec;
``timing_model.simulate_messages`` plays it on a simulated network, and ``timing_model.critical_path`` follows one rank
through it. There are no tensors, no communication and no time here, so nothing of the project is imported.

An algorithm is a function that gives each rank its ``Schedule``. The buffer is cut into chunks, and a rank encodes,
sends and receives chunks. Every algorithm keeps these rules:

- A chunk is encoded when it holds what is to be sent next, and sent as it was last encoded or received.
- Two ranks list the messages between them in the same order.
- A rank sends chunks to a peer in the order in which it receives them itself, after those that it need not receive. So
  a message can leave as soon as its segment has arrived, and the order is still kept.

An algorithm of the user's own is such a function in any module, and its name is ``module:function``. It is checked
(``timing_model.own_schedules``) and run like those here, and the timing model predicts it message by message; for those
here, ``timing_model.all_reduce.PATHS`` has faster functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

SEGMENT_BYTES = 1 << 20
"""Default size of the largest message, in bytes. In measurements, smaller segments pay a rendezvous each, and larger
ones leave gaps on a slow link while ranks compute."""
MOST_WIDTH = 64
"""Largest width: each unit costs one copy of the gradient and one iteration of staleness."""
LEAST_SEGMENTS, SMALLEST_SEGMENT = 2, 128 << 10
"""Fewest segments of a chunk, as long as that leaves messages of at least the second number, in bytes. A step waits
for the previous one only segment by segment: with a second segment on its way, a rank that the computation delays
leaves no gap on the wire."""
SEGMENTS_AHEAD = 4
"""Receives of segments to be added up that are posted before their turn. gloo's sender starts only when the receiver is
ready, so with one receive the wire would idle while a segment is added up. Each takes a segment of scratch memory."""


def split(numel: int, parts: int) -> list[tuple[int, int]]:
    """Return ``parts`` adjoining (start, stop) that cover ``numel`` elements, with sizes that differ by one at most.

    >>> split(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    return [(numel * i // parts, numel * (i + 1) // parts) for i in range(parts)]


def segments_of(chunk_bytes: float, segment_bytes: int = SEGMENT_BYTES) -> int:
    """Return the number of messages in which a chunk of ``chunk_bytes`` on the wire travels.

    Raises ``ValueError`` unless ``segment_bytes`` is a whole number of at least 1.

    >>> [segments_of(nbytes) for nbytes in (0, 1 << 17, 1 << 18, 1 << 21, (1 << 21) + 1)]
    [1, 1, 2, 2, 3]
    """
    if segment_bytes < 1:
        raise ValueError(f"segment_bytes must be a whole number of at least 1; got {segment_bytes}")
    return max(1, math.ceil(chunk_bytes / segment_bytes), min(LEAST_SEGMENTS, int(chunk_bytes // SMALLEST_SEGMENT)))


@dataclass(frozen=True, slots=True)
class Encode:
    """Turn a chunk's values into bytes."""

    chunk: int
    holders: int = 1
    """Size of the group of ranks, aligned to a multiple of it, that hold the same values and encode them to the same
    bytes: they share the error, which is made once."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a chunk's bytes to ``peer``."""

    chunk: int
    peer: int
    step: int
    """Step of the algorithm, for text that people read."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive a chunk from ``peer``, and add it to the rank's own values or replace them with it."""

    chunk: int
    peer: int
    step: int
    reduce: bool


Operation = Encode | Send | Receive


@dataclass(frozen=True, slots=True)
class Event:
    """A chunk that arrives or is there from the start, and the operations on it that follow."""

    chunk: int
    arrival: Receive | None
    """Message that the event waits for; None for a chunk that is there from the start."""
    encode: Encode | None
    sends: tuple[Send, ...]
    following: Receive | None
    """Next arrival of the chunk; None if its values are now the sum."""

    @property
    def reduces(self) -> bool:
        """True if the chunk that arrives is added to the rank's own values, not taken in their place."""
        return self.arrival is not None and self.arrival.reduce

    @property
    def keeps_encoded(self) -> bool:
        """True if this rank continues with the values that its own bytes decode to: none arrive in their place."""
        return self.encode is not None and (self.following is None or self.following.reduce)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One rank's part in an all-reduce of ``chunks`` chunks, numbered from 0.

    Raises ``ValueError`` if an operation names another chunk.
    """

    chunks: int
    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        for operation in self.operations:
            if not 0 <= operation.chunk < self.chunks:
                raise ValueError(f"chunk must be at least 0 and below {self.chunks}; got {operation.chunk}")

    @property
    def sends(self) -> list[Send]:
        return [operation for operation in self.operations if isinstance(operation, Send)]

    @property
    def receives(self) -> list[Receive]:
        return [operation for operation in self.operations if isinstance(operation, Receive)]

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Operations, grouped by the arrival that they wait for; chunks that wait for none come first."""
        begun: list[list[Operation]] = []
        arriving: list[list[Operation]] = []
        latest: dict[int, list[Operation]] = {}
        for operation in self.operations:
            if isinstance(operation, Receive):
                latest[operation.chunk] = []
                arriving.append(latest[operation.chunk])
            elif operation.chunk not in latest:
                latest[operation.chunk] = []
                begun.append(latest[operation.chunk])
            latest[operation.chunk].append(operation)
        events: list[Event] = []
        following: dict[int, Receive] = {}
        for group in reversed(begun + arriving):
            first = group[0]
            arrival = first if isinstance(first, Receive) else None
            encode = next((operation for operation in group if isinstance(operation, Encode)), None)
            sends = tuple(operation for operation in group if isinstance(operation, Send))
            events.append(Event(first.chunk, arrival, encode, sends, following.get(first.chunk)))
            if arrival is not None:
                following[first.chunk] = arrival
        return tuple(reversed(events))


Algorithm = Callable[[int, int], Schedule]
"""Function of a rank and the number of ranks that returns the rank's schedule."""


# ---- Rings


def ring(rank: int, world_size: int) -> Schedule:
    """The ring: reduce-scatter, then all-gather, between neighbours (Patarasuk & Yuan, 2009). 2(p-1) steps, p chunks.

    Reduce-scatter, p-1 steps: chunk r travels from rank r around the ring, summed up on its way, and is finished on
    rank r-1. All-gather, p-1 steps: the finished chunks travel around once more. What a rank receives at one step is
    what it sends at the next: there is no other dependency.
    """
    p = world_size
    if p == 1:
        return Schedule(chunks=1, operations=())
    groups = [[chunk] for chunk in range(p)]
    return Schedule(
        chunks=p,
        operations=(
            *_reduce_scatter(rank, range(p), groups),
            Encode((rank + 1) % p),
            *_all_gather(rank, range(p), groups, first_step=p - 1),
        ),
    )


def gather_ring(rank: int, world_size: int) -> Schedule:
    """An all-gather, not an all-reduce: p-1 ring steps give every rank all p chunks, of which rank r has chunk r."""
    p = world_size
    gathered = _all_gather(rank, range(p), [[(member - 1) % p] for member in range(p)])
    return Schedule(chunks=p, operations=(Encode(rank), *gathered) if p > 1 else ())


def hierarchical(rank: int, world_size: int, ranks_per_node: int) -> Schedule:
    """Three rings: inside a node, between nodes, inside a node; each value crosses a node's NIC once each way.

    The ranks of a node have adjoining numbers, and there is a chunk for each rank. Reduce-scatter around the node
    leaves each of its ranks with the node's sum of one share. The ranks of all nodes that have the same share reduce it
    around a ring between nodes. An all-gather around the node follows. With N nodes of g ranks, a rank sends
    2(N-1)/N n/g bytes of n to another node, and a node's NIC carries as much as it would for one rank.

    Raises ``ValueError`` unless ``ranks_per_node`` divides ``world_size``.
    """
    g, nodes = ranks_per_node, world_size // ranks_per_node
    if world_size % g:
        raise ValueError(f"ranks_per_node must divide world_size {world_size}; got {ranks_per_node}")
    if g == 1 or nodes == 1:
        return ring(rank, world_size)
    node, local = divmod(rank, g)
    on_node = range(node * g, node * g + g)
    share = (local + 1) % g  # what this rank holds after the first ring
    on_share = range(local, world_size, g)
    # Chunks of each share, in the order in which this node sends them to others, so that the first can go at once.
    chunks = [[part * nodes + (node - k) % nodes for k in range(nodes)] for part in range(g)]
    inner_steps, outer_steps = g - 1, nodes - 1
    # Chunks of each share, in the order in which others leave their sums here.
    finished = [[part * nodes + (node + 1 - k) % nodes for k in range(nodes)] for part in range(g)]
    single = [[share * nodes + other] for other in range(nodes)]
    return Schedule(
        chunks=world_size,
        operations=(
            *_reduce_scatter(local, on_node, chunks),
            *_reduce_scatter(node, on_share, single, inner_steps),
            Encode(finished[share][0]),
            *_all_gather(node, on_share, single, inner_steps + outer_steps),
            *_all_gather(local, on_node, finished, inner_steps + 2 * outer_steps),
        ),
    )


def _reduce_scatter(
    index: int, members: Sequence[int], groups: Sequence[Sequence[int]], first_step: int = 0
) -> list[Operation]:
    """Return the ring steps after which ``members[index]`` holds the sum of the chunks in ``groups[index + 1]``.

    ``members`` are the ranks on the ring, ``groups`` the chunks that travel together, one group for each member.
    """
    p = len(members)
    left, right = members[(index - 1) % p], members[(index + 1) % p]
    operations: list[Operation] = []
    for step in range(p - 1):
        for chunk in groups[(index - step) % p]:
            operations += [Encode(chunk), Send(chunk, right, first_step + step)]
        for chunk in groups[(index - step - 1) % p]:
            operations.append(Receive(chunk, left, first_step + step, reduce=True))
    return operations


def _all_gather(
    index: int, members: Sequence[int], groups: Sequence[Sequence[int]], first_step: int = 0
) -> list[Operation]:
    """Return the ring steps that bring ``groups[index + 1]``, the chunks of ``members[index]``, to all members."""
    p = len(members)
    left, right = members[(index - 1) % p], members[(index + 1) % p]
    operations: list[Operation] = []
    for step in range(p - 1):
        operations += [Send(chunk, right, first_step + step) for chunk in groups[(index - step + 1) % p]]
        operations += [Receive(chunk, left, first_step + step, reduce=False) for chunk in groups[(index - step) % p]]
    return operations


# ---- Partners at distances that are powers of two


def halving_doubling(rank: int, world_size: int) -> Schedule:
    """Recursive halving, then recursive doubling (Rabenseifner, 2004; Thakur, Rabenseifner & Gropp, 2005).

    2 log2 p steps with q chunks, q being the largest power of two that is not above p. Reduce-scatter: at distances
    q/2, ..., 2, 1 a rank gives its partner the half of its chunks that is the partner's, and adds up its own half,
    until one chunk is left: that of its own number. All-gather: the same steps backwards. Where p is not a power of
    two, each of the p - q ranks from q on first gives all of its values to a rank below q, and gets the result from it
    at the end.

    Seen from a rank, chunk ``rank ^ k`` is at distance k. Chunks come in the order of falling distances, since distant
    ones are sent on first, and are gathered in the order of rising distances.
    """
    q = _power_of_two(world_size)
    steps = q.bit_length() - 1
    operations: list[Operation] = []
    if rank >= q:  # an extra rank
        partner = rank - q
        for k in reversed(range(q)):
            operations += [Encode(partner ^ k), Send(partner ^ k, partner, 0)]
        operations += [Receive(partner ^ k, partner, 2 * steps + 1, reduce=False) for k in range(q)]
        return Schedule(chunks=q, operations=tuple(operations))
    extra = rank + q if rank + q < world_size else None
    if extra is not None:
        operations += [Receive(rank ^ k, extra, 0, reduce=True) for k in reversed(range(q))]
    for step in range(1, steps + 1):
        distance = q >> step
        partner = rank ^ distance
        for k in reversed(range(distance)):
            operations += [Encode(partner ^ k), Send(partner ^ k, partner, step)]
        operations += [Receive(rank ^ k, partner, step, reduce=True) for k in reversed(range(distance))]
    if world_size > 1:
        operations.append(Encode(rank))
    for step in range(steps):
        distance = 1 << step
        partner = rank ^ distance
        operations += [Send(rank ^ k, partner, steps + 1 + step) for k in range(distance)]
        operations += [Receive(partner ^ k, partner, steps + 1 + step, reduce=False) for k in range(distance)]
    if extra is not None:
        operations += [Send(rank ^ k, extra, 2 * steps + 1) for k in range(q)]
    return Schedule(chunks=q, operations=tuple(operations))


def recursive_doubling(rank: int, world_size: int) -> Schedule:
    """Few messages, each with the whole buffer, for small buffers (Thakur et al., 2005). log2 p steps, one chunk.

    Partners at distances 1, 2, 4, ... exchange their values and add them up. Both add the same two messages, so they
    continue with the same values and encode them to the same bytes. Where p is not a power of two and q is the largest
    one below it, each rank from q on first gives its values to a rank below q and gets the result at the end, so all
    ranks encode the result once more."""
    q = _power_of_two(world_size)
    steps = q.bit_length() - 1
    if rank >= q:  # an extra rank
        partner = rank - q
        return Schedule(
            chunks=1,
            operations=(Encode(0), Send(0, partner, 0), Receive(0, partner, steps + 1, reduce=False)),
        )
    extra = rank + q if rank + q < world_size else None
    operations: list[Operation] = []
    if extra is not None:
        operations.append(Receive(0, extra, 0, reduce=True))
    for step in range(steps):
        partner = rank ^ (1 << step)
        operations += [
            Encode(0, holders=1 << step),
            Send(0, partner, step + 1),
            Receive(0, partner, step + 1, reduce=True),
        ]
    if world_size > q:
        operations.append(Encode(0, holders=q))
    if extra is not None:
        operations.append(Send(0, extra, steps + 1))
    return Schedule(chunks=1, operations=tuple(operations))


def _power_of_two(world_size: int) -> int:
    """Return the largest power of two that is not above ``world_size``."""
    return 1 << (world_size.bit_length() - 1)


# ---- Every rank with every other at once


def all_to_all(rank: int, world_size: int) -> Schedule:
    """All-to-all, a sum, and all-gather (Theano-MPI's ASA, Ma et al., 2016). Two steps, p chunks.

    Chunk r of all ranks goes to rank r, which sums it up in float32 and sends it to all. A value is encoded once by
    each rank, and once as a sum: the fewest roundings of all algorithms. p-1 senders meet at every NIC.
    """
    p = world_size
    if p == 1:
        return Schedule(chunks=1, operations=())
    operations: list[Operation] = []
    for k in range(1, p):
        peer = (rank + k) % p
        operations += [Encode(peer), Send(peer, peer, 0)]
    operations += [Receive(rank, (rank - k) % p, 0, reduce=True) for k in range(1, p)]
    operations.append(Encode(rank))
    operations += [Send(rank, (rank + k) % p, 1) for k in range(1, p)]
    operations += [Receive((rank - k) % p, (rank - k) % p, 1, reduce=False) for k in range(1, p)]
    return Schedule(chunks=p, operations=tuple(operations))


# ---- By name

SCHEDULES: dict[str, Algorithm] = {
    "ring": ring,
    "halving-doubling": halving_doubling,
    "recursive-doubling": recursive_doubling,
    "all-to-all": all_to_all,
}
"""Algorithms that need only a rank and the number of ranks, by their names on the command line."""
ALL_REDUCES = (*SCHEDULES, "hierarchical", "native")
"""Every all-reduce by name. "native" is torch's own, which has no schedule here: gloo's ring, or nccl's choice."""


def make_schedule(all_reduce: str, rank: int, world_size: int, ranks_per_node: int = 1) -> Schedule:
    """Return the part of ``rank`` in the all-reduce of this name, which must not be "native".

    Raises ``ValueError`` unless ``ranks_per_node``, which only hierarchical reads, divides ``world_size``.
    """
    if all_reduce == "hierarchical":
        return hierarchical(rank, world_size, ranks_per_node)
    return SCHEDULES[all_reduce](rank, world_size)
