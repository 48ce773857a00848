"""Comparison of iteration times with the prediction."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from pipesgd.pipeline.width import SYNCHRONOUS_ITERATIONS
from pipesgd.planning.planned import Planned

WINDOW, WINDOWS = 20, 3
"""Iterations, or windows of local steps, whose median is compared with the prediction; and medians in a row that must
be off to be reported."""
TOLERANCE = 0.1
"""Share by which a median may be beyond the prediction's interval."""
SETTLING = 5
"""Number of iterations at the start of a run that take longer."""
REFILL = 2
"""Iterations after a fallback to width 1 in which the pipeline fills again."""


class Drift:
    """Detector of iteration times that stay outside the predicted interval; it reports once.

    Iterations at width 1, in a warm-up and after the guard fell back, are not compared with a prediction for another
    width.

    Args:
        planned: the plan of the run.
        warmup_iterations: first iterations that run at width 1.
        fell_back: iterations of an earlier attempt at this run in which the guard fell back.
    """

    def __init__(self, planned: Planned, *, warmup_iterations: int = 0, fell_back: Iterable[int] = ()):
        self._planned = planned
        self._synchronous_until = max([warmup_iterations, *map(_end_of_fallback, fell_back)])
        self._seen = 0
        self._held: list[float] = []
        """Iterations of a window of local steps that has not ended."""
        self._window: list[float] = []
        self._sides: list[int] = []
        self._reported = False

    def observe(self, iteration: int, seconds: float, *, fell_back: bool = False) -> str | None:
        """Record the time of an iteration, and whether the guard fell back in it; return what is to be reported, if
        anything."""
        synchronous = iteration < self._synchronous_until
        if fell_back:
            self._synchronous_until = _end_of_fallback(iteration)
        return None if synchronous else self._compare(seconds)

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


def _end_of_fallback(iteration: int) -> int:
    """Return the first iteration that is compared again if the guard falls back in ``iteration``."""
    return iteration + 1 + SYNCHRONOUS_ITERATIONS + REFILL
