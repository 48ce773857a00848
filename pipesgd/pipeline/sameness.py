"""Settings that must be the same on all ranks, compared before anything depends on them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipesgd.errors import DisagreementError
from pipesgd.ranks import Ranks


def check_same_settings(ranks: Ranks, settings: Mapping[str, Any], tensors: Mapping[str, Sequence[str]]) -> None:
    """Compare this rank's settings, and descriptions of its tensors, with those of all other ranks. Collective.

    Descriptions are long, so ranks exchange hashes of them, and the descriptions themselves only if these differ.

    Raises:
        DisagreementError: some differ: the first rank that differs from rank 0, with both ranks' values.
    """
    hashes = {name: _hash(described) for name, described in tensors.items()}
    everybody = ranks.exchange("settings", {"settings": settings, "hashes": hashes})
    first = everybody[0]
    for rank, other in enumerate(everybody):
        names = sorted(first["settings"].keys() | other["settings"].keys())
        differing = [name for name in names if first["settings"].get(name) != other["settings"].get(name)]
        if differing:
            said = [_difference(n, first["settings"].get(n), rank, other["settings"].get(n)) for n in differing]
            raise DisagreementError("; ".join(said))
    for name, described in tensors.items():
        if any(other["hashes"][name] != first["hashes"][name] for other in everybody):
            _name_first_difference(name, ranks.exchange(name, list(described)))


def optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The class of the optimizer, and the options of its groups."""
    settings: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        options = {f"{name} of parameter group {number}": value for name, value in group.items() if name != "params"}
        settings |= options | {f"number of parameters in group {number}": len(group["params"])}
    return {name: plain(value) for name, value in settings.items()}


def describe_parameters(model: nn.Module, parameters: Iterable[Tensor]) -> list[str]:
    """Name, shape and dtype of these, in their order; without a name if they are not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [_describe(names.get(id(parameter), "parameter"), parameter) for parameter in parameters]


def describe_buffers(model: nn.Module) -> list[str]:
    """Name, shape and dtype of the model's buffers."""
    return [_describe(name, buffer) for name, buffer in model.named_buffers()]


def plain(value: Any) -> Any:
    """``value`` as JSON would bring it to another rank."""
    if isinstance(value, Tensor):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)  # no addresses: they differ


def _difference(name: str, on_rank_0: Any, rank: int, on_rank: Any) -> str:
    return f"{name} must be the same on all ranks; got {on_rank_0!r} on rank 0, {on_rank!r} on rank {rank}"


def _name_first_difference(name: str, everybody: Sequence[Sequence[str]]) -> None:
    for rank, described in enumerate(everybody):
        for number in range(max(len(described), len(everybody[0]))):
            one, other = ([*of_rank, *["none"] * (number + 1)][number] for of_rank in (everybody[0], described))
            if one != other:
                raise DisagreementError(_difference(f"{name} (number {number})", one, rank, other))


def _describe(name: str, tensor: Tensor) -> str:
    shape = "x".join(str(size) for size in tensor.shape) or "scalar"
    return f"{name} {shape} {str(tensor.dtype).removeprefix('torch.')}"


def _hash(described: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(described)).encode()).hexdigest()
