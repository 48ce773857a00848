"""Comparison of iteration times with the prediction."""

from __future__ import annotations

import statistics

from pipesgd.planning.planned import Planned

WINDOW, WINDOWS = 20, 3
"""Iterations, or windows of local steps, whose median is compared with the prediction; and medians in a row that must
be off to be reported."""
TOLERANCE = 0.1
"""Share by which a median may be beyond the prediction's interval."""
SETTLING = 5
"""Number of iterations at the start of a run that take longer."""


class Drift:
    """Detector of iteration times that stay outside the predicted interval; it reports once."""

    def __init__(self, planned: Planned):
        self._planned = planned
        self._seen = 0
        self._held: list[float] = []
        """Iterations of a window of local steps that has not ended."""
        self._window: list[float] = []
        self._sides: list[int] = []
        self.contradicted = False
        """True once iteration times have stayed outside of the interval."""

    def observe(self, seconds: float) -> str | None:
        """Record the time of an iteration; return what is to be reported, if anything."""
        self._held.append(seconds)
        whole = self._planned.windows(self._held)
        if not whole:
            return None
        self._held = []
        self._seen += 1
        if self.contradicted or self._seen <= SETTLING:
            return None
        self._window += whole
        if len(self._window) < WINDOW:
            return None
        median, (low, _, high) = statistics.median(self._window), self._planned.median
        above, below = median > high * (1 + TOLERANCE), median < low / (1 + TOLERANCE)
        self._sides.append(int(above) - int(below))
        self._window = []
        if abs(sum(self._sides[-WINDOWS:])) < WINDOWS:
            return None
        self.contradicted = True
        return self._planned.contradicted(median)
