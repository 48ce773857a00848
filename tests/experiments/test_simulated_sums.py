"""Sums over simulated ranks, compared with the trainer's all-reduce between threads."""

from __future__ import annotations

import pytest
import torch
from _memory_transport import MemoryTransport, run_threads
from torch import Tensor

from experiments.simulated_sums import Ring, SimulatedSums
from pipesgd.codecs.options import CodecOptions, Int4, Int8, codec_named
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.reducers.powersgd import PowerSgd
from timing_model.schedules import ring

SEGMENTED = 3 * (300 << 10) + 1
"""Number of values whose chunks, at a byte a value, are sent by three ranks in two segments each."""


def values(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(
    "codec",
    [
        codec_named("fp32"),
        codec_named("bf16", error_feedback=True),
        Int8(rounding="stochastic"),
        Int8(rounding="stochastic", error_feedback=True),
        Int4(block=64),
        codec_named("qsgd"),
    ],
    ids=CodecOptions.describe,
)
@pytest.mark.parametrize(("world_size", "numel"), [(1, 10), (3, 2), (4, 5000), (3, SEGMENTED)])
def test_the_ring_of_one_process_is_that_of_several_bit_for_bit(
    codec: CodecOptions, world_size: int, numel: int
) -> None:
    """Random numbers depend on the segments, of which a small model has one in each chunk."""
    keys = (7, 2**32 - 1)  # a second sum, to which residuals are added

    def real(transport: MemoryTransport) -> tuple[list[Tensor], Tensor | None]:
        residual = torch.zeros(numel) if codec.gives_back else None
        all_reduce = ScheduledAllReduce(transport, ring(transport.rank, world_size), codec.make())
        sums = [values(transport.rank, numel) for _ in keys]
        for flat, key in zip(sums, keys, strict=True):
            all_reduce(flat, residual, key)
        return sums, residual

    # First, since it may compile the codec's loops, for which a thread would not wait.
    simulated = Ring(codec.make(), world_size)
    residuals = [torch.zeros(numel) if codec.gives_back else None for _ in range(world_size)]
    totals = []
    for key in keys:
        flats = [values(rank, numel) for rank in range(world_size)]
        simulated.sum(flats, residuals, key)
        totals.append(flats[-1])
    of_ranks, _ = run_threads(world_size, real)
    for (sums, expected), residual in zip(of_ranks, residuals, strict=True):
        assert all(map(torch.equal, totals, sums))
        if residual is not None and expected is not None:
            assert torch.equal(residual, expected)


def test_one_ring_sums_tensors_of_several_sizes() -> None:
    simulated = Ring(Int8().make(), 2)
    for numel in (1000, 10, 5000, 1000):
        flats = [torch.ones(numel), torch.ones(numel)]
        simulated.sum(flats, [None, None])
        assert torch.equal(flats[-1], torch.full((numel,), 2.0))


def test_sums_of_low_rank_leave_the_same_values_to_all_ranks() -> None:
    sums = SimulatedSums(PowerSgd(low_rank=2), 3, seed=0)
    for iteration in range(2):
        buffers = [FlatBuffer([torch.empty(20, 30), torch.empty(7)]) for _ in range(3)]
        for rank, buffer in enumerate(buffers):
            buffer.flats[0].copy_(values(rank, 607))
        sums.sum(buffers, iteration)
        assert torch.equal(buffers[0].flats[0], buffers[2].flats[0])
        assert torch.equal(buffers[1].flats[0], buffers[2].flats[0])
        assert torch.linalg.matrix_rank(buffers[2].views[0]) == 2


def test_an_error_on_one_rank_is_raised_and_ends_all() -> None:
    sums = SimulatedSums(PowerSgd(low_rank=1), 3, seed=0)
    buffers = [FlatBuffer([torch.empty(20, 30)]) for _ in range(3)]
    sums.sum(buffers, 0)
    buffers[1] = FlatBuffer([torch.empty(2)])
    with pytest.raises(RuntimeError):
        sums.sum(buffers, 1)
