"""Clipping of the averaged gradient when it is applied, and of its stand-in when weights are predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipesgd.checks import check_above_zero

EPSILON = 1e-6
"""Term that torch adds to the norm in ``clip_grad_norm_``."""

TotalNorm = Callable[[list[Tensor]], Tensor]
"""Function that returns the norm of some gradients together, a tensor of one number."""


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """Clipping of gradients before the optimizer sees them; none by default.

    Raises:
        UserInputError: a bound is not above zero.
    """

    norm: float | None = None
    """Largest norm of all gradients together, to which longer ones are scaled down."""
    value: float | None = None
    """Largest magnitude of a single value. It is applied first."""
    total_norm: TotalNorm = torch.nn.utils.get_total_norm
    """Function that returns the norm of all gradients together."""

    def __post_init__(self) -> None:
        for name, bound in (("clip-norm", self.norm), ("clip-value", self.value)):
            if bound is not None:
                check_above_zero(name, bound)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Clip ``gradients`` in place, as torch's ``clip_grad_value_`` and ``clip_grad_norm_`` do."""
        tensors = list(gradients)
        if not tensors:
            return
        if self.value is not None:
            torch._foreach_clamp_min_(tensors, -self.value)
            torch._foreach_clamp_max_(tensors, self.value)
        if self.norm is not None:
            total = self.total_norm(tensors)
            torch._foreach_mul_(tensors, torch.clamp(self.norm / (total + EPSILON), max=1.0))
