"""Deep Gradient Compression, which gathers the largest values of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipesgd.checks import refuse
from pipesgd.codecs.base import Codec
from pipesgd.comm.all_reduce import AllReduce, Finish, no_op
from pipesgd.comm.connections import Connections
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.options import option
from pipesgd.reducers.base import Float32Places, GradientCodec, as_real, check_kept

WARMUP_DENSITY = 0.25
"""Density at which a warm-up begins, as in the paper."""
SAMPLE = 1 << 16
"""Number of values from which the threshold is guessed: for 1% of them the guess is wrong by a few percent."""


NUMBERS_PER_VALUE = 2
"""Numbers sent per value: an index and the value, of 4 bytes each."""


@dataclass(frozen=True)
class TopK(GradientCodec):
    """The largest values of each rank; see ``TopKReducer``."""

    name: str = field(default="topk", init=False)
    density: float = option(0.01, above_zero=True)
    """Share of the values that are sent."""
    density_warmup: int = option(0, at_least=0)
    """Iterations in which the density falls from a quarter to ``density``, by a constant factor."""
    momentum_correction: float = option(0.0, at_least=0)
    """Momentum that is applied before values are selected, in place of the optimizer's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            (self.density > 1, f"density must be at most 1; got {self.density}"),
            (self.momentum_correction >= 1, f"momentum-correction must be below 1; got {self.momentum_correction}"),
        )

    @property
    def own_momentum(self) -> float:
        return self.momentum_correction

    @property
    def bits(self) -> float:
        """Bits that are sent for each value of a gradient."""
        return 32 * NUMBERS_PER_VALUE * self.density

    def _words(self) -> list[str]:
        return [f"with density {self.density:g}"]

    def check(self, parameters: Sequence[Tensor]) -> None:
        """Raise ``UserInputError`` if indices of values of ``parameters`` do not fit into 32 bits."""
        for dtype in {parameter.dtype for parameter in parameters}:
            numel = sum(one.numel() * (1 + one.is_complex()) for one in parameters if one.dtype == dtype)
            if numel > torch.iinfo(torch.int32).max:
                raise UserInputError(f"parameters must be at most 2**31 - 1 with --codec topk; got {numel}")

    def reducer(self, connections: Connections, codec: Codec, *, seed: int) -> TopKReducer:
        ranks = connections.ranks
        return self.sums(connections.all_gather(), rank=ranks.rank, world_size=ranks.world_size)

    def sums(self, all_gather: AllReduce, *, rank: int, world_size: int) -> TopKReducer:
        """Return the reducer that sums gradients by this ``all_gather``."""
        return TopKReducer(self, all_gather, rank=rank, world_size=world_size)


class TopKReducer:
    """Reducer in which every rank sends its k largest values of each flat tensor, and keeps the others for later.

    Lin, Han, Mao, Wang & Dally, "Deep Gradient Compression", ICLR 2018, sections 3.1 to 3.3. Each ``sum``, with the
    rank's gradient g, is

    1. accumulate: u = momentum * u + g, v = v + u (without momentum v = v + g);
    2. choose: the k = max(1, round(density * numel)) values of v that are largest in magnitude;
    3. mask: clear u and v at the chosen values;
    4. gather: k int32 indices and k float32 values of every rank go around the ring;
    5. add: all parts are added to zeros in rank order, which gives the same bytes on every rank.

    Without momentum, the sums and what the ranks keep together equal the ranks' inputs. With momentum, the optimizer's
    own must be 0, since this one takes its place. In the first ``density_warmup`` iterations the density falls from a
    quarter to ``density``, by the same factor each time. The paper's clipping of local gradients is left out.

    A value that is not finite is chosen before all others, and is dropped if there is no room for it. Everything is
    accumulated in float32, and rounded to the gradients' dtype at the end. A single rank sends nothing, but still
    chooses values: this is the algorithm for one rank.

    Args:
        options: densities and momentum.
        all_gather: completes a flat tensor of equal parts, of which each rank has set its own.
        rank: index of this rank's part.
        world_size: number of parts.
    """

    def __init__(self, options: TopK, all_gather: AllReduce, *, rank: int, world_size: int):
        self._options = options
        self._momentum = options.momentum_correction
        self._all_gather = all_gather
        self._rank = rank
        self._world_size = world_size
        self._velocities: list[Tensor] = []  # u of the paper; none without momentum
        self._residuals: list[Tensor] = []  # v of the paper
        self._sums = Float32Places()
        self._message = torch.empty(0, dtype=torch.int32)

    def sum(self, buffer: FlatBuffer, iteration: int, finish: Finish = no_op) -> None:
        self.state(buffer)  # makes it, if there is none
        counts = self._counts(buffer, iteration)
        message = self._message_of(NUMBERS_PER_VALUE * sum(counts), self._residuals[0].device)
        for number, (indices, values) in enumerate(_parts(message[self._rank], counts)):
            self._accumulate(number, as_real(buffer.flats[number]))
            self._take(number, indices, values)
        self._all_gather(message.view(-1))
        sums = [self._sums.place(number, flat).zero_() for number, flat in enumerate(buffer.flats)]
        for part in message:
            for total, (indices, values) in zip(sums, _parts(part, counts), strict=True):
                total.index_add_(0, indices, values)
        for flat, total in zip(buffer.flats, sums, strict=True):
            if total is not flat:
                as_real(flat).copy_(total)
            finish(flat)

    def wire_bytes(self, buffer: FlatBuffer, iteration: int) -> int:
        return 4 * NUMBERS_PER_VALUE * sum(self._counts(buffer, iteration)) * (self._world_size - 1)

    def state(self, buffer: FlatBuffer) -> list[Tensor]:
        if not self._residuals:
            self._residuals = [torch.zeros_like(as_real(flat), dtype=torch.float32) for flat in buffer.flats]
        if self._momentum and not self._velocities:
            self._velocities = [torch.zeros_like(residual) for residual in self._residuals]
        return [*self._residuals, *self._velocities]

    def state_dict(self) -> dict[str, Any]:
        return {
            "velocities": [velocity.clone() for velocity in self._velocities],
            "residuals": [residual.clone() for residual in self._residuals],
        }

    def check_state(self, state: dict[str, Any], buckets: Sequence[Sequence[Tensor]]) -> None:
        check_kept(state["velocities"], buckets)
        check_kept(state["residuals"], buckets)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._velocities = [velocity.clone() for velocity in state["velocities"]]
        self._residuals = [residual.clone() for residual in state["residuals"]]

    def of_members(self, alike: dict[str, Any], taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
        raise UserInputError("codec must be another one where the number of ranks changes; got topk")

    def _counts(self, buffer: FlatBuffer, iteration: int) -> list[int]:
        """Return the number of values of each flat tensor that are sent in ``iteration``."""
        density = density_in(iteration, self._options.density, self._options.density_warmup)
        return [count_of(as_real(flat).numel(), density) for flat in buffer.flats]

    def _message_of(self, numbers: int, device: torch.device) -> Tensor:
        """Return int32 (world_size, ``numbers``) to be overwritten, the same memory while the density is the same."""
        if self._message.numel() != self._world_size * numbers:
            self._message = torch.empty(self._world_size * numbers, dtype=torch.int32, device=device)
        return self._message.view(self._world_size, numbers)

    def _accumulate(self, number: int, gradient: Tensor) -> None:
        residual = self._residuals[number]
        if self._momentum:
            gradient = self._velocities[number].mul_(self._momentum).add_(gradient)
        residual.add_(gradient)

    def _take(self, number: int, indices: Tensor, values: Tensor) -> None:
        """Move the largest residuals into ``indices`` and ``values``, (k,) each."""
        residual = self._residuals[number]
        chosen = largest(residual.abs(), indices.numel())
        indices.copy_(chosen)
        torch.index_select(residual, 0, chosen, out=values)
        kept = [residual, *self._velocities[number : number + 1]]
        for tensor in kept:
            tensor.index_fill_(0, chosen, 0.0)
        if not values.isfinite().all():  # there may be more such values than were sent
            bad = ~residual.isfinite()
            for tensor in kept:
                tensor.masked_fill_(bad, 0.0)


def density_in(iteration: int, density: float, warmup: int) -> float:
    """Return the share of the values that is sent in ``iteration``, the first being 0.

    >>> [density_in(iteration, 0.0625, 2) for iteration in range(4)]
    [0.25, 0.125, 0.0625, 0.0625]
    """
    if iteration >= warmup:
        return density
    fallen: float = WARMUP_DENSITY * (density / WARMUP_DENSITY) ** (iteration / warmup)
    return max(density, fallen)


def count_of(numel: int, density: float) -> int:
    """Return the number of values, out of ``numel``, that are sent: at least one, unless there is none."""
    return min(numel, max(1, round(density * numel)))


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """Return the indices (``count``,) of the largest of ``magnitudes``, NaN above all, in no order.

    The result is exact, and several times faster than ``torch.topk`` on all of them: the paper's sample gives a
    threshold that is a little too low, and only values above it are compared. If it was too high, all values are.
    """
    numel = magnitudes.numel()
    if numel > 2 * SAMPLE:
        sample = magnitudes[:: numel // SAMPLE | 1]  # an odd step: few row lengths are a multiple of it
        expected = sample.numel() * count / numel
        threshold = torch.topk(sample, min(sample.numel(), int(1.2 * expected) + 8), sorted=False).values.min()
        candidates = torch.nonzero(~(magnitudes < threshold)).squeeze(1)  # so that NaN is among them
        if candidates.numel() >= count:
            return candidates[torch.topk(magnitudes[candidates], count, sorted=False).indices]
    return torch.topk(magnitudes, count, sorted=False).indices


def _parts(part: Tensor, counts: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices and values of each flat tensor in a rank's ``part`` of the message, as views."""
    for of_flat in part.split([NUMBERS_PER_VALUE * count for count in counts]):
        indices, values = of_flat.chunk(2) if of_flat.numel() else (of_flat, of_flat)
        yield indices, values.view(torch.float32)
