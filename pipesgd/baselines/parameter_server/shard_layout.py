"""A parameter server's range of a model's flat buffers, and a copy of the optimizer for the parameters in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesgd.flat_buffer import FlatBuffer
from timing_model.schedules import split

MOST_STATE_PER_WEIGHT = 16
"""The largest state of a server, in sizes of its weights: optimizers keep up to three times their parameters."""
MOST_STATE_PER_PIECE = 1 << 16
"""Added bytes for each part of a parameter: names and headers in torch's file format."""


@dataclass(frozen=True)
class _Piece:
    """The part of one parameter that a server owns: elements ``start`` to ``stop`` of it."""

    parameter: int
    flat: int
    offset: int
    """Where it begins in the server's range of that flat buffer."""
    start: int
    stop: int
    shape: tuple[int, ...]
    """The parameter's own if it is there as a whole, else (elements,)."""

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor that is shaped as the parameter."""
        return tensor.reshape(-1)[self.start : self.stop].view(self.shape)


class ShardLayout:
    """What of a model's flat buffers server ``index`` of ``servers`` owns: one contiguous range of each."""

    def __init__(self, buffer: FlatBuffer, index: int, servers: int):
        self._ranges = [split(flat.numel(), servers)[index] for flat in buffer.flats]
        self.pieces: list[_Piece] = []
        kinds = [flat.dtype for flat in buffer.flats]
        for parameter, view in enumerate(buffer.views):
            kind = kinds.index(view.dtype)
            offset, (first, last) = int(view.storage_offset()), self._ranges[kind]
            start, stop = max(offset, first) - offset, min(offset + view.numel(), last) - offset
            if start < stop:
                shape = tuple(view.shape) if stop - start == view.numel() else (stop - start,)
                self.pieces.append(_Piece(parameter, kind, offset + start - first, start, stop, shape))

    def ranges_of(self, buffer: FlatBuffer) -> list[Tensor]:
        """The server's ranges of ``buffer``, as views: one a flat tensor, in their order."""
        return [flat[start:stop] for flat, (start, stop) in zip(buffer.flats, self._ranges, strict=True)]

    def most_state_bytes(self, buffer: FlatBuffer) -> int:
        """Largest size of the server's state that is sent or accepted, in bytes."""
        weights = sum(part.nbytes for part in self.ranges_of(buffer))
        return MOST_STATE_PER_WEIGHT * weights + MOST_STATE_PER_PIECE * (len(self.pieces) + 1)

    def views(self, ranges: Sequence[Tensor]) -> list[Tensor]:
        """For each of ``pieces``, a view of its shape into the server's ranges."""
        return [
            ranges[piece.flat][piece.offset : piece.offset + piece.stop - piece.start].view(piece.shape)
            for piece in self.pieces
        ]


def optimizer_of_shard(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], layout: ShardLayout, weights: Sequence[Tensor]
) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` that updates ``weights``, the shard's pieces, in place of the parameters.

    Its groups and their options stay, and its state so far where that has an element for each of a parameter's;
    parameters of other shards are dropped.
    """
    absent = torch.empty(0)
    memo: dict[int, Any] = {id(parameter): absent for group in optimizer.param_groups for parameter in group["params"]}
    for piece, weight in zip(layout.pieces, weights, strict=True):
        parameter = parameters[piece.parameter]
        memo[id(parameter)] = weight
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                memo[id(value)] = piece.of(value).clone()
    copied = copy.deepcopy(optimizer, memo)
    copied.state.pop(absent, None)
    for group in copied.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not absent]
    return copied
