"""Sums of gradients by what each rank's gradient is made of, which all ranks gather in place of the whole matrices."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pipesgd.codecs.base import Codec
from pipesgd.comm.all_reduce import AllReduce
from pipesgd.reducers.base import Gathering


class GatheringReducer(Gathering):
    """Sum of matrices of which each rank gathers what all ranks' matrices are made of, and adds it in rank order.

    Every rank adds the same bytes in the same order, so sums are the same bytes on all ranks. Nothing is encoded or
    left out, so there is no state: sums are those of an all-reduce, except for the order in which values are added.

    Args:
        all_gather: completes a flat tensor of equal parts, of which each rank has set its own.
        rank: index of this rank's part.
        world_size: number of parts, p.
    """

    def __init__(self, all_gather: AllReduce, *, rank: int, world_size: int):
        self._all_gather = all_gather
        self._rank = rank
        self._world_size = world_size
        self.bytes_sent = 0

    def _gather(self, own: Tensor) -> Tensor:
        """Return all ranks' tensors like ``own``, (numel,), in rank order: (world_size, numel)."""
        gathered = own.new_empty(self._world_size, own.numel())
        gathered[self._rank] = own
        flat = gathered.view(-1)
        self._all_gather(flat)
        self.bytes_sent += self._all_gather.wire_bytes(flat)
        return gathered


def sends_less(part_bytes: int, matrix: Tensor, codec: Codec, world_size: int) -> bool:
    r"""Return True if gathering parts of a gradient sends fewer bytes than summing all of it around a ring.

    .. math:: (p-1)\, m < 2 \frac{p-1}{p}\, n

    m is ``part_bytes``, n are the bytes of ``matrix``, encoded by ``codec``, and p is ``world_size``. One rank sends
    nothing either way.

    >>> import torch
    >>> from pipesgd.codecs.floats import Uncompressed
    >>> [sends_less(part, torch.zeros(100, 7), Uncompressed(), world_size=2) for part in (2799, 2800)]
    [True, False]
    """
    numel = matrix.numel() * (2 if matrix.is_complex() else 1)
    whole = matrix.nbytes if codec.in_place else codec.wire_bytes(numel)
    return world_size > 1 and world_size * part_bytes < 2 * whole


def weights_of(model: nn.Module, is_of_kind: Callable[[nn.Module], bool]) -> list[Tensor]:
    """Return the weights of the model's layers of a kind, except those that another layer has, too.

    ``is_of_kind`` tells the layers. What they have besides a ``weight``, such as a bias, is not among the weights.
    """
    found: dict[int, Tensor] = {}
    others: set[int] = set()
    for module in model.modules():
        of_kind = is_of_kind(module)
        for name, parameter in module.named_parameters(recurse=False):
            if of_kind and name == "weight":
                found[id(parameter)] = parameter
            else:
                others.add(id(parameter))
    return [weight for identity, weight in found.items() if identity not in others]
