"""Closed forms: the bytes that the code sends, known relations between algorithms, limits; and refused arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesgd.comm.native import ring_wire_bytes
from timing_model.all_reduce import all_reduce_time
from timing_model.collective_time import (
    halving_doubling_time,
    hierarchical_time,
    ring_all_reduce_bytes,
    ring_all_reduce_time,
)
from timing_model.parameter_server import parameter_server_time
from timing_model.params import CodecCost, ComputeTimes, LinkParams, Noise
from timing_model.schedules import ALL_REDUCES, ring

SECONDS = st.floats(0, 1e3)
LINK = LinkParams(alpha=2e-4, beta=3e-9, gamma=1e-10, sync=5e-5, overhead=1e-5)


@given(world_size=st.integers(1, 64), chunk=st.integers(0, 10**6))
def test_the_bytes_are_those_that_the_ring_sends(world_size: int, chunk: int) -> None:
    for rank in range(world_size):
        sent = ring_wire_bytes(rank, world_size, chunk * world_size, 1)
        assert sent == pytest.approx(ring_all_reduce_bytes(chunk * world_size, world_size), rel=1e-12)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.integers(2, 40), st.integers(0, 999))
def test_the_time_is_that_of_the_rings_own_schedule(
    alpha: float, beta: float, gamma: float, sync: float, world_size: int, chunk: int
) -> None:
    link = LinkParams(alpha=alpha, beta=beta, gamma=gamma, sync=sync)
    receives = ring(0, world_size).receives
    steps = [alpha + chunk * beta + (chunk * gamma if receive.reduce else 0.0) for receive in receives]
    assert ring_all_reduce_time(link, chunk * world_size, world_size) == pytest.approx(sum(steps) + sync, rel=1e-9)


def test_one_rank_communicates_nothing() -> None:
    assert ring_all_reduce_time(LinkParams(alpha=1, beta=1, gamma=1, sync=1), 100, 1) == 0.0


@pytest.mark.parametrize("field", ["alpha", "beta", "gamma", "sync", "overhead"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_nonsense_is_refused_by_name(field: str, value: float) -> None:
    values = {"alpha": 0.0, "beta": 0.0, "gamma": 0.0, "sync": 0.0, field: value}
    with pytest.raises(ValueError, match=f"^{field} must be finite and at least 0; got {value}$"):
        LinkParams(**values)


def test_impossible_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size must be a whole number of at least 1; got 0"):
        ring_all_reduce_bytes(1.0, 0)
    with pytest.raises(ValueError, match="nbytes must be finite and at least 0; got -1"):
        ring_all_reduce_bytes(-1.0, 2)


def test_a_node_is_one_rank_and_one_node_is_a_ring() -> None:
    inner = LinkParams(alpha=1e-5, beta=1e-10, gamma=1e-10, sync=1e-3)
    assert hierarchical_time(inner, LINK, 1e6, nodes=5, ranks_per_node=1) == ring_all_reduce_time(LINK, 1e6, 5)
    one_node = hierarchical_time(inner, LINK, 1e6, nodes=1, ranks_per_node=5)
    assert one_node == pytest.approx(ring_all_reduce_time(inner, 1e6, 5) - inner.sync + LINK.sync, rel=1e-12)
    times = [hierarchical_time(inner, LINK, 1e6, nodes=3, ranks_per_node=2, nics=nics) for nics in (1, 2, 4)]
    assert times[0] > times[1] == times[2]  # a rank has one NIC at most


def test_the_cliff_of_halving_doubling() -> None:
    """Ranks in excess of a power of two double the bytes; the ring wins above some size."""
    latency, transfer, reduction = 1e-4, 1e-8, 1e-9
    link = LinkParams(alpha=latency, beta=transfer, gamma=reduction, sync=0)
    for p, q in ((5, 4), (7, 4), (12, 8)):
        fewer_messages = 2 * (p - 1) - 2 * (math.log2(q) + 1)
        more_bytes = 2 * (1 - 1 / q + 1) - 2 * (1 - 1 / p)
        equal = fewer_messages * latency / (more_bytes * (transfer + reduction / 2))
        for nbytes, ring_wins in ((0.99 * equal, False), (1.01 * equal, True)):
            assert (ring_all_reduce_time(link, nbytes, p) < halving_doubling_time(link, nbytes, p)) == ring_wins


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 0.0}, "bits must be finite and above 0; got 0.0"),
        ({"encode": -1.0}, "encode must be finite and at least 0; got -1.0"),
        ({"hop": math.nan}, "hop must be finite and at least 0; got nan"),
    ],
)
def test_an_impossible_codec_is_refused(values: dict[str, float], message: str) -> None:
    possible = {"bits": 8.0, "encode": 0.0, "decode": 0.0, "add": 0.0, "hop": 0.0}
    with pytest.raises(ValueError, match=f"^{message}$"):
        CodecCost(name="", **(possible | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cv": -0.1}, "cv must be finite and at least 0; got -0.1"),
        ({"comm_cv": -0.1}, "comm_cv must be finite and at least 0; got -0.1"),
        ({"persistence": 1.0}, "persistence must be at least 0 and below 1; got 1.0"),
        ({"persistence": float("nan")}, "persistence must be at least 0 and below 1; got nan"),
        ({"slow_ranks": (2.0, 0.5)}, "slow_ranks must be finite and at least 1; got 0.5"),
    ],
)
def test_impossible_noise_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Noise(**values)


def test_impossible_all_reduces_are_refused() -> None:
    for arguments, message in (
        (("bcube", LINK, 1.0, 2), "all_reduce must be one of ring, .*, native; got bcube"),
        (("ring", LINK, -1.0, 2), "numel must be finite and at least 0; got -1.0"),
        (("ring", LINK, 1.0, 0), "world_size must be a whole number of at least 1; got 0"),
        (("hierarchical", LINK, 1.0, 4), "inner must be given"),
    ):
        with pytest.raises(ValueError, match=message):
            all_reduce_time(*arguments)
    with pytest.raises(ValueError, match="ranks_per_node must divide world_size 4; got 3"):
        all_reduce_time("hierarchical", LINK, 1.0, 4, inner=LINK, ranks_per_node=3)
    with pytest.raises(ValueError, match="segment_bytes must be a whole number of at least 1; got 0"):
        all_reduce_time("ring", LINK, 1.0, 4, segment_bytes=0)


def test_a_collective_takes_longer_in_training_by_its_handover() -> None:
    times = ComputeTimes(update=0.0, forward=1.0, backward=1.0, handover=0.5)
    assert times.at_width(1, 1.0) == times.at_width(2, 1.0) == (2.0, 1.5)
    assert times.at_width(2, 0.0) == (2.0, 0.0), "one rank has no collective"


@pytest.mark.parametrize("name", [*ALL_REDUCES, "ps-sync", "hierarchical, closed"])
def test_a_byte_takes_no_less_than_its_cpu_time(name: str) -> None:
    """Times are those of a wire as slow as the core, where that is the slower one."""

    def seconds(beta: float, host: float, p: int) -> float:
        link = LinkParams(alpha=3e-5, beta=beta, gamma=1e-10, sync=0.0, overhead=1e-5, host=host)
        if name == "ps-sync":
            return parameter_server_time(link, 1e7, p).total
        if name == "hierarchical, closed":
            return hierarchical_time(link, link, 1e7, nodes=p // 2, ranks_per_node=2, nics=2)
        return all_reduce_time(name, link, 1e6, p, inner=link, ranks_per_node=2, nics=2).total

    for p in (4, 6):
        assert seconds(1e-10, 8e-10, p) == pytest.approx(seconds(8e-10, 0.0, p))
        assert seconds(8e-10, 1e-10, p) == seconds(8e-10, 0.0, p)


def test_ranks_that_share_a_card_have_a_core_each() -> None:
    """Eight ranks of a node share the wire, but not the cores that send: 8 x 0.1 ns are less than 1 ns."""
    link = LinkParams(alpha=0.0, beta=1e-10, gamma=0.0, sync=0.0, host=1e-9)
    alone = LinkParams(alpha=0.0, beta=1e-9, gamma=0.0, sync=0.0)
    free = LinkParams(alpha=0.0, beta=0.0, gamma=0.0, sync=0.0)
    time = all_reduce_time("hierarchical", link, 1e6, 16, inner=free, ranks_per_node=8, segment_bytes=1 << 30)
    own = all_reduce_time("hierarchical", alone, 1e6, 16, inner=free, ranks_per_node=8, nics=8, segment_bytes=1 << 30)
    assert time.total == pytest.approx(own.total)
    assert hierarchical_time(free, link, 4e6, nodes=2, ranks_per_node=8) == pytest.approx(time.total)
