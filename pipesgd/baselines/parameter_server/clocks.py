"""Who may go on, of workers whose iterations may differ by a bound. Integers only: no threads, no communication."""

from __future__ import annotations

from collections.abc import Sequence


class Clocks:
    """Stale-synchronous iterations (Ho et al., NeurIPS 2013): the fastest leads the slowest by ``bound`` at most.

    Worker i's clock is the number of its gradients that have arrived. It starts iteration c, its clock being c, only
    while ``c - min(clocks) <= bound``; until then it waits for its reply. Bound 0 makes rounds, in which all wait for
    the last; with None nobody ever waits. The slowest never waits: there is always one that goes on.

    >>> clocks = Clocks(2, bound=1)
    >>> clocks.arrived(0), clocks.arrived(0)  # the second leaves worker 0 waiting, for it leads by 2
    ([0], [])
    >>> clocks.waits_for(0)
    [1]
    >>> clocks.arrived(1)  # the slowest goes on, and the fastest with it
    [0, 1]
    """

    def __init__(self, workers: int, bound: int | None):
        self.bound = bound
        self.arrivals = [0] * workers
        """Each worker's clock."""
        self.left: set[int] = set()
        """Workers from which nothing more will arrive."""
        self._waiting: set[int] = set()

    def arrived(self, worker: int) -> list[int]:
        """A gradient of ``worker`` has arrived: the workers that may start their next iteration now."""
        assert worker not in self._waiting, "a worker that waits computes nothing"
        assert worker not in self.left
        self.arrivals[worker] += 1
        self._waiting.add(worker)
        due = [one for one in sorted(self._waiting) if self.bound is None or self._lead(one) <= self.bound]
        self._waiting.difference_update(due)
        return due

    def leave(self, worker: int) -> None:
        """Nothing more will arrive from ``worker``. Who waits for it, or comes to, waits in vain."""
        self.left.add(worker)

    def waits_for(self, worker: int) -> list[int]:
        """Whose gradients ``worker`` waits for: those of the slowest; none if it does not wait."""
        if worker not in self._waiting:
            return []
        slowest = min(self.arrivals)
        return [one for one, arrivals in enumerate(self.arrivals) if arrivals == slowest]

    def waits_in_vain(self, worker: int) -> bool:
        """Whether a worker that ``worker`` waits for has left."""
        return not self.left.isdisjoint(self.waits_for(worker))

    def started(self, worker: int) -> int:
        """The last iteration that ``worker`` was let into."""
        return self.arrivals[worker] - (worker in self._waiting)

    def restore(self, arrivals: Sequence[int]) -> None:
        """Go back to these clocks; nobody waits."""
        assert len(arrivals) == len(self.arrivals)
        self.arrivals = list(arrivals)
        self._waiting.clear()

    def _lead(self, worker: int) -> int:
        return self.arrivals[worker] - min(self.arrivals)
