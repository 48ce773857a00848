"""The ring, first as integers, then between threads, then over gloo beside torch's own all-reduce."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from _memory_transport import MemoryTransport, integers, run_threads
from _ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from pipesgd.collectives.native import NativeAllReduce
from pipesgd.collectives.ring import RingAllReduce
from pipesgd.collectives.schedule import ring_bytes_sent, ring_steps, split
from pipesgd.collectives.transport import TorchTransport, communication_group
from pipesgd.launch import Ranks

AWKWARD_SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 1000, 1001, 4099)


@given(numel=st.integers(0, 10_000), parts=st.integers(1, 40))
def test_split_covers_everything_once_and_evenly(numel: int, parts: int) -> None:
    pieces = split(numel, parts)
    assert len(pieces) == parts
    assert pieces[0][0] == 0
    assert pieces[-1][1] == numel
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
    sizes = [stop - start for start, stop in pieces]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", range(1, 10))
def test_the_schedule_sums_every_chunk_and_gives_it_to_everybody(world_size: int) -> None:
    """Play the schedule with sets: which ranks' values are in each chunk of each rank."""
    holds = [[{rank} for _ in range(world_size)] for rank in range(world_size)]
    steps = [ring_steps(rank, world_size) for rank in range(world_size)]
    for s in range(2 * (world_size - 1)):
        sent = [set(holds[rank][steps[rank][s].send_chunk]) for rank in range(world_size)]
        for rank in range(world_size):
            left, step = (rank - 1) % world_size, steps[rank][s]
            assert step.receive_chunk == steps[left][s].send_chunk
            if step.reduce:
                assert not holds[rank][step.receive_chunk] & sent[left], "a value added twice"
                holds[rank][step.receive_chunk] |= sent[left]
            else:
                holds[rank][step.receive_chunk] = sent[left]
    assert all(chunk == set(range(world_size)) for chunks in holds for chunk in chunks)


@pytest.mark.parametrize("world_size", range(1, 10))
def test_what_is_received_at_one_ring_step_is_sent_at_the_next(world_size: int) -> None:
    for rank in range(world_size):
        steps = ring_steps(rank, world_size)
        assert all(now.receive_chunk == later.send_chunk for now, later in itertools.pairwise(steps))


@given(numel=st.integers(0, 500), world_size=st.integers(1, 9), segment_bytes=st.sampled_from([1, 4, 12, 64, 4096]))
def test_the_sum_is_exact_the_same_everywhere_and_counted(numel: int, world_size: int, segment_bytes: int) -> None:
    def reduce(transport: MemoryTransport) -> tuple[torch.Tensor, int, int, int]:
        all_reduce = RingAllReduce(transport, segment_bytes=segment_bytes)
        flat = integers(numel, transport.rank)
        all_reduce(flat)
        return flat, transport.bytes_sent, transport.bytes_received, all_reduce.wire_bytes(flat)

    results, network = run_threads(world_size, reduce)
    expected = torch.stack([integers(numel, rank) for rank in range(world_size)]).sum(0)
    for rank, (flat, sent, received, announced) in enumerate(results):
        assert torch.equal(flat, expected)
        assert sent == announced == sum(nbytes for sender, _, nbytes, _ in network.log if sender == rank)
        assert received == results[(rank - 1) % world_size][1]
    assert sum(nbytes for _, _, nbytes, _ in network.log) == 2 * (world_size - 1) * numel * 4
    assert all(nbytes <= max(segment_bytes, 4) for _, _, nbytes, _ in network.log)


def test_a_chunk_travels_in_at_least_two_messages_unless_it_is_small() -> None:
    def reduce(transport: MemoryTransport) -> None:
        RingAllReduce(transport)(torch.zeros(numel))

    for nbytes_of_chunk, messages in ((256 << 10, 2), ((256 << 10) - 4, 1), (1 << 20, 2), (4 << 20, 4)):
        numel = 3 * nbytes_of_chunk // 4
        _, network = run_threads(3, reduce)
        assert len(network.log) == 3 * 4 * messages


def test_rounding_is_the_same_on_every_rank() -> None:
    """Floats whose sum depends on the order: the ranks agree on one order for each chunk."""

    def reduce(transport: MemoryTransport) -> torch.Tensor:
        flat = torch.randn(1001, generator=torch.Generator().manual_seed(transport.rank)) * 10.0**transport.rank
        RingAllReduce(transport, segment_bytes=256)(flat)
        return flat

    results, _ = run_threads(5, reduce)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_one_ring_serves_buffers_of_many_sizes_and_dtypes() -> None:
    """The scratch space of a large buffer must not spoil a small one, nor the other way round."""
    kinds = [(10, torch.float64), (1000, torch.float32), (3, torch.int64), (999, torch.float16), (10, torch.float64)]

    def reduce(transport: MemoryTransport) -> list[torch.Tensor]:
        all_reduce = RingAllReduce(transport, segment_bytes=100)
        flats = [integers(numel, transport.rank, dtype) for numel, dtype in kinds]
        for flat in flats:
            all_reduce(flat)
        return flats

    results, _ = run_threads(3, reduce)
    for index, (numel, dtype) in enumerate(kinds):
        expected = torch.stack([integers(numel, rank, dtype) for rank in range(3)]).sum(0, dtype=dtype)
        assert all(torch.equal(flats[index], expected) for flats in results)


def test_bytes_sent_approach_twice_the_buffer() -> None:
    assert ring_bytes_sent(0, 1, [100]) == 0
    assert ring_bytes_sent(0, 2, [50, 50]) == 100
    assert sum(ring_bytes_sent(rank, 64, [1] * 64) for rank in range(64)) == 64 * 2 * 63


def _beside_torch(ranks: Ranks, sizes: tuple[int, ...]) -> list[tuple[bool, bool]]:
    transport = TorchTransport(communication_group(ranks, ranks.timeout, "gloo"), ranks.timeout)
    ring = RingAllReduce(transport, segment_bytes=1024)
    native = NativeAllReduce(communication_group(ranks, ranks.timeout, "gloo"), ranks.timeout)
    outcomes = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for numel in sizes:
            ours, theirs, reference = (integers(numel, ranks.rank, dtype) for _ in range(3))
            before = transport.bytes_sent
            ring(ours)
            counted = transport.bytes_sent - before == ring.wire_bytes(ours)
            native(theirs)
            dist.all_reduce(reference)
            outcomes.append((torch.equal(ours, reference) and torch.equal(theirs, reference), counted))
    return outcomes


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_over_gloo_it_equals_torchs_all_reduce(world_size: int) -> None:
    for outcomes in run_ranks(world_size, _beside_torch, AWKWARD_SIZES):
        assert len(outcomes) == 4 * len(AWKWARD_SIZES)
        assert all(equal and counted for equal, counted in outcomes)
