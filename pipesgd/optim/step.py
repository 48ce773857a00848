"""Parameters that an optimizer trains, and a step of it in the iteration that computed the gradients."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pipesgd.checks import check_one_of
from pipesgd.errors import NonFiniteGradientError, UserInputError
from pipesgd.flat_buffer import are_finite, give_gradients
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.loss_scale import LossScale
from pipesgd.sections import ON_NONFINITE
from pipesgd.shards import local
from pipesgd.strategy import Span, StepReport


def trainable_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that ``optimizer`` updates, each once, in the order of its groups.

    Raises:
        UserInputError: there are none, they are on more than one device, or the optimizer computes losses itself.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserInputError(f"optimizer must step without a closure; got {type(optimizer).__name__}")
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not parameters:
        raise UserInputError("optimizer must hold a parameter that requires a gradient; got none")
    if len({parameter.device for parameter in parameters.values()}) > 1:
        raise UserInputError("all parameters must be on one device")
    return list(parameters.values())


def held_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that ``optimizer`` holds, frozen ones, too, each once, in the order of its groups."""
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())


def trainable_identities(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the ids of the parameters that ``optimizer`` updates: in microseconds they show if these have changed."""
    return [
        id(parameter) for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    ]


def check_unchanged(optimizer: torch.optim.Optimizer, identities: Sequence[int], strategy: str) -> None:
    """Refuse parameters that were frozen, unfrozen or added since ``identities`` were theirs.

    Raises:
        UserInputError: there are such parameters.
    """
    if trainable_identities(optimizer) != identities:
        raise UserInputError(
            f"parameters must not be frozen, unfrozen or added while {strategy} trains them; "
            "close the strategy and make a new one"
        )


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Drop all gradients of ``optimizer``'s parameters: those that backward passes left before a strategy was made.

    Its first update would add those of trained parameters to its own, and every update apply those of frozen ones.
    """
    held = held_parameters(optimizer)
    give_gradients(held, [None] * len(held))


@contextlib.contextmanager
def set_aside_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take away the gradients of ``optimizer``'s parameters while the context is open, then give them back."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    give_gradients(parameters, [None] * len(parameters))
    try:
        yield
    finally:  # without a call, in which an interruption would leave all of them out
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def count_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep torch's schedulers from warning that they are stepped before the optimizer: it was, only elsewhere."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def check_copies_gradients(optimizer: torch.optim.Optimizer, memory: Sequence[Tensor]) -> None:
    """Refuse an optimizer that holds on to gradients in ``memory``, which later gradients will overwrite.

    Raises:
        UserInputError: it does so.
    """
    places = {tensor.untyped_storage()._cdata for tensor in map(local, memory)}
    if any(tensor.untyped_storage()._cdata in places for tensor in _strided_tensors(optimizer.state)):
        raise UserInputError(
            "optimizer must clone what it keeps of a gradient, as in state[p]['last'] = p.grad.clone(), since later "
            f"gradients overwrite it; got {type(optimizer).__name__}, which keeps p.grad itself"
        )


def _strided_tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``state``, of dicts, lists and other values; of DTensors this rank's part."""
    if isinstance(state, Tensor) and state.layout == torch.strided:
        yield local(state)
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _strided_tensors(value)


def make_hookable(optimizer: torch.optim.Optimizer) -> None:
    """Let torch call hooks of ``optimizer``'s steps, also where its class leaves out torch's constructor.

    Wrappers of other optimizers do so, such as Lookahead in several packages. Steps of base classes are hooked, too, as
    they are once torch has made an optimizer of that class: a loop may call ``super().step()`` in another method.
    """
    kind = type(optimizer)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if not hasattr(kind, name) and name not in vars(optimizer):
            setattr(kind, name, OrderedDict())  # of other optimizers of this class, which have no hooks
        vars(optimizer).setdefault(name, OrderedDict())
    if not getattr(kind.step, "hooked", False):
        optimizer._patch_step_function()
    bases = [base for base in kind.__mro__ if issubclass(base, torch.optim.Optimizer)][1:-1]  # the last is torch's own
    for base in bases:
        step = vars(base).get("step")
        if step is not None and not getattr(step, "hooked", False):
            base.step = torch.optim.Optimizer.profile_hook_step(step)  # type: ignore[assignment,method-assign]
            base.step.hooked = True  # type: ignore[attr-defined]


def check_not_schedule_free(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that changes weights in ``train()`` and ``eval()``, where gradients are late.

    Raises:
        UserInputError: it does so.
    """
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise UserInputError(
            "optimizer must not be schedule-free, except at width 1 without local steps: its train() and eval() change "
            f"weights in place; got {type(optimizer).__name__}"
        )


class OwnSteps:
    """Steps of an optimizer that belong to a strategy: a hook that refuses them to the training loop.

    A step of the loop's would change this rank's weights alone, and nothing would tell later why replicas differ.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        make_hookable(optimizer)
        self._optimizer = optimizer
        self._taken = False
        self._handles: list[RemovableHandle] = []

    def refuse_others(self) -> None:
        """Refuse, from now on, all steps that are not ``taken``."""
        self._handles.append(self._optimizer.register_step_pre_hook(self))

    @torch._disable_dynamo  # a compiled step calls it outside of its graphs
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse a step, or let it be; torch calls this before it."""
        if not self._taken:
            raise UserInputError(
                "optimizer.step() must be left to the pipeline, whose step() does it; got a call of it in the training "
                "loop"
            )

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Allow steps while the context is open."""
        self._taken = True
        try:
            yield
        finally:
            self._taken = False

    def remove(self) -> None:
        """Refuse nothing any more."""
        while self._handles:
            self._handles.pop().remove()


class SynchronousUpdate:
    """Update by gradients in the iteration that computed them: divided by the loss scale, checked, and clipped.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        clip: clipping of the gradients; None clips nothing.
        scaler: scaler of the losses, with float16 (``pipesgd.optim.loss_scale``).
        on_nonfinite: "stop" raises ``NonFiniteGradientError``, "skip" leaves the update out.
        averaged: whether the gradients are means over the ranks, and not this rank's own.

    Raises:
        UserInputError: a value is out of range, or the optimizer has no parameter to train.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip: Clipping | None,
        scaler: torch.amp.GradScaler | None,
        on_nonfinite: str,
        averaged: bool = False,
    ):
        check_one_of("on_nonfinite", on_nonfinite, ON_NONFINITE)
        self.parameters, self._identities = trainable_parameters(optimizer), trainable_identities(optimizer)
        self.loss_scale = LossScale(scaler, self.parameters)
        self._optimizer = optimizer
        self._clip = clip or Clipping()
        self._averaged = averaged
        self._skip_nonfinite = on_nonfinite == "skip" or self.loss_scale.skips
        drop_gradients(optimizer)

    def check_parameters(self, strategy: str) -> None:
        """Refuse parameters that were frozen, unfrozen or added since, which ``strategy`` cannot follow.

        Raises:
            UserInputError: there are such parameters.
        """
        check_unchanged(self._optimizer, self._identities, strategy)

    def apply(self, iteration: int) -> StepReport:
        """Do one step with the gradients in ``.grad``, then drop them.

        Raises:
            NonFiniteGradientError: they hold a NaN or an infinity, unless such an update is to be skipped.
        """
        begin = time.perf_counter()
        scale = self.loss_scale.divide(self.parameters)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        finite = are_finite(gradients)
        self.loss_scale.observe(finite, scale)
        if finite:
            self._clip(gradients)
            self._optimizer.step()
        elif self._skip_nonfinite:
            count_as_stepped(self._optimizer)
        else:
            raise NonFiniteGradientError(iteration, own=not self._averaged)
        self._optimizer.zero_grad()
        return StepReport(
            applied=(iteration,) if finite else (),
            skipped=() if finite else (iteration,),
            spans=(Span("update", iteration, begin, time.perf_counter()),),
        )
