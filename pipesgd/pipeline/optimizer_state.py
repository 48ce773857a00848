"""State of the optimizer, such as momentum: where ranks have different ones, all get rank 0's."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipesgd.errors import UserInputError
from pipesgd.nested import changed, loadable
from pipesgd.optim.step import held_parameters
from pipesgd.pipeline.sameness import plain
from pipesgd.ranks import Ranks
from pipesgd.replicas import SumOverRanks, share_rank_0s_values
from pipesgd.shards import like, local

T = TypeVar("T")

SLICE_BYTES = 64 * 2**20
"""Most bytes of the state that are on the device at a time for being sent."""


def share_rank_0s_state(optimizer: torch.optim.Optimizer, ranks: Ranks, sum_over_ranks: SumOverRanks) -> None:
    """Give all ranks rank 0's state of ``optimizer``, with the same keys, unless all have the same one. Collective.

    Ranks compare hashes, so that what is the same already is not sent. Of DTensors they get rank 0's parts.

    Raises:
        UserInputError: states cannot be compared, or they differ and rank 0's cannot be sent.
    """

    def together(what: str, attempt: Callable[[], T]) -> T:
        return ranks.raise_together(what, functools.partial(_refusing, optimizer, attempt))

    hashed = together("the optimizer's state", functools.partial(_sha256, optimizer))
    if len(set(ranks.all_gather_object("a hash of the optimizer's state", hashed))) == 1:
        return
    is_first = ranks.rank == 0
    saved = together("the optimizer's state to be sent", functools.partial(_saved, optimizer) if is_first else bytes)
    size = ranks.all_gather_object("size of the optimizer's state", len(saved))[0]
    device = held_parameters(optimizer)[0].device
    received = bytearray(saved) if is_first else bytearray(size)
    for begin in range(0, size, SLICE_BYTES):
        part = torch.frombuffer(received, dtype=torch.uint8)[begin : begin + SLICE_BYTES]
        sent = part.to(device)
        share_rank_0s_values(nn.Module(), [sent], ranks.rank, sum_over_ranks)
        part.copy_(sent)
    together("the optimizer's state of rank 0", bool if is_first else lambda: _load(optimizer, received, device))


def _refusing(optimizer: torch.optim.Optimizer, attempt: Callable[[], T]) -> T:
    """Return ``attempt()``, or refuse the state with which it fails."""
    try:
        return attempt()
    except Exception as failure:  # whatever an object of the user's own raises
        raise UserInputError(
            "state of the optimizer must be of tensors and numbers, or the same on all ranks: load it on each of them, "
            f"or keep each rank's own by init_sync=False; got that of {type(optimizer).__name__}, which cannot be sent "
            f"({type(failure).__name__})"
        ) from failure


def _by_parameter(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of each parameter, None for those that have none, and that of the whole optimizer."""
    state = optimizer.state
    found: dict[str, Any] = loadable({
        "parameters": [state.get(parameter) for parameter in held_parameters(optimizer)],
        "others": {key: value for key, value in state.items() if not isinstance(key, Tensor)},
    })  # fmt: skip
    return found


def _sha256(optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of all of the state; of DTensors it has the bytes of this rank's parts."""
    digest = hashlib.sha256()
    _add(_by_parameter(optimizer), digest.update)
    return digest.hexdigest()


def _add(value: Any, update: Callable[[Any], None]) -> None:
    """Call ``update`` with the bytes of ``value``, in one order on all ranks; of other objects, with their class."""
    if isinstance(value, Tensor):
        value = local(value).detach()
        update(f"{value.dtype} {tuple(value.shape)}".encode())
        if hasattr(value, "__tensor_flatten__"):  # a tensor made of others, such as one of 8 bits and their scales
            _add({name: getattr(value, name) for name in value.__tensor_flatten__()[0]}, update)
        else:
            update(value.to_dense().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        for key, item in sorted(((repr(plain(key)), item) for key, item in value.items()), key=itemgetter(0)):
            update(f"{key}:".encode())
            _add(item, update)
    elif isinstance(value, list | tuple):
        update(f"{len(value)} of".encode())
        for item in value:
            _add(item, update)
    else:
        update(repr(plain(value)).encode())


def _saved(optimizer: torch.optim.Optimizer) -> bytes:
    """Return the state as ``_load`` reads it, after reading it once."""
    file = io.BytesIO()
    torch.save(changed(_by_parameter(optimizer), lambda one: local(one) if isinstance(one, Tensor) else one), file)
    torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    return file.getvalue()


def _load(optimizer: torch.optim.Optimizer, saved: bytearray, device: torch.device) -> None:
    """Replace the state by one that was ``saved``, whose tensors come onto the CPU or this ``device``, as they were."""

    def placed(storage: Any, where: str) -> Any:
        return storage if where == "cpu" else torch.serialization.default_restore_location(storage, str(device))

    optimizer.state.clear()
    found = torch.load(io.BytesIO(saved), map_location=placed, weights_only=True)
    optimizer.state.update(found["others"])
    for parameter, state in zip(held_parameters(optimizer), found["parameters"], strict=True):
        if state is not None:
            again = functools.partial(_of_kind, parameter)
            optimizer.state[parameter] = changed(state, again)


def _of_kind(parameter: Tensor, value: Any) -> Any:
    """Return what is shaped like this rank's part of ``parameter`` as a tensor of the parameter's kind."""
    return like(parameter, value) if isinstance(value, Tensor) and value.shape == local(parameter).shape else value
