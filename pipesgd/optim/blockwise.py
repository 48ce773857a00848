"""Steps of SGD, Adam and AdamW block by block, so that memory is passed over once for all that is done with a value.

A step of torch's optimizers passes over parameters, gradients and state several times, and a prediction is another step
on copies of them. Here everything that is done with the values of a block is done while they are in the processor's
cache, by torch's own functions of these optimizers. The bits are those of whole steps: the operations are the same, a
value depends on nothing but the values at its own place, and pieces begin at multiples of ``PIECE``, so that torch's
vectorised loops take the same values together, and the same last ones of a tensor by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.optim.sgd import sgd

from pipesgd.optim.hyperparameters import Hyperparameters, with_options
from pipesgd.optim.step import OwnSteps
from pipesgd.shards import is_dtensor, local, spread_alike

PIECE = 1 << 17
"""Largest number of values of a piece and of a block. A step works on up to twelve arrays, so a block is in the cache
that cores share; shorter ones would fit into a core's own, but cost more in calls than they save (experiments/LOG.md).
A multiple of what a vectorised loop takes at once, which is at most 64."""

State: TypeAlias = dict[str, list[Any]]
"""State of the pieces of a block, by its name: a tensor for each piece, or None where there is none yet."""

COUNT = "step"
"""Name of the state that counts a parameter's steps; it is not shaped like the parameter."""


def pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return ``tensors``, which are contiguous, in pieces of at most ``PIECE`` values; parts of a tensor are flat."""
    return [piece for tensor in tensors for piece in _cut(tensor)]


def blocks(cut: Sequence[Tensor], groups: Sequence[int]) -> Iterator[slice]:
    """Yield slices of ``cut``, which are pieces: blocks of one group, with at most ``PIECE`` values together."""
    begin = values = 0
    for number, piece in enumerate(cut):
        if number > begin and (groups[number] != groups[begin] or values + piece.numel() > PIECE):
            yield slice(begin, number)
            begin, values = number, 0
        values += piece.numel()
    if begin < len(cut):
        yield slice(begin, len(cut))


def in_blocks(*lists: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield the tensors of these lists, which are shaped alike, block by block; all at once if they cannot be cut."""
    if not can_cut(*lists):
        yield tuple(list(tensors) for tensors in lists)
        return
    cut = [pieces(tensors) for tensors in lists]
    for block in blocks(cut[0], [0] * len(cut[0])):
        yield tuple(one[block] for one in cut)


def can_cut(*lists: Sequence[Tensor]) -> bool:
    """Return True if ``pieces`` can cut these tensors, and one thread of a CPU computes with them."""
    strided = torch.strided  # this is asked of every tensor in every step
    return torch.get_num_threads() == 1 and all(
        tensor.is_cpu and tensor.layout is strided and tensor.is_contiguous() for tensors in lists for tensor in tensors
    )


class Steps:
    """Steps of an optimizer on its own parameters and state, or on copies of them, block by block.

    ``steps_in_blocks`` makes it for one update, the predictions after it, or both.

    Attributes:
        weights: pieces of the parameters, or of this rank's parts of them.
        has_state: True if the optimizer has all the state that it keeps under the options of step 0: it has stepped.

    Args:
        optimizer: the optimizer.
        algorithm: the way it steps.
        parameters: those that it trains.
        parts: this rank's part of each of them.
        groups: number of the parameter group of each of them.
        options: options of each parameter group, for each step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        algorithm: _Algorithm,
        parameters: Sequence[Tensor],
        parts: Sequence[Tensor],
        groups: Sequence[int],
        options: Sequence[Sequence[Mapping[str, Any]]],
    ):
        self._algorithm = algorithm
        self._options = options
        self._states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        self._groups: list[int] = []
        """Number of the parameter group of each piece."""
        self._state: State = {name: [] for name in algorithm.state}
        self.weights: list[Tensor] = []
        for part, group, own in zip(parts, groups, self._states, strict=True):
            cut = _cut(part)
            self.weights += cut
            self._groups += [group] * len(cut)
            for name, of_pieces in self._state.items():
                value = own.get(name)
                if value is None:
                    of_pieces += [algorithm.first_state(piece, name) for piece in cut]
                else:
                    of_pieces += [value] * len(cut) if name == COUNT else _cut(local(value))
        self.has_state = all(
            own.get(name) is not None
            for group, own in zip(groups, self._states, strict=True)
            if algorithm.keeps_state(options[0][group])
            for name in algorithm.state
        )

    def __iter__(self) -> Iterator[slice]:
        """Yield the blocks, as slices of pieces."""
        return blocks(self.weights, self._groups)

    def update(self, block: slice, gradients: list[Tensor]) -> None:
        """Do step 0 on the optimizer's own parameters and state of ``block``; see ``count_update``."""
        if COUNT in self._state:  # a step counts on what it is given, which the pieces of a parameter must not share
            self._state[COUNT][block] = _copies(self._state[COUNT][block])
        self.step(0, block, self.weights[block], gradients, {name: of[block] for name, of in self._state.items()})

    def count_update(self) -> None:
        """Let the optimizer's own state count the update that all blocks have done."""
        if COUNT in self._state:
            torch._foreach_add_([own[COUNT] for own in self._states], 1)

    def copied_state(self, block: slice) -> State:
        """Return a copy of the optimizer's state of ``block``."""
        return {name: _copies(of[block]) for name, of in self._state.items()}

    def step(self, number: int, block: slice, weights: list[Tensor], gradients: list[Tensor], state: State) -> None:
        """Do step ``number`` on the ``weights`` and the ``state`` of ``block``."""
        self._algorithm.step(self._options[number][self._groups[block.start]], weights, gradients, state)


def steps_in_blocks(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    under: Sequence[Hyperparameters],
    tensors: Sequence[Sequence[Tensor]],
) -> Steps | None:
    """Return steps of ``optimizer`` block by block; None if they would not be its own, bit for bit, or no faster.

    This is the one place that decides that. It is a list of what is known to be right: torch's SGD, Adam and AdamW
    themselves, with the options of this version that are plain numbers and without those that choose other code;
    floating-point parameters, dense and contiguous, on a CPU with one thread; and no hooks for all optimizers. A
    DTensor is stepped as this rank's part of it, since these optimizers compute every value by itself.

    Args:
        optimizer: any optimizer.
        parameters: the parameters that are to be stepped.
        under: hyperparameters of each step, at least one.
        tensors: lists of tensors, each shaped like this rank's parts of the parameters or empty, that are cut into the
            same pieces.
    """
    algorithm = _ALGORITHMS.get(type(optimizer))
    if algorithm is None or optimizer.defaults.keys() != algorithm.options:
        return None
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return None
    options = [with_options(optimizer, hyperparameters) for hyperparameters in under]
    if not all(_is_plain(of_group) for of_step in options for of_group in of_step):
        return None
    of_groups = [(number, one) for number, group in enumerate(optimizer.param_groups) for one in group["params"]]
    trained = [(number, one) for number, one in of_groups if one.requires_grad]
    if [id(one) for _, one in trained] != [id(parameter) for parameter in parameters]:
        return None  # a parameter that is in a group twice is stepped twice
    if any(one.grad is not None for _, one in of_groups if not one.requires_grad):
        return None  # torch steps frozen parameters that have a gradient
    parts = [local(parameter) for parameter in parameters]
    if not all(type(one) in (Tensor, nn.Parameter) and one.is_floating_point() for one in parts):
        return None
    shaped = [of_all for of_all in tensors if of_all]
    for name in algorithm.state:
        values = [optimizer.state.get(parameter, {}).get(name) for parameter in parameters]
        if name == COUNT:
            if not all(value is None or _is_number(value) for value in values):
                return None
        else:
            of_parameters = [p if value is None else value for value, p in zip(values, parameters, strict=True)]
            if not all(map(spread_alike, of_parameters, parameters)):
                return None
            shaped.append([local(value) for value in of_parameters])
    if not all(_are_alike(of_all, parts) for of_all in shaped) or not can_cut(parts, *shaped):
        return None
    return Steps(optimizer, algorithm, parameters, parts, [number for number, _ in trained], options)


def steps_by_itself(optimizer: Optimizer) -> bool:
    """Return True if only torch and ``OwnSteps`` have a part in ``optimizer.step``: nobody misses a call of it."""
    wrapper = vars(optimizer).get("step")
    is_torchs = wrapper is None or (
        hasattr(wrapper, "_wrapped_by_lr_sched") and wrapper.__wrapped__ is type(optimizer).step
    )
    before = optimizer._optimizer_step_pre_hooks.values()
    return is_torchs and all(isinstance(hook, OwnSteps) for hook in before) and not optimizer._optimizer_step_post_hooks


@dataclass(frozen=True)
class _Algorithm:
    """An optimizer's own way to step."""

    options: frozenset[str]
    """All options that the optimizer has, in the version that this was written for."""
    state: tuple[str, ...]
    """Names of the state that it keeps of a parameter."""
    keeps_state: Callable[[Mapping[str, Any]], bool]
    """Function that returns True if it keeps state under some options."""
    first_state: Callable[[Tensor, str], Any]
    """Function that returns what a piece's state of some name is before the first step."""
    step: Callable[[Mapping[str, Any], list[Tensor], list[Tensor], State], None]
    """Function that steps, under some options, weights with their gradients and their state."""


def _step_sgd(options: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor], state: State) -> None:
    sgd(
        weights,
        gradients,
        state["momentum_buffer"],
        foreach=False,
        fused=False,
        lr=options["lr"],
        momentum=options["momentum"],
        dampening=options["dampening"],
        weight_decay=options["weight_decay"],
        nesterov=options["nesterov"],
        maximize=options["maximize"],
    )


def _step_adam(options: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor], state: State) -> None:
    beta1, beta2 = options["betas"]
    adam(
        weights,
        gradients,
        state["exp_avg"],
        state["exp_avg_sq"],
        [],
        state[COUNT],
        foreach=False,
        fused=False,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        decoupled_weight_decay=options["decoupled_weight_decay"],
        maximize=options["maximize"],
    )


_SGD = _Algorithm(
    options=frozenset(
        ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "differentiable", "fused")
    ),
    state=("momentum_buffer",),
    keeps_state=lambda options: bool(options["momentum"]),
    first_state=lambda piece, name: None,
    step=_step_sgd,
)
_ADAM = _Algorithm(
    options=frozenset(
        (
            *("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize"),
            *("foreach", "capturable", "differentiable", "fused"),
        )
    ),
    state=("exp_avg", "exp_avg_sq", COUNT),
    keeps_state=lambda options: True,
    # Zeros without memory of their own: only copies of them are changed.
    first_state=lambda piece, name: torch.zeros(()) if name == COUNT else piece.new_zeros(()).expand(piece.shape),
    step=_step_adam,
)
_ALGORITHMS: dict[type[Optimizer], _Algorithm] = {SGD: _SGD, Adam: _ADAM, AdamW: _ADAM}

_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "eps")
_OTHER_CODE = ("amsgrad", "capturable", "differentiable", "foreach", "fused")
"""Options that, if they are on, let an optimizer run other code, or keep other state."""


def _is_plain(options: Mapping[str, Any]) -> bool:
    """Return True if all numbers are Python's own, and no option chooses other code."""
    numbers = [*(options[name] for name in _NUMBERS if name in options), *options.get("betas", ())]
    return all(isinstance(number, int | float) for number in numbers) and not any(map(options.get, _OTHER_CODE))


def _is_number(value: Any) -> bool:
    """Return True if ``value`` is a plain tensor with one value."""
    return isinstance(value, Tensor) and value.ndim == 0 and not is_dtensor(value)


def _are_alike(tensors: Sequence[Any], parameters: Sequence[Tensor]) -> bool:
    """Return True if ``tensors`` are tensors with the shapes and dtypes of ``parameters``."""
    return all(
        isinstance(tensor, Tensor) and tensor.shape == parameter.shape and tensor.dtype == parameter.dtype
        for tensor, parameter in zip(tensors, parameters, strict=True)
    )


def _cut(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.numel() <= PIECE:
        return (tensor.detach(),) if tensor.requires_grad else (tensor,)
    cut: tuple[Tensor, ...] = tensor.detach().view(-1).split(PIECE)
    return cut


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    # A copy of zeros without memory of their own has memory.
    return [None if one is None else one.clone(memory_format=torch.contiguous_format) for one in tensors]
