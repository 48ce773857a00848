"""Barriers of workers that may be far apart. Integers and times only: no threads, no clock, no communication."""

from __future__ import annotations


class Meetings:
    """Who has come to which collective call, and of whom nothing was heard for how long.

    Every worker comes to meetings 1, 2, 3 and so on. Those who have come wait for the rest. A worker that is far behind
    may take as long as it needs while its gradients keep arriving: it is silent only when nothing was heard of it for
    ``timeout`` seconds of another one's wait.

    >>> meetings = Meetings(2, timeout=5.0)
    >>> meetings.come(0, 1, place=7, now=100.0)
    >>> meetings.missing(0)
    [1]
    >>> meetings.heard(1, now=104.0)  # a gradient, say
    >>> meetings.silent(0, now=109.0), meetings.silent(0, now=109.5)
    ([], [1])
    """

    def __init__(self, workers: int, timeout: float):
        self.timeout = timeout
        self._numbers = [0] * workers
        self._places = [0] * workers
        self._came = [0.0] * workers
        self._heard = [0.0] * workers

    def heard(self, worker: int, now: float) -> None:
        """Something has arrived from ``worker``."""
        self._heard[worker] = now

    def come(self, worker: int, number: int, place: int, now: float) -> None:
        """``worker`` has come to meeting ``number``, called from ``place``. Saying so again changes nothing.

        Raises:
            ValueError: it cannot be there: it has skipped a meeting, or is at one that is over.
        """
        known = self._numbers[worker]
        if number == known + 1 and not self.missing(worker):
            self._numbers[worker], self._places[worker], self._came[worker] = number, place, now
        elif number != known or place != self._places[worker]:
            raise ValueError(f"the number of a meeting must be {known} or one more; got {number}")

    def missing(self, worker: int) -> list[int]:
        """Those for whom ``worker`` waits; nobody if all have come to its last meeting."""
        return [one for one, number in enumerate(self._numbers) if number < self._numbers[worker]]

    def elsewhere(self, worker: int) -> list[int]:
        """Those who have come to the same meeting as ``worker``, but from another place."""
        number, place = self._numbers[worker], self._places[worker]
        everybody = enumerate(zip(self._numbers, self._places, strict=True))
        return [one for one, (its_number, its_place) in everybody if its_number == number and its_place != place]

    def silent(self, worker: int, now: float) -> list[int]:
        """Those for whom ``worker`` waits, and of whom nothing was heard for the timeout since it came."""
        since = self._came[worker]
        return [one for one in self.missing(worker) if now - max(self._heard[one], since) > self.timeout]
