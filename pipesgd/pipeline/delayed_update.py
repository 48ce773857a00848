"""When gradients that arrive late are applied, and how: for ``Pipelined``, and for simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipesgd.flat_buffer import give_gradients
from pipesgd.optim import hyperparameters
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.hyperparameters import Hyperparameters
from pipesgd.optim.step import count_as_stepped
from pipesgd.pipeline.divergence_guard import Guard
from pipesgd.pipeline.prediction import make_prediction


class LateUpdates:
    """Updates by gradients that were computed up to K-1 iterations ago.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        parameters: those that it updates.
        width: iterations in flight, K.
        warmup_iterations: first iterations that run at width 1.
        prediction: by name; there is none at width 1.
        guard: whether there is one; likewise.
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
        prediction: str,
        guard: bool,
        clip: Clipping,
    ):
        self.width = width
        self.warmup_iterations = warmup_iterations
        self._prediction_name = prediction if width > 1 else "none"
        self.prediction = make_prediction(self._prediction_name, parameters, optimizer, clip)
        self.guard = Guard() if guard and width > 1 else None
        self._optimizer = optimizer
        self._parameters = parameters
        self._clip = clip

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """Update these parameters from now on, when no gradient of the others is in flight. The prediction begins anew.

        Raises:
            UserInputError: the optimizer cannot be copied for the prediction.
        """
        self.prediction = make_prediction(self._prediction_name, parameters, self._optimizer, self._clip)
        self._parameters = parameters

    def width_after(self, iterations: int) -> int:
        """The width at which gradients are applied once those of so many iterations are handed over."""
        synchronous = iterations <= self.warmup_iterations
        if self.guard is not None:
            synchronous |= self.guard.is_synchronous(iterations)
        return 1 if synchronous else self.width

    def hand_over(self) -> Hyperparameters:
        """For a gradient that is handed over now: the optimizer's options, to apply it with."""
        count_as_stepped(self._optimizer)
        return hyperparameters.current(self._optimizer)

    def apply(self, mean: Sequence[Tensor], kept: Sequence[Tensor], options: Hyperparameters) -> None:
        """One step of the optimizer, on the true weights.

        Args:
            mean: over the ranks, of the gradients of one iteration, shaped like the parameters; changed in place.
            kept: what the prediction kept of this rank's gradient.
            options: those that ``hand_over`` gave.
        """
        self.prediction.correct(mean, kept)
        self._clip(mean)
        give_gradients(self._parameters, mean)
        with hyperparameters.set_to(self._optimizer, options):
            self._optimizer.step()
        give_gradients(self._parameters, [None] * len(self._parameters))
