"""Pace of a rank's messages, which leaves room on its line for others (``--rate-limit``)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

PACED_SECONDS, SAVED_SECONDS = 0.015, 0.005
"""Seconds that the largest message takes at a rate limit, and seconds of that rate that a rank saves up while it sends
nothing: together a fiftieth of a second, so that the messages handed over in a second keep to the rate within 2 %.
Shorter ones would be mostly the headers of their packets at 1 Mbit/s."""


def paced_segment_bytes(segment_bytes: int, rate_limit: float) -> int:
    """Return the size of the largest message, in bytes, of a rank that sends at most ``rate_limit`` bytes a second.

    >>> [paced_segment_bytes(1 << 20, rate) for rate in (1e6, 1e9, math.inf)]
    [15000, 1048576, 1048576]
    """
    return int(min(segment_bytes, max(1.0, rate_limit * PACED_SECONDS)))


class TokenBucket:
    """Token bucket that lets messages of ``rate`` bytes a second pass.

    A message passes once the bucket is not in debt, and takes its bytes, which may put the bucket into debt. So in any
    T seconds the messages that pass have at most ``rate * (T + SAVED_SECONDS)`` bytes, and those of one message more.
    A wait is no longer than the message before takes at the rate. It holds up the communication thread only: whoever
    waits for that thread hears of a lost rank, or of Ctrl-C, at once.

    Args:
        rate: bytes a second; infinity lets everything pass.
        clock: returns the time in s.
        sleep: waits for some seconds.

    >>> now = [0.0]
    >>> bucket = TokenBucket(100.0, clock=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    >>> for _ in range(3):
    ...     bucket.take(50)
    >>> now
    [1.0]
    """

    def __init__(
        self,
        rate: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ):
        self._rate = rate
        self._clock, self._sleep = clock, sleep
        self._paid_at = -math.inf
        """Time from which on the bucket is not in debt."""

    def take(self, nbytes: int) -> None:
        """Wait until a message of ``nbytes`` may pass."""
        while (early := self._paid_at - self._clock()) > 0:
            self._sleep(early)
        self._paid_at = max(self._paid_at, self._clock() - SAVED_SECONDS) + nbytes / self._rate
