"""Time of an all-reduce: the longest path through its work, its messages and its latencies.

The path is followed along one rank, since all ranks do the same, message for message: a rank's n-th message to a
partner arrives when its own n-th message from the corresponding partner does. There is one function per algorithm,
which goes through the schedule of that name in ``schedules.py`` many segments at a time. Recursive ones are for 2^k
ranks only, since with other numbers messages of two ranks meet at the wire of a third.
``tests/timing_model/test_simulate_messages.py`` checks the functions against a simulator of every message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

EVEN = 1e-11
"""Relative tolerance: a ring step that shifts all times equally, up to this share, is like all later steps."""


@dataclass(frozen=True, kw_only=True)
class SegmentCosts:
    """Costs of one segment, in s."""

    work: Mapping[str, float]
    """CPU time of each operation: "encode", "decode", "add", "hop"."""
    alpha: float
    """Latency between nodes."""
    transfer: float
    """Transfer time on a wire between nodes."""
    overhead: float
    """CPU time of sending the segment."""
    inner_alpha: float = 0.0
    """Latency inside a node."""
    inner_transfer: float = 0.0
    """Transfer time on a wire inside a node."""


class _Rank:
    r"""A rank and its progress.

    For its events e in order, with m the message that e waits for and m' the messages that e sends:

    .. math::

        C(e) = \max(C(e-1), A(m)) + work(e), \qquad
        C(m') = C(m'-1) + o, \qquad
        P(m') = \max(P(m'-1), C(m')) + w, \qquad
        A(m') = P(m') + \alpha

    C is the time of the rank's CPU, P that of its wire, and A the arrival at the other end. So the latencies of
    consecutive messages overlap, and so do one segment's transfer and another's work, as in the code. Every rank has a
    wire inside its node and another to other nodes, both full duplex; for ranks that share a NIC, ``transfer`` accounts
    for their share. A message must have left before its memory is used again, which delays nobody here: what is
    received into that memory arrives later.
    """

    def __init__(self, costs: SegmentCosts):
        self._costs = costs
        self._cpu = 0.0
        self._wires = {False: 0.0, True: 0.0}
        """Times, in s, at which the wires are free: True is the one inside the node, False the other."""

    @property
    def end(self) -> float:
        """Time, in s, at which the rank has done and sent everything."""
        return max(self._cpu, *self._wires.values())

    def begin(self, operations: str, segments: int) -> Values:
        """Work on segments that wait for nothing; return when a message of each is posted."""
        return self.work(operations, np.zeros(segments))

    def work(self, operations: str, arrivals: Values) -> Values:
        """Work on segments as they arrive and post a message after each; return when, (segments,)."""
        return self.work_for(operations, arrivals, 1)[:, 0]

    def work_for(self, operations: str, arrivals: Values, messages: int) -> Values:
        """Work as ``work`` does, with ``messages`` messages after each segment; return when, (segments, messages)."""
        costs = self._costs
        seconds = sum(costs.work[operation] for operation in operations.split()) + messages * costs.overhead
        done = _served(self._cpu, arrivals, seconds)
        self._cpu = float(done[-1]) if len(done) else self._cpu
        return np.asarray(done[:, None] - costs.overhead * np.arange(messages - 1, -1, -1))

    def send(self, posted: Values, *, inner: bool = False) -> Values:
        """Return when the messages arrive that are posted at the times ``posted``."""
        costs = self._costs
        transfer, alpha = (costs.inner_transfer, costs.inner_alpha) if inner else (costs.transfer, costs.alpha)
        left = _served(self._wires[inner], posted.ravel(), transfer)
        self._wires[inner] = float(left[-1]) if len(left) else self._wires[inner]
        return left.reshape(posted.shape) + alpha

    def pass_on(
        self, times: int, operations: str, arrivals: Values, *, inner: bool = False, also: list[Values] | None = None
    ) -> Values:
        """Work on segments and pass them on in each of ``times`` ring steps; return when the last ones arrive.

        ``also`` collects, step by step, when a second message for each segment is posted, which the caller sends.
        """
        for step in range(times):
            before = self._state(arrivals, inner)
            posted = self.work_for(operations, arrivals, 1 if also is None else 2)
            arrivals = self.send(posted[:, 0], inner=inner)
            if also is not None:
                also.append(posted[:, 1])
            later = self._state(arrivals, inner) - before
            if np.ptp(later) <= EVEN * later[0]:  # maxima and sums do not depend on where time begins
                rest = times - 1 - step
                self._cpu += rest * later[0]
                self._wires[inner] += rest * later[0]
                if also is not None:
                    also.append(np.add.outer(later[0] * np.arange(1, rest + 1), also[-1]).ravel())
                return np.asarray(arrivals + rest * later[0])
        return arrivals

    def _state(self, arrivals: Values, inner: bool) -> Values:
        return np.array([self._cpu, self._wires[inner], *arrivals])


def ring(costs: SegmentCosts, world_size: int, segments: int, *, inner: bool = False) -> float:
    """Time of ``schedules.ring`` with ``segments`` segments per chunk, in s, on at least 2 ranks.

    The functions below give the times of the schedules of their names in the same way.
    """
    rank = _Rank(costs)
    arrivals = rank.send(rank.begin("encode", segments), inner=inner)
    arrivals = rank.pass_on(world_size - 2, "hop", arrivals, inner=inner)
    arrivals = rank.send(rank.work("hop decode", arrivals), inner=inner)
    arrivals = rank.pass_on(world_size - 2, "decode", arrivals, inner=inner)
    rank.work_for("decode", arrivals, 0)
    return rank.end


def gather_ring(costs: SegmentCosts, world_size: int, segments: int) -> float:
    rank = _Rank(costs)
    arrivals = rank.send(rank.begin("encode decode", segments))
    arrivals = rank.pass_on(world_size - 2, "decode", arrivals)
    rank.work_for("decode", arrivals, 0)
    return rank.end


def all_to_all(costs: SegmentCosts, world_size: int, segments: int) -> float:
    rank, others = _Rank(costs), world_size - 1
    arrivals = rank.send(rank.begin("encode", others * segments))
    last = (others - 1) * segments
    rank.work_for("add", arrivals[:last], 0)
    arrivals = rank.send(rank.work_for("hop decode", arrivals[last:], others))
    rank.work_for("decode", arrivals.T.ravel(), 0)  # waits for one rank after the other
    return rank.end


def recursive_doubling(costs: SegmentCosts, world_size: int, segments: int) -> float:
    rank, levels = _Rank(costs), world_size.bit_length() - 1
    arrivals = rank.send(rank.begin("encode decode", segments))
    for _ in range(levels - 1):
        arrivals = rank.send(rank.work("hop decode", arrivals))
    rank.work_for("add", arrivals, 0)
    return rank.end


def halving_doubling(costs: SegmentCosts, world_size: int, segments: int) -> float:
    rank, levels = _Rank(costs), world_size.bit_length() - 1
    half = world_size // 2 * segments
    arrivals = rank.send(rank.begin("encode", half))
    while half > segments:
        half //= 2  # half of what arrives belongs to the next partner
        sent = rank.send(rank.work("hop", arrivals[:half]))
        rank.work_for("add", arrivals[half:], 0)
        arrivals = sent
    sent = rank.send(rank.work_for("hop decode", arrivals, levels))
    incoming: list[list[Values]] = [[] for _ in range(levels)]
    for level in range(levels):
        for later, messages in zip(incoming[level:], sent.T, strict=True):
            later.append(messages)
        arrivals = np.concatenate(incoming[level])
        sent = rank.send(rank.work_for("decode", arrivals, levels - level - 1))
    return rank.end


def hierarchical(costs: SegmentCosts, world_size: int, segments: int, *, ranks_per_node: int) -> float:
    g, nodes = ranks_per_node, world_size // ranks_per_node
    if g == 1 or nodes == 1:
        return ring(costs, world_size, segments, inner=nodes == 1)
    rank = _Rank(costs)
    arrivals = rank.send(rank.begin("encode", nodes * segments), inner=True)
    arrivals = rank.pass_on(g - 2, "hop", arrivals, inner=True)
    sent = rank.send(rank.work("hop", arrivals[:segments]))  # between nodes
    rank.work_for("add", arrivals[segments:], 0)
    arrivals = rank.pass_on(nodes - 2, "hop", sent)
    posted = rank.work_for("hop decode", arrivals, 2)
    on_node = [posted[:, 1]]
    arrivals = rank.pass_on(nodes - 2, "decode", rank.send(posted[:, 0]), also=on_node)
    on_node.append(rank.work("decode", arrivals))
    arrivals = rank.send(np.concatenate(on_node), inner=True)
    arrivals = rank.pass_on(g - 2, "decode", arrivals, inner=True)
    rank.work_for("decode", arrivals, 0)
    return rank.end


def _served(free: float, ready: Values, seconds: float) -> Values:
    """Return when each item is done: one after the other from ``free`` on, ``seconds`` each, none before ``ready``."""
    before = seconds * np.arange(len(ready))
    return np.asarray(np.maximum.accumulate(np.maximum(ready - before, free)) + before + seconds)
