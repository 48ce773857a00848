"""Time of gloo's ring, which torch's all-reduce runs on CPU tensors, from its schedule."""

from __future__ import annotations

import math

from timing_model.checks import check_at_least, check_count
from timing_model.critical_path import EVEN
from timing_model.params import LinkParams

GLOO_SEGMENT = 1 << 20
"""Bytes of gloo's largest message."""
IN_FLIGHT = 2
"""Number of messages that gloo keeps in flight."""


def native_all_reduce_time(link: LinkParams, nbytes: float, world_size: int) -> float:
    r"""Time of gloo's ring, from its schedule, in s.

    Two phases, sums and then gathering, have N messages of m bytes each (``native_messages``). In turn i of a phase a
    rank waits for message i - 2 to arrive and adds it up, waits for its own message i - 2 to leave, and posts the
    receive and the send of message i. A message leaves once the receiver's notice that it is ready has arrived:

    .. math::

        C(i) = \max(\max(C(i-1), A(i-2)) + g,\; P(i-2)) + o, \qquad
        P(i) = \max(P(i-1), C(i) + \alpha) + b, \qquad
        A(i) = P(i) + \alpha

    Here b = beta m, and g = gamma m, but 0 while gathering. The two phases and S add up. One rank takes 0 s.
    Raises ``ValueError`` if ``world_size < 1`` or ``nbytes < 0``. Source: gloo's allreduce.cc.

    >>> native_all_reduce_time(LinkParams(alpha=1.0, beta=0.0, gamma=0.0, sync=0.0), 8, 2)
    4.0
    """
    messages, segment = native_messages(nbytes, world_size)
    if world_size == 1:
        return 0.0
    return link.sync + sum(_phase(link, messages, segment, added) for added in (link.gamma * segment, 0.0))


def _phase(link: LinkParams, messages: int, segment: int, added: float) -> float:
    """Return the time of a phase, in s, computed turn by turn."""

    def taken(now: float, leaves: float) -> float:
        """Return when message i - 2, which leaves at ``leaves``, has arrived and been added up, and has left."""
        return max(max(now, leaves + link.alpha) + added, leaves)

    def turn(now: float, wire: float) -> tuple[float, float]:
        """Post a message at ``now``; return when that is done, and when the message has left."""
        now += link.overhead
        return now, max(wire, now + link.alpha) + link.byte_seconds() * segment

    now, before = turn(0.0, 0.0)
    now, last = turn(now, before)
    number = IN_FLIGHT
    while number < messages:
        earlier = now, before, last
        for _ in range(min(IN_FLIGHT, messages - number)):
            now, leaves = turn(taken(now, before), last)
            before, last = last, leaves
            number += 1
        later = [one - other for one, other in zip((now, before, last), earlier, strict=True)]
        if max(later) - min(later) <= EVEN * max(later):  # all later turns shift by the same time
            pairs = (messages - number) // IN_FLIGHT
            now, before, last = (time + pairs * later[0] for time in (now, before, last))
            number += pairs * IN_FLIGHT
    return taken(taken(now, before), last)


def native_messages(nbytes: float, world_size: int) -> tuple[int, int]:
    """Return the number of messages that a rank sends in each of the two phases of gloo's ring, and the bytes of one.

    >>> native_messages(8 << 20, 4)
    (6, 1048576)
    """
    check_count("world_size", world_size)
    check_at_least("nbytes", nbytes, 0)
    per_rank = math.ceil(max(math.ceil(nbytes / GLOO_SEGMENT), 2 * world_size) / world_size)
    return per_rank * (world_size - 1), math.ceil(nbytes / (per_rank * world_size))
