"""Parameters of which each rank holds a part, torch's DTensors, as the plain tensors that this rank holds of them.

Everything here leaves plain tensors as they are. DTensors are told by what they offer and not by their class: importing
``torch.distributed.tensor`` takes time, and a program without DTensors needs nothing of it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

Sharding = tuple[tuple[int, ...], tuple[int, ...]]
"""Ranks that a tensor is sharded over, and the dimensions of their mesh."""


_PLAIN = (Tensor, nn.Parameter)


def is_dtensor(tensor: Any) -> bool:
    """Return True if ``tensor`` is a DTensor, spread over the ranks of a device mesh."""
    if type(tensor) in _PLAIN:  # at once, since this is asked of every tensor in every step
        return False
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that this rank holds, in the same memory; a plain tensor is such a part itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Any = tensor.to_local()  # type: ignore[attr-defined]
        part = part.wait() if hasattr(part, "wait") else part  # a collective of torch's may still fill it
        return part.detach()  # type: ignore[no-any-return]


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return ``part``, shaped like this rank's part of ``parameter``, as a tensor of the parameter's kind, uncopied."""
    if not is_dtensor(parameter) or is_dtensor(part):
        return part
    whole: Any = parameter
    with torch.no_grad():
        made: Tensor = type(whole).from_local(
            part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return made


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return this rank's part of ``parameter.grad``; None if there is no gradient.

    A gradient may be spread otherwise than its parameter. Ranks that work on parts of a sequence, for example, hold a
    summand each of the gradient of a weight that all of them have. It is brought to the placement of its parameter, for
    which ranks communicate: all ranks of the parameter's mesh call this together.
    """
    gradient: Any = parameter.grad
    if gradient is None or not is_dtensor(parameter):
        return gradient  # type: ignore[no-any-return]
    placements = parameter.placements  # type: ignore[attr-defined]
    if tuple(gradient.placements) != tuple(placements):
        with torch.no_grad():
            gradient = gradient.redistribute(placements=placements)
    return local(gradient)


def give(parameter: Tensor, storage: Tensor) -> None:
    """Let ``parameter`` hold the values in ``storage``, shaped like this rank's part of it.

    A plain parameter gets the memory itself. A DTensor keeps its own, which FSDP2 has views of, so values are copied.
    """
    if is_dtensor(parameter):
        local(parameter).copy_(storage)
    else:
        parameter.data = storage


def kept(parameter: Tensor, storage: Tensor) -> Tensor:
    """Return memory that keeps the values of ``parameter`` when it is given others.

    That is ``storage``, the memory that a plain parameter has now, and a copy of this rank's part of a DTensor.
    """
    return local(parameter).clone() if is_dtensor(parameter) else storage


def sharded_dimensions(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of its mesh along which ranks hold different parts of ``tensor``; none if it is plain."""
    if not is_dtensor(tensor):
        return ()
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    return tuple(number for number, placement in enumerate(placements) if not placement.is_replicate())


def ranks_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the ranks of the mesh that a DTensor is spread over, as torch's default process group counts them."""
    return tuple(tensor.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]


def sharding(tensor: Tensor) -> Sharding:
    """Return the ranks and the dimensions of the mesh that ``tensor`` is sharded over; both are empty if it is not."""
    dimensions = sharded_dimensions(tensor)
    return (ranks_of(tensor), dimensions) if dimensions else ((), ())


def place(tensor: Tensor) -> str:
    """Return which part of ``tensor`` this rank holds: ranks of the tensor's mesh with the same place hold the same."""
    if not is_dtensor(tensor):
        return ""
    coordinates = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    return ",".join(str(coordinates[number]) for number in sharded_dimensions(tensor))


def layout(tensor: Tensor) -> str:
    """Describe how ``tensor`` is spread over ranks, as "(Shard(dim=0),)"; an empty string if it is plain."""
    return str(tuple(tensor.placements)) if is_dtensor(tensor) else ""  # type: ignore[attr-defined]


def gathering_modules(model: nn.Module) -> list[Any]:
    """Return the parts of ``model`` that FSDP2 gathers the weights of, and may keep gathered after a forward pass."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]
