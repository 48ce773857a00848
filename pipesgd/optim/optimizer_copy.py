"""A copy of any optimizer, which updates the same parameters and follows the original, to predict with its steps."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesgd.errors import UserInputError
from pipesgd.optim.hyperparameters import Hyperparameters, current, set_to
from pipesgd.optim.step import held_parameters, make_hookable, set_aside_gradients
from pipesgd.shards import local

_OF_A_SCALER = ("grad_scale", "found_inf")
"""Attributes that GradScaler gives a fused optimizer for a step, whose gradients it has not unscaled."""


class OptimizerCopy:
    """Copy of an optimizer: it updates the same parameters, with its own options and state.

    An optimizer that wraps another one, as Lookahead does, has a copy that wraps a copy.

    Args:
        optimizer: the original.
        stand_ins: tensors that the copy updates in place of some of the parameters, by ``id`` of the parameter.

    Raises:
        UserInputError: the optimizer cannot be copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stand_ins: Mapping[int, Tensor] | None = None):
        self._original = optimizer
        self._stand_ins = stand_ins or {}
        self._pairs: list[tuple[torch.optim.Optimizer, torch.optim.Optimizer]] = []
        """The optimizer and those that it wraps, each with its copy."""
        try:
            self._copy = _copied(optimizer, self._parameters_themselves(), self._pairs)
        except Exception as failure:
            raise UserInputError(
                "prediction must be none for an optimizer that cannot be copied; "
                f"got {type(optimizer).__name__}: {failure}"
            ) from failure

    def follow(self) -> None:
        """Take over the original's options and state."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for original, copied in self._pairs:
            own = copied.state
            for key, values in original.state.items():
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
            for key in own.keys() - original.state.keys():
                del own[key]
        if targets:
            torch._foreach_copy_(targets, sources)
        memo = self._memo()
        for original, copied in self._pairs:
            for group, options in zip(copied.param_groups, original.param_groups, strict=True):
                # An optimizer may count its steps in a tensor among the options: the copy must not count in the same.
                own_options = {name: value for name, value in options.items() if name != "params"}
                group.update(copy.deepcopy(own_options, memo))
            _follow_attributes(original, copied, memo)

    def begin(self, lr: float) -> None:
        """Forget all state, as before the first step, and set this learning rate, since schedules may begin at 0."""
        for _, copied in self._pairs:
            copied.state.clear()
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

    @property
    def attributes(self) -> dict[str, Any]:
        """All that the copy has in place of what the original has by itself."""
        names = vars(self._original).keys() - _of_torch() | {"state", "param_groups"}
        return {name: vars(self._copy)[name] for name in names & vars(self._original).keys() & vars(self._copy).keys()}

    def _memo(self) -> dict[int, Any]:
        """Return what copies refer to: the parameters themselves, and the copy's own where it was the original's."""
        memo = self._parameters_themselves() | {id(original): copied for original, copied in self._pairs}
        if len(self._pairs) == 1 and vars(self._original).keys() <= _of_torch():
            return memo
        for original, copied in self._pairs:
            groups, own = copied.param_groups, copied.state
            memo |= {id(original.param_groups): groups, id(original.state): own}
            memo |= {id(one): other for one, other in zip(original.param_groups, groups, strict=True)}
            for key, values in original.state.items():
                memo[id(values)] = own[key]
                if isinstance(values, dict):
                    memo |= {id(value): own[key][name] for name, value in values.items() if isinstance(value, Tensor)}
        return memo

    def _parameters_themselves(self) -> dict[int, Any]:
        """Return a memo for deepcopy, by which parameters are not copied."""
        parameters = (parameter for group in self._original.param_groups for parameter in group["params"])
        return {id(parameter): self._stand_ins.get(id(parameter), parameter) for parameter in parameters}


@functools.cache
def _of_torch() -> frozenset[str]:
    """Return the attributes that torch gives an optimizer, and those that are a part of its surroundings."""
    made_by_torch = vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)).keys()
    # ``step`` would be a scheduler's wrapper, which steps the original.
    return frozenset((*made_by_torch, "step", "_opt_called", *_OF_A_SCALER))


def _copied(
    original: torch.optim.Optimizer,
    memo: dict[int, Any],
    pairs: list[tuple[torch.optim.Optimizer, torch.optim.Optimizer]],
) -> torch.optim.Optimizer:
    """Return a copy of ``original`` that wraps copies of what that wraps, and has no hooks; ``memo`` is of deepcopy.

    torch's optimizers themselves leave the attributes of subclasses out of copies.
    """
    if hasattr(original, "__deepcopy__"):  # it knows how it can be copied, or that it cannot
        pairs.append((original, copy.deepcopy(original, memo)))
        return pairs[-1][1]
    made: torch.optim.Optimizer = object.__new__(type(original))
    memo[id(original)] = made
    pairs.append((original, made))
    for inner in vars(original).values():
        if isinstance(inner, torch.optim.Optimizer) and id(inner) not in memo:
            _copied(inner, memo, pairs)
    for name, value in vars(original).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            vars(made)[name] = OrderedDict()
        elif name not in ("step", *_OF_A_SCALER):
            vars(made)[name] = copy.deepcopy(value, memo)
    make_hookable(made)
    return made


def _follow_attributes(original: torch.optim.Optimizer, copied: torch.optim.Optimizer, memo: dict[int, Any]) -> None:
    """Give ``copied`` the attributes of the ``original``'s own class, which may make some as late as in a step."""
    for name in vars(original).keys() - _of_torch():
        setattr(copied, name, copy.deepcopy(vars(original)[name], memo))
    for name in vars(copied).keys() - vars(original).keys() - _of_torch():
        delattr(copied, name)


@contextlib.contextmanager
def without_effect(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a step of ``optimizer`` change neither parameters nor itself while the context is open.

    Optimizers of torch leave alone what has no gradient. Others may count their steps, or change weights in some of
    them: for the time being these have copies, and afterwards all that they had before.

    Raises:
        UserInputError: the optimizer cannot be copied.
    """
    with set_aside_gradients(optimizer):
        if type(optimizer).__module__.startswith("torch."):
            yield
            return
        held = held_parameters(optimizer)
        stand_ins = {id(one): torch.nn.Parameter(one.detach().clone(), one.requires_grad) for one in held}
        try:
            copied = OptimizerCopy(optimizer, stand_ins).attributes
        except UserInputError as refusal:
            raise UserInputError(
                "optimizer must be one that can be copied, since a step of it that applies nothing is to leave no "
                f"trace; got {type(optimizer).__name__}: {refusal.__cause__}"
            ) from refusal
        before = dict(vars(optimizer))
        vars(optimizer).update(copied)
        try:
            yield
        finally:
            for name in vars(optimizer).keys() - before.keys():
                delattr(optimizer, name)
            vars(optimizer).update({name: before[name] for name in copied})


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
