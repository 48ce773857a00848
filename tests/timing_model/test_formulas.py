"""The formulas against the code that they describe, a step-by-step recursion, and their limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesgd.collectives.ring import ring, ring_wire_bytes
from timing_model import LinkParams, pipelined_iteration_time, ring_all_reduce_bytes, ring_all_reduce_time

SECONDS = st.floats(0, 1e3)


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


@given(compute=st.floats(0.01, 10), communication=st.floats(0, 10), width=st.integers(1, 6))
def test_the_iteration_is_the_steady_state_of_the_pipelines_recursion(
    compute: float, communication: float, width: int
) -> None:
    """Iteration t computes once the result of t-K is there; the network takes one gradient after the other."""
    computed, arrived = [0.0] * width, [0.0] * width
    iterations = 600
    for _ in range(iterations):
        computed.append(max(computed[-1], arrived[-width]) + compute)
        arrived.append(max(arrived[-1], computed[-1]) + communication)
    period = (arrived[-1] - arrived[-1 - iterations // 2]) / (iterations // 2)
    assert pipelined_iteration_time(compute, communication, width).total == pytest.approx(period, rel=0.01)


@given(compute=st.floats(0, 10), communication=st.floats(0, 10))
def test_width_2_is_the_smallest_that_reaches_the_limit(compute: float, communication: float) -> None:
    limit = max(compute, communication)
    assert pipelined_iteration_time(compute, communication, 2).total == limit
    assert pipelined_iteration_time(compute, communication, 9).total == limit
    assert pipelined_iteration_time(compute, communication, 1).total == compute + communication


@pytest.mark.parametrize("field", ["alpha", "beta", "gamma", "sync"])
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
    with pytest.raises(ValueError, match="width must be at least 1; got 0"):
        pipelined_iteration_time(1.0, 1.0, 0)
    with pytest.raises(ValueError, match="times must be at least 0"):
        pipelined_iteration_time(-1.0, 1.0, 1)
