"""Width of the next iteration, as an object with state that all ranks compute alike.

It is fed only with what is the same on all ranks: the number of iterations, and the norms of means on which they agree.
"""

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


class Width:
    """The same width in all iterations.

    Args:
        most: iterations in flight, K.
    """

    wants_norms = False
    """True if ``observe`` needs the norms of means, the same bits on all ranks."""

    def __init__(self, most: int):
        self.most = most

    def after(self, iterations: int) -> int:
        """Return the width at which gradients are applied after this number of iterations has been handed over."""
        return self.most

    def observe(self, norm: float, iteration: int) -> bool:
        """Note the ``norm`` of a mean applied in ``iteration``; return True if a period at width 1 begins with it."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to continue identically after a restart."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``, also of a width without or with other changes."""


class WarmedUp(Width):
    """Width 1 in the first iterations, and then that of another object.

    Args:
        width: the width after them.
        iterations: number of the first iterations.
    """

    def __init__(self, width: Width, iterations: int):
        super().__init__(width.most)
        self._width = width
        self._iterations = iterations

    def after(self, iterations: int) -> int:
        return 1 if iterations <= self._iterations else self._width.after(iterations)


class Guarded(Width):
    """Width 1 for a while when gradients blow up, which is the sign of harmful staleness, and else that of ``width``.

    Measurements (experiments/LOG.md) show that where plain staleness ends in divergence, the norm grows to ten times
    its mean some tens of iterations before. Agreement of local gradients with the mean is no sign: it improves.

    At width 1 it judges nothing, but its state is kept for a later pipeline.
    """

    def __init__(self, width: Width):
        super().__init__(width.most)
        self.wants_norms = width.most > 1
        self._width = width
        self._mean = 0.0
        self._seen = 0
        self._synchronous_until = 0

    def after(self, iterations: int) -> int:
        return 1 if iterations < self._synchronous_until else self._width.after(iterations)

    def observe(self, norm: float, iteration: int) -> bool:
        """Note the ``norm`` of a mean applied in ``iteration``; return True if a fallback begins with it.

        No norm is judged before a mean above zero has settled. Only finite norms enter the mean. During a fallback
        they enter capped at ``FACTOR`` times the mean, so that the mean follows a lasting change of level.
        """
        settled = self._seen >= SETTLE
        blows_up = settled and not norm <= FACTOR * self._mean  # NaN does
        if blows_up and iteration >= self._synchronous_until:
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
        if state:  # else it is of a width without a guard
            self._mean, self._seen = state["mean"], state["seen"]
            self._synchronous_until = state["synchronous_until"]


def make_width(width: int, warmup_iterations: int = 0, *, guard: bool = False) -> Width:
    """Return the width of a pipeline of width K, with what its options ask for."""
    made = Width(width)
    if warmup_iterations:
        made = WarmedUp(made, warmup_iterations)
    return Guarded(made) if guard else made
