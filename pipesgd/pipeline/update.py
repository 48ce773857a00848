"""The weight half of a pipeline: late means are applied to the weights, and those that are to come are predicted.

It knows neither ranks nor connections: real ranks and simulated ones apply gradients by the same code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipesgd.flat_buffer import are_finite, check_shapes, give_gradients, on_device
from pipesgd.optim import hyperparameters
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.loss_scale import LossScale
from pipesgd.optim.step import OwnSteps, check_copies_gradients, count_as_stepped
from pipesgd.pipeline.prediction import Agreement, NoPrediction, SwappedWeights, Unapplied, make_prediction
from pipesgd.pipeline.width import Width
from pipesgd.sections import Updates
from pipesgd.strategy import Comparison


class Whole(Protocol):
    """A replica of the weights of which this process holds a part: what is asked of all of its parts."""

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of all gradients of the replica, given this part of them."""

    def is_so(self, flag: bool) -> bool:
        """Return True if ``flag`` is true of all parts."""

    def counted(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the values that this part counts, so that all together count each value once."""

    def add_up(self, numbers: Sequence[float]) -> Sequence[float]:
        """Return the sums of ``numbers`` over the parts."""

    def gather_again(self) -> None:
        """Forget weights that were gathered from other parts, since they have changed."""


@dataclass(frozen=True)
class Guessed:
    """A rank's guess of a mean that arrives, and its quality."""

    unapplied: Unapplied
    comparison: Comparison | None
    agreement: Agreement


class Update:
    """Updates by gradients that were computed up to K-1 iterations ago.

    1. ``keep`` is called with a gradient of this rank when it departs;
    2. ``compare`` may be called in any thread when its mean has arrived;
    3. ``apply``, up to K-1 iterations later, applies that mean to the true weights;
    4. ``predict`` lets the parameters hold the weights that are expected once all gradients in flight are applied.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        parameters: the parameters that it updates.
        width: iterations in flight.
        updates: how gradients are applied and predicted. A prediction is not used at width 1, unless it is a class that
            says so (``at_width_1``).
        loss_scale: scale of the losses; None if there is none.
        whole: the replica of which this process holds a part; None if it holds the whole.
        written: function that is called once with a parameter that was written while it held predicted weights.

    Raises:
        UserInputError: there is no such prediction, or the optimizer cannot be copied for it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        width: Width,
        updates: Updates,
        *,
        loss_scale: LossScale | None = None,
        whole: Whole | None = None,
        written: Callable[[Tensor], None] | None = None,
    ):
        self.parameters = parameters
        self.width = width
        self.loss_scale = loss_scale
        self.agreement = Agreement()
        self.skips = updates.on_nonfinite == "skip" or loss_scale is not None
        """True if a mean that is not finite is left out; else it is an error."""
        self.own_steps = OwnSteps(optimizer)
        """Steps of the optimizer, which are no one else's once it refuses others."""
        self._optimizer = optimizer
        self._whole = whole
        self._clip = None if updates.clip_norm is None and updates.clip_value is None else clipping_of(updates, whole)
        kind = updates.prediction
        used = width.most > 1 or (isinstance(kind, type) and kind.at_width_1)
        self._prediction = make_prediction(kind if used else "none", parameters, optimizer, self._clip)
        if whole is not None:
            self._prediction.add_up = whole.add_up
            self._prediction.weights.exchanged = whole.gather_again
        self._prediction.weights.notices.tell = written
        self._copies_gradients = False
        """True once an update has shown that the optimizer keeps no gradient of which it has made no copy."""

    @property
    def weights(self) -> SwappedWeights:
        """True and predicted weights, one of which the parameters hold."""
        return self._prediction.weights

    @property
    def predicts(self) -> bool:
        """True if the parameters may hold predicted weights."""
        return not isinstance(self._prediction, NoPrediction)

    @property
    def keeps_own(self) -> bool:
        """True if this rank's own gradients are kept until their mean has arrived, as they are at width 1."""
        return self._prediction.keeps_gradients or self.width.most == 1

    # ---- 1. A gradient departs

    def keep(self, local: Sequence[Tensor | None], scale: float = 1.0) -> Unapplied:
        """Return what to keep of this rank's gradient (None for parameters without one), which departs.

        ``scale`` is the loss scale in effect when it was computed. Of a gradient that will cause no update, since it is
        not finite, no guess is kept.
        """
        count_as_stepped(self._optimizer)
        kept = self._prediction.keep(local)
        if self.skips and kept and not self._is_so(are_finite(one for one in local if one is not None)):
            kept = []
        return Unapplied(kept, hyperparameters.current(self._optimizer), scale)

    def _is_so(self, flag: bool) -> bool:
        return flag if self._whole is None else self._whole.is_so(flag)

    # ---- 2. Its mean arrives

    def compare(self, mean: Sequence[Tensor], unapplied: Unapplied) -> Comparison | None:
        """Compare ``mean`` with its guess; None if there was none."""
        if self._whole is None:
            return self._prediction.compare(mean, unapplied.kept)
        return self._prediction.compare(self._whole.counted(mean), self._whole.counted(unapplied.kept))

    # ---- 3. The mean is applied

    def observe_scale(self, finite: bool, unapplied: Unapplied) -> None:
        """Let the loss scale follow the arrival of a mean, which may not be finite."""
        if self.loss_scale is not None:
            self.loss_scale.observe(finite, unapplied.scale)

    def apply(self, mean: Sequence[Tensor], guessed: Sequence[Guessed], *, norm: float | None, iteration: int) -> bool:
        """Apply a mean to the true weights, by one step of the optimizer with the options of its ``keep``.

        Args:
            mean: mean over ranks of one iteration's gradients, finite, shaped like the parameters; changed in place.
            guessed: the guess of each rank in this process; real ranks have a process each.
            norm: norm of the mean, the same on all ranks where ``width`` wants norms.
            iteration: number of iterations handed over so far, that of this step included.

        Returns:
            True if a period at width 1 begins.
        """
        fell_back = self.width.wants_norms and norm is not None and self.width.observe(norm, iteration)
        self.learn(mean, guessed)
        if self._clip is not None:
            self._clip(mean)
        give_gradients(self.parameters, mean)
        with hyperparameters.set_to(self._optimizer, guessed[0].unapplied.hyperparameters), self.own_steps.taken():
            self._optimizer.step()
        give_gradients(self.parameters, [None] * len(self.parameters))
        return fell_back

    def learn(self, mean: Sequence[Tensor], guessed: Sequence[Guessed]) -> None:
        """Take note of a mean that is to be applied, whose guesses are ``guessed``; it may be changed in place."""
        for one in guessed:
            self._prediction.learn(mean, one.unapplied.kept, one.comparison, one.agreement)
        self._prediction.correct(mean, guessed[0].unapplied.kept)

    def check_copies(self, gradients: Sequence[Tensor]) -> None:
        """Look once whether the optimizer, which has stepped with ``gradients``, keeps one of them itself.

        Raises:
            UserInputError: it does so.
        """
        if not self._copies_gradients:
            check_copies_gradients(self._optimizer, gradients)
            self._copies_gradients = True

    # ---- 4. Weights are predicted

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement | None = None) -> None:
        """Let the parameters hold the weights expected once the gradients ``in_flight``, oldest first, are applied.

        ``agreement`` is by default that of this process's rank; simulated ranks have one each.
        """
        self._prediction.predict(in_flight, agreement or self.agreement)
        if self.weights.are_predicted:
            self.weights.notices.begin()

    # ---- State

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to continue identically after a restart, besides the gradients in flight."""
        return {
            "prediction": self._prediction.state_dict(),
            "agreement": self.agreement.state_dict(),
            "width": self.width.state_dict(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``UserInputError`` if ``state`` is of other parameters."""
        check_shapes(state["agreement"]["missed"], self.parameters)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``; the parameters hold the true weights of that moment."""
        device = self.parameters[0].device
        self.weights.adopt()
        self._prediction.load_state_dict(on_device(state["prediction"], device))
        self.agreement.load_state_dict(on_device(state["agreement"], device))
        self.width.load_state_dict(state["width"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])


def clipping_of(updates: Updates, whole: Whole | None = None) -> Clipping:
    """Return the clipping that ``updates`` ask for, of all gradients of a replica together."""
    clip = Clipping(norm=updates.clip_norm, value=updates.clip_value)
    return clip if whole is None else dataclasses.replace(clip, total_norm=whole.total_norm)
