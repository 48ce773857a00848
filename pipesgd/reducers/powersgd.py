"""PowerSGD, which sums factors of low rank instead of matrices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipesgd.checks import refuse
from pipesgd.codecs.base import Codec
from pipesgd.codecs.options import FACTOR_CODECS, codec_named
from pipesgd.comm.all_reduce import AllReduce, Finish, no_op
from pipesgd.comm.connections import Connections
from pipesgd.flat_buffer import (
    FlatBuffer,
    are_finite,
    check_sizes,
    places_in_flats,
    real_numel,
    sizes_of_flats,
)
from pipesgd.options import option
from pipesgd.reducers.base import GradientCodec, added_up, as_real, check_kept
from pipesgd.reducers.low_rank import LEAST_COMPRESSION, LowRank

SHORTEST = 1e-30
"""Length below which a column is not made 1 long: it is zero, or nearly so."""
FACTOR_BLOCK = 64
"""Block of int8 for factors: few blocks then have values of two columns, whose sizes may be far apart."""


@dataclass(frozen=True)
class PowerSgd(GradientCodec):
    """Factors of low rank in place of matrices (see ``PowerSgdReducer``).

    ``rule`` says which parameters are factored, and at which rank.

    >>> PowerSgd(low_rank=2).rule.matrices(torch.empty(30, 40))
    [Matrix(rows=30, columns=40, rank=2)]
    """

    name: str = field(default="powersgd", init=False)
    low_rank: int | None = option(None, at_least=1)
    """Rank of the factors, 4 by default."""
    compression: float | None = option(None, at_least=LEAST_COMPRESSION, named="rank-compression")
    """Number of times by which the factors of each matrix have fewer values than it, in place of one rank for all."""
    factors: str = option("fp32", choices=FACTOR_CODECS, named="factor-codec")
    """Encoding of the factors and of what is not compressed, on the wire: fp32 (exact), bf16 or int8."""
    dense_start: int = option(0, at_least=0)
    """Number of first iterations in which matrices are summed whole, encoded as factors would be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.low_rank is not None and self.compression is not None
        refuse((both, f"low-rank must be left out with --rank-compression, which chooses ranks; got {self.low_rank}"))

    @property
    def multiplies(self) -> bool:
        return True

    @property
    def rule(self) -> LowRank:
        """Rule that says which parameters are factored, and at which rank."""
        return LowRank(self.low_rank or LowRank.rank, self.compression)

    def make(self, device: str = "cpu") -> Codec:
        """Return the codec of the factors."""
        block = {"block": FACTOR_BLOCK} if self.factors == "int8" else {}
        return codec_named(self.factors, **block).make(device)

    def _words(self) -> list[str]:
        by_size = self.compression is not None
        ranks = f"with {self.compression:g} times fewer values" if by_size else f"of rank {self.rule.rank}"
        whole = f"after {self.dense_start} whole gradients"
        return [ranks, *[f"in {self.factors}"] * (self.factors != "fp32"), *[whole] * (self.dense_start > 0)]

    def said_of(self, parameters: Iterable[Tensor]) -> str:
        return f", {self.rule.describe(parameters)}"

    def reducer(self, connections: Connections, codec: Codec, *, seed: int) -> PowerSgdReducer:
        return PowerSgdReducer(
            connections.all_reduce(codec),
            world_size=connections.ranks.world_size,
            rule=self.rule,
            exact=codec.in_place,
            dense_start=self.dense_start,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a parameter's gradient in a bucket, in real numbers."""

    flat: int
    """Number of the flat tensor among those of the bucket."""
    values: slice

    def in_flats(self, flats: Sequence[Tensor]) -> Tensor:
        """Return the parameter's values in the flat tensors of a bucket, or in its residuals: a view, (numel,)."""
        return as_real(flats[self.flat])[self.values]


@dataclass(frozen=True, slots=True)
class _Whole:
    """A parameter that is not compressed."""

    place: _Place
    residual: Tensor
    """Residual, (numel,), zero where encodings are exact."""
    sent: slice
    """Its place in ``left`` of its bucket."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix that is compressed, of a parameter, with views into the tensors of its bucket."""

    place: _Place
    residual: Tensor
    """Residual, (rows, columns)."""
    left: Tensor
    """Left factor, (rank, rows), P of the paper, column by column."""
    right: Tensor
    """Right factor, (rank, columns), Q of the paper, column by column."""
    first_right: Tensor
    """Random right factor to begin with."""

    def in_flats(self, flats: Sequence[Tensor]) -> Tensor:
        """Return the parameter's gradient in the flat tensors of a bucket as a matrix, which is a view."""
        return self.place.in_flats(flats).view(self.residual.shape)


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory of a bucket, and the views of its parameters."""

    residuals: list[Tensor]
    """Residuals of all parameters, for each flat tensor of the bucket."""
    left: Tensor
    """All left factors, and the uncompressed parameters."""
    right: Tensor
    """All right factors."""
    matrices: list[_Matrix]
    lost: Tensor | None
    """Values that this rank's encodings leave out of ``left``, in the present sum; None if they are exact."""
    wholes: list[_Whole]
    state_of: list[list[Tensor]]
    """Residual and right factor of each parameter, (numel,) each; the factor is empty if it is not compressed."""


class PowerSgdReducer:
    """Sums matrices by one step of a power iteration (Vogels, Karimireddy & Jaggi, NeurIPS 2019, algorithms 1 and 2).

    Parameters are matrices of a rank r by ``LowRank``, or are summed as they are. A ``sum`` of a bucket over p ranks is

    1. accumulate: M = gradient + residual, (rows, columns), of this rank;
    2. left factors: P = M Q, (rows, r), with Q from the last iteration, its columns made 1 long. All P and the
       uncompressed parameters are summed in one all-reduce; then the columns of each P are made orthonormal;
    3. right factors: Q = M^T P, (columns, r), summed in a second all-reduce;
    4. decode: the sum is P Q^T; the residual becomes M - P Q^T / p, so that the sum and all ranks' residuals together
       equal the ranks' inputs. The next iteration starts from Q.

    In the first ``dense_start`` iterations a bucket is summed as it is, in one all-reduce, since the directions of
    gradients change most at the beginning.

    A value that is not finite makes its whole matrix NaN on all ranks, which drop its residual and restart from the
    first Q.

    Factors may be encoded on the wire. Whatever P^ the ranks then have, made orthonormal, and whatever Q^, both are the
    same bytes on all of them, and the residual of step 4 has what their encodings left out, too, since it is what the
    ranks' inputs have in excess of P^ Q^T. A parameter that is not compressed has a residual of its own encodings.
    Factors are sent column by column, and int8 has small blocks, so that a scale is of one column: their lengths are as
    far apart as singular values. Those of P are about as long as those of Q, since that is 1 long where it multiplies.

    Everything is computed in float32. Every rank makes P orthonormal (by Householder QR, where a column of zeros
    becomes a direction to explore, which would stay zero for ever with Gram-Schmidt) and multiplies P Q^T itself from
    the same bytes. The results are the same bytes if torch computes alike, with the same kind of processor, version of
    torch, and number of threads. At the start, ranks compare some products and the numbers of their threads
    (``pipesgd.pipeline.sameness.check_same_products``).

    A single rank keeps its gradients as they are.

    Args:
        all_reduce: sums exactly, or with a codec on the wire.
        world_size: number of ranks, p.
        rule: says which parameters are factored, and at which rank.
        exact: whether ``all_reduce`` sums exactly.
        dense_start: number of first iterations in which nothing is factored.
        seed: seed of the first Q, the same on all ranks.
    """

    def __init__(
        self,
        all_reduce: AllReduce,
        *,
        world_size: int,
        rule: LowRank,
        exact: bool = True,
        dense_start: int = 0,
        seed: int = 0,
    ):
        self._all_reduce = all_reduce
        self._world_size = world_size
        self._rule = rule
        self._exact = exact
        self._dense_start = dense_start
        self._seed = seed
        self._residuals: dict[int, Tensor] = {}  # by number of the flat tensor
        self._rights: dict[int, Tensor] = {}  # by number of the bucket's first flat tensor, as rooms are
        self._rooms: dict[int, _Room] = {}

    def sum(self, buffer: FlatBuffer, iteration: int, finish: Finish = no_op) -> None:
        if self._world_size > 1:
            room = self._room(buffer)
            if iteration < self._dense_start:
                self._sum_whole(buffer.flats, room.residuals)
            else:
                self._sum_factors(buffer.flats, room)
            if not are_finite(room.residuals):  # values that overflowed in the last step
                for residual in room.residuals:
                    residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for flat in buffer.flats:
            finish(flat)

    def _sum_whole(self, flats: Sequence[Tensor], residuals: Sequence[Tensor]) -> None:
        for flat, residual in zip(flats, residuals, strict=True):
            real = as_real(flat)
            values = real.to(torch.float32).add_(residual)
            residual.zero_()
            self._all_reduce(values, None if self._exact else residual)
            if values is not real:
                real.copy_(values)

    def _sum_factors(self, flats: Sequence[Tensor], room: _Room) -> None:
        # 1. and 2.
        for matrix in room.matrices:
            matrix.residual.add_(matrix.in_flats(flats))
            lengths = torch.linalg.vector_norm(matrix.right, dim=1, keepdim=True)
            matrix.right.div_(lengths.clamp_min_(SHORTEST))
            torch.mm(matrix.right, matrix.residual.t(), out=matrix.left)
        for whole in room.wholes:
            torch.add(whole.residual, whole.place.in_flats(flats), out=room.left[whole.sent])
        if room.lost is None:
            self._all_reduce(room.left)
        else:
            self._all_reduce(room.left, room.lost.zero_())
        for whole in room.wholes:
            whole.place.in_flats(flats).copy_(room.left[whole.sent])
            if room.lost is not None:
                whole.residual.copy_(room.lost[whole.sent])
        # 3.
        finite = are_finite([room.left])  # most often, and then nobody need look at each matrix
        for matrix in room.matrices:
            if finite or are_finite([matrix.left]):
                matrix.left.copy_(torch.linalg.qr(matrix.left.t()).Q.t())
            torch.mm(matrix.left, matrix.residual, out=matrix.right)
        self._all_reduce(room.right)
        # 4.
        finite = are_finite([room.left, room.right])
        for matrix in room.matrices:
            values = matrix.in_flats(flats)
            if finite or are_finite([matrix.left, matrix.right]):  # the same bytes on all ranks, so all do the same
                if values.dtype == torch.float32:
                    torch.mm(matrix.left.t(), matrix.right, out=values)
                else:
                    values.copy_(matrix.left.t() @ matrix.right)
                matrix.residual.add_(values, alpha=-1 / self._world_size)
            else:
                values.fill_(torch.nan)
                matrix.residual.zero_()
                matrix.right.copy_(matrix.first_right)

    def wire_bytes(self, buffer: FlatBuffer, iteration: int) -> int:
        if iteration < self._dense_start:
            return sum(self._all_reduce.wire_bytes(as_real(flat).to(torch.float32)) for flat in buffer.flats)
        sizes = zip(*map(self._sizes, buffer.views), strict=True)
        device = buffer.flats[0].device
        parts = [torch.empty(sum(numels), dtype=torch.float32, device=device) for numels in sizes]
        return sum(map(self._all_reduce.wire_bytes, parts))

    def state(self, buffer: FlatBuffer) -> list[Tensor]:
        if self._world_size == 1:
            return []
        room = self._room(buffer)
        return [*room.residuals, room.right]

    def state_of(self, number: int, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        return self._rooms[number].state_of if number in self._rooms else [[] for _ in parameters]

    def forget_from(self, number: int) -> None:
        self._residuals = {one: kept for one, kept in self._residuals.items() if one < number}
        self._rights = {one: kept for one, kept in self._rights.items() if one < number}
        self._rooms = {one: kept for one, kept in self._rooms.items() if one < number}

    def state_dict(self) -> dict[str, Any]:
        return {
            "residuals": [self._residuals[number].clone() for number in sorted(self._residuals)],
            "rights": {first: right.clone() for first, right in self._rights.items()},
        }

    def check_state(self, state: dict[str, Any], buckets: Sequence[Sequence[Tensor]]) -> None:
        check_kept(state["residuals"], buckets)
        first = 0
        for bucket in buckets:
            if first in state["rights"]:
                check_sizes([state["rights"][first].numel()], [sum(right for _, right in map(self._sizes, bucket))])
            first += len(sizes_of_flats([bucket]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._residuals = {number: residual.clone() for number, residual in enumerate(state["residuals"])}
        self._rights = {first: right.clone() for first, right in state["rights"].items()}
        self._rooms = {}

    def of_members(self, alike: dict[str, Any], taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return alike | {"residuals": added_up([state["residuals"] for state in taken])}

    def _sizes(self, parameter: Tensor) -> tuple[int, int]:
        """Return how many values the first and the second all-reduce have of a parameter like this one."""
        made = self._rule.matrices(parameter)
        rights = sum(one.columns * one.rank for one in made)
        return sum(one.rows * one.rank for one in made) if made else real_numel(parameter), rights

    def _room(self, buffer: FlatBuffer) -> _Room:
        """Return the memory for buckets like this one, made once."""
        if buffer.first not in self._rooms:
            self._rooms[buffer.first] = self._make_room(buffer)
        return self._rooms[buffer.first]

    def _make_room(self, buffer: FlatBuffer) -> _Room:
        """Lay out the tensors for buckets like this one; loaded state is kept."""
        flats, first = buffer.flats, buffer.first
        made = list(map(self._rule.matrices, buffer.views))
        of_lefts, of_rights = zip(*map(self._sizes, buffer.views), strict=True)
        # All left factors are in front of what is summed as it is.
        order = sorted(range(len(made)), key=lambda index: not made[index])
        left = torch.zeros(sum(of_lefts), dtype=torch.float32, device=flats[0].device)
        stops = itertools.accumulate(of_lefts[index] for index in order)
        lefts = {index: slice(stop - of_lefts[index], stop) for index, stop in zip(order, stops, strict=True)}
        first_right = self._random(first, sum(of_rights)).to(left.device)
        right = self._rights.setdefault(first, first_right.clone())
        residuals = [
            self._residuals.setdefault(number, torch.zeros_like(as_real(flat), dtype=torch.float32))
            for number, flat in enumerate(flats, first)
        ]
        room = _Room(residuals, left, right, [], None if self._exact else torch.empty_like(left), [], [])
        places = places_in_flats([buffer.views])
        of_each = zip(made, places, right.split(of_rights), first_right.split(of_rights), strict=True)
        for index, (matrices, (flat, start, stop), own_right, own_first) in enumerate(of_each):
            whole = _Place(flat, slice(start, stop))
            residual = whole.in_flats(residuals)
            room.state_of.append([residual, own_right])
            if not matrices:
                room.wholes.append(_Whole(whole, residual, lefts[index]))
                continue
            numels = [one.rows * one.columns for one in matrices]
            starts = itertools.accumulate([start, *numels[:-1]])
            views = zip(
                matrices,
                [_Place(flat, slice(begin, begin + numel)) for begin, numel in zip(starts, numels, strict=True)],
                left[lefts[index]].split([one.rows * one.rank for one in matrices]),
                own_right.split([one.columns * one.rank for one in matrices]),
                own_first.split([one.columns * one.rank for one in matrices]),
                strict=True,
            )
            room.matrices.extend(
                _Matrix(
                    place=place,
                    residual=place.in_flats(residuals).view(one.rows, one.columns),
                    left=of_left.view(one.rank, one.rows),
                    right=of_right.view(one.rank, one.columns),
                    first_right=of_first.view(one.rank, one.columns),
                )
                for one, place, of_left, of_right, of_first in views
            )
        return room

    def _random(self, first: int, numel: int) -> Tensor:
        """Return random values for the first Q of the bucket whose first flat tensor has the number ``first``."""
        # Made from integers, which are the same on all processors, unlike torch's normal numbers.
        generator = torch.Generator().manual_seed(self._seed + first)
        return torch.randint(-(2**23), 2**23, (numel,), generator=generator).float().mul_(2**-23)
