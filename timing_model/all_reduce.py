"""Time of the project's all-reduces as its code runs them, with algorithm, codec and segments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from timing_model import critical_path
from timing_model.checks import check_at_least, check_count
from timing_model.critical_path import SegmentCosts
from timing_model.gloo import native_all_reduce_time
from timing_model.own_schedules import check_all_reduce, schedules_of
from timing_model.params import FLOAT_BYTES, CodecCost, LinkParams, Parts, PlacedLink, uncompressed
from timing_model.schedules import SEGMENT_BYTES, SEGMENTS_AHEAD, Schedule, hierarchical, segments_of
from timing_model.simulate_messages import Network, Step, at_once, priced, simulate_messages, steps_of

PATHS: dict[str, Callable[[SegmentCosts, int, int], float]] = {
    "ring": critical_path.ring,
    "gather-ring": critical_path.gather_ring,
    "halving-doubling": critical_path.halving_doubling,
    "recursive-doubling": critical_path.recursive_doubling,
    "all-to-all": critical_path.all_to_all,
}
"""Functions that follow the longest path through an all-reduce, from the costs of a segment, the number of ranks, and
that of segments in a chunk. An all-reduce without one is simulated message by message, which is exact but O(p^2)."""


class CollectiveTime(NamedTuple):
    """Time of one collective, in s; wire and codec sum to the total."""

    total: float
    wire: float
    """Latency, transfer, message overhead and synchronization: the time left with a codec that costs nothing."""
    codec: float
    """Encoding, decoding and adding that the wire does not hide."""


def messages_meet(all_reduce: str | None, world_size: int) -> bool:
    """Return True if messages of two ranks may meet at the wire of a third and so must be simulated one by one.

    >>> [messages_meet("halving-doubling", p) for p in (4, 5)]
    [False, True]
    """
    if all_reduce in ("halving-doubling", "recursive-doubling"):
        return world_size & (world_size - 1) != 0
    return all_reduce not in (None, *PATHS, "hierarchical", "native")


def chunks_of(all_reduce: str, world_size: int) -> int:
    """Return the number of chunks into which an all-reduce cuts the values; a message has a chunk or a segment of one.

    >>> [chunks_of("halving-doubling", p) for p in (4, 5)]
    [4, 4]
    """
    if all_reduce in ("recursive-doubling", "native"):
        return 1
    if all_reduce == "halving-doubling":
        return 1 << (world_size.bit_length() - 1)
    if all_reduce in ("ring", "gather-ring", "all-to-all", "hierarchical"):
        return world_size
    return _schedules(all_reduce, world_size, 1)[0].chunks


def all_reduce_time(
    all_reduce: str,
    link: LinkParams,
    numel: float,
    world_size: int,
    *,
    codec: CodecCost | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    inner: LinkParams | None = None,
    ranks_per_node: int = 1,
    nics: int = 1,
    placed: tuple[PlacedLink, ...] = (),
    members: int = 1,
) -> CollectiveTime:
    """Time of one all-reduce of ``numel`` float32 values, from a common start to the last rank's end, in s.

    The time is the ``critical_path`` of the schedule that the code plays, or a simulation of its messages where these
    can meet (``messages_meet``; O(p^2)). There it matters which receives are posted: a message that nobody waits for
    yet must not take the wire from the others. Where all ranks do the same, receives are assumed to be posted in time,
    which holds unless latency and work exceed the wire time of several segments; but halving-doubling and all-to-all
    with more segments in a chunk than ``SEGMENTS_AHEAD`` really take up to 15 % longer (``experiments/LOG.md``). native
    is gloo's ring, which adds at ``link.gamma`` whatever the codec, and whose values are converted before and after.
    One rank, or no value, takes 0 s. Chunks and segments are assumed to be of equal size, so there should be at least
    one value for each.

    Args:
        all_reduce: one of ``ALL_REDUCES``, or ``module:function``.
        link: link between nodes.
        numel: number of float32 values.
        world_size: number of ranks, p.
        codec: codec on the wire; None sends float32, and adds at ``link.gamma``.
        segment_bytes: bytes of the largest message.
        inner: link inside a node, for hierarchical; its alpha and beta count.
        ranks_per_node: ranks of a node, g, for hierarchical; a divisor of p.
        nics: NICs of a node, r, for hierarchical: its g ranks send at once, each at min(1, r/g) of ``link``'s rate.
        placed: links between the ranks, where not all are alike: each message is simulated on its own one, and only
            gamma and sync of ``link`` count. Each rank has wires of its own, so ``inner`` and ``nics`` do not count.
        members: with ``placed``, number of all-reduces that run at once, each among ``world_size`` ranks: number j is
            among the ranks j, ``members`` + j, 2 ``members`` + j and so on.

    Raises:
        ValueError: a value is out of range.

    >>> link = LinkParams(alpha=1.0, beta=0.25, gamma=0.0, sync=0.5)
    >>> all_reduce_time("ring", link, 4.0, world_size=2)
    CollectiveTime(total=6.5, wire=6.5, codec=0.0)
    """
    check_all_reduce("all_reduce", all_reduce)
    check_at_least("numel", numel, 0)
    check_count("world_size", world_size)
    check_count("ranks_per_node", ranks_per_node)
    check_count("nics", nics)
    check_count("members", members)
    cost = codec or uncompressed(link.gamma)
    if world_size == 1 or numel == 0:
        return CollectiveTime(0.0, 0.0, 0.0)
    if all_reduce == "native":
        if placed:
            raise ValueError(
                "all_reduce must not be native with placed links: the model knows no single messages of it"
            )
        wire, total = _native_times(link, cost.wire_bytes(numel), world_size)
        total += (cost.encode + cost.decode) * numel + 2 * cost.call
        return CollectiveTime(total, wire, total - wire)
    if all_reduce != "hierarchical":
        inner, ranks_per_node = None, 1
    elif inner is None and not placed:
        raise ValueError("inner must be given with all_reduce hierarchical; got None")
    elif world_size % ranks_per_node:
        raise ValueError(f"ranks_per_node must divide world_size {world_size}; got {ranks_per_node}")
    options = (segment_bytes, inner, ranks_per_node, nics, placed, members)
    total, wire = (_time(all_reduce, link, one, numel, world_size, *options) for one in (cost, cost.free()))
    wire = min(wire, total)  # where messages meet, work can let another message pass and so save time
    return CollectiveTime(total, wire, total - wire)


def gather_time(
    link: LinkParams,
    numel: float,
    world_size: int,
    *,
    codec: CodecCost,
    segment_bytes: int = SEGMENT_BYTES,
) -> CollectiveTime:
    r"""Time of a reducer that gathers every rank's part around the ring, as topk does, in s.

    .. math:: T = n k_e + (p-1)(\alpha + o + w) + p\, n k_a + S

    n is ``numel``, k_e and k_a are ``codec.encode`` (choosing) and ``codec.add`` (adding one rank's part, per value of
    the whole), and w is the transfer of a part; the latencies of its segments overlap. The time grows with p. Nothing
    is encoded again on the way, and parts are added when all have arrived (``pipesgd/systems/exchanges/topk.py``). A
    single rank also chooses and adds, but sends nothing.

    Raises ``ValueError`` if a value is out of range.

    >>> link = LinkParams(alpha=1.0, beta=0.25, gamma=0.0, sync=0.0)
    >>> topk = CodecCost(name="topk", bits=8.0, encode=0.5, decode=0.0, add=0.25, hop=0.0)
    >>> gather_time(link, 4.0, 3, codec=topk)
    CollectiveTime(total=9.0, wire=4.0, codec=5.0)
    """
    check_at_least("numel", numel, 0)
    check_count("world_size", world_size)
    work = codec.encode * numel + codec.call + world_size * (codec.add * numel + codec.call)
    if world_size == 1:
        return CollectiveTime(work, 0.0, work)
    wire = _gather_ring_time(link, codec.free(), numel, world_size, segment_bytes)
    return CollectiveTime(wire + work, wire, work)


def parts_time(
    link: LinkParams, parts: Parts, world_size: int, *, segment_bytes: int = SEGMENT_BYTES
) -> CollectiveTime:
    r"""Time of gathering all ranks' parts of some gradients around the ring, and adding them up, in s.

    .. math:: T = q\left((p-1)(\alpha + o) + S\right) + (p-1)\, m \beta + W

    m is ``parts.nbytes`` of one rank, in q = ``parts.messages`` one after the other, and W is ``parts.work``; the
    latencies of a message's segments overlap. W is that of this number of ranks. One rank gathers nothing.

    Raises ``ValueError`` if a value is out of range.

    >>> link = LinkParams(alpha=1.0, beta=0.25, gamma=0.0, sync=0.5)
    >>> parts_time(link, Parts(tensors=(0,), nbytes=8.0, messages=2, work=3.0), 3)
    CollectiveTime(total=12.0, wire=9.0, codec=3.0)
    """
    check_count("world_size", world_size)
    if world_size == 1:
        return CollectiveTime(parts.work, 0.0, parts.work)
    numel = parts.nbytes / parts.messages / FLOAT_BYTES
    wire = parts.messages * _gather_ring_time(link, uncompressed(0.0), numel, world_size, segment_bytes)
    return CollectiveTime(wire + parts.work, wire, parts.work)


def _gather_ring_time(link: LinkParams, codec: CodecCost, numel: float, world_size: int, segment_bytes: int) -> float:
    """Return the time, in s, in which each rank's part of ``numel`` values travels around the ring."""
    whole = numel * world_size
    return _time("gather-ring", link, codec, whole, world_size, segment_bytes, None, 1, 1, (), 1)


@lru_cache(maxsize=256)
def _schedules(all_reduce: str, world_size: int, ranks_per_node: int) -> list[Schedule]:
    if all_reduce == "hierarchical":
        return [hierarchical(rank, world_size, ranks_per_node) for rank in range(world_size)]
    return schedules_of(all_reduce, world_size)


@lru_cache(maxsize=16)
def _steps(all_reduce: str, world_size: int, ranks_per_node: int, segments: int, members: int) -> list[list[Step]]:
    steps = [steps_of(one, segments, SEGMENTS_AHEAD) for one in _schedules(all_reduce, world_size, ranks_per_node)]
    if members == 1:
        return steps
    return at_once(steps, [range(member, members * world_size, members) for member in range(members)])


@lru_cache(maxsize=256)
def unconnected(
    all_reduce: str, world_size: int, ranks_per_node: int, placed: tuple[PlacedLink, ...], members: int = 1
) -> tuple[int, int] | None:
    """Return a rank of this all-reduce, and one that it sends to, between which no link leads; None if none misses.

    With islands of several ``members``, there is an all-reduce for each of them, and a ring inside each island.
    """
    parts = _schedules(all_reduce, world_size // members, ranks_per_node)
    for rank in range(world_size):
        island, member = divmod(rank, members)
        peers = {send.peer * members + member for event in parts[island].events for send in event.sends}
        if members > 1:
            peers.add(island * members + (member + 1) % members)
        for peer in sorted(peers):
            if not any(one.connects(rank, peer) for one in placed):
                return rank, peer
    return None


@lru_cache(maxsize=65536)
def _time(
    all_reduce: str,
    link: LinkParams,
    codec: CodecCost,
    numel: float,
    world_size: int,
    segment_bytes: int,
    inner: LinkParams | None,
    ranks_per_node: int,
    nics: int,
    placed: tuple[PlacedLink, ...],
    members: int,
) -> float:
    chunk = numel / chunks_of(all_reduce, world_size)
    segments = segments_of(codec.wire_bytes(chunk), segment_bytes)
    if placed or messages_meet(all_reduce, world_size):
        steps = _steps(all_reduce, world_size, ranks_per_node, segments, members if placed else 1)
        programs = priced(steps, chunk / segments, codec)
        return max(simulate_messages(programs, Network(link=link, placed=placed))) + link.sync
    values = chunk / segments
    nbytes = codec.wire_bytes(values)
    costs = SegmentCosts(
        work=codec.seconds(values),
        alpha=link.alpha,
        transfer=nbytes * link.byte_seconds(max(1.0, ranks_per_node / nics)),
        overhead=link.overhead,
        inner_alpha=inner.alpha if inner else 0.0,
        inner_transfer=nbytes * inner.byte_seconds() if inner else 0.0,
    )
    if all_reduce == "hierarchical":
        time = critical_path.hierarchical(costs, world_size, segments, ranks_per_node=ranks_per_node)
    else:
        time = PATHS[all_reduce](costs, world_size, segments)
    return time + link.sync


@lru_cache(maxsize=65536)
def _native_times(link: LinkParams, nbytes: float, world_size: int) -> tuple[float, float]:
    """Return the times of gloo's ring, in s, without and with its sums."""
    without = dataclasses.replace(link, gamma=0.0)
    return native_all_reduce_time(without, nbytes, world_size), native_all_reduce_time(link, nbytes, world_size)
