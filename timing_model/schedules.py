"""What every rank does in a collective, as data: the order in which ``pipesgd`` works through its schedules.

A ``Program`` is a rank's events, one for every segment that arrives or begins its way. This package may not import
pipesgd, so the schedules are written down here once more; ``tests/timing_model/test_code.py`` holds them to the code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from timing_model.checks import check_count


@dataclass(frozen=True, slots=True)
class Event:
    """A segment that arrives, or one to begin with, and what is done with it then: work, then messages."""

    segment: int
    """Its number. Before it changes, what has been sent of it before must have left."""
    source: int | None
    """Rank whose next message is waited for."""
    work: tuple[str, ...]
    """Operations on the segment's values: "encode", "decode", "add", "hop", as in ``CodecCost``."""
    targets: tuple[int, ...]
    """Ranks to which the segment is sent."""

    @property
    def adds(self) -> bool:
        """Whether what arrives is added up, not taken."""
        return "add" in self.work or "hop" in self.work


Program = tuple[Event, ...]


@dataclass(frozen=True)
class Schedule:
    """A collective: programs of its ranks, whose messages all have a ``chunks``-th of the values, or a part of it."""

    world_size: int
    chunks: int
    program: Callable[[int, int], Program]
    """Of a rank, with so many segments a chunk."""


@dataclass(frozen=True, slots=True)
class _Op:
    """One word of a schedule: encode a chunk, send it to ``target``, or receive it from ``source``."""

    chunk: int
    source: int | None = None
    target: int | None = None
    reduce: bool = False


@lru_cache(maxsize=256)
def ring(world_size: int) -> Schedule:
    """Reduce-scatter and all-gather between neighbours, p chunks."""
    p = world_size

    def ops(rank: int) -> list[_Op]:
        groups = [[chunk] for chunk in range(p)]
        if p == 1:
            return []
        own = [*_reduce_scatter(rank, range(p), groups), _Op((rank + 1) % p)]
        return own + _all_gather(rank, range(p), groups)

    return Schedule(p, p, _programs(ops))


@lru_cache(maxsize=256)
def gather_ring(world_size: int) -> Schedule:
    """All-gather between neighbours: every rank begins with one of p chunks."""
    p = world_size

    def ops(rank: int) -> list[_Op]:
        groups = [[(member - 1) % p] for member in range(p)]
        return [_Op(rank), *_all_gather(rank, range(p), groups)] if p > 1 else []

    return Schedule(p, p, _programs(ops))


@lru_cache(maxsize=256)
def all_to_all(world_size: int) -> Schedule:
    """Chunk r of all ranks goes to rank r, which sums it up and sends it to all."""
    p = world_size

    def ops(rank: int) -> list[_Op]:
        if p == 1:
            return []
        listed: list[_Op] = []
        for k in range(1, p):
            listed += [_Op((rank + k) % p), _Op((rank + k) % p, target=(rank + k) % p)]
        listed += [_Op(rank, source=(rank - k) % p, reduce=True) for k in range(1, p)]
        listed.append(_Op(rank))
        listed += [_Op(rank, target=(rank + k) % p) for k in range(1, p)]
        return listed + [_Op((rank - k) % p, source=(rank - k) % p) for k in range(1, p)]

    return Schedule(p, p, _programs(ops))


@lru_cache(maxsize=256)
def recursive_doubling(world_size: int) -> Schedule:
    """Partners at distances 1, 2, 4, ... exchange all they have; ranks above the largest power of two fold in first."""
    p, q = world_size, _power_of_two(world_size)

    def ops(rank: int) -> list[_Op]:
        if rank >= q:
            return [_Op(0), _Op(0, target=rank - q), _Op(0, source=rank - q)]
        folded = rank + q < p
        listed = [_Op(0, source=rank + q, reduce=True)] if folded else []
        for step in range(q.bit_length() - 1):
            partner = rank ^ (1 << step)
            listed += [_Op(0), _Op(0, target=partner), _Op(0, source=partner, reduce=True)]
        listed += [_Op(0)] if p > q else []
        return listed + ([_Op(0, target=rank + q)] if folded else [])

    return Schedule(p, 1, _programs(ops))


@lru_cache(maxsize=256)
def halving_doubling(world_size: int) -> Schedule:
    """Recursive halving, then doubling, q chunks; ranks above q, the largest power of two, fold in first."""
    p, q = world_size, _power_of_two(world_size)
    distances = [q >> step for step in range(1, q.bit_length())]

    def ops(rank: int) -> list[_Op]:
        if rank >= q:
            partner, listed = rank - q, []
            for k in reversed(range(q)):
                listed += [_Op(partner ^ k), _Op(partner ^ k, target=partner)]
            return listed + [_Op(partner ^ k, source=partner) for k in range(q)]
        extra = rank + q
        listed = [_Op(rank ^ k, source=extra, reduce=True) for k in reversed(range(q))] if extra < p else []
        for distance in distances:
            partner = rank ^ distance
            for k in reversed(range(distance)):
                listed += [_Op(partner ^ k), _Op(partner ^ k, target=partner)]
            listed += [_Op(rank ^ k, source=partner, reduce=True) for k in reversed(range(distance))]
        listed += [_Op(rank)] if p > 1 else []
        for distance in reversed(distances):
            partner = rank ^ distance
            listed += [_Op(rank ^ k, target=partner) for k in range(distance)]
            listed += [_Op(partner ^ k, source=partner) for k in range(distance)]
        return listed + ([_Op(rank ^ k, target=extra) for k in range(q)] if extra < p else [])

    return Schedule(p, q, _programs(ops))


@lru_cache(maxsize=256)
def hierarchical(world_size: int, ranks_per_node: int) -> Schedule:
    """A ring on each node, rings between nodes, and a ring on each node; ranks of a node adjoin."""
    g, nodes = ranks_per_node, world_size // ranks_per_node
    if world_size % g:
        raise ValueError(f"ranks_per_node must divide world_size {world_size}; got {ranks_per_node}")
    if g == 1 or nodes == 1:
        return ring(world_size)

    def ops(rank: int) -> list[_Op]:
        node, local = divmod(rank, g)
        on_node = range(node * g, node * g + g)
        share = (local + 1) % g
        on_share = range(local, world_size, g)
        chunks = [[part * nodes + (node - k) % nodes for k in range(nodes)] for part in range(g)]
        finished = [[part * nodes + (node + 1 - k) % nodes for k in range(nodes)] for part in range(g)]
        single = [[share * nodes + other] for other in range(nodes)]
        return [
            *_reduce_scatter(local, on_node, chunks),
            *_reduce_scatter(node, on_share, single),
            _Op(finished[share][0]),
            *_all_gather(node, on_share, single),
            *_all_gather(local, on_node, finished),
        ]

    return Schedule(world_size, world_size, _programs(ops))


def _power_of_two(world_size: int) -> int:
    """The largest that is not above ``world_size``."""
    check_count("world_size", world_size)
    return 1 << (world_size.bit_length() - 1)


def _reduce_scatter(index: int, members: Sequence[int], groups: Sequence[Sequence[int]]) -> list[_Op]:
    p = len(members)
    left, right = members[(index - 1) % p], members[(index + 1) % p]
    listed: list[_Op] = []
    for step in range(p - 1):
        for chunk in groups[(index - step) % p]:
            listed += [_Op(chunk), _Op(chunk, target=right)]
        listed += [_Op(chunk, source=left, reduce=True) for chunk in groups[(index - step - 1) % p]]
    return listed


def _all_gather(index: int, members: Sequence[int], groups: Sequence[Sequence[int]]) -> list[_Op]:
    p = len(members)
    left, right = members[(index - 1) % p], members[(index + 1) % p]
    listed: list[_Op] = []
    for step in range(p - 1):
        listed += [_Op(chunk, target=right) for chunk in groups[(index - step + 1) % p]]
        listed += [_Op(chunk, source=left) for chunk in groups[(index - step) % p]]
    return listed


def _programs(ops: Callable[[int], list[_Op]]) -> Callable[[int, int], Program]:
    @lru_cache(maxsize=4096)
    def program(rank: int, segments: int) -> Program:
        return _events(ops(rank), segments)

    return program


def _events(ops: Sequence[_Op], segments: int) -> Program:
    """One event for every segment of every arrival of a chunk, and of every chunk that begins here."""
    begun: list[list[_Op]] = []
    arriving: list[list[_Op]] = []
    latest: dict[int, list[_Op]] = {}
    for op in ops:
        if op.source is not None:
            latest[op.chunk] = []
            arriving.append(latest[op.chunk])
        elif op.chunk not in latest:
            latest[op.chunk] = []
            begun.append(latest[op.chunk])
        latest[op.chunk].append(op)
    events: list[Event] = []
    reduced_later: dict[int, bool] = {}  # by chunk: whether what arrives of it next is added up
    for group in reversed(begun + arriving):
        chunk, later = group[0].chunk, reduced_later.get(group[0].chunk)
        events += [_event(chunk * segments + index, group, later) for index in reversed(range(segments))]
        if group[0].source is not None:
            reduced_later[chunk] = group[0].reduce
    return tuple(reversed(events))


def _event(segment: int, group: Sequence[_Op], reduced_later: bool | None) -> Event:
    first = group[0]
    encodes = any(op.source is None and op.target is None for op in group)
    if first.source is None or not first.reduce:
        work = ["encode"] if encodes else ["decode"]
    else:
        work = ["hop"] if encodes else ["add"]
    if encodes and reduced_later is not False:  # nothing will come in its place: this rank too goes on with the bytes
        work.append("decode")
    return Event(segment, first.source, tuple(work), tuple(op.target for op in group if op.target is not None))
