"""Application of gradients that arrive late, for ``Pipelined`` and for simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesgd.flat_buffer import give_gradients
from pipesgd.optim import hyperparameters
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.step import count_as_stepped
from pipesgd.pipeline.divergence_guard import Guard
from pipesgd.pipeline.islands import Island
from pipesgd.pipeline.prediction import Agreement, NoPrediction, Prediction, SwappedWeights, Unapplied, make_prediction
from pipesgd.strategy import Comparison


@dataclass(frozen=True)
class Guessed:
    """A rank's guess of a mean that arrives, and its quality."""

    unapplied: Unapplied
    comparison: Comparison | None
    agreement: Agreement


class DelayedUpdate:
    """Updates by gradients that were computed up to K-1 iterations ago.

    1. ``hand_over`` is called with a gradient of this rank when its all-reduce begins;
    2. ``arrived``, up to K-1 iterations later, applies its mean to the true weights;
    3. ``predict`` lets the parameters hold the weights that are expected once all gradients in flight are applied.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        parameters: the parameters that it updates.
        width: iterations in flight, K.
        warmup_iterations: first iterations that run at width 1.
        prediction: a name or a class; not used at width 1, unless it is a class that says so (``at_width_1``).
        guard: whether to fall back to width 1 when gradients blow up. At width 1 it judges nothing, but its state is
            kept for a later pipeline.
        clip: clipping of averaged gradients, and of the guesses in their place in a prediction; None clips nothing.
        island: the ranks that hold the weights together with this one; None if it holds them alone.
        written: function that is called once with a parameter that was written while it held predicted weights.

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
        clip: Clipping | None,
        island: Island | None = None,
        written: Callable[[Tensor], None] | None = None,
    ):
        self.width = width
        self.warmup_iterations = warmup_iterations
        used = width > 1 or (isinstance(prediction, type) and prediction.at_width_1)
        self._kind = prediction if used else "none"
        self._guard = Guard() if guard else None
        self._optimizer = optimizer
        self._clip = clip
        self._island = island
        self._prediction = make_prediction(self._kind, parameters, optimizer, clip)
        if island is not None:
            self._prediction.add_up = island.add_up
            self._prediction.weights.exchanged = island.gather_again
        self._prediction.weights.notices.tell = written
        self._parameters = parameters

    @property
    def weights(self) -> SwappedWeights:
        """True and predicted weights, one of which the parameters hold."""
        return self._prediction.weights

    @property
    def predicts(self) -> bool:
        """True if the parameters may hold predicted weights."""
        return not isinstance(self._prediction, NoPrediction)

    @property
    def keeps_gradients(self) -> bool:
        """True if ``hand_over`` keeps the gradient itself."""
        return self._prediction.keeps_gradients

    @property
    def wants_norms(self) -> bool:
        """True if ``arrived`` needs the norms of means, for a guard."""
        return self._guard is not None and self.width > 1

    @property
    def nbytes(self) -> int:
        """Memory in bytes that the prediction holds, besides what it keeps of gradients in flight."""
        return self._prediction.nbytes

    def width_after(self, iterations: int) -> int:
        """Return the width at which gradients are applied after this number of iterations has been handed over."""
        synchronous = iterations <= self.warmup_iterations
        if self._guard is not None:
            synchronous |= self._guard.is_synchronous(iterations)
        return 1 if synchronous else self.width

    def hand_over(self, local: Sequence[Tensor | None]) -> Unapplied:
        """Return what to keep of this rank's gradient (None for parameters without one), whose all-reduce begins."""
        count_as_stepped(self._optimizer)
        return Unapplied(self._prediction.keep(local), hyperparameters.current(self._optimizer))

    def compare(self, mean: Sequence[Tensor], unapplied: Unapplied) -> Comparison | None:
        """Compare ``mean`` with its guess; None if there was none. Any thread may call this, before ``arrived``."""
        if self._island is None:
            return self._prediction.compare(mean, unapplied.kept)
        return self._prediction.compare(self._island.counted(mean), self._island.counted(unapplied.kept))

    def arrived(
        self,
        mean: Sequence[Tensor],
        guessed: Sequence[Guessed],
        *,
        norm: float | None,
        iteration: int,
    ) -> bool:
        """Apply a mean to the true weights, by one step of the optimizer with the options of its ``hand_over``.

        Args:
            mean: mean over ranks of one iteration's gradients, finite, shaped like the parameters; changed in place.
            guessed: the guess of each rank in this process; real ranks have a process each.
            norm: norm of the mean, the same on all ranks; for a guard.
            iteration: the iteration in which the mean is applied.

        Returns:
            True if the guard has found that staleness hurts, so that a period at width 1 begins.
        """
        guard = self._guard if self.wants_norms else None
        fell_back = guard is not None and norm is not None and guard.observe(norm, iteration)
        self.learn(mean, guessed)
        if self._clip is not None:
            self._clip(mean)
        give_gradients(self._parameters, mean)
        with hyperparameters.set_to(self._optimizer, guessed[0].unapplied.hyperparameters):
            self._optimizer.step()
        give_gradients(self._parameters, [None] * len(self._parameters))
        return fell_back

    def learn(self, mean: Sequence[Tensor], guessed: Sequence[Guessed]) -> None:
        """Take note of a mean that is to be applied, whose guesses are ``guessed``; it may be changed in place."""
        for one in guessed:
            self._prediction.learn(mean, one.unapplied.kept, one.comparison, one.agreement)
        self._prediction.correct(mean, guessed[0].unapplied.kept)

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        """Let the parameters hold the weights expected once the gradients ``in_flight``, oldest first, are applied."""
        self._prediction.predict(in_flight, agreement)
        if self.weights.are_predicted:
            self.weights.notices.begin()

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to continue identically after a restart, besides the gradients in flight."""
        return {
            "prediction": self._prediction.state_dict(),
            "guard": None if self._guard is None else self._guard.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self._prediction.load_state_dict(state["prediction"])
        if self._guard is not None and state["guard"] is not None:
            self._guard.load_state_dict(state["guard"])
