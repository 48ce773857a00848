"""A parameter server's range of the weights, and the rule by which a gradient updates it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipesgd.flat_buffer import FlatBuffer, laid_out_like
from pipesgd.optim import hyperparameters
from pipesgd.optim.step import check_copies_gradients
from timing_model.schedules import split

MOST_STATE_PER_WEIGHT, MOST_STATE_PER_PIECE = 16, 1 << 16
"""Largest state of a server: multiple of its weights' bytes (optimizers keep up to three times their parameters), plus
bytes for each piece of a parameter (names and headers in torch's file format)."""


class Piece(NamedTuple):
    """The elements ``start`` to ``stop`` of one parameter, as its memory has them."""

    parameter: int
    start: int
    stop: int
    shape: tuple[int, ...]
    """Shape of the piece: the parameter's own if the piece is all of it, else (elements,)."""
    stride: tuple[int, ...]
    """Strides of the piece."""

    def of(self, values: Tensor) -> Tensor:
        """Return ``values``, contiguous memory with those of this piece, as a view of its shape."""
        return values.as_strided(self.shape, self.stride)

    def copy_of(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Return a copy of this piece of a ``tensor`` that has the shape of ``parameter``."""
        memory = tensor.new_empty(tensor.numel())
        laid_out_like(parameter, memory).copy_(tensor)
        return self.of(memory[self.start : self.stop].clone())


class ShardLayout:
    """The part of a model's flat buffers that server ``index`` of ``servers`` owns: one contiguous range of each."""

    def __init__(self, buffer: FlatBuffer, index: int, servers: int):
        self._ranges = [split(flat.numel(), servers)[index] for flat in buffer.flats]
        self._of_range: list[list[Piece]] = []
        for flat, (first, last) in zip(buffer.flats, self._ranges, strict=True):
            pieces = []
            for parameter, view in enumerate(buffer.views):
                offset, elements = int(view.storage_offset()), view.numel()
                start, stop = max(first - offset, 0), min(last - offset, elements)
                if view.dtype == flat.dtype and start < stop:
                    whole = stop - start == elements
                    shape, stride = (tuple(view.shape), view.stride()) if whole else ((stop - start,), (1,))
                    pieces.append(Piece(parameter, start, stop, shape, stride))
            self._of_range.append(pieces)
        self.pieces = [piece for pieces in self._of_range for piece in pieces]
        self.nbytes = sum(part.nbytes for part in self.ranges_of(buffer))
        self.most_state_bytes = MOST_STATE_PER_WEIGHT * self.nbytes + MOST_STATE_PER_PIECE * (len(self.pieces) + 1)
        """Largest size in bytes of a server's state that is sent or accepted."""

    def ranges_of(self, buffer: FlatBuffer) -> list[Tensor]:
        """Return the server's ranges of ``buffer``, as views: one per flat tensor, in their order."""
        return [flat[start:stop] for flat, (start, stop) in zip(buffer.flats, self._ranges, strict=True)]

    def views(self, ranges: Sequence[Tensor]) -> list[Tensor]:
        """Return, for each of ``pieces``, a view of its shape into the server's ``ranges``."""
        views = []
        for values, pieces in zip(ranges, self._of_range, strict=True):
            parts = values.split([piece.stop - piece.start for piece in pieces])
            views += [piece.of(part) for part, piece in zip(parts, pieces, strict=True)]
        return views


class UpdateRule(Protocol):
    """The weights that a server owns, and the way in which a gradient updates them."""

    weights: list[Tensor]
    """The server's ranges of the flat buffers."""
    answers: bool
    """True if ``update`` puts an answer in the gradient's place, which the worker gets instead of the weights."""

    def update(self, gradient: Sequence[Tensor], options: Sequence[float], lr_divisor: int) -> None:
        """Update the weights by ``gradient``, a round's mean or one worker's, computed with the optimizer ``options``.

        Learning rates are divided by ``lr_divisor``: 1 for a mean, else the number of workers, whose gradients together
        then move the weights about as far as their mean would. For ``options`` see ``hyperparameters.as_numbers``.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return all that the rule remembers between updates, except the weights; together they must be at most the
        layout's ``most_state_bytes``."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Any exception is reported as a fault of the state, which is then not used."""


class ElasticRule:
    """The centre of elastic averaging, in asynchronous EASGD (Zhang, Choromanska and LeCun, NeurIPS 2015, algorithm 1).

    A worker sends its own weights x in the range that ``layout`` gives this server. The answer is the elastic
    difference ``d = moving_rate (x - centre)``, which is added to the centre, and which the worker subtracts from its
    weights: they pull each other by the same amount. The centre begins at the values of ``parameters``.
    """

    answers = True

    def __init__(self, parameters: Sequence[Tensor], layout: ShardLayout, moving_rate: float):
        self.weights = _initial(parameters, layout)
        self._moving_rate = moving_rate

    def update(self, gradient: Sequence[Tensor], options: Sequence[float], lr_divisor: int) -> None:
        for centre, values in zip(self.weights, gradient, strict=True):
            values.sub_(centre).mul_(self._moving_rate)
            centre.add_(values)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError("a centre has no state but its weights")


class OptimizerRule:
    """Steps a copy of the user's ``optimizer`` on the range of its ``parameters`` that ``layout`` gives this server.

    Groups and their options are kept, and so is existing state with one element per element of a parameter; parameters
    of other servers are dropped.
    """

    answers = False

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, layout: ShardLayout):
        self.weights = _initial(parameters, layout)
        self._layout = layout
        self._pieces = layout.views(self.weights)
        absent = torch.empty(0)
        memo: dict[int, Any] = {id(one): absent for group in optimizer.param_groups for one in group["params"]}
        for piece, weight in zip(layout.pieces, self._pieces, strict=True):
            parameter = parameters[piece.parameter]
            memo[id(parameter)] = weight
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    memo[id(value)] = piece.copy_of(value, parameter)
        self._optimizer = copy.deepcopy(optimizer, memo)
        self._optimizer.state.pop(absent, None)
        for group in self._optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter is not absent]
        self._copies_gradients = False

    def update(self, gradient: Sequence[Tensor], options: Sequence[float], lr_divisor: int) -> None:
        for weight, view in zip(self._pieces, self._layout.views(gradient), strict=True):
            weight.grad = view
        hyperparameters.set_numbers(self._optimizer, options)
        for group in self._optimizer.param_groups:
            group["lr"] /= lr_divisor
        self._optimizer.step()
        for weight in self._pieces:
            weight.grad = None
        if not self._copies_gradients:
            check_copies_gradients(self._optimizer, gradient)
            self._copies_gradients = True

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


def _initial(parameters: Sequence[Tensor], layout: ShardLayout) -> list[Tensor]:
    """Return copies of the values of ``parameters`` in the ranges that ``layout`` gives this server."""
    initial = FlatBuffer(parameters)
    initial.fill_from([parameter.detach() for parameter in parameters])
    return [part.clone() for part in layout.ranges_of(initial)]
