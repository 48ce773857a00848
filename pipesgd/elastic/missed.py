"""A rank that hangs while all others wait for it: it leaves before they end."""

from __future__ import annotations

from collections.abc import Sequence

from pipesgd.membership import heartbeat

SUM_DEADLINES, EXCHANGE_DEADLINES = 1.5, 0.9 * heartbeat.LONGEST_PHASE
"""Deadlines that others wait for a sum, and for another exchange, after which a rank that hangs leaves. They give up a
sum with the second deadline, and an exchange, before which ranks evaluate or write, after more of them."""


def is_missed(own: heartbeat.Beat, others: Sequence[heartbeat.Beat], timeout: float) -> bool:
    """Return True if a rank has done nothing for so long that all ``others``, who wait for it, would soon end."""
    sums = any(one.phase.endswith("all-reduce") for one in others)
    limit = timeout * (SUM_DEADLINES if sums else EXCHANGE_DEADLINES)
    waited = all(one.waiting and one.seconds >= limit for one in others)
    return bool(others) and waited and not own.waiting and own.seconds >= limit
