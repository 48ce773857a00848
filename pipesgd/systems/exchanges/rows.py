"""Sum of embeddings' gradients by the rows that are not zero, which all ranks gather."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipesgd.comm.all_reduce import Finish, no_op
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.systems.exchanges.gathering import GatheringReducer, weights_of

MOST_ROWS = 2**31 - 1
"""Largest number of rows of an embedding: indices travel as int32."""


class RowsReducer(GatheringReducer):
    """Sums matrices of which each rank has few rows that are not zero, by gathering these rows.

    An embedding's gradient has a row for every symbol, and all but those of the batch's symbols are zero. A ``sum``
    over p ranks is

    1. count: the numbers of rows that are not zero, int32 (p, matrices), go around the ring;
    2. gather: the indices of these rows, int32, and then the rows as they are, go around the ring. A rank's message has
       room for as many rows of a matrix as the rank with the most has, R;
    3. add: the rows of all ranks are added to zeros in rank order, which gives the same bytes on every rank.

    For each matrix a rank sends p-1 times 4 bytes, and R times 4 bytes more than a row has. A row with a NaN is not
    zero.
    """

    eligible = "a torch.nn.Embedding is trained that shares its weights with no other layer"

    @staticmethod
    def weights(model: nn.Module) -> list[Tensor]:
        """Return the weights of the model's embeddings, except those that are another layer's, too.

        Where an output layer has the same weights, every row has a gradient.

        Raises:
            UserInputError: an embedding has more rows than ``MOST_ROWS``.
        """
        weights = weights_of(model, lambda module: isinstance(module, nn.Embedding | nn.EmbeddingBag))
        for weight in weights:
            if len(weight) > MOST_ROWS:
                raise UserInputError(
                    f"embeddings must have at most 2**31 - 1 rows with --reduce rows; got {len(weight)}"
                )
        return weights

    @staticmethod
    def pieces(gradient: Tensor, kept: None) -> int:
        """Return the number of rows of a gradient that are not zero."""
        return len(rows_of(gradient.to_dense()))

    @staticmethod
    def part_bytes(count: int, matrix: Tensor) -> int:
        """Return the bytes of one rank's part of a matrix if the rank with the most has ``count`` rows.

        >>> RowsReducer.part_bytes(3, torch.zeros(100, 7))
        100
        """
        return 4 + count * (4 + matrix[:1].nbytes)

    def sum(self, buffer: FlatBuffer, iteration: int, finish: Finish = no_op) -> None:
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


def rows_of(matrix: Tensor) -> Tensor:
    """Return the indices of the rows of ``matrix`` that are not zero, int64 (count,), in their order."""
    return matrix.ne(0).any(dim=1).nonzero().squeeze(1)
