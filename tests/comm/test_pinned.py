"""Messages sent through host memory: the same sums, and no memory allocated again."""

from __future__ import annotations

import pytest
import torch
from _all_reduces import ALGORITHMS, options
from _memory_transport import MemoryTransport, Network, integers, run_threads

from pipesgd.codecs.floats import Uncompressed
from pipesgd.codecs.options import DENSE_CODECS
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.comm.pinned import PinnedTransport
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.systems.exchanges.topk import TopK
from timing_model.schedules import gather_ring

WORLD_SIZE = 6
SIZES = (1000, 17, 1000)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("codec", DENSE_CODECS)
def test_sums_and_residuals_are_those_without_it_and_memory_is_taken_once(name: str, codec: str) -> None:
    def reduce(transport: MemoryTransport, pinned: bool) -> tuple[list[torch.Tensor], list[int], int]:
        between = PinnedTransport(transport) if pinned else transport
        schedule = ALGORITHMS[name](transport.rank, WORLD_SIZE)
        all_reduce = ScheduledAllReduce(between, schedule, options(codec).make(), segment_bytes=256)
        results, allocated = [], []
        for _ in range(3):
            for number, numel in enumerate(SIZES):
                generator = torch.Generator().manual_seed(transport.rank)
                flat, residual = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
                all_reduce(flat, None if codec == "fp32" else residual, key=number)
                results += [flat, residual]
            if isinstance(between, PinnedTransport):
                allocated.append(between.buffers_allocated)
        assert between.bytes_sent == transport.bytes_sent > 0
        assert between.bytes_received == transport.bytes_received > 0
        return results, allocated, transport.bytes_sent

    plain, _ = run_threads(WORLD_SIZE, lambda transport: reduce(transport, pinned=False))
    pinned, _ = run_threads(WORLD_SIZE, lambda transport: reduce(transport, pinned=True))
    for (expected, _, nbytes), (results, allocated, counted) in zip(plain, pinned, strict=True):
        assert counted == nbytes
        assert all(torch.equal(ours, other) for ours, other in zip(results, expected, strict=True))
        assert allocated[0] == allocated[1] == allocated[2] > 0


def test_memory_is_used_again_only_when_its_message_is_done() -> None:
    network = Network(2)
    here, there = PinnedTransport(MemoryTransport(network, 0)), PinnedTransport(MemoryTransport(network, 1))
    received = [torch.zeros(5), torch.zeros(5)]
    sends = [here.send(integers(5, rank), 1, "a message") for rank in range(2)]
    receives = [there.receive(tensor, 0, "a message") for tensor in received]
    assert (here.buffers_allocated, there.buffers_allocated) == (2, 2), "two of each are under way"
    for pending in (*sends, *receives):
        pending.wait()
    assert all(torch.equal(tensor, integers(5, rank)) for rank, tensor in enumerate(received))
    kinds = [torch.zeros(20, dtype=torch.uint8), torch.zeros((2, 5), dtype=torch.float16), torch.zeros(9)]
    for tensor in kinds:
        here.send(tensor, 1, "another").wait()
        there.receive(tensor, 0, "another").wait()
    assert (here.buffers_allocated, there.buffers_allocated) == (3, 3), "nine floats need more than 32 bytes"


def test_memory_is_bounded_while_messages_become_smaller() -> None:
    """Messages of topk do in each iteration of a warm-up of its density."""

    def gather(transport: MemoryTransport) -> list[int]:
        between = PinnedTransport(transport)
        all_gather = ScheduledAllReduce(between, gather_ring(transport.rank, 3), Uncompressed(), segment_bytes=1 << 20)
        options = {"density": 0.01, "density_warmup": 40}
        reducer = TopK(**options).sums(all_gather, rank=transport.rank, world_size=3)
        allocated = []
        for iteration in range(41):
            reducer.sum(FlatBuffer([torch.ones(1000)]), iteration)
            allocated.append(between.buffers_allocated)
        return allocated

    results, _ = run_threads(3, gather)
    for allocated in results:
        assert allocated[-1] <= 6 * allocated[0], "messages from 2000 to 80 bytes: 2048, 1024, ..., 128"
