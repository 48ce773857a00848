"""Fallback to width 1 for a while when gradients blow up, which is the sign of harmful staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FACTOR = 5.0
"""Multiple of its running mean at which a norm is a blow-up: even the wildest synchronous training stays below 4."""
DECAY = 0.98
"""Decay of the running mean per iteration: it covers about 50 iterations."""
SETTLE = 20
"""Iterations until the running mean is meaningful."""
SYNCHRONOUS_ITERATIONS = 100
"""Length of a fallback in iterations."""


class Guard:
    """Watches the norm of the averaged gradient, which must be the same on all ranks, so that they fall back together.

    Measurements (experiments/LOG.md) show that where plain staleness ends in divergence, the norm grows to ten times
    its mean some tens of iterations before. Agreement of local gradients with the mean is no sign: it improves.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._seen = 0
        self._synchronous_until = 0

    def is_synchronous(self, iteration: int) -> bool:
        """Return True if ``iteration`` runs at width 1."""
        return iteration < self._synchronous_until

    def observe(self, norm: float, iteration: int) -> bool:
        """Note the ``norm`` of a gradient applied in ``iteration``; return True if a fallback begins with it.

        No norm is judged before a mean above zero has settled. Only finite norms enter the mean. During a fallback
        they enter capped at ``FACTOR`` times the mean, so that the mean follows a lasting change of level.
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
        """Return the running mean, the number of norms in it, and the end of the fallback."""
        return {"mean": self._mean, "seen": self._seen, "synchronous_until": self._synchronous_until}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self._mean, self._seen = state["mean"], state["seen"]
        self._synchronous_until = state["synchronous_until"]
