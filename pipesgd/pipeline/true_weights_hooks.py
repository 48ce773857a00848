"""Hooks on a model that let it hold its true weights whenever it does not train, so that nobody must remember to.

A forward pass of the whole model uses the true weights if the model is in evaluation mode or gradients are off. A part
of the model that is called by itself follows the mode of the whole model alone: gradients may be off in a part that
trains, as in a reentrant checkpoint of activations. ``state_dict`` and ``load_state_dict`` of the model, and of any
part of it, read and write the true weights; the model keeps loaded weights until the next update.

The predicted weights return at once where no graph remembers which weights it was computed with, and otherwise before
the next forward pass that trains. A backward pass through a graph of the other weights then fails, as it does in torch
after any change in place.

Gradients of a forward pass in evaluation mode are those of the true weights. Nothing tells in the forward pass whether
they will be trained with, so ``check_gradients`` refuses them where they are handed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from pipesgd.errors import UserInputError
from pipesgd.pipeline.delayed_update import DelayedUpdate
from pipesgd.shards import is_dtensor


class TrueWeightsHooks:
    """The hooks on ``model`` and on all of its parts; ``remove`` takes them off.

    A copy of the model, by ``copy.deepcopy`` or ``pickle``, gets hooks that do nothing.

    Args:
        model: the whole model.
        updates: holder of the true and predicted weights of its parameters.
    """

    def __init__(self, model: nn.Module, updates: DelayedUpdate):
        self._model = unwrapped(model)
        self._updates = updates
        self._computing = False
        """True while a forward pass of the whole model runs."""
        self._brief = False
        """True if predicted weights return at the end of that forward pass."""
        self._evaluated = False
        """True from a forward pass in evaluation mode that has put in the true weights to the next one that trains."""
        self._had_gradients = False
        """True if there were gradients before that pass in evaluation mode."""
        self._saving: nn.Module | None = None
        """Part of the model whose ``state_dict`` is being made."""
        self._shown_to_save = False
        """True if predicted weights return once it is made."""
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(OutsideOfGraphs(self._before_whole), prepend=True),
            model.register_forward_hook(OutsideOfGraphs(self._after_whole), always_call=True),
        ]
        for module in model.modules():
            if module is not model:
                self._handles.append(module.register_forward_pre_hook(Hook(self._before_part), prepend=True))
            self._handles += [
                module.register_state_dict_pre_hook(Hook(self._begin_saving)),
                module.register_state_dict_post_hook(Hook(self._end_saving)),
                module.register_load_state_dict_pre_hook(Hook(self._begin_loading)),
            ]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def check_gradients(self, *, new: bool = False) -> None:
        """Refuse to take over gradients that were computed with the true weights, in evaluation mode.

        Args:
            new: whether they are of the backward pass that is running. Else they may be from before an evaluation.

        Raises:
            UserInputError: they were computed so.
        """
        weights = self._updates.weights
        if not (self._evaluated and weights.are_valid and not weights.are_predicted):
            return
        if new or (self._has_gradients() and not self._had_gradients):
            raise UserInputError(
                "model must be in training mode when it computes gradients for a step, since only there it has the "
                "predicted weights; got gradients of evaluation mode (call model.train(), and eval() only on layers "
                "that are to stay in it, as batch norm)"
            )

    def _before_whole(self, module: nn.Module, inputs: Any) -> None:
        self._computing = True
        self._brief = False
        if not torch.is_grad_enabled():
            self._brief = self._updates.weights.show_true()
        else:
            self._follow_mode()

    def _after_whole(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._computing = False
        if self._brief:
            self._brief = False
            self._updates.weights.return_to_predicted()

    def _before_part(self, module: nn.Module, inputs: Any) -> None:
        if not (torch.compiler.is_compiling() or self._computing):
            self._follow_mode()

    def _follow_mode(self) -> None:
        if self._model.training:
            self._updates.weights.return_to_predicted(graphs_end=True)
            self._evaluated = False
        elif self._updates.weights.show_true(graphs_end=True):
            self._evaluated, self._had_gradients = True, self._has_gradients()

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._model.parameters())

    def _begin_saving(self, module: nn.Module, *details: Any) -> None:
        shown = self._updates.weights.show_true()
        if shown or self._saving in (None, module):  # else a part of it, unless one could not be made
            self._saving, self._shown_to_save = module, shown

    def _end_saving(self, module: nn.Module, state: dict[str, Any], *details: Any) -> None:
        if self._saving is module:
            self._saving = None
            for name, value in state.items():
                # The memory of a DTensor will hold predicted weights; with keep_vars the parameters are wanted.
                if is_dtensor(value) and not isinstance(value, nn.Parameter):
                    state[name] = value.clone()
            if self._shown_to_save:
                self._updates.weights.return_to_predicted()

    def _begin_loading(self, module: nn.Module, *details: Any) -> None:
        self._updates.weights.restore()  # the predicted weights are not those expected from the loaded ones


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module within wrappers of torch, which may be left in another mode than it is in."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class Hook:
    """A hook of torch that is replaced by one that does nothing when its module is copied or pickled."""

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., None]]]:
        return type(self), (_do_nothing,)


class OutsideOfGraphs(Hook):
    """A hook that is called in every forward pass of a compiled model, whose graphs do not contain it."""

    @torch._disable_dynamo  # as torch.compiler.disable, but imports the compiler, which takes a second, when called
    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


def _do_nothing(*arguments: Any) -> None:
    return
