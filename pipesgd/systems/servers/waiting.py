"""Rules of which workers wait for which, using only integers and times, without threads or messages."""

from __future__ import annotations


class Clocks:
    """Stale-synchronous iterations (Ho et al., NeurIPS 2013): the fastest leads the slowest by ``bound`` at most.

    Worker i's clock c is the number of its gradients that have arrived. The worker starts iteration c only
    while ``c - min(clocks) <= bound``; until then it waits for its reply. Bound 0 makes rounds, in which all wait for
    the last worker; with None nobody ever waits. The slowest worker never waits, so at least one always continues.

    >>> clocks = Clocks(2, bound=1)
    >>> clocks.arrived(0), clocks.arrived(0)  # the second leaves worker 0 waiting, for it leads by 2
    ([0], [])
    >>> clocks.waits_for(0)
    [1]
    >>> clocks.arrived(1)  # the slowest continues, and the fastest with it
    [0, 1]
    """

    def __init__(self, workers: int, bound: int | None):
        self.bound = bound
        self.arrivals = [0] * workers
        """Clock of each worker."""
        self.left: set[int] = set()
        """Workers from which nothing more will arrive, so that waiting for them is in vain."""

    def arrived(self, worker: int) -> list[int]:
        """Count a gradient of ``worker``; return the workers that may start their next iteration because of it."""
        waiting = [one for one in range(len(self.arrivals)) if one == worker or self.waits_for(one)]
        self.arrivals[worker] += 1
        return [one for one in waiting if not self.waits_for(one)]

    def waits_for(self, worker: int) -> list[int]:
        """Return the workers whose gradients ``worker`` waits for, the slowest ones; none if it need not wait."""
        slowest = min(self.arrivals)
        if self.bound is None or self.arrivals[worker] - slowest <= self.bound:
            return []
        return [one for one, arrivals in enumerate(self.arrivals) if arrivals == slowest]

    def waits_in_vain(self, worker: int) -> list[int]:
        """Return the workers that ``worker`` waits for although they have left."""
        return [one for one in self.waits_for(worker) if one in self.left]


class Meetings:
    """Barriers at a server: which workers have come to which collective call, and which have been silent for how long.

    Every worker comes to meetings 1, 2, 3 and so on. Those who have come wait for the rest. A worker that is far behind
    may take as long as it needs while its gradients keep arriving: it is silent only if nothing was heard of it for
    ``timeout`` seconds of another worker's wait.

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
        self._at = [(0, 0)] * workers  # number and place of each worker's last meeting
        self._came = [0.0] * workers
        self._heard = [0.0] * workers

    def heard(self, worker: int, now: float) -> None:
        """Note that something has arrived from ``worker``."""
        self._heard[worker] = now

    def come(self, worker: int, number: int, place: int, now: float) -> None:
        """Note that ``worker`` is at meeting ``number``, called from ``place``. Repeated calls change nothing.

        Raises:
            ValueError: the worker cannot be there: it has skipped a meeting, or is at one that is over.
        """
        known, _ = self._at[worker]
        if number == known + 1 and not self.missing(worker):
            self._at[worker], self._came[worker] = (number, place), now
        elif (number, place) != self._at[worker]:
            raise ValueError(f"the number of a meeting must be {known} or one more; got {number}")

    def missing(self, worker: int) -> list[int]:
        """Return the workers that ``worker`` waits for; none if all have come to its last meeting."""
        return [one for one, (number, _) in enumerate(self._at) if number < self._at[worker][0]]

    def elsewhere(self, worker: int) -> list[int]:
        """Return the workers that have come to the same meeting as ``worker``, but from another place."""
        number, place = self._at[worker]
        return [
            one for one, (its_number, its_place) in enumerate(self._at) if its_number == number and its_place != place
        ]

    def silent(self, worker: int, now: float) -> list[int]:
        """Return the workers that ``worker`` waits for and that were silent for the timeout since it came."""
        since = self._came[worker]
        return [one for one in self.missing(worker) if now - max(self._heard[one], since) > self.timeout]
