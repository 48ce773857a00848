"""Weight prediction: gradients are computed at the weights that are expected once all that is in flight is applied.

A gradient that is applied K-1 iterations late was computed on weights that lack K-1 updates. The predictions here
differ in what they put in place of those:

- ``local``: this rank's own gradients of these iterations (SAPipe, NeurIPS 2022, "local"), each an unbiased estimate of
  the mean that will arrive. The ranks' errors add up to zero, and with one rank, or the same data on all ranks, there
  are none: then it is synchronous training, bit for bit, with any optimizer.
- ``eager``: the same gradients, smaller the less they have agreed with the means so far, and turned back by what they
  missed these by; and from there on along the whole predicted update. Ours; measured in experiments/LOG.md. Where ranks
  agree fully it is ``local``, to the bit.
- ``none``: weights as they are; plain staleness.

``experiments/predictions.py`` has others from the literature, to compare with: every class of predictions can be given
to ``Pipelined``. A prediction is this rank's own affair: the true weights change by the means alone, so they stay
bit-identical on all ranks, and nothing of this travels.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from pipesgd.checks import check_one_of
from pipesgd.config import PREDICTIONS
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import give_gradients
from pipesgd.optim.hyperparameters import Hyperparameters
from pipesgd.optim.optimizer_copy import OptimizerCopy
from pipesgd.strategy import Comparison

Prepare = Callable[[Sequence[Tensor]], None]
"""What is done in place with gradients before the optimizer sees them: clipping."""

SHRINKAGE, REACH, CARRIED = 1 / 3, 1.0, 0.7
"""Coefficients of ``Eager``: how much smaller its guesses are and how much further it goes where ranks do not agree,
and the share of what it missed that it carries on.

In width 2 the ranks' errors die out up to a product of learning rate and curvature of (1 + CARRIED) / ((1 + r) s), and
their variance in flat directions is ((1 + r) s)^2 / (1 - CARRIED^2) times ``local``'s, with s and r as below.
"""
COMPARED_DIGITS = 5
"""After the point, of comparisons: the same values, added up in another order, must compare as the same."""
AGREEMENT_DECAY = 0.95
"""Of the running mean of cosines between this rank's gradients and the means that arrived: about 20 iterations."""


@dataclass(frozen=True)
class Unapplied:
    """What this rank knows of a gradient that is in flight."""

    kept: Sequence[Tensor]
    """Tensors that the prediction kept of it, shaped like the parameters; not to be changed."""
    hyperparameters: Hyperparameters
    """Options of the optimizer that it will be applied with."""


class Agreement:
    """What this rank has seen of its guesses lately."""

    def __init__(self) -> None:
        self.cosine = 1.0
        """A running mean of cosines between this rank's gradients and the means."""
        self.missed: list[Tensor] = []
        """By what its guesses missed the means, added up and fading; empty until a prediction wants it."""

    def saw(self, comparison: Comparison | None) -> None:
        """Take note of a mean that has arrived."""
        if comparison is not None and comparison.cosine is not None:
            # So written, cosines of exactly 1 leave it at exactly 1.
            self.cosine += (1 - AGREEMENT_DECAY) * (comparison.cosine - self.cosine)

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return sum(tensor.nbytes for tensor in self.missed)

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on the same after a restart."""
        return {"cosine": self.cosine, "missed": [tensor.clone() for tensor in self.missed]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self.cosine = state["cosine"]
        self.missed = [tensor.clone() for tensor in state["missed"]]


def compare(mean: Sequence[Tensor], guess: Sequence[Tensor]) -> Comparison:
    """How well ``guess``, of real numbers, stood for ``mean``."""
    dots = [
        torch.dot(_wide(one), _wide(other))
        for a, b in ((mean, guess), (mean, mean), (guess, guess))
        for one, other in zip(a, b, strict=True)
    ]
    # From the device all at once; Python adds them up in float64.
    both, means, guesses = (sum(of_tensors) for of_tensors in torch.stack(dots).view(3, -1).tolist())
    if not (math.isfinite(means + guesses) and means > 0 and guesses > 0):
        return Comparison(cosine=None, relative_error=None)
    squared_error = round((means + guesses - 2 * both) / means, COMPARED_DIGITS)
    return Comparison(
        cosine=round(both / math.sqrt(means * guesses), COMPARED_DIGITS),
        relative_error=math.sqrt(max(squared_error, 0.0)),
    )


def _wide(tensor: Tensor) -> Tensor:
    """The values in one dimension, of float32 at least: sums of shorter floats overflow, or lose nearly all digits."""
    flat = tensor.reshape(-1)
    return flat.float() if flat.itemsize < torch.float32.itemsize else flat


class SwappedWeights:
    """Two sets of storage that the parameters change between: of the true weights, and of predicted ones.

    They change hands, so nothing is copied back.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self._parameters = parameters
        self.true: list[Tensor] = []
        """Storage of the true weights while the parameters hold others; empty otherwise."""
        self.predicted: list[Tensor] = []
        """Storage for predicted weights, once there were any."""

    @property
    def are_predicted(self) -> bool:
        """True if the parameters hold predicted weights now."""
        return bool(self.true)

    @property
    def nbytes(self) -> int:
        """Memory besides that of the true weights."""
        return _nbytes(self.predicted)

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Let the parameters hold a copy of ``weights``, to be changed into what is predicted."""
        if not self.predicted:
            self.predicted = [torch.empty_like(parameter.data) for parameter in self._parameters]
        torch._foreach_copy_(self.predicted, list(weights))
        self.return_to_predicted()

    def restore(self) -> None:
        """Let the parameters hold the true weights."""
        if self.true:
            _give_storage(self._parameters, self.true)
            self.true = []

    def return_to_predicted(self) -> None:
        """Let the parameters, which hold the true weights, hold the predicted ones again."""
        self.true = [parameter.data for parameter in self._parameters]
        _give_storage(self._parameters, self.predicted)

    def adopt(self) -> None:
        """Take the weights that the parameters hold for the true ones."""
        if self.true:
            self.predicted, self.true = self.true, []


class Prediction(abc.ABC):
    """A way to predict weights. What is abstract or empty here is what kinds of predictions differ in.

    Args:
        parameters: those that ``optimizer`` updates.
        optimizer: the user's own.
        prepare: what is done with gradients before the optimizer sees them.
    """

    keeps_gradients = False
    """True if what is kept of a gradient is the gradient itself."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, prepare: Prepare):
        self._parameters = parameters
        self.weights = SwappedWeights(parameters)

    @abc.abstractmethod
    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        """Let the parameters hold what they will be when the gradients in flight, oldest first, are applied."""

    def keep(self, local: Sequence[Tensor | None]) -> list[Tensor]:
        """What to keep of a gradient that is handed over, computed by this rank on the weights as they are now."""
        return []

    def compare(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> Comparison | None:
        """How well what stood for ``mean`` did; None if nothing did. Called by the communication thread."""
        return None

    def learn(
        self, mean: Sequence[Tensor], kept: Sequence[Tensor], comparison: Comparison | None, agreement: Agreement
    ) -> None:
        """Take note of a finite ``mean`` that has arrived, for this rank's ``agreement``; ``compare`` compared it."""
        agreement.saw(comparison)

    def correct(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """The ``mean`` of a gradient of which this was ``kept`` is about to be applied; it may be changed."""
        return

    @property
    def nbytes(self) -> int:
        """Memory that it holds, besides the true weights and what it keeps of gradients in flight."""
        return self.weights.nbytes

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to predict the same after a restart, besides what is in flight."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        return


@final
class NoPrediction(Prediction):
    """Gradients are computed on the true weights, K-1 updates late."""

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        return


class Replayed(Prediction, abc.ABC):
    """A copy of the user's optimizer steps, on a copy of the weights, once for every gradient in flight.

    Costs a copy of weights, optimizer state and gradient, and K-1 steps of the optimizer, an iteration.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, prepare: Prepare):
        _check_apart(parameters, type(self))
        super().__init__(parameters, optimizer, prepare)
        self._prepare = prepare
        self._copy = OptimizerCopy(optimizer)
        self._gradients = [torch.zeros_like(parameter.data) for parameter in parameters]

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        guesses = [(guess, gradient.hyperparameters) for gradient in in_flight if (guess := self._guess(gradient))]
        if not guesses:
            return
        self.weights.begin([parameter.data for parameter in self._parameters])
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
        # An optimizer may have given them other storage.
        self.weights.predicted = [parameter.data for parameter in self._parameters]

    @property
    def nbytes(self) -> int:
        return super().nbytes + _nbytes(self._gradients) + self._copy.nbytes

    @abc.abstractmethod
    def _guess(self, gradient: Unapplied) -> Sequence[Tensor]:
        """What stands for the mean that will arrive; empty if nothing does."""

    def _adapt(self, guess: list[Tensor], agreement: Agreement, *, oldest: bool) -> None:
        """Change a guess in place; that for the ``oldest`` gradient in flight, or for another one."""


class OwnGradients(Replayed):
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


@final
class Local(OwnGradients):
    """This rank's own gradients stand for the means, as they are."""


@final
class Eager(OwnGradients):
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
        if self.weights.are_predicted and agreement.cosine != 1.0:
            # true + (1 + r) (predicted - true)
            torch._foreach_lerp_(self.weights.predicted, self.weights.true, -REACH * (1.0 - agreement.cosine))

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


_KINDS: dict[str, type[Prediction]] = {"eager": Eager, "local": Local, "none": NoPrediction}


def make_prediction(
    kind: str | type[Prediction], parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, prepare: Prepare
) -> Prediction:
    """The prediction of this name or class, for the ``parameters`` that ``optimizer`` updates.

    Raises:
        UserInputError: there is none of this name, the optimizer cannot be copied for it, or the prediction
            would step parameters that share memory apart.
    """
    if isinstance(kind, str):
        check_one_of("prediction", kind, PREDICTIONS)
        kind = _KINDS[kind]
    return kind(parameters, optimizer, prepare)


def _check_apart(parameters: Sequence[Tensor], kind: type[Prediction]) -> None:
    places = [(p.untyped_storage()._cdata, p.storage_offset()) for p in parameters if p.numel()]
    if len(set(places)) < len(places):
        raise UserInputError(
            "prediction must be none where parameters share memory (tie them by assigning the Parameter itself, "
            f"b.weight = a.weight); got {kind.__name__.lower()}"
        )


def _give_storage(parameters: Sequence[Tensor], storage: Sequence[Tensor]) -> None:
    for parameter, tensor in zip(parameters, storage, strict=True):
        parameter.data = tensor


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
