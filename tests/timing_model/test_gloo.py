"""gloo's ring: its schedule, message by message."""

from __future__ import annotations

import itertools

import pytest

from timing_model.all_reduce import all_reduce_time
from timing_model.gloo import native_all_reduce_time, native_messages
from timing_model.params import CodecCost, LinkParams, uncompressed


def test_the_segments_are_gloos() -> None:
    """gloo's source says: at least two segments per rank, at most 1 MiB each, the same number for each rank."""
    assert native_messages(1.0, 3) == (4, 1)
    assert native_messages(6 << 20, 3) == (4, 1 << 20)
    assert native_messages((6 << 20) + 1, 3) == (6, (2 << 20) // 3 + 1)


def test_a_fast_network_is_all_latency_and_a_slow_one_all_bytes() -> None:
    latency = LinkParams(alpha=1.0, beta=0.0, gamma=0.0, sync=0.0)
    # There are two phases of N = 6 messages, two in flight, with a round trip each.
    assert native_all_reduce_time(latency, 1e6, 4) == 2 * 3 * 2.0
    transfer = LinkParams(alpha=0.0, beta=1.0, gamma=0.0, sync=0.5)
    messages, segment = native_messages(1e6, 4)
    assert native_all_reduce_time(transfer, 1e6, 4) == 2 * messages * segment + 0.5


def turn_by_turn(link: LinkParams, nbytes: float, world_size: int) -> float:
    """Compute the docstring's recursion, with all of its turns."""
    messages, segment = native_messages(nbytes, world_size)
    total = link.sync
    for added in (link.gamma * segment, 0.0):
        now, wire, left = 0.0, 0.0, []
        for turn in range(messages + 2):
            if turn >= 2:
                now = max(max(now, left[turn - 2] + link.alpha) + added, left[turn - 2])
            if turn < messages:
                now += link.overhead
                wire = max(wire, now + link.alpha) + link.beta * segment
                left.append(wire)
        total += now
    return total


def test_the_time_is_that_of_the_schedule_turn_by_turn() -> None:
    grid = itertools.product(
        (2, 3, 7, 100, 1001), (1.0, 4e6, 1.1e9), (0.0, 5e-6, 5e-3), (0.0, 8e-10), (0.0, 1e-9), (0.0, 2e-5)
    )
    for p, nbytes, alpha, beta, gamma, overhead in grid:
        link = LinkParams(alpha=alpha, beta=beta, gamma=gamma, sync=1e-4, overhead=overhead)
        assert native_all_reduce_time(link, nbytes, p) == pytest.approx(turn_by_turn(link, nbytes, p), rel=1e-9)


def test_values_are_converted_before_and_after() -> None:
    link = LinkParams(alpha=1e-4, beta=1e-8, gamma=0.0, sync=0.0)
    bf16 = CodecCost(name="bf16", bits=16, encode=2e-9, decode=1e-9, add=0.0, hop=0.0, call=1e-6)
    time = all_reduce_time("native", link, 1e6, 4, codec=bf16)
    assert time.total == pytest.approx(native_all_reduce_time(link, 2e6, 4) + 3e-3 + 2e-6, rel=1e-12)
    assert all_reduce_time("native", link, 1e6, 4, codec=uncompressed(1e-9)).codec == 0.0
