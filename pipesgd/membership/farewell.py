"""Where all ranks stop together when one of them is told to stop, so that they can write a last checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Farewell:
    """Finds the iteration that all workers can reach and none has passed. Without input or output.

    The rank that got the signal only notes it (``requested``). Each rank's watcher then fixes where its rank is
    (``hold``): from then on the rank begins no further iteration, so its place stays true while the others learn of it.
    All places together say where to stop (``meet_at``): where the fastest rank has come to. The others go on to there.

    The training loop asks ``is_due`` before each iteration, the watcher's thread does the rest.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """What this rank was told to stop by, if it was. Set by a signal handler, which must take no lock."""
        self.is_open = False
        """True while a signal is noted instead of ending this rank at once."""
        self.members = 0
        """The ranks that train are the first ones, so many."""
        self.seconds = 0.0
        """How long the ranks may take."""
        self._changed = threading.Condition()
        self._begun = 0
        self._held: int | None = None
        self._stop: int | None = None

    def open(self, *, members: int, start: int, seconds: float) -> None:
        """Note signals from now on, if ``seconds`` are above 0. This rank trains from iteration ``start``."""
        self.members, self._begun, self.seconds = members, start, seconds
        self.is_open = seconds > 0

    def is_due(self, iteration: int) -> bool:
        """True if ``iteration`` must not begin, because all ranks stop here. Waits while they find out where."""
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
        """Let this rank begin no further iteration; how many it has begun, the first ones of the run included."""
        with self._changed:
            if self._held is None:
                self._held = self._begun
            return self._held

    def meet_at(self, places: Sequence[int]) -> None:
        """Let this rank go on to where the fastest one has come to, and stop there."""
        with self._changed:
            self._stop = self._held = max(places)
            self._changed.notify_all()
