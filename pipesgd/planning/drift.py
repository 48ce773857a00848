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
REFILL = 2
"""Iterations after one that is not compared in which the pipeline fills again."""


class Drift:
    """Detector of iteration times that stay outside the predicted interval; it reports once.

    Iterations that are synchronous, at the start and after the guard fell back, are not compared with a prediction for
    another width, nor whole gradients at the start with one for factors of low rank.

    Args:
        planned: the plan of the run.
    """

    def __init__(self, planned: Planned):
        self._planned = planned
        self._refills = 0
        """Iterations until the pipeline is full again."""
        self._seen = 0
        self._held: list[float] = []
        """Iterations of a window of local steps that has not ended."""
        self._window: list[float] = []
        self._sides: list[int] = []
        self._reported = False

    def observe(self, seconds: float, *, unlike: bool = False) -> str | None:
        """Record the time of an iteration, and whether it was not of the kind that is planned; return what to report.

        An iteration is ``unlike`` if its width is less than that of the plan, or its gradient was sent whole.
        """
        if unlike:
            self._refills = REFILL
            return None
        if self._refills:
            self._refills -= 1
            return None
        return self._compare(seconds)

    def _compare(self, seconds: float) -> str | None:
        self._held.append(seconds)
        whole = self._planned.windows(self._held)
        if not whole:
            return None
        self._held = []
        self._seen += 1
        if self._reported or self._seen <= SETTLING:
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
        self._reported = True
        return self._planned.contradicted(median)
