"""Hooks on a model that let it hold its true weights whenever it does not train, so that nobody must remember to.

A forward pass of the whole model uses the true weights if the model is in evaluation mode or gradients are off. A part
of the model that is called by itself follows the mode of the whole model alone: gradients may be off in a part that
trains, as in a reentrant checkpoint of activations. ``state_dict`` and ``load_state_dict`` of the model, and of any
part of it, read and write the true weights; the model keeps loaded weights until the next update.

The predicted weights return at once where no graph remembers which weights it was computed with, and otherwise before
the next forward pass that trains. A backward pass through a graph of the other weights then fails, as it does in torch
after any change in place.

A change of mode that a part of the model does in its own way, as LoRA layers do that merge their factors in ``eval()``,
reads and writes the true weights, as does an update of torch's ``AveragedModel`` by the model.

Gradients of a forward pass in evaluation mode are those of the true weights. Nothing tells in the forward pass whether
they will be trained with, so ``check_gradients`` refuses them where they are handed over.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from pipesgd.errors import UserInputError, warn_of_line
from pipesgd.pipeline.prediction import SwappedWeights
from pipesgd.shards import is_dtensor


class TrueWeightsHooks:
    """The hooks on ``model`` and on all of its parts; ``remove`` takes them off.

    A copy of the model, by ``copy.deepcopy`` or ``pickle``, gets hooks that do nothing.

    Args:
        model: the whole model.
        weights: true and predicted weights of its parameters.
    """

    def __init__(self, model: nn.Module, weights: SwappedWeights):
        self._model = unwrapped(model)
        self._weights = weights
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
        self._modes = [mode for module in model.modules() for mode in changes_of_mode(module)]
        for mode in self._modes:
            mode.weights.append(weights)
        follow_averages()
        self._modules = list(model.modules())
        for module in self._modules:
            _WEIGHTS.setdefault(module, []).append(weights)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for mode in self._modes:
            mode.leave(self._weights)
        self._modes.clear()
        for module in self._modules:
            _WEIGHTS[module].remove(self._weights)
        self._modules.clear()

    def check_gradients(self, *, new: bool = False) -> None:
        """Refuse to take over gradients that were computed with the true weights, in evaluation mode.

        Args:
            new: whether they are of the backward pass that is running. Else they may be from before an evaluation.

        Raises:
            UserInputError: they were computed so.
        """
        if not (self._evaluated and self._weights.hidden):
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
            self._brief = self._weights.show_true()
        else:
            self._follow_mode()

    def _after_whole(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._computing = False
        if self._brief:
            self._brief = False
            self._weights.return_to_predicted()

    def _before_part(self, module: nn.Module, inputs: Any) -> None:
        if not (torch.compiler.is_compiling() or self._computing):
            self._follow_mode()

    def _follow_mode(self) -> None:
        if self._model.training:
            self._weights.return_to_predicted(graphs_end=True)
            self._evaluated = False
        elif self._weights.show_true(graphs_end=True):
            self._evaluated, self._had_gradients = True, self._has_gradients()

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._model.parameters())

    def _begin_saving(self, module: nn.Module, *details: Any) -> None:
        shown = self._weights.show_true()
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
                self._weights.return_to_predicted()

    def _begin_loading(self, module: nn.Module, *details: Any) -> None:
        self._weights.restore()  # the predicted weights are not those expected from the loaded ones


class ChangeOfMode:
    """A module's own ``train`` or ``eval``, on the module in its place, which finds and leaves the true weights.

    A copy of the module, by ``copy.deepcopy`` or ``pickle``, has the method of its class.
    """

    def __init__(self, module: nn.Module, name: str):
        self.weights: list[SwappedWeights] = []
        """Weights of the pipelines that train the module."""
        self._module = module
        self._name = name
        self._before = vars(module).get(name)
        """Attribute of this name that the module itself had; None if it was its class's."""
        self._change: Callable[..., Any] = getattr(module, name)
        vars(module)[name] = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with _true_weights(self.weights):
            return self._change(*arguments, **named)

    def leave(self, weights: SwappedWeights) -> None:
        """Forget one of ``weights``; after the last one, put back what was there."""
        self.weights.remove(weights)
        if not self.weights and vars(self._module).get(self._name) is self:
            del vars(self._module)[self._name]
            if self._before is not None:
                vars(self._module)[self._name] = self._before

    def __reduce__(self) -> tuple[type[functools.partial[Any]], tuple[Callable[..., Any], nn.Module]]:
        return functools.partial, (getattr(type(self._module), self._name), self._module)


def changes_of_mode(module: nn.Module) -> list[ChangeOfMode]:
    """Return the changes of mode that ``module`` does in its own way, in its methods' places."""
    names = [
        name
        for name in ("train", "eval")
        if getattr(type(module), name) is not getattr(nn.Module, name) or name in vars(module)
    ]
    present = ((name, vars(module).get(name)) for name in names)
    return [one if isinstance(one, ChangeOfMode) else ChangeOfMode(module, name) for name, one in present]


_WEIGHTS: WeakKeyDictionary[nn.Module, list[SwappedWeights]] = WeakKeyDictionary()
"""Weights of the pipelines that train each module that has hooks, or is a part of one."""


@contextlib.contextmanager
def _true_weights(weights: Sequence[SwappedWeights]) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for one in weights:
            held.enter_context(one.held_true())
        yield


def follow_averages() -> None:
    """Let torch's ``AveragedModel`` average the true weights of models that have hooks, from now on."""
    plainly = AveragedModel.update_parameters
    if getattr(plainly, "_has_true_weights", False):
        return

    @functools.wraps(plainly)
    def update_parameters(averaged: AveragedModel, model: nn.Module) -> None:
        with _true_weights(_WEIGHTS.get(unwrapped(model), ())):
            plainly(averaged, model)

    update_parameters._has_true_weights = True  # type: ignore[attr-defined]
    AveragedModel.update_parameters = update_parameters  # type: ignore[assignment, method-assign]


def warn_of_outsiders(model: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Warn of trained parameters that are not the model's: no hook of the model puts in their true weights."""
    own = set(map(id, model.parameters()))
    outside = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in own]
    if outside:
        warn_of_line(
            "trained parameters should be the model's, which is evaluated and saved with its true weights; got "
            f"{len(outside)} others (of shape {outside[0]}): read, write and save them in "
            "`with pipeline.true_weights():`, or make them a part of the model"
        )


def warn_of_write(model: nn.Module, parameter: Tensor) -> None:
    """Warn that a parameter of ``model`` was written while it held predicted weights."""
    names = (name for name, one in model.named_parameters() if one is parameter)
    warn_of_line(
        "parameters must be written in `with pipeline.true_weights():`, alike on all ranks: after a step they hold "
        "predicted weights, which the next update drops with all that was written to them; got another value of "
        f"{next(names, 'a parameter')} outside of it"
    )


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
