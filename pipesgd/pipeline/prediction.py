"""Weight prediction: compute each gradient at the weights expected once all gradients in flight are applied.

A gradient that is applied K-1 iterations late was computed on weights that lack K-1 updates. The predictions here
differ in what they put in place of those:

- ``local``: this rank's own gradients of these iterations (SAPipe, NeurIPS 2022, "local"), each an unbiased estimate of
  the mean that will arrive. The ranks' errors add up to zero. With one rank, or the same data on all ranks, there are
  none, and the result is synchronous training, bit for bit, with any optimizer.
- ``eager``: the same gradients, scaled down the less they have agreed with the means so far, and corrected by their
  past errors; the whole predicted update is then extrapolated. This method is ours and measured in experiments/LOG.md.
  Where ranks agree fully it equals ``local`` to the bit.
- ``none``: the weights as they are, which is plain staleness.

``experiments/predictions.py`` has others from the literature for comparison: any class of predictions can be given
to ``Pipelined``. A prediction is local to its rank: only the means change the true weights, which therefore stay
bit-identical on all ranks, and no part of a prediction is sent.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

from pipesgd.checks import check_one_of
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import give_gradients, on_device
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.hyperparameters import Hyperparameters
from pipesgd.optim.optimizer_copy import OptimizerCopy
from pipesgd.pipeline.notices import Notices, forget_computed_from_weights
from pipesgd.sections import PREDICTIONS
from pipesgd.shards import give, kept, local
from pipesgd.strategy import Comparison

AddUp = Callable[[Sequence[float]], Sequence[float]]
"""Function that adds up numbers over the ranks that hold one replica of the model together."""

SHRINKAGE, REACH, CARRIED = 1 / 3, 1.0, 0.7
"""Coefficients of ``Eager``: shrinkage of its guesses and extra look-ahead per unit of disagreement between ranks, and
the share of its past errors that it carries over.

At width 2 the ranks' errors die out up to a product of learning rate and curvature of (1 + CARRIED) / ((1 + r) s), and
their variance in flat directions is ((1 + r) s)^2 / (1 - CARRIED^2) times ``local``'s, with s and r as in the class.
"""
COMPARED_DIGITS = 5
"""Decimal places of comparisons: the same values, added up in another order, must compare as the same."""
AGREEMENT_DECAY = 0.95
"""Decay of the running mean of cosines between this rank's gradients and arrived means: about 20 iterations."""


@dataclass(frozen=True)
class Unapplied:
    """A gradient in flight, as far as this rank knows it."""

    kept: Sequence[Tensor]
    """Tensors that the prediction kept of the gradient, shaped like the parameters; not to be changed."""
    hyperparameters: Hyperparameters
    """Options of the optimizer that the gradient will be applied with."""
    scale: float = 1.0
    """Loss scale in effect when the gradient was computed."""

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all of it."""
        kept = [tensor.clone() for tensor in self.kept]
        return {"kept": kept, "hyperparameters": list(self.hyperparameters), "scale": self.scale}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], device: torch.device) -> Self:
        """Return that of a ``state_dict``, on this ``device``."""
        return cls(on_device(state["kept"], device), state["hyperparameters"], state["scale"])


class Agreement:
    """Record of how well this rank's recent guesses agreed with the means."""

    def __init__(self) -> None:
        self.cosine = 1.0
        """Running mean of cosines between this rank's gradients and the means."""
        self.missed: list[Tensor] = []
        """Decaying sum of the errors of this rank's guesses; empty until a prediction uses it."""

    def observe(self, comparison: Comparison | None) -> None:
        """Take note of a mean that has arrived."""
        if comparison is not None and comparison.cosine is not None:
            # Written like this, cosines of exactly 1 leave it at exactly 1.
            self.cosine += (1 - AGREEMENT_DECAY) * (comparison.cosine - self.cosine)

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to continue identically after a restart."""
        return {"cosine": self.cosine, "missed": [tensor.clone() for tensor in self.missed]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self.cosine = state["cosine"]
        self.missed = [tensor.clone() for tensor in state["missed"]]


def compare(mean: Sequence[Tensor], guess: Sequence[Tensor], add_up: AddUp = list) -> Comparison:
    """Compare ``guess``, of real numbers, with the ``mean`` that it predicted; this rank may hold a part of both."""
    dots = [
        torch.dot(_wide(one), _wide(other))
        for a, b in ((mean, guess), (mean, mean), (guess, guess))
        for one, other in zip(a, b, strict=True)
    ]
    # They leave the device all at once, and Python adds them up in float64.
    both, means, guesses = add_up([sum(of_tensors) for of_tensors in torch.stack(dots).view(3, -1).tolist()])
    if not (math.isfinite(means + guesses) and means > 0 and guesses > 0):
        return Comparison(cosine=None, relative_error=None)
    squared_error = round((means + guesses - 2 * both) / means, COMPARED_DIGITS)
    return Comparison(
        cosine=round(both / (math.sqrt(means) * math.sqrt(guesses)), COMPARED_DIGITS),  # means * guesses may underflow
        relative_error=math.sqrt(max(squared_error, 0.0)),
    )


def _wide(tensor: Tensor) -> Tensor:
    """Flatten ``tensor``, to float32 at least: sums of shorter floats overflow, or lose nearly all digits."""
    flat = tensor.reshape(-1)
    return flat.float() if flat.itemsize < torch.float32.itemsize else flat


class SwappedWeights:
    """Two sets of storage that the parameters switch between: one of the true weights, one of predicted weights.

    The parameters exchange their storage, so nothing is copied back, except of DTensors (``pipesgd.shards.give``).
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self._parameters = parameters
        self.true: list[Tensor] = []
        """Storage of the true weights while the parameters hold predicted ones; empty otherwise."""
        self.predicted: list[Tensor] = []
        """Storage of predicted weights; empty until the first prediction."""
        self.hidden = False
        """True if the parameters hold the true weights although the predicted ones are still valid."""
        self._holds = 0
        self.exchanged: Callable[[], None] = lambda: None
        """Function that is called when the parameters have been given other weights."""
        self.notices = Notices(parameters)
        """Notices of writes to predicted weights, which are lost."""

    @property
    def are_predicted(self) -> bool:
        """True if the parameters hold predicted weights now."""
        return bool(self.true)

    @property
    def are_valid(self) -> bool:
        """True if there are predicted weights, although the parameters may hold the true ones for the moment."""
        return self.are_predicted or self.hidden

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Let the parameters hold a copy of ``weights``, to be changed into predicted weights."""
        if not self.predicted:
            self.predicted = [torch.empty_like(data) for data in _data(self._parameters)]
        torch._foreach_copy_(self.predicted, list(weights))
        self._give_predicted()

    def work(self) -> None:
        """Let the parameters hold weights that may change in place: predicted ones, or a copy of the true ones."""
        self.notices.look()
        self.notices.end()
        if self.hidden:
            self._give_predicted()
        elif not self.true:
            self.begin(_data(self._parameters))

    def restore(self) -> None:
        """Let the parameters hold the true weights from now on; the predicted ones are no longer valid."""
        self.show_true()
        self.notices.end()
        self.hidden = False

    def show_true(self, *, graphs_end: bool = False) -> bool:
        """Let the parameters hold the true weights until ``return_to_predicted``; return True if they held others.

        With ``graphs_end``, a backward pass through a graph that was computed with the other weights fails.
        """
        if not self.true:
            return False
        self.notices.look()
        with torch.inference_mode(False):  # these tensors outlive an evaluation in that mode
            self.predicted = [kept(*pair) for pair in zip(self._parameters, self.predicted, strict=True)]
        self._give(self.true)
        self.true = []
        self.hidden = True
        if graphs_end:
            torch.autograd.graph.increment_version(self._parameters)
        return True

    def return_to_predicted(self, *, graphs_end: bool = False) -> None:
        """Let the parameters hold the predicted weights again, if these are valid and no ``held_true`` is open."""
        if self.hidden and not self._holds:
            self._give_predicted()
            if graphs_end:
                torch.autograd.graph.increment_version(self._parameters)
            self.notices.begin_again()

    @contextlib.contextmanager
    def held_true(self) -> Iterator[None]:
        """Let the parameters hold the true weights while the context is open."""
        shown = self.show_true()
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if shown:  # an update in between has made them invalid
                self.return_to_predicted()

    def adopt(self) -> None:
        """Make the weights that the parameters hold the true ones."""
        self.notices.end()
        if self.true:
            self.predicted, self.true = self.true, []
        self.hidden = False

    def _give_predicted(self) -> None:
        with torch.inference_mode(False):
            self.true = [kept(*pair) for pair in zip(self._parameters, _data(self._parameters), strict=True)]
        self._give(self.predicted)
        self.predicted = _data(self._parameters)  # of a DTensor, which has a copy, so that no other one is held
        self.hidden = False

    def _give(self, storage: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, storage, strict=True):
            give(parameter, tensor)
        forget_computed_from_weights()
        self.exchanged()


class Prediction(abc.ABC):
    """A way to predict weights. Subclasses override the methods that are abstract or empty here.

    Args:
        parameters: the parameters that ``optimizer`` updates.
        optimizer: the user's optimizer.
        clip: clipping of gradients before the optimizer sees them; None clips nothing.
    """

    keeps_gradients = False
    """True if ``keep`` returns the gradient itself."""
    at_width_1 = False
    """True if it is used at width 1, too, where no gradient is in flight after a step."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, clip: Clipping | None):
        self._parameters = parameters
        self.weights = SwappedWeights(parameters)
        self.add_up: AddUp = list
        """Function for sums in ``compare``, of whose arguments this rank may hold a part."""

    @abc.abstractmethod
    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        """Let the parameters hold the weights expected once the gradients in flight, oldest first, are applied."""

    def keep(self, local: Sequence[Tensor | None]) -> list[Tensor]:
        """Return what to keep of a gradient of this rank that is handed over, computed at the current weights."""
        return []

    def compare(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> Comparison | None:
        """Compare ``mean`` with its guess; None if there was none. The communication thread calls this."""
        return None

    def learn(
        self, mean: Sequence[Tensor], kept: Sequence[Tensor], comparison: Comparison | None, agreement: Agreement
    ) -> None:
        """Update this rank's ``agreement`` when a finite ``mean`` has arrived; ``comparison`` is from ``compare``."""
        agreement.observe(comparison)

    def correct(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Change the ``mean`` of a gradient before it is applied, if needed; ``kept`` is what was kept of it."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to predict identically after a restart, besides the gradients in flight."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        return


@final
class NoPrediction(Prediction):
    """No prediction: gradients are computed on the true weights, K-1 updates late."""

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        return


class Replayed(Prediction, abc.ABC):
    """A prediction by steps of a copy of the user's optimizer, one step for each gradient in flight.

    It costs a copy of the optimizer's state, and of a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, clip: Clipping | None):
        _check_apart(parameters, type(self))
        super().__init__(parameters, optimizer, clip)
        self._clip: Callable[[Sequence[Tensor]], None] = _unclipped if clip is None else clip
        self._copy = OptimizerCopy(optimizer)
        self._gradients: list[Tensor] = []
        """Storage for a guess, which optimizers and clipping may change; empty until the first prediction."""

    @final
    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        guesses = [(self._guess(gradient), gradient.hyperparameters) for gradient in in_flight]
        guesses = [(guess, hyperparameters) for guess, hyperparameters in guesses if guess]
        if not guesses:
            return
        try:
            self._replay(guesses, agreement)
        finally:  # also when interrupted, and without a call: the next gradient would be added to a guess
            for parameter in self._parameters:
                parameter.grad = None

    @abc.abstractmethod
    def _guess(self, gradient: Unapplied) -> Sequence[Tensor]:
        """Return the guess for the mean that will arrive; empty if there is none."""

    def _adapt(self, guess: list[Tensor], agreement: Agreement, *, oldest: bool) -> None:
        """Change a guess in place, for the ``oldest`` gradient in flight or for another one."""

    def _extrapolate(self, predicted: list[Tensor], true: list[Tensor], agreement: Agreement) -> None:
        """Change ``predicted`` weights in place."""

    def _replay(self, guesses: Sequence[tuple[Sequence[Tensor], Hyperparameters]], agreement: Agreement) -> None:
        """Let the parameters hold weights that the copy of the optimizer has stepped by these guesses."""
        self.weights.begin(_data(self._parameters))
        self._copy.follow()
        if not self._gradients:
            self._gradients = [torch.zeros_like(data) for data in _data(self._parameters)]
        gradients = self._gradients
        devices = [gradients[0].device] if torch.cuda.is_initialized() and gradients[0].is_cuda else []
        # A rank without a guess takes fewer steps, and must still draw the same random numbers in the next update.
        with torch.random.fork_rng(devices):
            for order, (guess, hyperparameters) in enumerate(guesses):
                torch._foreach_copy_(gradients, list(guess))
                self._adapt(gradients, agreement, oldest=order == 0)
                self._clip(gradients)
                give_gradients(self._parameters, gradients)
                self._copy.step(hyperparameters)
        # An optimizer may have given the parameters other storage.
        self.weights.predicted = _data(self._parameters)
        self._extrapolate(self.weights.predicted, self.weights.true, agreement)


class OwnGradients(Replayed):
    """A prediction in which this rank's own gradients take the place of the means."""

    keeps_gradients = True

    def keep(self, local: Sequence[Tensor | None]) -> list[Tensor]:
        return [
            torch.zeros_like(data) if gradient is None else gradient
            for data, gradient in zip(_data(self._parameters), local, strict=True)
        ]

    def compare(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> Comparison | None:
        if not kept or any(tensor.is_complex() for tensor in kept):
            return None
        return compare(mean, kept, self.add_up)

    def _guess(self, gradient: Unapplied) -> Sequence[Tensor]:
        return gradient.kept


@final
class Local(OwnGradients):
    """A prediction in which this rank's own gradients take the place of the means, unchanged."""


@final
class Eager(OwnGradients):
    """A prediction by this rank's own gradients, scaled down, corrected by their past errors, and then extrapolated.

    With the disagreement d = 1 - mean cosine, the guess for the oldest gradient in flight is ``s g + CARRIED e``, for
    the others ``s g``, with s = 1 - SHRINKAGE d. The error e of this rank's guesses accumulates as ``e <- CARRIED e + s
    (g - mean)``. The predicted update of the weights is then applied 1 + r times, r = REACH d.

    An error x in a rank's weights shifts its gradient by x times the curvature, so its next guess is off in the
    opposite direction. Where learning rate times curvature is above 1, ranks then oscillate apart, although synchronous
    training is stable up to 3.8 there (momentum 0.9). Carrying over past errors corrects the guess. Summed over the
    ranks, these corrections are zero, as the errors are. Extrapolation looks ahead along momentum, as Nesterov's does:
    it damps what all ranks have in common by more than the ranks' errors cost. Shrinking the guesses first gives
    momentum, which has no such errors, the larger share of the update.
    """

    def learn(
        self, mean: Sequence[Tensor], kept: Sequence[Tensor], comparison: Comparison | None, agreement: Agreement
    ) -> None:
        share = self._share(agreement)  # the guess was made with the cosine as it was
        super().learn(mean, kept, comparison, agreement)
        if not kept:
            return
        if not agreement.missed:
            agreement.missed = [torch.zeros_like(tensor) for tensor in kept]
        torch._foreach_mul_(agreement.missed, CARRIED)
        # In this order, nothing is left where the two are equal.
        torch._foreach_add_(agreement.missed, list(kept), alpha=share)
        torch._foreach_sub_(agreement.missed, list(mean), alpha=share)

    def _adapt(self, guess: list[Tensor], agreement: Agreement, *, oldest: bool) -> None:
        share = self._share(agreement)
        if share != 1.0:
            torch._foreach_mul_(guess, share)
        if oldest and agreement.missed:
            torch._foreach_add_(guess, agreement.missed, alpha=CARRIED)

    def _extrapolate(self, predicted: list[Tensor], true: list[Tensor], agreement: Agreement) -> None:
        if agreement.cosine != 1.0:
            # true + (1 + r) (predicted - true)
            torch._foreach_lerp_(predicted, true, -REACH * (1.0 - agreement.cosine))

    def _share(self, agreement: Agreement) -> float:
        return 1.0 - SHRINKAGE * (1.0 - agreement.cosine)


def _unclipped(gradients: Sequence[Tensor]) -> None:
    """Leave ``gradients`` as they are."""


_KINDS: dict[str, type[Prediction]] = {"eager": Eager, "local": Local, "none": NoPrediction}


def make_prediction(
    kind: str | type[Prediction], parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, clip: Clipping | None
) -> Prediction:
    """Return the prediction of this name or class for the ``parameters`` that ``optimizer`` updates.

    Raises:
        UserInputError: there is none of this name, the optimizer cannot be copied for it, or the prediction
            would separate parameters that share memory.
    """
    if isinstance(kind, str):
        check_one_of("prediction", kind, PREDICTIONS)
        kind = _KINDS[kind]
    return kind(parameters, optimizer, clip)


def share_memory(parameters: Sequence[Tensor]) -> bool:
    """Return True if two of ``parameters`` are in the same place, from which swapping weights would separate them."""
    places = [(p.untyped_storage()._cdata, p.storage_offset()) for p in map(local, parameters) if p.numel()]
    return len(set(places)) < len(places)


def _check_apart(parameters: Sequence[Tensor], kind: type[Prediction]) -> None:
    if share_memory(parameters):
        raise UserInputError(
            "prediction must be none where parameters share memory (tie them by assigning the Parameter itself, "
            f"b.weight = a.weight); got {kind.__name__.lower()}"
        )


def _data(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the storage of each of ``parameters``, or of this rank's part of it."""
    return [local(parameter).data for parameter in parameters]
