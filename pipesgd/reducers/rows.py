"""Sum of embeddings' gradients by the rows that are not zero, which all ranks gather."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipesgd.codecs.base import Codec
from pipesgd.comm.all_reduce import AllReduce, Finish, no_op
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import FlatBuffer

MOST_ROWS = 2**31 - 1
"""Largest number of rows of an embedding: indices travel as int32."""


class RowsReducer:
    """Sums matrices of which each rank has few rows that are not zero, by gathering these rows.

    An embedding's gradient has a row for every symbol, and all but those of the batch's symbols are zero. A ``sum``
    over p ranks is

    1. count: the numbers of rows that are not zero, int32 (p, matrices), go around the ring;
    2. gather: the indices of these rows, int32, and then the rows as they are, go around the ring. A rank's message has
       room for as many rows of a matrix as the rank with the most has, R;
    3. add: the rows of all ranks are added to zeros in rank order, which gives the same bytes on every rank.

    For each matrix a rank sends p-1 times 4 bytes, and R times 4 bytes more than a row has. Nothing is encoded or left
    out, so there is no state: sums are those of an all-reduce, except for the order in which values are added. A row
    with a NaN is not zero.

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
        """Bytes that this rank has sent in the last ``sum``; they depend on all ranks' rows."""

    def sum(self, buffer: FlatBuffer, iteration: int, finish: Finish = no_op) -> None:
        """Replace the matrices in ``buffer``, (rows, columns) each, by their sums over the ranks. Collective.

        ``finish`` is called once with each flat tensor of the buffer.

        Raises:
            CommunicationError: a peer was lost, or silent for longer than the deadline.
        """
        self.bytes_sent = 0
        matrices = buffer.views
        # 1.
        used = [rows_of(matrix) for matrix in matrices]
        numbers = torch.tensor([len(rows) for rows in used], dtype=torch.int32, device=matrices[0].device)
        counts = self._gather(numbers).tolist()
        most = [max(of_ranks) for of_ranks in zip(*counts, strict=True)]
        # 2.
        own = numbers.new_zeros(sum(most))  # what is left of a part names row 0, which nobody reads
        for part, rows in zip(own.split(most), used, strict=True):
            part[: len(rows)] = rows
        indices = [of_rank.split(most) for of_rank in self._gather(own)]
        for dtype in dict.fromkeys(matrix.dtype for matrix in matrices):
            which = [number for number, matrix in enumerate(matrices) if matrix.dtype == dtype]
            parts = [matrices[number].index_select(0, indices[self._rank][number]) for number in which]
            gathered = self._gather(torch.cat([part.view(-1) for part in parts]))
            # 3.
            for number in which:
                matrices[number].zero_()  # all of it: a row of negative zeros counts as zero, and is not the same bytes
            for rank, message in enumerate(gathered):
                values = message.split([part.numel() for part in parts])
                for number, part, rows in zip(which, parts, values, strict=True):
                    count = counts[rank][number]
                    matrices[number].index_add_(0, indices[rank][number][:count], rows.view(part.shape)[:count])
        for flat in buffer.flats:
            finish(flat)

    def _gather(self, own: Tensor) -> Tensor:
        """Return all ranks' tensors like ``own``, (numel,), in rank order: (world_size, numel)."""
        gathered = own.new_empty(self._world_size, own.numel())
        gathered[self._rank] = own
        flat = gathered.view(-1)
        self._all_gather(flat)
        self.bytes_sent += self._all_gather.wire_bytes(flat)
        return gathered


def rows_of(matrix: Tensor) -> Tensor:
    """Return the indices of the rows of ``matrix`` that are not zero, int64 (count,), in their order."""
    return matrix.ne(0).any(dim=1).nonzero().squeeze(1)


def sends_less(rows: int, matrix: Tensor, codec: Codec, world_size: int) -> bool:
    r"""Return True if gathering the rows of a gradient sends fewer bytes than summing all of it around a ring.

    .. math:: (p-1)\, (4 + R\, (4 + b)) < 2 \frac{p-1}{p}\, n

    R is ``rows``, of the rank with the most; b are the bytes of a row, n those of ``matrix``, encoded by ``codec``;
    and p is ``world_size``. One rank sends nothing either way.

    >>> from pipesgd.codecs.floats import Uncompressed
    >>> [sends_less(rows, torch.zeros(100, 7), Uncompressed(), world_size=2) for rows in (87, 88)]
    [True, False]
    """
    numel = matrix.numel() * (2 if matrix.is_complex() else 1)
    whole = matrix.nbytes if codec.in_place else codec.wire_bytes(numel)
    gathered = 4 + rows * (4 + matrix[:1].nbytes)
    return world_size > 1 and world_size * gathered < 2 * whole


def embeddings(model: nn.Module) -> list[Tensor]:
    """Return the weights of the model's embeddings, except those that are another layer's, too.

    Where an output layer has the same weights, every row has a gradient.

    Raises:
        UserInputError: an embedding has more rows than ``MOST_ROWS``.
    """
    found: dict[int, Tensor] = {}
    others: set[int] = set()
    for module in model.modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for name, parameter in module.named_parameters(recurse=False):
            if is_embedding and name == "weight":  # a class derived from it may have other parameters, too
                found[id(parameter)] = parameter
            else:
                others.add(id(parameter))
    weights = [weight for identity, weight in found.items() if identity not in others]
    for weight in weights:
        if len(weight) > MOST_ROWS:
            raise UserInputError(f"embeddings must have at most 2**31 - 1 rows with --reduce rows; got {len(weight)}")
    return weights


def check_embeddings(model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Raise ``UserInputError`` unless one of ``parameters``, the trained ones, is among the model's embeddings."""
    known = set(map(id, embeddings(model)))
    if not any(id(parameter) in known for parameter in parameters):
        raise UserInputError(
            "reduce must be matrix unless a torch.nn.Embedding is trained that shares its weights with no other layer; "
            "got rows"
        )
