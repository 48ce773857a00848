"""Joint stop of all ranks when one of them gets a signal, so that they can write a last checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Farewell:
    """Agreement on the iteration that all training ranks can reach and none has passed, without input or output.

    The rank that got the signal only notes it (``requested``). Each rank's watcher then fixes the place of its rank
    (``hold``): from then on the rank begins no further iteration, so its place stays true while the others learn of it.
    All places together determine where to stop (``meet_at``): where the fastest rank is. The others continue to there.

    The training loop asks ``is_due`` before each iteration; the watcher's thread does the rest.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """Signal that asked this rank to stop, if any. It is set by a signal handler, which must take no lock."""
        self.is_open = False
        """True while a signal is noted instead of ending this rank at once."""
        self.members = 0
        """Number of ranks that train; they are the first ones."""
        self.seconds = 0.0
        """Seconds that the ranks may take to stop."""
        self._changed = threading.Condition()
        self._begun = 0
        self._held: int | None = None
        self._stop: int | None = None

    def open(self, *, members: int, start: int, seconds: float) -> None:
        """Note signals from now on, if ``seconds`` is above 0. This rank trains from iteration ``start``."""
        self.members, self._begun, self.seconds = members, start, seconds
        self.is_open = seconds > 0

    def is_due(self, iteration: int) -> bool:
        """Return True if ``iteration`` must not begin, because all ranks stop here. Waits while they find out where."""
        if self.members == 1:
            return self.requested is not None
        with self._changed:
            if self._held is not None and iteration >= self._held:
                self._changed.wait_for(lambda: self._stop is not None)
                if self._stop is not None and iteration >= self._stop:
                    return True
            self._begun = iteration + 1
            return False

    def hold(self) -> int:
        """Let this rank begin no further iteration; return how many it has begun since iteration 0 of the run."""
        with self._changed:
            if self._held is None:
                self._held = self._begun
            return self._held

    def meet_at(self, places: Sequence[int]) -> None:
        """Let this rank continue to the iteration that the fastest one has reached, and stop there."""
        with self._changed:
            self._stop = self._held = max(places)
            self._changed.notify_all()
