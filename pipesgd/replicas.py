"""Replicas of the model, one per rank: making them the same, and checking that they are, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pipesgd.checks import check_one_of
from pipesgd.comm.all_reduce import AllReduce
from pipesgd.errors import ReplicasDivergedError, named, warn
from pipesgd.flat_buffer import FlatBuffer, all_finite, are_finite, take_mean, take_shares
from pipesgd.pipeline_config import BUFFERS, Buffers
from pipesgd.ranks import Ranks
from pipesgd.shards import local

SumOverRanks = Callable[[FlatBuffer], None]
"""Function that replaces a buffer's values by their sum over the ranks. Collective."""


def share_rank_0s_values(model: nn.Module, also: Sequence[Tensor], rank: int, sum_over_ranks: SumOverRanks) -> None:
    """Give all ranks rank 0's parameters and buffers, and its values of the tensors in ``also``. Collective.

    Of DTensors they get rank 0's parts.
    """
    tensors = [*model.parameters(), *model.buffers(), *also]
    tensors = list({id(tensor): local(tensor).detach() for tensor in tensors}.values())
    # Booleans, 8-bit floats and some integers have no addition, or none in gloo, so they are sent as bytes.
    tensors = [tensor if _adds_up(tensor) else tensor.unsqueeze(-1).view(torch.uint8) for tensor in tensors]
    flat = FlatBuffer(tensors)
    if rank == 0:  # the others add zeros: a broadcast without a second kind of collective
        flat.fill_from(tensors)
    sum_over_ranks(flat)
    flat.copy_to(tensors)


def _adds_up(tensor: Tensor) -> bool:
    return tensor.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex())


def sum_buffer(buffer: FlatBuffer, all_reduce: AllReduce) -> None:
    """Replace the buffer's values by their sum over the ranks of ``all_reduce``. Collective."""
    for flat in buffer.flats:
        all_reduce(flat)


def combine_buffers(model: nn.Module, how: Buffers, ranks: Ranks, sum_over_ranks: SumOverRanks) -> None:
    """Set floating-point buffers to their "average" over ranks or to the values of "rank-0", or leave their "own".

    Collective. ``how`` is one of the three. Other buffers stay as they are, as do 8-bit floats, which cannot be added.
    Ranks whose buffers hold a NaN or an infinity are left out of the average, with a warning on rank 0, unless all do.

    Raises:
        UserInputError: ``how`` is something else.
    """
    check_one_of("buffers", how, BUFFERS)
    if how == "own":
        return
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.itemsize > 1]
    flat = FlatBuffer(buffers)
    if how == "average" or ranks.rank == 0:  # the others' zeros add nothing to rank 0's
        flat.fill_from(buffers)
    count = ranks.world_size
    if how == "average":
        take_shares(flat.flats, count)
    sum_over_ranks(flat)
    if how == "average":
        if not all_finite(flat):  # on all ranks alike
            own = are_finite(buffers)
            others = nonfinite_ranks(ranks, "buffers", own, close_by=True)
            finite = count - len(others)
            if others and finite:
                flat, count = FlatBuffer(buffers), finite
                if own:
                    flat.fill_from(buffers)
                take_shares(flat.flats, count)
                sum_over_ranks(flat)
            if others and ranks.rank == 0:
                rest = "they are left out of the average" if finite else "their average is not, either"
                warn(f"buffers of {named(others)} are not finite: {rest}")
        for part in flat.flats:
            take_mean(part, count)
    flat.copy_to(buffers)


def nonfinite_ranks(ranks: Ranks, what: str, finite: bool, *, close_by: bool = False) -> list[int]:
    """Return the numbers of the ranks that have called this with a false ``finite``, which is about their own ``what``.

    Collective; see ``Ranks.all_gather_object``.
    """
    of_ranks = ranks.all_gather_object(f"finite {what}", finite, close_by=close_by)
    return [ranks.number(rank) for rank, own in enumerate(of_ranks) if not own]


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of the bytes of all parameters, in the model's order, in hexadecimal.

    Of DTensors it has the bytes of this rank's parts.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = local(parameter).detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hashes_of_ranks(model: nn.Module, ranks: Ranks) -> list[str]:
    """Return the hash of every rank's weights, in rank order. All ranks call this together."""
    hashes: list[str] = ranks.all_gather_object("a hash of the weights", weights_sha256(model))
    return hashes


def check_same_weights(model: nn.Module, trained: Sequence[Tensor], ranks: Ranks) -> None:
    """Compare all ranks' ``trained`` and frozen parameters, which were written in the wrong place if they differ.

    Writes through ``.data`` or ``copy_`` leave no other trace, wherever they are made. Collective.

    Raises:
        ReplicasDivergedError: they differ; the message names the first one that does.
    """
    if ranks.world_size == 1:
        return
    ignored = getattr(model, "parameters_to_ignore", ())  # by DistributedDataParallel: each rank has its own
    own = set(map(id, trained))
    compared = {
        name: parameter
        for name, parameter in model.named_parameters()
        if (id(parameter) in own or not parameter.requires_grad) and name.removeprefix("module.") not in ignored
    }
    hashes = hashes_of_ranks(nn.ParameterList(compared.values()), ranks)
    others = [rank for rank, one in enumerate(hashes) if one != hashes[0]]
    if not others:
        return
    each = [weights_sha256(nn.ParameterList([parameter])) for parameter in compared.values()]
    of_ranks = ranks.all_gather_object("hashes of the weights", each)
    pairs = zip(compared, zip(*of_ranks, strict=True), strict=True)
    first = next(name for name, of_parameter in pairs if len(set(of_parameter)) > 1)
    raise ReplicasDivergedError(
        "weights must be written in pipeline.true_weights() alone, and alike on all ranks; got other weights on "
        f"{named([ranks.number(rank) for rank in others])} than on rank {ranks.number(0)}, first in {first}"
    )


def check_replicas(hashes: Sequence[str], iteration: int, ranks: Ranks) -> None:
    """Check that the hashes of all ``ranks`` are equal.

    Raises:
        ReplicasDivergedError: they differ; the message says which ranks hold what.
    """
    if len(set(hashes)) > 1:
        held = ", ".join(f"rank {ranks.number(rank)}: {text[:12]}" for rank, text in enumerate(hashes))
        raise ReplicasDivergedError(f"weights must be the same on all ranks after iteration {iteration}; got {held}")
