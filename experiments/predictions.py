"""Predictions from the literature, to compare ``pipesgd``'s own with (experiments/LOG.md has what they came to).

- ``Previous`` applies the last mean once more for each gradient in flight.
- ``Nesterov`` applies gradients of zero, so that momentum alone continues (as in DANA, Hakimi et al., 2019).
- ``SpecTrain`` applies the last update once more for each gradient in flight (Chen et al., 2018). At width 2, error
  feedback on updates computes gradients at the same points: apply u[t] + (u[t] - u[t-1]).
- ``DelayCompensation`` predicts no weights, but corrects a late gradient by
  ``lambda * g * g * (w_now - w_then)``, which stands for the curvature (DC-ASGD, Zheng et al., ICML 2017).

Any of these classes can be given to ``Pipelined`` as its ``prediction``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from pipesgd.optim.clipping import Clipping
from pipesgd.pipeline.prediction import Agreement, Prediction, Replayed, Unapplied

DC_LAMBDA, DC_DECAY, DC_EPSILON = 2.0, 0.95, 1e-7
"""Constants of DC-ASGD in its adaptive form: lambda is divided by the root of a moving mean of squared gradients."""


@final
class Nesterov(Replayed):
    """A prediction that replays gradients of zero in place of the means."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, clip: Clipping):
        super().__init__(parameters, optimizer, clip)
        self._zeros = [torch.zeros_like(parameter.data) for parameter in parameters]

    def _guess(self, gradient: Unapplied) -> Sequence[Tensor]:
        return self._zeros


class _Remembers(Prediction):
    """A prediction made from tensors that it keeps, and that a checkpoint must hold."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, clip: Clipping):
        super().__init__(parameters, optimizer, clip)
        self._memory: list[Tensor] = []

    def _remember(self, tensors: Sequence[Tensor]) -> None:
        """Copy ``tensors`` over those remembered before."""
        if not self._memory:
            self._memory = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(self._memory, list(tensors))

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": [tensor.clone() for tensor in self._memory]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._memory = [tensor.clone() for tensor in state["tensors"]]


@final
class Previous(_Remembers, Replayed):
    """A prediction that replays the last mean in place of the next ones."""

    def correct(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        self._remember(mean)

    def _guess(self, gradient: Unapplied) -> Sequence[Tensor]:
        return self._memory


@final
class SpecTrain(_Remembers):
    """A repeat of the last update for each gradient in flight: it takes no second step and copies only weights."""

    def correct(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        self._remember([parameter.data for parameter in self._parameters])  # the weights before this update

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        before = self._memory
        if not (in_flight and before):
            return
        self.weights.begin(before)
        # before + (1 + s) (now - before) = now + s (now - before)
        torch._foreach_lerp_(self.weights.predicted, self.weights.true, 1.0 + len(in_flight))


@final
class DelayCompensation(_Remembers):
    """A correction of late means by the distance that the weights have moved since, times the means' own squares."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, clip: Clipping):
        super().__init__(parameters, optimizer, clip)
        self._memory = [torch.zeros_like(parameter.data) for parameter in parameters]

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        return

    def keep(self, local: Sequence[Tensor | None]) -> list[Tensor]:
        return [parameter.data.clone() for parameter in self._parameters]

    def correct(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        gradients = list(mean)
        moved = torch._foreach_sub([parameter.data for parameter in self._parameters], list(kept))
        squares = torch._foreach_mul(gradients, gradients)
        running = self._memory
        torch._foreach_lerp_(running, squares, 1 - DC_DECAY)
        scale = torch._foreach_add(torch._foreach_sqrt(running), DC_EPSILON)
        torch._foreach_mul_(squares, moved)
        torch._foreach_addcdiv_(gradients, squares, scale, value=DC_LAMBDA)


COMPARED: dict[str, type[Prediction]] = {
    "previous": Previous,
    "nesterov": Nesterov,
    "spectrain": SpecTrain,
    "dc": DelayCompensation,
}
"""Predictions that are compared, by their names in the log."""
