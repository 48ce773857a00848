"""Options of an optimizer that change during a run; they travel with the gradient that was computed under them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipesgd.nested import loadable

SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""Names of the options that schedules change: torch's own schedules change the first three."""

Hyperparameters: TypeAlias = Sequence[dict[str, Any]]
"""Values of those of ``SCHEDULED`` that a parameter group has, for each group."""


def current(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    """Return the values that are set now."""
    return [{name: _kept(group[name]) for name in SCHEDULED if name in group} for group in optimizer.param_groups]


@contextlib.contextmanager
def set_to(optimizer: torch.optim.Optimizer, values: Hyperparameters) -> Iterator[None]:
    """Set ``values`` while the context is open; groups that were added after them keep their own."""
    groups = optimizer.param_groups[: len(values)]
    before = [{name: group[name] for name in of_group} for group, of_group in zip(groups, values, strict=True)]
    _update(optimizer, values)
    try:
        yield
    finally:
        _update(optimizer, before)


def as_numbers(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the values that are set now, one after the other."""
    return [
        float(number)
        for of_group in current(optimizer)
        for value in of_group.values()
        for number in (value if isinstance(value, list | tuple) else (value,))
    ]


def set_numbers(optimizer: torch.optim.Optimizer, numbers: Sequence[float]) -> None:
    """Set the values that ``as_numbers`` returned, of an optimizer with the same groups."""
    left = iter(numbers)
    for of_group, group in zip(current(optimizer), optimizer.param_groups, strict=True):
        for name, value in of_group.items():
            group[name] = tuple(next(left) for _ in value) if isinstance(value, list | tuple) else next(left)


def _update(optimizer: torch.optim.Optimizer, values: Hyperparameters) -> None:
    for group, of_group in zip(optimizer.param_groups[: len(values)], values, strict=True):
        group.update(of_group)


def _kept(value: Any) -> Any:
    if type(value) in (float, int):
        return value
    return value.clone() if isinstance(value, Tensor) else loadable(value)  # a schedule changes a tensor in place
