"""Iterations by strategy: compared with the simulator and with torch's own buckets, and their parts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from timing_model.all_reduce import CollectiveTime
from timing_model.iteration import (
    BUCKET,
    FIRST_BUCKET,
    collective_within,
    ddp_buckets,
    job_time,
    layerwise_iteration_time,
    pipelined_iteration_time,
    server_iteration_time,
)
from timing_model.params import ComputeTimes, Noise
from timing_model.simulate import simulate_iterations

SECONDS = st.floats(0, 10)
TIMES = ComputeTimes(update=0.5, forward=1.0, backward=2.0)


@st.composite
def compute_times(draw: st.DrawFn) -> ComputeTimes:
    return ComputeTimes(
        update=draw(SECONDS),
        forward=draw(SECONDS),
        backward=draw(SECONDS),
        compute_slowdown=draw(st.floats(0, 2)),
        processor_share=draw(st.floats(0, 1)),
    )


@st.composite
def collectives(draw: st.DrawFn) -> CollectiveTime:
    wire, codec = draw(SECONDS), draw(SECONDS)
    return CollectiveTime(wire + codec, wire, codec)


NOISES = st.sampled_from([Noise(), Noise(cv=0.1), Noise(cv=0.2, persistence=0.5), Noise(slow_ranks=(1.5,))])


@given(compute=st.floats(0.01, 10), communication=SECONDS, width=st.integers(1, 6), iterations=st.integers(1, 40))
def test_a_job_takes_what_the_simulator_says(compute: float, communication: float, width: int, iterations: int) -> None:
    times = ComputeTimes(update=0.0, forward=compute, backward=0.0)
    iteration = pipelined_iteration_time(times, CollectiveTime(communication, communication, 0.0), width)
    simulated = simulate_iterations(
        t_compute=compute, t_comm=communication, width=width, world_size=3, iterations=iterations
    )
    assert job_time(iteration, iterations, communication) == pytest.approx(float(simulated.ends[-1]), rel=1e-9)


@given(compute=SECONDS, communication=SECONDS)
def test_width_2_is_the_smallest_that_reaches_the_limit(compute: float, communication: float) -> None:
    times = ComputeTimes(update=0.0, forward=compute, backward=0.0)
    collective = CollectiveTime(communication, communication, 0.0)
    assert pipelined_iteration_time(times, collective, 2).total == pytest.approx(max(compute, communication), rel=1e-12)
    assert pipelined_iteration_time(times, collective, 9).total == pytest.approx(max(compute, communication), rel=1e-12)
    assert pipelined_iteration_time(times, collective, 1).total == compute + communication


@given(times=compute_times(), collective=collectives(), width=st.integers(1, 5), p=st.integers(1, 600), noise=NOISES)
def test_the_parts_are_the_total(
    times: ComputeTimes, collective: CollectiveTime, width: int, p: int, noise: Noise
) -> None:
    buckets = [(0.3, collective), (1.0, collective)]
    for iteration in (
        pipelined_iteration_time(times, collective, width, world_size=p, noise=noise),
        layerwise_iteration_time(times, buckets, world_size=p, noise=noise),
        server_iteration_time(times, collective, world_size=p, noise=noise),
    ):
        parts = (iteration.compute, iteration.wire, iteration.codec, iteration.jitter)
        assert sum(parts) == pytest.approx(iteration.total, rel=1e-9, abs=1e-12)
        assert iteration.total == pytest.approx(iteration.compute + iteration.exposed, rel=1e-9, abs=1e-12)
        assert all(math.isfinite(part) and part >= -1e-9 * iteration.total - 1e-12 for part in parts)


@given(times=compute_times(), t_comm=SECONDS)
def test_the_computation_is_slower_only_while_the_collective_runs(times: ComputeTimes, t_comm: float) -> None:
    """Both begin together; when the collective is done, the computation continues at full speed."""
    passes = times.forward + times.backward
    beside = min(times.processor_share * passes * (1 + times.compute_slowdown), max(t_comm - times.update, 0.0))
    left = times.total - beside / (1 + times.compute_slowdown)
    assert times.at_width(2, t_comm) == pytest.approx((beside + left, t_comm), rel=1e-9, abs=1e-9)
    assert times.at_width(1, t_comm) == (times.total, t_comm)


def test_computation_is_slower_only_while_a_collective_runs() -> None:
    times = ComputeTimes(update=0.0, forward=2.0, backward=0.0, compute_slowdown=1.0)
    for t_comm, expected in ((0.0, 2.0), (1.0, 2.5), (3.0, 3.5), (4.0, 4.0), (100.0, 4.0)):
        assert times.at_width(2, t_comm) == (expected, t_comm)
    alone = CollectiveTime(1.0, 1.0, 0.0)
    assert pipelined_iteration_time(times, alone, 1).total == 3.0  # one after the other
    assert pipelined_iteration_time(times, alone, 2).total == 2.5


# --- Layer-wise -------------------------------------------------------------------------------------------------------


@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=8).map(sorted), data=st.data())
def test_layerwise_is_the_recursion(shares: list[float], data: st.DataObject) -> None:
    t_comms = data.draw(st.lists(SECONDS, min_size=len(shares), max_size=len(shares)))
    buckets = [(share, CollectiveTime(t, t, 0.0)) for share, t in zip(shares, t_comms, strict=True)]
    # The longest chain begins when some bucket is ready, and has one collective after the other.
    longest = max(TIMES.forward + share * TIMES.backward + sum(t_comms[index:]) for index, share in enumerate(shares))
    expected = max(longest, TIMES.forward + TIMES.backward) + TIMES.update
    assert layerwise_iteration_time(TIMES, buckets).total == pytest.approx(expected, rel=1e-12)


def test_one_bucket_is_synchronous_and_many_hide_under_the_backward_pass() -> None:
    one = CollectiveTime(4.0, 4.0, 0.0)
    synchronous = pipelined_iteration_time(TIMES, one, 1).total
    assert layerwise_iteration_time(TIMES, [(1.0, one)]).total == synchronous
    quarter = CollectiveTime(0.4, 0.4, 0.0)
    quarters = [(share, quarter) for share in (0.25, 0.5, 0.75, 1.0)]
    assert layerwise_iteration_time(TIMES, quarters).exposed == pytest.approx(0.4)


@settings(deadline=None)
@given(numels=st.lists(st.integers(1, 20_000_000), min_size=1, max_size=30))
def test_the_buckets_are_torchs(numels: list[int]) -> None:
    parameters = [torch.empty(numel, device="meta") for numel in numels]
    cut, _ = dist._compute_bucket_assignment_by_size(parameters[::-1], [FIRST_BUCKET, BUCKET])
    sizes = [sum(4 * numels[::-1][index] for index in bucket) for bucket in cut]
    buckets = ddp_buckets([4 * numel for numel in numels])
    assert [nbytes for _, nbytes in buckets] == sizes
    assert buckets[-1][0] == 1.0


def test_torchs_defaults() -> None:
    assert FIRST_BUCKET == dist._DEFAULT_FIRST_BUCKET_BYTES


def test_impossible_iterations_are_refused() -> None:
    with pytest.raises(ValueError, match="width must be a whole number of at least 1; got 0"):
        pipelined_iteration_time(TIMES, CollectiveTime(1.0, 1.0, 0.0), 0)
    with pytest.raises(ValueError, match=r"shares .* must be from 0 to 1, and not fall; got 0.2 after 0.5"):
        layerwise_iteration_time(TIMES, [(0.5, CollectiveTime(1, 1, 0)), (0.2, CollectiveTime(1, 1, 0))])
    with pytest.raises(ValueError, match="iterations must be a whole number of at least 1; got 0"):
        job_time(pipelined_iteration_time(TIMES, CollectiveTime(1.0, 1.0, 0.0), 1), 0)
    with pytest.raises(ValueError, match=r"compute_slowdown must be finite and at least 0; got -1.0"):
        ComputeTimes(update=0.0, forward=1.0, backward=1.0, compute_slowdown=-1.0)


@pytest.mark.parametrize("noise", [Noise(), Noise(cv=0.2), Noise(cv=0.1, slow_ranks=(1.2,))])
@pytest.mark.parametrize(("width", "t_comm"), [(2, 4.0), (3, 4.5)])
def test_what_an_iteration_took_says_what_its_collective_did(noise: Noise, width: int, t_comm: float) -> None:
    collective = CollectiveTime(t_comm, t_comm, 0.0)
    total = pipelined_iteration_time(TIMES, collective, width, world_size=3, noise=noise).total
    found = collective_within(total, TIMES.total, width, world_size=3, noise=noise)
    assert found == pytest.approx(t_comm, rel=1e-5)
    assert collective_within(TIMES.total, TIMES.total, width, world_size=3, noise=noise) == 0.0
