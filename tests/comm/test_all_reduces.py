"""All-reduces: first as integers, then between threads, then between processes next to torch's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from _all_reduces import ALGORITHMS, options
from _memory_transport import MemoryTransport, Network, integers, run_threads
from _ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from pipesgd.codecs.base import Codec
from pipesgd.codecs.floats import Uncompressed
from pipesgd.codecs.options import DENSE_CODECS, codec_named
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.comm.connections import Connections
from pipesgd.comm.native import ring_wire_bytes
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks
from timing_model.own_schedules import Play
from timing_model.schedules import ALL_REDUCES, Receive, Send, gather_ring, hierarchical, ring, split

pytestmark = pytest.mark.slow

NAMES = list(ALGORITHMS)
AWKWARD_SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 1000, 1001, 4099)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
TOLERANCE = 2e-6
"""Absolute error of float32 sums of nine values near 1, in any order, with residuals added and taken away."""


@given(numel=st.integers(0, 10_000), parts=st.integers(1, 40))
def test_split_covers_everything_once_and_evenly(numel: int, parts: int) -> None:
    pieces = split(numel, parts)
    assert len(pieces) == parts
    assert pieces[0][0] == 0
    assert pieces[-1][1] == numel
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
    sizes = [stop - start for start, stop in pieces]
    assert max(sizes) - min(sizes) <= 1


# --- Schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", range(1, 10))
def test_the_gather_gives_every_chunk_to_everybody(world_size: int) -> None:
    play = Play("gather-ring", [gather_ring(rank, world_size) for rank in range(world_size)])
    assert all(
        [play.summands(one) for one in chunks] == [{rank} for rank in range(world_size)] for chunks in play.values
    )


@pytest.mark.parametrize("world_size", range(2, 18))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_messages_to_a_peer_go_in_the_order_in_which_their_chunks_have_come(name: str, world_size: int) -> None:
    """Given this order, segments can overtake the schedule's order, and two ranks never differ in theirs."""
    for rank in range(world_size):
        latest: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, operation in enumerate(ALGORITHMS[name](rank, world_size).operations):
            if isinstance(operation, Receive):
                latest[operation.chunk] = index
            elif isinstance(operation, Send) and operation.chunk in latest:
                assert last.get(operation.peer, -1) < latest[operation.chunk]
                last[operation.peer] = latest[operation.chunk]


@pytest.mark.parametrize("world_size", range(2, 10))
def test_what_is_received_at_one_ring_step_is_sent_at_the_next(world_size: int) -> None:
    for rank in range(world_size):
        schedule = ring(rank, world_size)
        assert [receive.chunk for receive in schedule.receives[:-1]] == [send.chunk for send in schedule.sends[1:]]


def test_a_hierarchical_all_reduce_sends_little_between_nodes() -> None:
    """16 ranks on 4 nodes: 2 (4-1)/4 of the buffer leaves a node, as if it were one rank; a ring sends 2 (16-1)/16."""
    sent = [0.0] * 4
    for rank in range(16):
        schedule = hierarchical(rank, 16, 4)
        sent[rank // 4] += sum(send.peer // 4 != rank // 4 for send in schedule.sends) / schedule.chunks
    assert sent == [1.5] * 4


def test_bytes_sent_approach_twice_the_buffer() -> None:
    assert ring_wire_bytes(0, 1, 100, 4) == 0
    assert ring_wire_bytes(0, 2, 100, 1) == 100
    assert sum(ring_wire_bytes(rank, 64, 64, 1) for rank in range(64)) == 64 * 2 * 63


# --- Sums between threads ---------------------------------------------------------------------------------------------


def reduce_between_threads(
    name: str,
    world_size: int,
    make: Callable[[], Codec],
    inputs: list[torch.Tensor],
    residuals: list[torch.Tensor] | None = None,
    *,
    segment_bytes: int = 64,
) -> tuple[list[torch.Tensor], Network]:
    """Return every rank's sum; ``residuals`` are changed in place."""

    def reduce(transport: MemoryTransport) -> torch.Tensor:
        schedule = ALGORITHMS[name](transport.rank, world_size)
        all_reduce = ScheduledAllReduce(transport, schedule, make(), segment_bytes=segment_bytes)
        flat = inputs[transport.rank].clone()
        all_reduce(flat, None if residuals is None else residuals[transport.rank], key=7)
        assert transport.bytes_sent == all_reduce.wire_bytes(flat)
        return flat

    sums, network = run_threads(world_size, reduce)
    for rank in range(1, world_size):
        assert torch.equal(sums[rank].view(torch.uint8), sums[0].view(torch.uint8)), "replicas differ"
    return sums, network


@pytest.mark.parametrize("name", ALGORITHMS)
@given(numel=st.integers(0, 100), world_size=st.integers(1, 9), segment_bytes=st.sampled_from([1, 4, 12, 64, 4096]))
def test_the_sum_is_exact_the_same_everywhere_and_counted(
    name: str, numel: int, world_size: int, segment_bytes: int
) -> None:
    inputs = [integers(numel, rank) for rank in range(world_size)]
    sums, network = reduce_between_threads(name, world_size, Uncompressed, inputs, segment_bytes=segment_bytes)
    assert torch.equal(sums[0], torch.stack(inputs).sum(0))
    assert all(nbytes <= max(segment_bytes, 4) for _, _, nbytes, _ in network.log)
    if name in ("ring", "all-to-all") or name.startswith("hierarchical"):
        assert sum(nbytes for _, _, nbytes, _ in network.log) == 2 * (world_size - 1) * numel * 4


@pytest.mark.parametrize(
    ("name", "codec", "world_size"),
    [
        (NAMES[(number + world_size + shift) % len(NAMES)], codec, world_size)
        for number, codec in enumerate(DENSE_CODECS[1:])
        for world_size in range(1, 9)
        for shift in (0, len(NAMES) // 2)
    ],
)
def test_sum_and_residuals_are_what_was_put_in(name: str, codec: str, world_size: int) -> None:
    """The sent values plus the kept ones equal the original sums, on awkward sizes, with residuals from before.

    Every algorithm, codec and number of ranks meets every other one.
    """
    generator = torch.Generator().manual_seed(world_size)
    for numel in (0, 1, 5, 64, 203):
        inputs = [torch.randn(numel, generator=generator) for _ in range(world_size)]
        residuals = [0.1 * torch.randn(numel, generator=generator) for _ in range(world_size)]
        meant = torch.stack([a + b for a, b in zip(inputs, residuals, strict=True)]).sum(0)
        before = [residual.clone() for residual in residuals]
        sums, _ = reduce_between_threads(name, world_size, options(codec).make, inputs, residuals)
        if world_size == 1:  # nothing is sent, and nothing is owed
            assert torch.equal(sums[0], inputs[0])
            assert torch.equal(residuals[0], before[0])
            continue
        kept = torch.stack(residuals).sum(0)
        assert torch.allclose(sums[0] + kept, meant, rtol=0, atol=TOLERANCE * world_size)
        assert numel < 64 or not torch.equal(kept, torch.zeros(numel)), "no residual was kept"


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("codec", ["int8", "int4", "ternary", "qsgd"])
def test_ranks_that_hold_the_same_sum_round_it_alike_at_random(name: str, codec: str) -> None:
    """Stochastic rounding leaves replicas identical (the helper checks that), and differs from value to value."""
    inputs = [torch.full((100,), 0.3) + torch.arange(100) / 300 for _ in range(7)]
    sums, _ = reduce_between_threads(name, 7, options(codec, rounding="stochastic").make, inputs)
    assert not torch.equal(sums[0], 7 * inputs[0])
    assert len(torch.unique(sums[0] - 7 * inputs[0])) > 10


@pytest.mark.parametrize("codec", DENSE_CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_on_one_rank_is_finite_on_none(codec: str, bad: float) -> None:
    for name in ALGORITHMS:
        inputs = [torch.ones(50) for _ in range(3)]
        inputs[1][17] = bad
        residuals = [torch.zeros(50) for _ in range(3)]
        sums, _ = reduce_between_threads(name, 3, options(codec).make, inputs, None if codec == "fp32" else residuals)
        assert not sums[0][17].isfinite()
        assert all(residual.isfinite().all() for residual in residuals), "it would come back in the next iteration"


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_part_of_a_sum_is_finished_once_and_not_before_its_time(name: str, world_size: int) -> None:
    """Finishing takes a thousandth of each sum: a part finished too early would be sent on and summed."""
    codec = ("fp32", "int8")[(NAMES.index(name) + world_size) % 2]
    inputs = [torch.randn(203, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    make = options(codec).make
    sums, _ = reduce_between_threads(name, world_size, make, inputs)

    def reduce(transport: MemoryTransport) -> torch.Tensor:
        schedule = ALGORITHMS[name](transport.rank, world_size)
        flat = inputs[transport.rank].clone()
        ScheduledAllReduce(transport, schedule, make(), segment_bytes=64)(
            flat, key=7, finish=lambda part: part.div_(1000)
        )
        return flat

    finished, _ = run_threads(world_size, reduce)
    assert all(torch.equal(flat, sums[0] / 1000) for flat in finished)


def test_a_chunk_travels_in_at_least_two_messages_unless_it_is_small() -> None:
    for nbytes_of_chunk, messages in ((256 << 10, 2), ((256 << 10) - 4, 1), (1 << 20, 2), (4 << 20, 4)):
        inputs = [torch.zeros(3 * nbytes_of_chunk // 4) for _ in range(3)]
        _, network = reduce_between_threads("ring", 3, Uncompressed, inputs, segment_bytes=1 << 20)
        assert len(network.log) == 3 * 4 * messages


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rounding_is_the_same_on_every_rank(name: str) -> None:
    """The sum of these floats depends on the order: the ranks agree on one order per chunk (checked in the helper)."""
    inputs = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(6)]
    reduce_between_threads(name, 6, Uncompressed, inputs, segment_bytes=256)


def test_one_ring_serves_buffers_of_many_sizes_and_dtypes() -> None:
    """The scratch space of a large buffer must not spoil a small one, nor vice versa."""
    kinds = [(10, torch.float64), (1000, torch.float32), (3, torch.int64), (999, torch.float16), (10, torch.float64)]

    def reduce(transport: MemoryTransport) -> list[torch.Tensor]:
        all_reduce = ScheduledAllReduce(transport, ring(transport.rank, 3), Uncompressed(), segment_bytes=100)
        flats = [integers(numel, transport.rank, dtype) for numel, dtype in kinds]
        for flat in flats:
            all_reduce(flat)
        return flats

    results, _ = run_threads(3, reduce)
    for index, (numel, dtype) in enumerate(kinds):
        expected = torch.stack([integers(numel, rank, dtype) for rank in range(3)]).sum(0, dtype=dtype)
        assert all(torch.equal(flats[index], expected) for flats in results)


# --- Between processes ------------------------------------------------------------------------------------------------


def _beside_torch(ranks: Ranks, number: int) -> list[tuple[str, bool, bool]]:
    """Sum buffers of every other size with each all-reduce, those in between with one rank more or less."""
    ranks.local_world_size = 2 if ranks.world_size % 2 == 0 else ranks.world_size
    ranks.local_rank = ranks.rank % ranks.local_world_size
    outcomes = []
    for shift, name in enumerate(ALL_REDUCES, start=ranks.world_size):
        extra = {} if name == "native" else {"segment_bytes": 1024, "connections": number}
        connections = Connections(name, ranks, timeout=ranks.timeout, **extra)
        all_reduce = connections.all_reduce()
        for number, numel in list(enumerate(AWKWARD_SIZES, start=shift))[shift % 2 :: 2]:
            dtype = DTYPES[number % len(DTYPES)]
            ours, reference = integers(numel, ranks.rank, dtype), integers(numel, ranks.rank, dtype)
            before = 0 if name == "native" else connections.transport.bytes_sent
            all_reduce(ours)
            counted = name == "native" or connections.transport.bytes_sent - before == all_reduce.wire_bytes(ours)
            dist.all_reduce(reference)
            outcomes.append((name, torch.equal(ours, reference), counted))
    return outcomes


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_between_processes_they_equal_torchs_all_reduce(world_size: int) -> None:
    for outcomes in run_ranks(world_size, _beside_torch, 1 + world_size % 3):
        assert len(outcomes) >= len(ALL_REDUCES) * (len(AWKWARD_SIZES) // 2)
        assert [outcome for outcome in outcomes if not all(outcome[1:])] == []


def _with_codecs(ranks: Ranks) -> list[tuple[str, str, float, float]]:
    ranks.local_world_size, ranks.local_rank = 2, ranks.rank % 2
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(ranks.rank))
    exact = flat.clone()
    dist.all_reduce(exact)
    errors = []
    for name in ALL_REDUCES:
        connections = Connections(name, ranks, timeout=ranks.timeout)
        for codec in ("bf16", "fp16") if name == "native" else DENSE_CODECS:
            ours = flat.clone()
            how = {"rounding": "nearest"} if codec == "ternary" else {}  # its random noise grows around a ring
            connections.all_reduce(codec_named(codec, **how).make())(ours)
            everybody = [torch.empty_like(ours) for _ in range(ranks.world_size)]
            dist.all_gather(everybody, ours)
            apart = max(float((ours - other).abs().max()) for other in everybody)
            errors.append((name, codec, float((ours - exact).norm() / exact.norm()), apart))
    return errors


def test_between_processes_every_codec_comes_near_torchs_sum() -> None:
    """Relative errors of a sum of four, in norm, are those that each codec promises, rounded several times."""
    most = {"fp32": 1e-6, "truncate16": 0.02, "bf16": 0.006, "fp16": 0.001, "int8": 0.02, "int4": 0.4, "ternary": 1.2}
    for errors in run_ranks(4, _with_codecs):
        assert len(errors) == 2 + (len(ALL_REDUCES) - 1) * len(DENSE_CODECS)
        for name, codec, error, apart in errors:
            assert apart == 0, (name, codec)
            assert error <= most.get(codec, 2.0), (name, codec)
            assert codec == "fp32" or error > 1e-5, (name, codec)


def _hierarchical_on_uneven_nodes(ranks: Ranks) -> str:
    ranks.local_world_size, ranks.local_rank = (2, ranks.rank) if ranks.rank < 2 else (1, 0)
    try:
        Connections("hierarchical", ranks, timeout=ranks.timeout)
    except UserInputError as error:
        return str(error)
    return "no error"


def test_hierarchical_needs_nodes_that_are_alike() -> None:
    for error in run_ranks(3, _hierarchical_on_uneven_nodes):
        assert error == (
            "all-reduce must not be hierarchical unless all nodes have the same number of ranks, and those of a node "
            "adjoining numbers; got 3 ranks on nodes of 1 and 2"
        )
