"""Hooks that keep the factors of linear layers' gradients: inputs and output gradients of the calls of these layers.

A call counts if a gradient of its output arrives in a backward pass that adds to the weight's ``.grad``. So neither do
calls without gradients, nor the first of the two calls that a checkpoint of activations makes of a layer, nor what
computes a gradient of something else, such as the input. Several calls, and several backward passes before a step,
append.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from pipesgd.optim.loss_scale import LossScale
from pipesgd.pipeline.true_weights_hooks import OutsideOfGraphs


@dataclass
class Factors:
    """Factors of the gradient of a linear layer's weight, one of each kind for every call of the layer."""

    name: str
    """Name of the weight, for messages."""
    inputs: list[Tensor] = field(default_factory=list)
    """Inputs of each call, (rows, columns of the weight), in the dtype of the weight."""
    gradients: list[Tensor] = field(default_factory=list)
    """Gradients of the outputs of each call, (rows, rows of the weight), likewise."""
    unit: float = 0.0
    """Unit roundoff of the coarsest dtype that the gradient was computed or kept in."""
    smallest: float = 0.0
    """Largest error of rounding a value of that dtype to 0."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(map(len, self.inputs))

    def add(self, other: Factors) -> None:
        """Append the calls of ``other``."""
        self.inputs += other.inputs
        self.gradients += other.gradients
        self.unit = max(self.unit, other.unit)
        self.smallest = max(self.smallest, other.smallest)


@dataclass
class _Kept:
    """Factors that are kept for a weight."""

    weight: Tensor
    complete: Factors
    """Factors of what the weight's ``.grad`` holds."""
    pending: dict[int, Factors] = field(default_factory=dict)
    """Factors of calls whose output gradients have arrived, by the backward pass, several of which run where a
    checkpoint of activations is reentrant. What a pass does not add to ``.grad`` is dropped at its end."""
    handles: list[RemovableHandle] = field(default_factory=list)

    def drop(self, backward: int) -> None:
        """Drop what is pending of a backward pass."""
        self.pending.pop(backward, None)


class FactorHooks:
    """Keeps the factors of gradients, in copies, from the backward pass until they are forgotten.

    They have, for every weight and row of a call, as many values as the weight has rows and columns. Until the backward
    pass reaches a call, its input stays in memory, as autograd keeps it, too, except within a checkpoint of
    activations that is not reentrant.

    Args:
        model: the model.
        weights: the weights, all trained, of whose gradients the factors are kept.
        loss_scale: scale of the losses, by which output gradients are divided; None if they have none.
    """

    def __init__(self, model: nn.Module, weights: Sequence[Tensor], loss_scale: LossScale | None):
        self._loss_scale = loss_scale
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._kept = {id(weight): _Kept(weight, Factors(names[id(weight)])) for weight in weights}
        for kept in self._kept.values():
            kept.handles.append(kept.weight.register_post_accumulate_grad_hook(partial(self._accumulated, kept)))
        for module in model.modules():
            if is_linear(module) and (of_module := self._kept.get(id(module.weight))) is not None:
                called = OutsideOfGraphs(partial(self._called, of_module))
                of_module.handles.append(module.register_forward_hook(called, prepend=True, with_kwargs=True))

    def look(self, weight: Tensor) -> Factors:
        """Return the factors of what the ``.grad`` of ``weight`` holds; none if there is no gradient."""
        kept = self._kept[id(weight)]
        return Factors(kept.complete.name) if weight.grad is None else kept.complete

    def forget(self) -> None:
        """Drop all factors. No backward pass may be running."""
        for kept in self._kept.values():
            kept.complete = Factors(kept.complete.name)
            kept.pending.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        for kept in self._kept.values():
            for handle in kept.handles:
                handle.remove()
        self._kept.clear()

    def _called(self, kept: _Kept, module: nn.Module, arguments: Any, named: Any, output: Tensor) -> None:
        """Watch for the gradient of a call's output."""
        if module.weight is not kept.weight or not (kept.weight.requires_grad and output.requires_grad):
            return
        # Autograd keeps the input as it is; under autocast, it keeps a copy of this dtype.
        inputs = (arguments[0] if arguments else named["input"]).detach().to(output.dtype)
        # An operation in place gives a view another place in the graph, but what it is a view of keeps its own. Hooks
        # of the node, in contrast to those of the tensor, come after all others that may change the gradient.
        node = (output if output._base is None else output._base).grad_fn
        assert node is not None
        node.register_prehook(partial(self._arrived, kept, inputs))

    @torch.no_grad()
    def _arrived(self, kept: _Kept, inputs: Tensor, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep copies of a call's input and of its output's gradient: autograd may change both after this."""
        (gradient,) = gradients
        if gradient is None:  # what used the output has none for it
            return
        backward = torch._C._current_graph_task_id()
        if backward not in kept.pending:
            kept.pending[backward] = Factors(kept.complete.name)
            Variable._execution_engine.queue_callback(partial(kept.drop, backward))
        rows, columns = kept.weight.shape
        count = math.prod(inputs.shape[:-1])
        x, g = inputs.reshape(count, columns), gradient.detach().reshape(count, rows)
        scale = 1.0 if self._loss_scale is None else self._loss_scale.scale
        kept.pending[backward].add(
            Factors(
                kept.complete.name,
                inputs=[kept.weight.new_empty(x.shape).copy_(x)],
                gradients=[kept.weight.new_empty(g.shape).copy_(g).div_(scale)],
                unit=max(unit_roundoff(kept.weight.dtype), unit_roundoff(g.dtype)),
                smallest=max(smallest_error(kept.weight.dtype), smallest_error(g.dtype) / scale),
            )
        )
        if kept.weight.grad is None:  # whatever it held before was dropped
            kept.complete = Factors(kept.complete.name)

    @staticmethod
    def _accumulated(kept: _Kept, weight: Tensor) -> None:
        """Count what is pending as part of ``.grad``, to which this backward pass has just added its gradient."""
        if (arrived := kept.pending.pop(torch._C._current_graph_task_id(), None)) is not None:
            kept.complete.add(arrived)


def is_linear(module: nn.Module) -> bool:
    """Return True if ``module`` is a ``torch.nn.Linear``, and of no class derived from it."""
    return type(module) is nn.Linear


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of products of matrices in ``dtype``, as torch is set to compute them."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.bfloat16
    return torch.finfo(dtype).eps / 2


def smallest_error(dtype: torch.dtype) -> float:
    """Return the largest error of rounding a small value of ``dtype`` to 0. float16 is not flushed."""
    limits = torch.finfo(dtype)
    return limits.tiny * (limits.eps if dtype == torch.float16 else 1.0)
