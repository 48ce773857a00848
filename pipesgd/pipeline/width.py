"""Width of the next iteration, as an object with state that all ranks compute alike.

It is fed only with what is the same on all ranks: the number of iterations, the norms of means on which they agree, and
learning rates. Rates are the user's, so ranks compare what follows from them, with the header of each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pipesgd.sections import AUTO

FACTOR = 5.0
"""Multiple of its running mean at which a norm is a blow-up: even the wildest synchronous training stays below 4."""
DECAY = 0.98
"""Decay of the running mean per iteration: it covers about 50 iterations."""
SETTLE = 20
"""Iterations until the running mean is meaningful."""
SYNCHRONOUS_ITERATIONS = 100
"""Length of a fallback in iterations."""
ARRIVED = 0.85
"""Share of its maximum at which a learning rate has risen: a start until 0.86 lost nothing, one until 0.52 did."""


Groups: TypeAlias = Sequence[Mapping[str, Any]]
"""Groups of parameters of an optimizer, with their options."""


class Width:
    """The same width in all iterations.

    Args:
        most: iterations in flight, K.
    """

    wants_norms = False
    """True if ``observe`` needs the norms of means, the same bits on all ranks."""

    def __init__(self, most: int):
        self.most = most

    @property
    def follows_rates(self) -> bool:
        """True if the rates of the next gradient may change the width."""
        return False

    def of(self, iteration: int, groups: Groups) -> int:
        """Return the width at which the gradient of this iteration is applied.

        It is called once for each, in order, when the gradient departs. ``groups`` are the optimizer's groups of
        parameters, with the options under which it was computed.
        """
        return self.most

    def observe(self, norm: float, iteration: int) -> bool:
        """Note the ``norm`` of a mean applied in ``iteration``; return True if a period at width 1 begins with it."""
        return False

    def note_skip(self) -> None:
        """Note that an update was left out, alike on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to continue identically after a restart."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``, also of a width without or with other changes."""


class FixedStart(Width):
    """Width 1 in the first iterations, and then the same one.

    Args:
        most: the width after them.
        iterations: number of the first iterations.
    """

    def __init__(self, most: int, iterations: int):
        super().__init__(most)
        self._iterations = iterations

    def of(self, iteration: int, groups: Groups) -> int:
        return 1 if iteration < self._iterations else self.most


class SynchronousStart(Width):
    """Width 1 while the learning rate rises at the start of a training, and then the same one.

    Late gradients cost accuracy while the rate rises, and little later (experiments/LOG.md). The first gradient is
    late unless its rate is known to rise: a group of the optimizer has a ``max_lr`` above its ``lr``, or an ``lr``
    below its ``initial_lr``, as torch's schedules leave them. If the second one's rate is above the first one's, the
    start begins there: nothing changes for a rate that does not rise.

    The start ends with the first gradient of which every rate that has risen since the one before is at least
    ``ARRIVED`` of its group's ``max_lr``, where there is one. A later rise does not return to it. Rates that stand
    still after an update that was left out say nothing: Accelerate's schedules skip that step, as loops with a
    GradScaler do.

    Args:
        most: the width after the start.
    """

    def __init__(self, most: int):
        super().__init__(most)
        self._shares: list[float] = []
        """Rates of the gradient before, as shares of ``max_lr`` where there is one; empty if there was none."""
        self._synchronous = False
        self._over = False
        self._skipped = False
        """True if an update was left out since the gradient before."""

    @property
    def follows_rates(self) -> bool:
        return not self._over

    def of(self, iteration: int, groups: Groups) -> int:
        if self._over:
            return self.most
        shares, before = [_share(group) for group in groups], self._shares
        stands_still, self._skipped = self._skipped and shares == before, False
        if stands_still:
            return 1 if self._synchronous else self.most
        rises = [_is_to_rise(group) for group in groups]
        if before:
            # A group that was added later has no rate before.
            rises = [share > earlier for share, earlier in zip(shares, before, strict=False)]
        self._synchronous = any(
            rise and ("max_lr" not in group or share < ARRIVED)
            for rise, share, group in zip(rises, shares, groups, strict=False)
        )
        self._over = bool(before) and not self._synchronous
        self._shares = shares
        return 1 if self._synchronous else self.most

    def note_skip(self) -> None:
        self._skipped = True

    def state_dict(self) -> dict[str, Any]:
        """Return the rates of the newest gradient, and how far the start has come."""
        flags = {"synchronous": self._synchronous, "over": self._over, "skipped": self._skipped}
        return {"shares": list(self._shares), **flags}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "over" in state:  # else it is of a width without such a start
            self._shares = list(state.get("shares", ()))  # states of 2026-11-29 and before have plain rates
            self._synchronous, self._over = state["synchronous"], state["over"]
            self._skipped = state.get("skipped", False)


def _share(group: Mapping[str, Any]) -> float:
    """Return the learning rate of ``group`` as a share of its ``max_lr``, if it has one.

    So rates that are scaled for another number of ranks are neither a rise nor a fall. An optimizer of the user's own
    may have no rate.
    """
    return float(group.get("lr", 0.0)) / (float(group.get("max_lr", 1.0)) or 1.0)


def _is_to_rise(group: Mapping[str, Any]) -> bool:
    rate = float(group.get("lr", 0.0))
    return rate < float(group.get("max_lr", rate)) or rate < float(group.get("initial_lr", rate))


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

    def of(self, iteration: int, groups: Groups) -> int:
        width = self._width.of(iteration, groups)  # in a fallback, too: it follows all rates
        return 1 if iteration < self._synchronous_until else width

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

    def note_skip(self) -> None:
        self._width.note_skip()

    def state_dict(self) -> dict[str, Any]:
        """Return the running mean, the number of norms in it, and the end of the fallback."""
        own = {"mean": self._mean, "seen": self._seen, "synchronous_until": self._synchronous_until}
        return own | self._width.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._width.load_state_dict(state)
        if "mean" in state:  # else it is of a width without a guard
            self._mean, self._seen = state["mean"], state["seen"]
            self._synchronous_until = state["synchronous_until"]


def make_width(width: int, synchronous_start: int | str = AUTO, *, guard: bool = False) -> Width:
    """Return the width of a pipeline of width K, with what its options ask for."""
    if synchronous_start == AUTO:
        made = SynchronousStart(width) if width > 1 else Width(width)
    else:
        made = FixedStart(width, int(synchronous_start)) if synchronous_start else Width(width)
    return Guarded(made) if guard else made
