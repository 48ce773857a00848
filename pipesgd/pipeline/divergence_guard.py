"""Falls back to width 1 for a while when gradients blow up, which is how harmful staleness shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FACTOR = 5.0
"""A norm so many times its running mean is a blow-up: synchronous training stays below 4 in its wildest iterations."""
DECAY = 0.98
"""Of the running mean: about 50 iterations."""
SETTLE = 20
"""Iterations until the running mean says something."""
SYNCHRONOUS_ITERATIONS = 100
"""How long a fallback lasts."""


class Guard:
    """Watches the norm of the averaged gradient, which all ranks must see alike: they fall back in the same iteration.

    Measured (experiments/LOG.md): where plain staleness ends in divergence, the norm grows to ten times its mean some
    tens of iterations before. How well local gradients agree with the mean does not tell: they agree better, not worse.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._seen = 0
        self._synchronous_until = 0

    def is_synchronous(self, iteration: int) -> bool:
        """Whether ``iteration`` runs at width 1."""
        return iteration < self._synchronous_until

    def saw(self, norm: float, iteration: int) -> bool:
        """Note the ``norm`` of a gradient applied in ``iteration``; return True if a fallback begins with it.

        Nothing is judged before a mean above zero has settled. Only finite norms enter the mean. During a fallback
        they enter up to ``FACTOR`` times the mean, so that the mean follows a lasting change of level.
        """
        settled = self._seen >= SETTLE
        blows_up = settled and not norm <= FACTOR * self._mean  # NaN does
        if blows_up and not self.is_synchronous(iteration):
            self._synchronous_until = iteration + SYNCHRONOUS_ITERATIONS
            return True
        if math.isfinite(norm) and (self._mean or norm):
            norm = min(norm, FACTOR * self._mean) if blows_up else norm
            weight = max(1 - DECAY, 1 / (self._seen + 1))
            self._mean += weight * (norm - self._mean)
            self._seen += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """What it has seen."""
        return {"mean": self._mean, "seen": self._seen, "synchronous_until": self._synchronous_until}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self._mean, self._seen = state["mean"], state["seen"]
        self._synchronous_until = state["synchronous_until"]
