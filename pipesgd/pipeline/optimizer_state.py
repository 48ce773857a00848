"""State of the optimizer, such as momentum: where ranks have different ones, all get rank 0's."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipesgd.errors import UserInputError
from pipesgd.nested import changed
from pipesgd.optim.step import held_parameters
from pipesgd.pipeline.sameness import plain
from pipesgd.ranks import Ranks
from pipesgd.replicas import SumOverRanks, share_rank_0s_values
from pipesgd.shards import like, local


def share_rank_0s_state(optimizer: torch.optim.Optimizer, ranks: Ranks, sum_over_ranks: SumOverRanks) -> None:
    """Give all ranks rank 0's state of ``optimizer``, with the same keys, unless all have the same one. Collective.

    Ranks compare hashes, so that what is the same already is not sent. Of DTensors they get rank 0's parts.

    Raises:
        UserInputError: states differ, and rank 0's holds something that is neither a tensor nor a plain value.
    """
    if len(set(ranks.all_gather_object("a hash of the optimizer's state", _sha256(optimizer)))) == 1:
        return
    is_first = ranks.rank == 0
    saved = ranks.raise_together("state of the optimizer", functools.partial(_saved, optimizer) if is_first else bytes)
    size = ranks.all_gather_object("size of the optimizer's state", len(saved))[0]
    device = held_parameters(optimizer)[0].device
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    if is_first:
        sent.copy_(torch.frombuffer(bytearray(saved), dtype=torch.uint8))
    share_rank_0s_values(nn.Module(), [sent], ranks.rank, sum_over_ranks)
    if not is_first:
        _load(optimizer, sent.cpu().numpy().tobytes(), device)


def _by_parameter(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of each parameter, None for those that have none, and that of the whole optimizer."""
    state = optimizer.state
    return {
        "parameters": [state.get(parameter) for parameter in held_parameters(optimizer)],
        "others": {key: value for key, value in state.items() if not isinstance(key, Tensor)},
    }


def _sha256(optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of all of the state; of DTensors it has the bytes of this rank's parts."""
    digest = hashlib.sha256()
    _add(_by_parameter(optimizer), digest.update)
    return digest.hexdigest()


def _add(value: Any, update: Callable[[Any], None]) -> None:
    """Call ``update`` with the bytes of ``value``, in the same order on all ranks."""
    if isinstance(value, Tensor):
        value = local(value).detach()
        update(f"{value.dtype} {tuple(value.shape)}".encode())
        if hasattr(value, "__tensor_flatten__"):  # a tensor made of others, such as one of 8 bits and their scales
            _add({name: getattr(value, name) for name in value.__tensor_flatten__()[0]}, update)
        else:
            update(value.to_dense().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        for key, item in sorted((str(key), item) for key, item in value.items()):
            update(f"{key}:".encode())
            _add(item, update)
    elif isinstance(value, list | tuple):
        update(f"{len(value)} of".encode())
        for item in value:
            _add(item, update)
    else:
        update(repr(plain(value)).encode())


def _saved(optimizer: torch.optim.Optimizer) -> bytes:
    """Return the state as ``_load`` reads it.

    Raises:
        UserInputError: it cannot be read.
    """
    file = io.BytesIO()
    try:
        torch.save(changed(_by_parameter(optimizer), lambda one: local(one) if isinstance(one, Tensor) else one), file)
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    except Exception as failure:  # whatever an object of the user's own raises
        raise UserInputError(
            "state of the optimizer must be the same on all ranks: load it on each of them; got different ones, and "
            f"rank 0's cannot be sent, since {type(optimizer).__name__} keeps more than tensors and numbers in it"
        ) from failure
    return file.getvalue()


def _load(optimizer: torch.optim.Optimizer, saved: bytes, device: torch.device) -> None:
    """Replace the state by one that was ``saved``, whose tensors come onto the CPU or this ``device``, as they were."""

    def placed(storage: Any, where: str) -> Any:
        return storage if where == "cpu" else torch.serialization.default_restore_location(storage, str(device))

    found = torch.load(io.BytesIO(saved), map_location=placed, weights_only=True)
    optimizer.state.clear()
    optimizer.state.update(found["others"])
    for parameter, state in zip(held_parameters(optimizer), found["parameters"], strict=True):
        if state is not None:
            again = functools.partial(_of_kind, parameter)
            optimizer.state[parameter] = changed(state, again)


def _of_kind(parameter: Tensor, value: Any) -> Any:
    """Return what is shaped like this rank's part of ``parameter`` as a tensor of the parameter's kind."""
    return like(parameter, value) if isinstance(value, Tensor) and value.shape == local(parameter).shape else value
