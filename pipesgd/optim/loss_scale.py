"""Loss scaling for float16, where gradients are applied some iterations after they were computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pipesgd.errors import UserInputError
from pipesgd.shards import local

_TAKEN: WeakValueDictionary[int, LossScale] = WeakValueDictionary()
"""Scales that are taken, by the identity of the scaler: torch's scalers have no hooks that could refuse others."""


class LossScale:
    """Scale of torch's ``GradScaler`` for late gradients, kept as the scaler's own ``step`` and ``update`` would.

    Before it travels, a gradient is divided by the scale that its own loss was multiplied by. When the mean over ranks
    turns out not to be finite, which all ranks see alike, the update is left out and the scale backs off, once for all
    gradients that were in flight at the scale that was too large; after ``growth_interval`` finite means in a row it
    grows. The caller does ``scaler.scale(loss).backward()``; neither ``step`` nor ``update`` must be called.

    Args:
        scaler: torch's scaler; None, or one that is not enabled, means no scaling at all.
        parameters: parameters whose gradients are scaled.

    Raises:
        UserInputError: parameters are not float32, so that they need no scale or cannot be scaled.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, parameters: Sequence[Tensor]):
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._finite_in_a_row = 0
        self.check(parameters)

    def check(self, parameters: Sequence[Tensor]) -> None:
        """Refuse parameters that are not float32, so that they need no scale or cannot be scaled.

        Raises:
            UserInputError: there are such parameters, and a scaler.
        """
        for dtype in (torch.bfloat16, torch.float16):
            if self._scaler is not None and any(parameter.dtype == dtype for parameter in parameters):
                raise UserInputError(
                    "scaler must be left out unless parameters are float32 and computed with in float16 by autocast; "
                    f"got a GradScaler and parameters in {dtype}"
                )

    def take(self) -> None:
        """Let no other pipeline have the scaler until ``leave``.

        The other one would divide its gradients by a scale that this one has changed since their backward pass.

        Raises:
            UserInputError: another pipeline has it.
        """
        if self._scaler is not None and _TAKEN.setdefault(id(self._scaler), self) is not self:
            raise UserInputError(
                "scaler must be a GradScaler that no other open pipeline has, since each changes its scale; got one "
                "that another has: close that first, or leave scalers out and train in bfloat16"
            )

    def leave(self) -> None:
        """Let other pipelines have the scaler again."""
        if _TAKEN.get(id(self._scaler)) is self:
            del _TAKEN[id(self._scaler)]

    @property
    def skips(self) -> bool:
        """True if gradients that are not finite are to be expected, and left out."""
        return self._scaler is not None

    def divide(self, parameters: Sequence[Tensor]) -> float:
        """Divide the gradients of ``parameters`` by the scale that their losses were multiplied by, and return it."""
        scale = self.scale
        if self._scaler is not None:
            _divide(parameters, scale)
        return scale

    @property
    def scale(self) -> float:
        """Factor by which losses are multiplied now; 1 without scaling."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def rescale(self, parameters: Sequence[Tensor], before: float) -> None:
        """Bring the gradients of ``parameters``, whose losses had the scale ``before``, to the current scale."""
        if self.scale != before:
            _divide(parameters, before / self.scale)

    def observe(self, finite: bool, scale: float) -> None:
        """Record the arrival of a mean of gradients that were computed at ``scale``."""
        if self._scaler is None:
            return
        now = self._scaler.get_scale()
        if not finite:
            self._finite_in_a_row = 0
            if scale <= now:  # gradients in flight at a scale that was backed off from say nothing new
                self._set_scale(scale * self._scaler.get_backoff_factor())
            return
        self._finite_in_a_row += 1
        if self._finite_in_a_row == self._scaler.get_growth_interval():
            self._finite_in_a_row = 0
            grown = now * self._scaler.get_growth_factor()
            if grown <= torch.finfo(torch.float32).max:  # the type of a scale
                self._set_scale(grown)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the number of finite gradients in a row."""
        scale = None if self._scaler is None else self._scaler.get_scale()
        return {"scale": scale, "finite_in_a_row": self._finite_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a ``state_dict``; without one, or from one without scaling, at the scaler's own scale."""
        self._finite_in_a_row = 0 if state is None else state["finite_in_a_row"]
        if self._scaler is not None and state is not None and state["scale"] is not None:
            self._set_scale(state["scale"])

    def _set_scale(self, scale: float) -> None:
        assert self._scaler is not None
        # ``update`` works only after a first loss was scaled.
        self._scaler.load_state_dict(self._scaler.state_dict() | {"scale": scale})


def _divide(parameters: Sequence[Tensor], divisor: float) -> None:
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, divisor)
