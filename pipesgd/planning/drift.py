"""Whether iterations take as long as was predicted."""

from __future__ import annotations

import statistics

from pipesgd.planning.planned import Planned

WINDOW, WINDOWS = 20, 3
"""Iterations whose median is compared with the prediction; and how many such in a row must be off to be mentioned."""
TOLERANCE = 0.1
"""By what share a median may be beyond the prediction's interval."""
SETTLING = 5
"""First iterations of a run, which take longer."""


class Drift:
    """Tells once when iterations take another time than was predicted, for long."""

    def __init__(self, planned: Planned):
        self._planned = planned
        self._seen = 0
        self._window: list[float] = []
        self._sides: list[int] = []
        self._told = False

    def saw(self, seconds: float) -> str | None:
        """Take note of an iteration; what is to be said, if anything."""
        self._seen += 1
        if self._told or self._seen <= SETTLING:
            return None
        self._window.append(seconds)
        if len(self._window) < WINDOW:
            return None
        median, (low, _, high) = statistics.median(self._window), self._planned.median
        above, below = median > high * (1 + TOLERANCE), median < low / (1 + TOLERANCE)
        self._sides.append(int(above) - int(below))
        self._window = []
        if abs(sum(self._sides[-WINDOWS:])) < WINDOWS:
            return None
        self._told = True
        return self._planned.contradicted(median)
