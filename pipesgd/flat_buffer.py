"""Conversion of parameters to and from flat contiguous buffers, and the only place that takes the mean over ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesgd.errors import UserInputError
from pipesgd.nested import changed
from pipesgd.shards import Sharding, like, local, local_gradient, sharding

Kind = tuple[torch.dtype, torch.device, Sharding]
"""Kind of tensors that share a flat one."""


class FlatBuffer:
    """Contiguous memory for values shaped like some tensors, so that they can be reduced as one.

    There is one flat tensor for each (dtype, device) among the tensors, which is one for most models. It holds this
    rank's parts of DTensors, and one more flat tensor holds what is not sharded: ranks with the same values of it then
    encode and round them alike, whatever shards they have next to them.

    Values are in the memory order of their tensors, as in the gradients that autograd makes: fused optimizers walk
    through the memory of parameters and gradients side by side.

    Attributes:
        flats: the flat tensors, each (numel,).
        views: for each of the tensors, in their order, a view of its shape and strides into one of ``flats``.
        first: number of the first of ``flats`` in the buffer that this one is a bucket of; 0 if it is none.
    """

    first = 0

    def __init__(self, tensors: Sequence[Tensor]):
        kinds: dict[Kind, list[int]] = {}
        for index, tensor in enumerate(tensors):
            kinds.setdefault(_kind(tensor), []).append(index)
        views: dict[int, Tensor] = {}
        self.flats: list[Tensor] = []
        for (dtype, device, _), indices in kinds.items():
            parts = [local(tensors[index]) for index in indices]
            sizes = [part.numel() for part in parts]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for index, part, view in zip(indices, parts, flat.split(sizes), strict=True):
                views[index] = laid_out_like(part, view)
            self.flats.append(flat)
        self.views = [views[index] for index in range(len(tensors))]

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats)

    def fill_from(self, tensors: Sequence[Tensor]) -> None:
        """Copy in the values of ``tensors``, which match the constructor's in number, order and shape."""
        if tensors:
            torch._foreach_copy_(self.views, [local(tensor) for tensor in tensors])

    def fill(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy in this rank's parts of tensors, as ``fill_from`` does; None counts as zero."""
        pairs = list(zip(self.views, tensors, strict=True))
        absent = [view for view, tensor in pairs if tensor is None]
        if absent:
            torch._foreach_zero_(absent)
        present = [(view, tensor) for view, tensor in pairs if tensor is not None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [tensor for _, tensor in present])

    def copy_to(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values out to ``tensors``."""
        if tensors:
            torch._foreach_copy_([local(tensor) for tensor in tensors], self.views)


class BucketedBuffer(FlatBuffer):
    """Flat buffers of buckets of some tensors, which together are one buffer.

    Attributes:
        buckets: a ``FlatBuffer`` for each bucket; ``flats`` are theirs, those of the first bucket in front.

    Args:
        tensors: the tensors.
        buckets: indices of the tensors in each bucket; every tensor is in one of them.
    """

    def __init__(self, tensors: Sequence[Tensor], buckets: Sequence[Sequence[int]]):
        self.buckets = [FlatBuffer([tensors[index] for index in bucket]) for bucket in buckets]
        self.flats = []
        views: dict[int, Tensor] = {}
        for indices, bucket in zip(buckets, self.buckets, strict=True):
            bucket.first = len(self.flats)
            self.flats += bucket.flats
            views |= dict(zip(indices, bucket.views, strict=True))
        self.views = [views[index] for index in range(len(tensors))]


def laid_out_like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return a view of ``values``, contiguous memory for as many, with the shape and the memory order of ``tensor``.

    It has the strides of ``tensor``, unless there are gaps between its values or some share a place: such a tensor has
    a contiguous gradient.
    """
    if is_dense(tensor):
        return values.as_strided(tensor.shape, tensor.stride())
    return values.view(tensor.shape)


def is_dense(tensor: Tensor) -> bool:
    """Return True if the values of ``tensor`` fill its memory, each in a place of its own, in whatever order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return ``tensor``, which ``is_dense``, with its dimensions in the order of its memory: a contiguous view."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def memory_layout(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of the gradient of ``tensor``; None if it is contiguous, as nearly all are."""
    part = local(tensor)
    return None if part.is_contiguous() or not is_dense(part) else part.stride()


def real_numel(tensor: Tensor) -> int:
    """Return how many real numbers this rank holds of ``tensor``: a complex one is two of them."""
    return local(tensor).numel() * (2 if tensor.is_complex() else 1)


def sizes_of_flats(buckets: Sequence[Sequence[Tensor]]) -> list[int]:
    """Return the size of each flat tensor of a ``BucketedBuffer`` of tensors in these buckets, in real numbers."""
    return list({number: stop for number, _, stop in places_in_flats(buckets)}.values())  # the last stop of each


def places_in_flats(buckets: Sequence[Sequence[Tensor]]) -> list[tuple[int, int, int]]:
    """Return (number of the flat tensor, start, stop) of each tensor of ``buckets`` in a ``BucketedBuffer`` of them,
    counted in real numbers."""
    stops: list[int] = []
    places = []
    for bucket in buckets:
        kinds: dict[Kind, int] = {}
        for tensor in bucket:
            number = kinds.setdefault(_kind(tensor), len(stops))
            if number == len(stops):
                stops.append(0)
            start = stops[number]
            stops[number] += real_numel(tensor)
            places.append((number, start, stops[number]))
    return places


def check_sizes(saved: Sequence[int], here: Sequence[int]) -> None:
    """Raise ``UserInputError`` unless the sizes of a state's tensors are those ``here``."""
    if list(saved) != list(here):
        before, now = (" + ".join(map(str, sizes)) for sizes in (saved, here))
        raise UserInputError(f"trained parameters must have {before} values, as in the state that is loaded; got {now}")


def check_shapes(saved: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Raise ``UserInputError`` if there are tensors of a state, and these are not shaped like ``parameters``."""
    if not saved:
        return
    shapes = [tuple(tensor.shape) for tensor in saved], [tuple(local(parameter).shape) for parameter in parameters]
    for number, (before, now) in enumerate(itertools.zip_longest(*shapes)):
        if before != now:
            raise UserInputError(
                f"trained parameters (number {number}) must be of shape {before}, as in the state that is loaded; got "
                f"{now}"
            )


def check_layouts(saved: Sequence[tuple[int, ...] | None], parameters: Sequence[Tensor]) -> None:
    """Raise ``UserInputError`` unless ``parameters`` have the ``memory_layout`` that they had in a state."""
    here = [memory_layout(parameter) for parameter in parameters]
    for number, (before, now) in enumerate(zip(saved, here, strict=False)):
        if (None if before is None else tuple(before)) != now:
            raise UserInputError(
                f"trained parameters (number {number}) must have the strides {before or 'of contiguous memory'}, as in "
                f"the state that is loaded; got {now or 'contiguous memory'}"
            )


def _kind(tensor: Tensor) -> Kind:
    return tensor.dtype, tensor.device, sharding(tensor)


def check_dense(parameters: Sequence[Tensor]) -> None:
    """Raise ``UserInputError`` if a gradient of ``parameters`` is sparse, so that it cannot be packed."""
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
        raise UserInputError("gradients must be dense; got a sparse one (use sparse=False in torch.nn.Embedding)")


def make_dense(parameters: Sequence[Tensor]) -> None:
    """Replace each sparse ``.grad`` of ``parameters`` by a dense one of the same values."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


@torch.no_grad()
def pack_gradients(parameters: Sequence[Tensor], buffer: FlatBuffer) -> list[Tensor | None]:
    """Copy every parameter's ``.grad``, which is dense, into ``buffer``; a parameter without one counts as zero.

    Leaves ``.grad`` None, so that the next backward pass makes new gradients, and returns the present ones, of
    DTensors this rank's parts, without the graphs that ``create_graph=True`` gives them.
    """
    present = [local_gradient(parameter) for parameter in parameters]
    buffer.fill(present)
    gradients = [
        gradient.detach() if gradient is not None and gradient.requires_grad else gradient for gradient in present
    ]
    give_gradients(parameters, [None] * len(parameters))
    return gradients


def give_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Make ``gradients`` the parameters' ``.grad`` without copying; those of DTensors may be this rank's part alone."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else like(parameter, gradient)


def on_device(state: Any, device: torch.device) -> Any:
    """Return ``state``, of dicts, lists, tensors and numbers, with all tensors on ``device``."""
    return changed(state, lambda value: value.to(device) if isinstance(value, Tensor) else value)


def take_shares(flats: Iterable[Tensor], world_size: int) -> None:
    """Divide this rank's float16 values by the number of ranks, before they are summed and ``take_mean`` is called.

    Their sum overflows earlier than that of longer floats, which ``take_mean`` divides.
    """
    for flat in flats:
        if flat.dtype == torch.float16:
            flat.div_(world_size)


def take_mean(flat: Tensor, world_size: int) -> None:
    """Turn the sum over ranks that ``flat`` holds into the mean; in float16, the sum of shares is that already."""
    if flat.dtype == torch.float16:
        return
    if flat.is_floating_point() or flat.is_complex():
        flat.div_(world_size)
    else:
        flat.div_(world_size, rounding_mode="floor")


def all_finite(buffer: FlatBuffer) -> bool:
    """Return True if ``buffer`` holds neither NaN nor infinity."""
    return are_finite(buffer.flats)


def finite_norm(tensor: Tensor) -> float | None:
    """Return the norm of ``tensor``, to as many digits as float32 sums have; None if it holds a NaN or an infinity.

    It takes one pass, as ``are_finite`` does, and a second one only if squares of large finite values overflow.
    """
    norm = _norm(tensor, torch.float32)
    if math.isfinite(norm):
        return norm
    if not bool(tensor.isfinite().all()):
        return None
    return _norm(tensor, torch.float64)


def _norm(tensor: Tensor, least: torch.dtype) -> float:
    """Return the norm of ``tensor``, added up in its dtype, or in ``least`` if that is wider."""
    norm: float = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, least)).item()
    return norm


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if ``tensors`` hold neither NaN nor infinity.

    A sum is one fast pass, and it is not finite if any value is not. Every value is looked at only if the sum is not
    finite, which large finite values can cause too.
    """
    every = (tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors)
    return all(bool(values.sum().isfinite()) or bool(values.isfinite().all()) for values in every)
