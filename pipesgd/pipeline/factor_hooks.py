"""Hooks that keep the factors of linear layers' gradients: inputs and output gradients of the calls of these layers.

A call counts if a gradient of its output arrives, so neither do calls without gradients, nor the first of the two calls
that a checkpoint of activations makes of a layer. Several calls, and several backward passes before a step, append.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipesgd.optim.loss_scale import LossScale
from pipesgd.pipeline.true_weights_hooks import Hook
from pipesgd.reducers.factors import Factors, is_linear, smallest_error, unit_roundoff


@dataclass
class _Kept:
    """Factors that are kept for a weight."""

    weight: Tensor
    complete: Factors
    """Factors of what the weight's ``.grad`` holds."""
    pending: Factors
    """Factors of calls whose output gradients have arrived in the present backward pass."""
    handles: list[RemovableHandle] = field(default_factory=list)


class FactorHooks:
    """Keeps the factors of gradients, in copies, from the backward pass until they are forgotten.

    They have, for every weight and row of a call, as many values as the weight has rows and columns. Until the backward
    pass reaches a call, its input stays in memory, as autograd keeps it, too, except within a checkpoint of
    activations that is not reentrant.

    Args:
        model: the model.
        loss_scale: scale of the losses, by which output gradients are divided.
    """

    def __init__(self, model: nn.Module, loss_scale: LossScale):
        self._model = model
        self._loss_scale = loss_scale
        self._kept: dict[int, _Kept] = {}  # by the id of the weight

    def follow(self, weights: Sequence[Tensor]) -> None:
        """Keep the factors of these weights' gradients from now on, and those of no others."""
        wanted = {id(weight): weight for weight in weights}
        for identity in self._kept.keys() - wanted.keys():
            for handle in self._kept.pop(identity).handles:
                handle.remove()
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for identity, weight in wanted.items():
            if identity not in self._kept:
                kept = _Kept(weight, Factors(names[identity]), Factors(names[identity]))
                kept.handles.append(weight.register_post_accumulate_grad_hook(partial(self._accumulated, kept)))
                self._kept[identity] = kept
                for module in self._model.modules():
                    if is_linear(module) and module.weight is weight:
                        called = Hook(partial(self._called, kept))
                        kept.handles.append(module.register_forward_hook(called, prepend=True, with_kwargs=True))

    def look(self, weight: Tensor) -> Factors:
        """Return the factors of what the ``.grad`` of ``weight`` holds; none if there is no gradient."""
        kept = self._kept[id(weight)]
        return Factors(kept.complete.name) if weight.grad is None else kept.complete

    def forget(self) -> None:
        """Drop all factors. No backward pass may be running."""
        for kept in self._kept.values():
            kept.complete, kept.pending = Factors(kept.complete.name), Factors(kept.complete.name)

    def remove(self) -> None:
        """Remove the hooks."""
        self.follow([])

    def _called(self, kept: _Kept, module: nn.Module, arguments: Any, named: Any, output: Tensor) -> None:
        """Watch for the gradient of a call's output."""
        if module.weight is not kept.weight or not (kept.weight.requires_grad and output.requires_grad):
            return
        # Autograd keeps the input as it is; under autocast, it keeps a copy of this dtype.
        inputs = (arguments[0] if arguments else named["input"]).detach().to(output.dtype)
        # An operation in place gives a view another place in the graph, but what it is a view of keeps its own.
        watched = output if output._base is None else output._base
        watched.register_hook(partial(self._arrived, kept, inputs))

    @torch.no_grad()
    def _arrived(self, kept: _Kept, inputs: Tensor, gradient: Tensor) -> None:
        """Keep copies of a call's input and of its output's gradient: autograd may change both after this."""
        rows, columns = kept.weight.shape
        x, g = inputs.reshape(-1, columns), gradient.detach().reshape(-1, rows)
        scale = self._loss_scale.scale
        kept.pending.add(
            Factors(
                kept.pending.name,
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
        """Count what is pending as part of ``.grad``, to which the gradient of all of it has just been added."""
        kept.complete.add(kept.pending)
        kept.pending = Factors(kept.pending.name)
