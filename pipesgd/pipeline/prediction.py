"""What takes the staleness out: gradients are computed on weights that are predicted from what is still in flight.

A gradient that is applied K-1 iterations late was computed on weights that lack K-1 updates. The predictions here
differ in what they put in place of those:

- ``local``: this rank's own gradients of these iterations (SAPipe, NeurIPS 2022, "local"), each an unbiased estimate of
  the mean that will arrive. The ranks' errors add up to zero, and with one rank, or the same data on all ranks, there
  are none: then it is synchronous training, bit for bit, with any optimizer.
- ``eager``: the same gradients, smaller the less they have agreed with the means so far, and turned back by what they
  missed these by; and from there on along the whole predicted update. Ours; measured in experiments/LOG.md. Where ranks
  agree fully it is ``local``, to the bit.
- ``previous``: the last mean that was applied, once more for each.
- ``nesterov``: gradients of zero: momentum alone goes on (as in DANA, Hakimi et al., 2019).
- ``spectrain``: the last update, once more for each (Chen et al., 2018). In width 2 the points at which gradients are
  computed are also those of an error feedback on updates: apply u[t] + (u[t] - u[t-1]).
- ``dc``: no predicted weights, but a late gradient is corrected by ``lambda * g * g * (w_now - w_then)``, which stands
  for the curvature (DC-ASGD, Zheng et al., ICML 2017).
- ``none``: weights as they are; plain staleness.

What is predicted is this rank's own affair: the true weights change by the means alone, so they stay bit-identical on
all ranks, and nothing of this travels.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesgd.checks import check_one_of
from pipesgd.config import PREDICTIONS
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import give_gradients
from pipesgd.optim.hyperparameters import Hyperparameters
from pipesgd.optim.optimizer_copy import OptimizerCopy
from pipesgd.pipeline.agreement import Agreement, compare
from pipesgd.strategy import Comparison

Prepare = Callable[[Sequence[Tensor]], None]
"""What is done in place with gradients before the optimizer sees them: clipping."""

SHRINKAGE, REACH, CARRIED = 1 / 3, 1.0, 0.7
"""Of ``Eager``: how much smaller its guesses are and how much further it goes where ranks do not agree, and the share
of what it missed that it carries on.

In width 2 the ranks' errors die out up to a product of learning rate and curvature of (1 + CARRIED) / ((1 + r) s), and
their variance in flat directions is ((1 + r) s)^2 / (1 - CARRIED^2) times ``local``'s, with s and r as below.
"""
DC_LAMBDA, DC_DECAY, DC_EPSILON = 2.0, 0.95, 1e-7
"""Of the adaptive form of DC-ASGD: lambda is divided by the root of a moving mean of the gradient's squares."""


@dataclass(frozen=True)
class Unapplied:
    """What this rank knows of a gradient that is in flight."""

    kept: Sequence[Tensor]
    """What the prediction kept of it, shaped like the parameters; not to be changed."""
    hyperparameters: Hyperparameters
    """That it will be applied with."""


class Prediction:
    """Nothing is predicted: gradients are computed on the true weights, K-1 updates late.

    The base of the others. Between ``predict`` and ``restore`` the parameters may hold other weights than the true
    ones; what changes hands is their storage, so that nothing is copied back.
    """

    keeps_gradients = False
    """Whether what it keeps of a gradient is the gradient itself."""

    def __init__(self, parameters: Sequence[Tensor]):
        self._parameters = parameters
        self._true: list[Tensor] = []
        """Storage of the true weights while the parameters hold others; empty otherwise."""
        self._predicted: list[Tensor] = []
        """Storage for predicted weights, once there were any."""
        self._memory: dict[str, list[Tensor]] = {}
        """What must be remembered to predict the same after a restart, besides what is in flight, by name."""

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        """Let the parameters hold what they will be when the gradients in flight, oldest first, are applied."""

    def compare(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> Comparison | None:
        """How well what stands for ``mean`` did; None if nothing does. Called by the communication thread."""
        return None

    def restore(self) -> None:
        """Let the parameters hold the true weights."""
        if self._true:
            _give_storage(self._parameters, self._true)
            self._true = []

    def return_to_predicted(self) -> None:
        """After ``restore``, let the parameters hold the predicted weights again."""
        self._true = [parameter.data for parameter in self._parameters]
        _give_storage(self._parameters, self._predicted)

    def adopt(self) -> None:
        """Take the weights that the parameters hold for the true ones."""
        if self._true:
            self._predicted, self._true = self._true, []

    @property
    def nbytes(self) -> int:
        """Memory that it holds, besides the true weights and what it keeps of gradients in flight."""
        return sum(_nbytes(tensors) for tensors in (self._predicted, *self._memory.values()))

    @property
    def holds_predicted(self) -> bool:
        """Whether the parameters hold predicted weights now."""
        return bool(self._true)

    def keep(self, local: Sequence[Tensor | None]) -> list[Tensor]:
        """What to keep of a gradient that is handed over, computed by this rank on the weights as they are now."""
        return []

    def learn(
        self, mean: Sequence[Tensor], kept: Sequence[Tensor], comparison: Comparison | None, agreement: Agreement
    ) -> None:
        """Take note of a finite ``mean`` that has arrived, for this rank's ``agreement``; ``compare`` compared it."""
        agreement.saw(comparison)

    def correct(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """The ``mean`` of a gradient of which this was ``kept`` is about to be applied; it may be changed."""

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to predict the same after a restart, besides what is in flight."""
        return {name: _clones(tensors) for name, tensors in self._memory.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self._memory = {name: _clones(state[name]) for name in self._memory}

    def _remember(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Copy these, in the place of what was remembered under this name."""
        if not self._memory[name]:
            self._memory[name] = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(self._memory[name], list(tensors))

    def _begin(self, weights: Sequence[Tensor]) -> None:
        """Give the parameters storage for predicted weights, which are ``weights`` to begin with."""
        if not self._predicted:
            self._predicted = [torch.empty_like(parameter.data) for parameter in self._parameters]
        torch._foreach_copy_(self._predicted, list(weights))
        self.return_to_predicted()


class Replayed(Prediction, abc.ABC):
    """A copy of the user's optimizer steps, on a copy of the weights, once for every gradient in flight.

    Costs a copy of weights, optimizer state and gradient, and K-1 steps of the optimizer, an iteration.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, prepare: Prepare):
        super().__init__(parameters)
        self._prepare = prepare
        self._copy = OptimizerCopy(optimizer)
        self._gradients = [torch.zeros_like(parameter.data) for parameter in parameters]

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        guesses = [(guess, gradient.hyperparameters) for gradient in in_flight if (guess := self._guess(gradient))]
        if not guesses:
            return
        self._begin([parameter.data for parameter in self._parameters])
        self._copy.follow()
        try:
            for number, (guess, options) in enumerate(guesses):
                # A copy, since optimizers (and clipping) may change gradients in place.
                torch._foreach_copy_(self._gradients, list(guess))
                self._adapt(self._gradients, agreement, oldest=number == 0)
                self._prepare(self._gradients)
                give_gradients(self._parameters, self._gradients)
                self._copy.step(options)
        finally:  # also when interrupted: the next gradient would be added to a guess
            give_gradients(self._parameters, [None] * len(self._parameters))
        self._predicted = [parameter.data for parameter in self._parameters]  # an optimizer may give them other storage

    @property
    def nbytes(self) -> int:
        return super().nbytes + _nbytes(self._gradients) + self._copy.nbytes

    @abc.abstractmethod
    def _guess(self, gradient: Unapplied) -> Sequence[Tensor]:
        """What stands for the mean that will arrive; empty if nothing does."""

    def _adapt(self, guess: list[Tensor], agreement: Agreement, *, oldest: bool) -> None:
        """Change a guess in place; that for the ``oldest`` gradient in flight, or for another one."""


class Local(Replayed):
    """This rank's own gradients stand for the means."""

    keeps_gradients = True

    def keep(self, local: Sequence[Tensor | None]) -> list[Tensor]:
        return [
            torch.zeros_like(parameter.data) if gradient is None else gradient
            for parameter, gradient in zip(self._parameters, local, strict=True)
        ]

    def compare(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> Comparison | None:
        if not kept or any(tensor.is_complex() for tensor in kept):
            return None
        return compare(mean, kept)

    def _guess(self, gradient: Unapplied) -> Sequence[Tensor]:
        return gradient.kept


class Eager(Local):
    """This rank's own gradients stand for the means, turned back by what they missed before; and then further on.

    With the disagreement d = 1 - mean cosine, the guess for the oldest gradient in flight is ``s g + CARRIED e``, for
    the others ``s g``, with s = 1 - SHRINKAGE d. What this rank's guesses missed is e, ``e <- CARRIED e + s (g -
    mean)``. The predicted update of the weights is then taken 1 + r times, r = REACH d.

    A rank that computes at weights off by x gets a gradient that is off by x times the curvature, and its next guess is
    off the other way. Where learning rate times curvature is above 1, ranks swing apart, although synchronous training
    is stable up to 3.8 there (momentum 0.9). Carrying on what was missed turns the guess back. Over the ranks it adds
    up to zero, as the misses do. Going further looks ahead along momentum, as Nesterov's does: it damps what all ranks
    have in common by more than the ranks' errors cost, and shrinking the guesses first makes that momentum's share the
    larger one, which has no such errors.
    """

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        super().predict(in_flight, agreement)
        if self.holds_predicted and agreement.cosine != 1.0:
            # true + (1 + r) (predicted - true)
            torch._foreach_lerp_(self._predicted, self._true, -REACH * (1.0 - agreement.cosine))

    def learn(
        self, mean: Sequence[Tensor], kept: Sequence[Tensor], comparison: Comparison | None, agreement: Agreement
    ) -> None:
        if kept:
            share = self._share(agreement)
            if not agreement.missed:
                agreement.missed = [torch.zeros_like(tensor) for tensor in kept]
            torch._foreach_mul_(agreement.missed, CARRIED)
            # In this order nothing is left where they are equal.
            torch._foreach_add_(agreement.missed, list(kept), alpha=share)
            torch._foreach_sub_(agreement.missed, list(mean), alpha=share)
        super().learn(mean, kept, comparison, agreement)

    def _adapt(self, guess: list[Tensor], agreement: Agreement, *, oldest: bool) -> None:
        share = self._share(agreement)
        if share != 1.0:
            torch._foreach_mul_(guess, share)
        if oldest and agreement.missed:
            torch._foreach_add_(guess, agreement.missed, alpha=CARRIED)

    def _share(self, agreement: Agreement) -> float:
        return 1.0 - SHRINKAGE * (1.0 - agreement.cosine)


class Nesterov(Replayed):
    """Gradients of zero stand for the means."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, prepare: Prepare):
        super().__init__(parameters, optimizer, prepare)
        self._zeros = [torch.zeros_like(parameter.data) for parameter in parameters]

    @property
    def nbytes(self) -> int:
        return super().nbytes + _nbytes(self._zeros)

    def _guess(self, gradient: Unapplied) -> Sequence[Tensor]:
        return self._zeros


class Previous(Replayed):
    """The last mean stands for the next ones."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, prepare: Prepare):
        super().__init__(parameters, optimizer, prepare)
        self._memory["mean"] = []

    def correct(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        self._remember("mean", mean)

    def _guess(self, gradient: Unapplied) -> Sequence[Tensor]:
        return self._memory["mean"]


class SpecTrain(Prediction):
    """The last update stands for those of the gradients in flight: no second step, and only weights are copied."""

    def __init__(self, parameters: Sequence[Tensor]):
        super().__init__(parameters)
        self._memory["before"] = []  # the true weights before the last update

    def correct(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        self._remember("before", [parameter.data for parameter in self._parameters])

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        before = self._memory["before"]
        if not (in_flight and before):
            return
        self._begin(before)
        # before + (1 + s) (now - before) = now + s (now - before)
        torch._foreach_lerp_(self._predicted, self._true, 1.0 + len(in_flight))


class DelayCompensation(Prediction):
    """Late means are corrected by how far the weights have moved since, times their own squares."""

    def __init__(self, parameters: Sequence[Tensor]):
        super().__init__(parameters)
        self._memory["squares"] = [torch.zeros_like(parameter.data) for parameter in parameters]

    def keep(self, local: Sequence[Tensor | None]) -> list[Tensor]:
        return _clones([parameter.data for parameter in self._parameters])

    def correct(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        gradients = list(mean)
        moved = torch._foreach_sub([parameter.data for parameter in self._parameters], list(kept))
        squares = torch._foreach_mul(gradients, gradients)
        running = self._memory["squares"]
        torch._foreach_lerp_(running, squares, 1 - DC_DECAY)
        scale = torch._foreach_add(torch._foreach_sqrt(running), DC_EPSILON)
        torch._foreach_mul_(squares, moved)
        torch._foreach_addcdiv_(gradients, squares, scale, value=DC_LAMBDA)


def make_prediction(
    name: str, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, prepare: Prepare
) -> Prediction:
    """The prediction called ``name``, for the ``parameters`` that ``optimizer`` updates.

    Raises:
        UserInputError: there is none of this name, the optimizer cannot be copied for it, or the prediction
            would step parameters that share memory apart.
    """
    check_one_of("prediction", name, PREDICTIONS)
    kind = _PREDICTIONS[name]
    if not issubclass(kind, Replayed):
        return kind(parameters)
    places = [(p.untyped_storage()._cdata, p.storage_offset()) for p in parameters if p.numel()]
    if len(set(places)) < len(places):
        raise UserInputError(
            "prediction must be none, spectrain or dc where parameters share memory (tie them by assigning the "
            f"Parameter itself, b.weight = a.weight); got {name}"
        )
    return kind(parameters, optimizer, prepare)


_PREDICTIONS: dict[str, type[Prediction]] = {
    "eager": Eager,
    "local": Local,
    "previous": Previous,
    "nesterov": Nesterov,
    "spectrain": SpecTrain,
    "dc": DelayCompensation,
    "none": Prediction,
}


def _give_storage(parameters: Sequence[Tensor], storage: Sequence[Tensor]) -> None:
    for parameter, tensor in zip(parameters, storage, strict=True):
        parameter.data = tensor


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
