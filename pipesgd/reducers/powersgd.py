"""PowerSGD, which sums factors of low rank instead of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipesgd.comm.all_reduce import AllReduce, Finish, no_op
from pipesgd.comm.connections import Connections
from pipesgd.flat_buffer import FlatBuffer, are_finite, check_sizes, in_memory_order, real_numel
from pipesgd.options import option
from pipesgd.reducers.base import GradientCodec, as_real


@dataclass(frozen=True)
class PowerSgd(GradientCodec):
    """Factors of low rank in place of matrices; see ``PowerSgdReducer``."""

    name: str = field(default="powersgd", init=False)
    low_rank: int = option(4, at_least=1)
    """Rank of the factors."""

    def _words(self) -> list[str]:
        return [f"of rank {self.low_rank}"]

    def reducer(self, connections: Connections, *, seed: int) -> PowerSgdReducer:
        ranks = connections.ranks
        return PowerSgdReducer(connections.all_reduce(), world_size=ranks.world_size, low_rank=self.low_rank, seed=seed)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A compressed parameter: views into the flat tensors that hold the factors and residuals of all parameters."""

    index: int
    """Index of the parameter."""
    residual: Tensor
    """Residual, (rows, columns)."""
    left: Tensor
    """Left factor, (rows, low_rank), P of the paper."""
    right: Tensor
    """Right factor, (columns, low_rank), Q of the paper."""
    first_right: Tensor
    """Random right factor to begin with."""


class PowerSgdReducer:
    """Sums matrices by one step of a power iteration (Vogels, Karimireddy & Jaggi, NeurIPS 2019, algorithms 1 and 2).

    A parameter of two or more dimensions is treated as a matrix, the first dimension of its memory by the others, if
    its factors are smaller: (rows + columns) * low_rank < rows * columns. All others are summed as they are. A ``sum``
    over p ranks is

    1. accumulate: M = gradient + residual, (rows, columns), of this rank;
    2. left factors: P = M Q, (rows, low_rank), with Q from the last iteration. All P and the uncompressed parameters
       are summed in one all-reduce; then the columns of each P are made orthonormal;
    3. right factors: Q = M^T P, (columns, low_rank), summed in a second all-reduce;
    4. decode: the sum is P Q^T; the residual becomes M - P Q^T / p, so that the sum and all ranks' residuals together
       equal the ranks' inputs. The next iteration starts from Q, whose scale does not matter there.

    A value that is not finite makes its whole matrix NaN on all ranks, which drop its residual and restart from the
    first Q.

    Everything is computed in float32. Every rank makes P orthonormal (by Householder QR, where a column of zeros
    becomes a direction to explore, which would stay zero for ever with Gram-Schmidt) and multiplies P Q^T itself from
    the same bytes. The results are the same bytes if torch computes alike, with the same kind of processor, version of
    torch, and number of threads. At the start, ranks compare some products and the numbers of their threads
    (``pipesgd.pipeline.sameness.check_same_products``).

    A single rank keeps its gradients as they are.

    Args:
        all_reduce: sums exactly.
        world_size: number of ranks, p.
        low_rank: columns of the factors.
        seed: seed of the first Q, the same on all ranks.
    """

    def __init__(self, all_reduce: AllReduce, *, world_size: int, low_rank: int, seed: int = 0):
        self._all_reduce = all_reduce
        self._world_size = world_size
        self._low_rank = low_rank
        self._seed = seed
        self._left = torch.empty(0)  # all left factors, and the uncompressed parameters
        self._right = torch.empty(0)  # all right factors
        self._residuals = torch.empty(0)
        self._matrices: list[_Matrix] = []
        self._uncompressed: list[tuple[int, Tensor]] = []  # the parameter's index, and its place in ``_left``
        self._ready = False

    def sum(self, buffer: FlatBuffer, iteration: int, finish: Finish = no_op) -> None:
        if self._world_size > 1:
            self._sum(buffer)
        for flat in buffer.flats:
            finish(flat)

    def _sum(self, buffer: FlatBuffer) -> None:
        self.state(buffer)  # makes room, if there is none
        # 1. and 2.
        for matrix in self._matrices:
            matrix.residual.add_(_as_matrix(buffer, matrix))
            torch.mm(matrix.residual, matrix.right, out=matrix.left)
        for index, place in self._uncompressed:
            place.copy_(_values(buffer, index))
        self._all_reduce(self._left)
        for index, place in self._uncompressed:
            _values(buffer, index).copy_(place)
        # 3.
        for matrix in self._matrices:
            if are_finite([matrix.left]):
                matrix.left.copy_(torch.linalg.qr(matrix.left).Q)
            torch.mm(matrix.residual.t(), matrix.left, out=matrix.right)
        self._all_reduce(self._right)
        # 4.
        for matrix in self._matrices:
            values = _as_matrix(buffer, matrix)
            if are_finite([matrix.left, matrix.right]):  # the same bytes on all ranks, so all do the same
                values.copy_(matrix.left @ matrix.right.t())
                matrix.residual.add_(values, alpha=-1 / self._world_size)
            else:
                values.fill_(torch.nan)
                matrix.residual.zero_()
                matrix.right.copy_(matrix.first_right)
        if not are_finite([self._residuals]):  # values that overflowed in the last step
            self._residuals.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def wire_bytes(self, buffer: FlatBuffer, iteration: int) -> int:
        lefts, rights = 0, 0
        for view in buffer.views:
            rows, columns = self._shape(view)
            lefts += rows * self._low_rank if columns else rows
            rights += columns * self._low_rank
        device = buffer.flats[0].device
        parts = [torch.empty(numel, dtype=torch.float32, device=device) for numel in (lefts, rights)]
        return sum(map(self._all_reduce.wire_bytes, parts))

    def state(self, buffer: FlatBuffer) -> list[Tensor]:
        if self._world_size > 1 and not self._ready:
            self._make_room(buffer)
        return [self._residuals, self._right]

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": self._residuals.clone(), "right": self._right.clone()}

    def check_state(self, state: dict[str, Any], buckets: Sequence[Sequence[Tensor]]) -> None:
        if state["right"].numel():
            matrices = [shape for bucket in buckets for shape in map(self._shape, bucket) if shape[1]]
            sizes = [sum(rows * columns for rows, columns in matrices), sum(c * self._low_rank for _, c in matrices)]
            check_sizes([state["residuals"].numel(), state["right"].numel()], sizes)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._residuals = state["residuals"].clone()
        self._right = state["right"].clone()
        self._ready = False

    def _shape(self, view: Tensor) -> tuple[int, int]:
        """Return rows and columns of a parameter's matrix; for one that is not compressed, its numel and 0."""
        numel = real_numel(view)
        if view.dim() >= 2 and numel:
            rows = len(in_memory_order(view))
            columns = numel // rows
            if (rows + columns) * self._low_rank < numel:
                return rows, columns
        return numel, 0

    def _make_room(self, buffer: FlatBuffer) -> None:
        """Lay out the flat tensors for buffers like this one; loaded state is kept."""
        shapes = [self._shape(view) for view in buffer.views]
        matrices = [(index, rows, columns) for index, (rows, columns) in enumerate(shapes) if columns]
        uncompressed = [(index, numel) for index, (numel, columns) in enumerate(shapes) if not columns]
        device, low_rank = buffer.flats[0].device, self._low_rank
        of_lefts = [rows * low_rank for _, rows, _ in matrices]
        of_rights = [columns * low_rank for _, _, columns in matrices]
        of_residuals = [rows * columns for _, rows, columns in matrices]
        # Made from integers, which are the same on all processors, unlike torch's normal numbers.
        generator = torch.Generator().manual_seed(self._seed)
        integers = torch.randint(-(2**23), 2**23, (sum(of_rights),), generator=generator)
        first_right = integers.float().mul_(2**-23).to(device)
        if not self._right.numel():
            self._right = first_right.clone()
            self._residuals = torch.zeros(sum(of_residuals), dtype=torch.float32, device=device)
        lefts_and_whole = sum(of_lefts) + sum(numel for _, numel in uncompressed)
        self._left = torch.zeros(lefts_and_whole, dtype=torch.float32, device=device)
        lefts, whole = self._left.split([sum(of_lefts), self._left.numel() - sum(of_lefts)])
        self._uncompressed = [
            (index, place)
            for (index, _), place in zip(uncompressed, whole.split([numel for _, numel in uncompressed]), strict=True)
        ]
        self._matrices = [
            _Matrix(
                index=index,
                residual=residual.view(rows, columns),
                left=left.view(rows, low_rank),
                right=right.view(columns, low_rank),
                first_right=first.view(columns, low_rank),
            )
            for (index, rows, columns), residual, left, right, first in zip(
                matrices,
                self._residuals.split(of_residuals),
                lefts.split(of_lefts),
                self._right.split(of_rights),
                first_right.split(of_rights),
                strict=True,
            )
        ]
        self._ready = True


def _as_matrix(buffer: FlatBuffer, matrix: _Matrix) -> Tensor:
    """Return the parameter's gradient in ``buffer`` as a matrix, which is a view."""
    return _values(buffer, matrix.index).view(matrix.residual.shape)


def _values(buffer: FlatBuffer, index: int) -> Tensor:
    """Return the real numbers of a parameter's gradient in ``buffer``, a view of one dimension, as memory has them."""
    return as_real(in_memory_order(buffer.views[index]))
