"""A copy of any optimizer, which updates the same parameters and follows the original, to predict with its steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesgd.errors import UserInputError
from pipesgd.optim.hyperparameters import Hyperparameters, current, set_to
from pipesgd.optim.step import set_aside_gradients
from pipesgd.shards import local

_OF_A_SCALER = ("grad_scale", "found_inf")
"""Attributes that GradScaler gives a fused optimizer for a step, whose gradients it has not unscaled."""


class OptimizerCopy:
    """Copy of an optimizer: it updates the same parameters, with its own options and state.

    Args:
        optimizer: the original.
        stand_ins: tensors that the copy updates in place of some of the parameters, by ``id`` of the parameter.

    Raises:
        UserInputError: the optimizer cannot be copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stand_ins: Mapping[int, Tensor] | None = None):
        self._original = optimizer
        self._stand_ins = stand_ins or {}
        memo = self._parameters_themselves()
        try:
            self._copy = copy.deepcopy(optimizer, memo)
            # torch's Optimizer leaves the attributes of subclasses out of copies. ``step`` stays out: it would be a
            # scheduler's wrapper, which steps the original.
            self._known = vars(self._copy).keys() | vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)).keys() | {"step"}
            self._follow_attributes(self._memo())
        except Exception as failure:
            raise UserInputError(
                "prediction must be none for an optimizer that cannot be copied; "
                f"got {type(optimizer).__name__}: {failure}"
            ) from failure

    def follow(self) -> None:
        """Take over the original's options and state."""
        own = self._copy.state
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for key, values in self._original.state.items():
            if not isinstance(values, dict):  # a value of the whole optimizer, not of a parameter
                own[key] = copy.deepcopy(values)
                continue
            kept = own[key]
            for name, value in values.items():
                target = kept.get(name)
                if isinstance(value, Tensor) and isinstance(target, Tensor) and target.shape == value.shape:
                    targets.append(local(target))
                    sources.append(local(value))
                else:
                    kept[name] = copy.deepcopy(value)
            for name in kept.keys() - values.keys():
                del kept[name]
        for key in own.keys() - self._original.state.keys():
            del own[key]
        if targets:
            torch._foreach_copy_(targets, sources)
        memo = self._memo()
        for group, options in zip(self._copy.param_groups, self._original.param_groups, strict=True):
            # An optimizer may count its steps in a tensor among the options: the copy must not count in the same one.
            own_options = {name: value for name, value in options.items() if name != "params"}
            group.update(copy.deepcopy(own_options, memo))
        self._follow_attributes(memo)

    @property
    def nbytes(self) -> int:
        """Bytes of the copy's state."""
        tensors = (
            value for values in self._copy.state.values() if isinstance(values, dict) for value in values.values()
        )
        return sum(local(value).nbytes for value in tensors if isinstance(value, Tensor))

    def begin(self, lr: float) -> None:
        """Forget all state, as before the first step, and set this learning rate, since schedules may begin at 0."""
        self._copy.state.clear()
        for group in self._copy.param_groups:
            group["params"] = list({id(parameter): parameter for parameter in group["params"]}.values())
            group["lr"] = torch.full_like(group["lr"], lr) if isinstance(group["lr"], Tensor) else lr

    def step(self, hyperparameters: Hyperparameters | None = None) -> None:
        """Update the parameters with their ``.grad``, under these options or those that the copy has."""
        with set_to(self._copy, current(self._copy) if hyperparameters is None else hyperparameters):
            self._copy.step()

    def state_of(self, tensor: Tensor) -> dict[str, Any]:
        """Return the state of a tensor that the copy updates; empty if it has none."""
        state: dict[str, Any] = self._copy.state.get(tensor, {})
        return state

    def _follow_attributes(self, memo: dict[int, Any]) -> None:
        for name, value in vars(self._original).items():
            if name not in self._known and name not in _OF_A_SCALER:
                # A subclass may make attributes as late as in its first step.
                setattr(self._copy, name, copy.deepcopy(value, memo))
        for name in vars(self._copy).keys() - vars(self._original).keys() - self._known:
            delattr(self._copy, name)

    def _memo(self) -> dict[int, Any]:
        """Return what copies refer to: the parameters themselves, and the copy where it was the original."""
        return self._parameters_themselves() | {id(self._original): self._copy}

    def _parameters_themselves(self) -> dict[int, Any]:
        """Return a memo for deepcopy, by which parameters are not copied."""
        parameters = (parameter for group in self._original.param_groups for parameter in group["params"])
        return {id(parameter): self._stand_ins.get(id(parameter), parameter) for parameter in parameters}


def state_of_a_zero_gradient(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return the state that ``optimizer`` would have of each of ``parameters`` after a step with a gradient of zero.

    The optimizer and the parameters stay as they are.

    Raises:
        UserInputError: the optimizer cannot be copied.
    """
    stand_ins = {id(parameter): torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters}
    stepper = OptimizerCopy(optimizer, stand_ins)
    for tensor in stand_ins.values():
        tensor.grad = torch.zeros_like(tensor)
    with set_aside_gradients(optimizer):  # the copy updates the other parameters themselves
        stepper.step()
    return [stepper.state_of(tensor) for tensor in stand_ins.values()]
