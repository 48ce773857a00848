"""The rule that says which parameters are sent as factors of low rank, and at which rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from pipesgd.flat_buffer import in_memory_order, real_numel

LEAST_COMPRESSION = 2.0
"""Least ratio of a matrix's values to those of its factors: below it, products and a second all-reduce cost more than
the bytes that are saved. torch's hook has the same default (min_compression_rate)."""
STACKED = 3
"""Number of projections in the weight of an attention: queries, keys and values."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of real numbers that is sent as two factors."""

    rows: int
    columns: int
    rank: int
    """Rank of the factors."""


@dataclass(frozen=True)
class LowRank:
    """The rule by which parameters are factored, which depends on their shapes alone.

    - A parameter of two or more dimensions is one matrix, the first dimension of its memory by the others. So a
      convolution has a row for each output channel.
    - A parameter of two dimensions that is three times as high as wide is three square matrices: the stacked
      projections of an attention (``in_proj_weight``). The gradient of the values is several times as large as those
      of queries and keys, and would take the directions of common factors.
    - Every matrix has the rank ``rank`` or, with ``compression``, a rank by its size: the largest whose factors have
      that many times fewer values than the matrix, and at least 1.
    - A matrix of which the factors have more than half of its values is sent as it is (``LEAST_COMPRESSION``). So are
      parameters of fewer than two dimensions, such as biases and norms.
    - Embeddings and the last layer are matrices like others. They are often the largest ones: sent as they are, they
      would be most of the bytes.
    """

    rank: int = 4
    """Rank of the factors, without ``compression``."""
    compression: float | None = None
    """Number of times by which factors have fewer values than their matrix, at least ``LEAST_COMPRESSION``."""

    def matrices(self, tensor: Tensor) -> list[Matrix]:
        """Return the matrices that a parameter like ``tensor`` consists of, one after the other in its memory.

        There are none if it is sent as it is.

        >>> import torch
        >>> LowRank(rank=4).matrices(torch.empty(1000, 784))
        [Matrix(rows=1000, columns=784, rank=4)]
        >>> LowRank(compression=10).matrices(torch.empty(192, 64))[0], LowRank().matrices(torch.empty(10, 10))
        (Matrix(rows=64, columns=64, rank=3), [])
        """
        numel = real_numel(tensor)
        if tensor.dim() < 2 or not numel:
            return []
        stacked = tensor.dim() == 2 and tensor.shape[0] == STACKED * tensor.shape[1] and tensor.is_contiguous()
        count = STACKED if stacked else 1
        rows = len(in_memory_order(tensor)) // count
        columns = numel // count // rows
        at_rank_1 = rows * columns / (rows + columns)  # times fewer values
        rank = self.rank if self.compression is None else max(1, int(at_rank_1 / self.compression))
        return [Matrix(rows, columns, rank)] * count if rank * LEAST_COMPRESSION <= at_rank_1 else []

    def describe(self, parameters: Iterable[Tensor]) -> str:
        """Describe in a few words how many of ``parameters`` are factored, and what that saves."""
        of_each = [(real_numel(one), self.matrices(one)) for one in parameters]
        sent = sum(sum(one.rank * (one.rows + one.columns) for one in made) or numel for numel, made in of_each)
        factored = sum(bool(made) for _, made in of_each)
        ratio = sum(numel for numel, _ in of_each) / max(1, sent)
        return f"factors for {factored} of {len(of_each)} parameters, {ratio:.1f} times fewer values"
