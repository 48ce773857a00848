"""A copy of any optimizer, which updates the same parameters and follows the original: steps to predict with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from pipesgd.errors import UserInputError
from pipesgd.hyperparameters import Hyperparameters, set_to


class OptimizerCopy:
    """A copy of an optimizer: it updates the same parameters, with options and a state of its own.

    Raises:
        UserInputError: the optimizer cannot be copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._original = optimizer
        memo = self._parameters_themselves()
        try:
            self._copy = copy.deepcopy(optimizer, memo)
            # torch's Optimizer leaves the attributes of subclasses out of copies. ``step`` stays out: it would be a
            # scheduler's wrapper, which steps the original.
            known = vars(self._copy).keys() | vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)).keys() | {"step"}
            self._left_out = [name for name in vars(optimizer) if name not in known]
            self._follow_attributes()
        except Exception as failure:
            raise UserInputError(
                "prediction must be none, spectrain or dc for an optimizer that cannot be copied; "
                f"got {type(optimizer).__name__}: {failure}"
            ) from failure

    def follow(self) -> None:
        """Take over the original's options and state."""
        own = self._copy.state
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for key, values in self._original.state.items():
            kept = own[key]
            for name, value in values.items():
                target = kept.get(name)
                if isinstance(value, Tensor) and isinstance(target, Tensor) and target.shape == value.shape:
                    targets.append(target)
                    sources.append(value)
                else:
                    kept[name] = copy.deepcopy(value)
            for name in kept.keys() - values.keys():
                del kept[name]
        for key in own.keys() - self._original.state.keys():
            del own[key]
        if targets:
            torch._foreach_copy_(targets, sources)
        for group, options in zip(self._copy.param_groups, self._original.param_groups, strict=True):
            group.update((name, value) for name, value in options.items() if name != "params")
        self._follow_attributes()

    @property
    def nbytes(self) -> int:
        """Memory of its state."""
        tensors = (value for values in self._copy.state.values() for value in values.values())
        return sum(value.nbytes for value in tensors if isinstance(value, Tensor))

    def step(self, hyperparameters: Hyperparameters) -> None:
        """Update the parameters with their ``.grad``."""
        with set_to(self._copy, hyperparameters):
            self._copy.step()

    def _follow_attributes(self) -> None:
        memo = self._parameters_themselves()
        for name in self._left_out:
            setattr(self._copy, name, copy.deepcopy(getattr(self._original, name), memo))

    def _parameters_themselves(self) -> dict[int, Any]:
        """For deepcopy: parameters are not copied."""
        return {id(parameter): parameter for group in self._original.param_groups for parameter in group["params"]}
