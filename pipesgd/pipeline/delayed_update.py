"""Applying gradients that arrive late: for ``Pipelined``, and for simulated ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesgd.flat_buffer import give_gradients
from pipesgd.optim import hyperparameters
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.step import count_as_stepped
from pipesgd.pipeline.divergence_guard import Guard
from pipesgd.pipeline.prediction import Agreement, Prediction, SwappedWeights, Unapplied, make_prediction
from pipesgd.strategy import Comparison


@dataclass(frozen=True)
class Guessed:
    """What a rank had in the place of a mean that arrives, and how good it was."""

    unapplied: Unapplied
    comparison: Comparison | None
    agreement: Agreement


class DelayedUpdate:
    """Updates by gradients that were computed up to K-1 iterations ago.

    1. ``hand_over`` a gradient of this rank when it begins its way;
    2. ``arrived``, up to K-1 iterations later, applies its mean to the true weights;
    3. ``predict`` lets the parameters hold the weights that are expected when all that is still in flight is applied.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        parameters: those that it updates.
        width: iterations in flight, K.
        warmup_iterations: first iterations that run at width 1.
        prediction: by name or class; there is none at width 1.
        guard: whether to fall back to width 1 when gradients blow up; never at width 1.
        clip: how averaged gradients are clipped, and what stands for them in a prediction.

    Raises:
        UserInputError: there is no such prediction, or the optimizer cannot be copied for it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        *,
        width: int,
        warmup_iterations: int,
        prediction: str | type[Prediction],
        guard: bool,
        clip: Clipping,
    ):
        self.width = width
        self.warmup_iterations = warmup_iterations
        self._kind = prediction if width > 1 else "none"
        self._prediction = make_prediction(self._kind, parameters, optimizer, clip)
        self._guard = Guard() if guard and width > 1 else None
        self._optimizer = optimizer
        self._parameters = parameters
        self._clip = clip

    @property
    def weights(self) -> SwappedWeights:
        """The true weights and the predicted ones, and which of them the parameters hold."""
        return self._prediction.weights

    @property
    def keeps_gradients(self) -> bool:
        """True if ``hand_over`` keeps the gradient itself."""
        return self._prediction.keeps_gradients

    @property
    def wants_norms(self) -> bool:
        """True if ``arrived`` needs the norms of means, for a guard."""
        return self._guard is not None

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """Update these parameters from now on, when no other gradient is in flight; the prediction starts again.

        Raises:
            UserInputError: the optimizer cannot be copied for the prediction.
        """
        self._prediction = make_prediction(self._kind, parameters, self._optimizer, self._clip)
        self._parameters = parameters

    def width_after(self, iterations: int) -> int:
        """The width at which gradients are applied once those of this number of iterations are handed over."""
        synchronous = iterations <= self.warmup_iterations
        if self._guard is not None:
            synchronous |= self._guard.is_synchronous(iterations)
        return 1 if synchronous else self.width

    def hand_over(self, local: Sequence[Tensor | None]) -> Unapplied:
        """What to keep of this rank's gradient, which begins its way now; None for parameters that have none."""
        count_as_stepped(self._optimizer)
        return Unapplied(self._prediction.keep(local), hyperparameters.current(self._optimizer))

    def compare(self, mean: Sequence[Tensor], unapplied: Unapplied) -> Comparison | None:
        """How well what stood for ``mean`` did; None if nothing did. Any thread may call this, before ``arrived``."""
        return self._prediction.compare(mean, unapplied.kept)

    def arrived(
        self, mean: Sequence[Tensor], guessed: Sequence[Guessed], *, norm: float | None, iteration: int
    ) -> bool:
        """Apply a mean to the true weights, by one step of the optimizer with the options of its ``hand_over``.

        Args:
            mean: over the ranks, of one iteration's gradients, finite, shaped like the parameters; changed in place.
            guessed: by each rank in this process; real ranks have a process of their own.
            norm: of the mean, the same on all ranks; for a guard.
            iteration: the one that this is applied in.

        Returns:
            True if the guard has found that staleness hurts, and a time at width 1 begins.
        """
        fell_back = self._guard is not None and norm is not None and self._guard.saw(norm, iteration)
        for one in guessed:
            self._prediction.learn(mean, one.unapplied.kept, one.comparison, one.agreement)
        late = guessed[0].unapplied
        self._prediction.correct(mean, late.kept)
        self._clip(mean)
        give_gradients(self._parameters, mean)
        with hyperparameters.set_to(self._optimizer, late.hyperparameters):
            self._optimizer.step()
        give_gradients(self._parameters, [None] * len(self._parameters))
        return fell_back

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        """Let the parameters hold the weights that are expected when ``in_flight``, oldest first, are applied."""
        self._prediction.predict(in_flight, agreement)

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to continue the same after a restart, besides what is in flight."""
        return {
            "prediction": self._prediction.state_dict(),
            "guard": None if self._guard is None else self._guard.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self._prediction.load_state_dict(state["prediction"])
        if self._guard is not None and state["guard"] is not None:
            self._guard.load_state_dict(state["guard"])
