"""A parameter server's state as bytes, and back: checked, since it comes from another rank or from a file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from pipesgd.baselines.parameter_server.messages import MOST_COUNTED
from pipesgd.errors import UserInputError


class ShardState(TypedDict):
    """What a server keeps."""

    weights: list[Tensor]
    optimizer: dict[str, Any]
    arrivals: list[int]
    """Gradients of each worker that have arrived."""


def pack_state(state: ShardState, most_bytes: int) -> Tensor:
    """``state`` as bytes (uint8); raises ``UserInputError`` if these are too many to be sent."""
    file = io.BytesIO()
    torch.save(state, file)
    packed = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    check_state_bytes(packed.nbytes, most_bytes)
    return packed


def unpack_state(packed: Tensor, weights: Sequence[Tensor], workers: int) -> ShardState:
    """What ``pack_state`` made, of a server with such ``weights``; raises ``UserInputError`` if it cannot be that."""
    try:
        state = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    except Exception:  # noqa: BLE001 (torch raises many kinds: of archives, of pickles, and of what is in them)
        state = None
    if not (isinstance(state, dict) and set(state) == set(ShardState.__annotations__)):
        raise UserInputError("a server's state must be one that a server has saved; got something else")
    kinds = _kinds(state["weights"])
    if kinds is None or kinds != _kinds(list(weights)):
        raise UserInputError("a server's state must hold the weights of this model; got others")
    arrivals = state["arrivals"]
    if not (
        isinstance(arrivals, list)
        and len(arrivals) == workers
        and all(type(one) is int and 0 <= one <= MOST_COUNTED for one in arrivals)
    ):
        raise UserInputError(f"a server's state must count the gradients of {workers} workers; got something else")
    return ShardState(weights=state["weights"], optimizer=state["optimizer"], arrivals=arrivals)


def check_state_bytes(nbytes: int, most: int) -> None:
    """Raise ``UserInputError`` if a server's state is too large to be sent."""
    if nbytes > most:
        raise UserInputError(f"a server's state must be at most 16 times its weights, {most} bytes; got {nbytes}")


def _kinds(weights: object) -> list[tuple[torch.Size, torch.dtype]] | None:
    """Shape and type of each; None unless these are tensors."""
    if not (isinstance(weights, list) and all(isinstance(one, Tensor) for one in weights)):
        return None
    return [(one.shape, one.dtype) for one in weights]
