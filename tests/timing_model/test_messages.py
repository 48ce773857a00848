"""The longest path, which knows what ranks do alike, against a simulator of every message, which does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timing_model import CodecCost, LinkParams, all_reduce_time, ring_all_reduce_time, schedules, uncompressed
from timing_model.all_reduce import SCHEDULES, segments_of
from timing_model.messages import Network, Task, simulate_messages, simulate_ring, tasks_of

EXACT = 1e-9
SECONDS = st.floats(0, 1)
LINK = LinkParams(alpha=1.0, beta=2.0, gamma=0.5, sync=0.0)


@st.composite
def links(draw: st.DrawFn) -> LinkParams:
    return LinkParams(alpha=draw(SECONDS), beta=draw(SECONDS), gamma=draw(SECONDS), sync=0.0, overhead=draw(SECONDS))


@st.composite
def codecs(draw: st.DrawFn) -> CodecCost:
    operations = {name: draw(SECONDS) for name in ("encode", "decode", "add", "hop", "call")}
    return CodecCost(name="", bits=draw(st.floats(1, 32)), **operations)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(deadline=None, max_examples=60)
@given(link=links(), codec=codecs(), world_size=st.integers(1, 9), each=st.floats(0.1, 100), segments=st.integers(1, 4))
def test_the_time_is_that_of_the_messages(
    name: str, link: LinkParams, codec: CodecCost, world_size: int, each: float, segments: int
) -> None:
    schedule = SCHEDULES[name](world_size)
    numel = each * schedule.chunks
    segment_bytes = max(1, math.ceil(codec.wire_bytes(each) / segments))
    segments = segments_of(codec.wire_bytes(each), segment_bytes)
    simulated = max(simulate_messages(tasks_of(schedule, numel, codec, segments=segments), Network(link=link)))
    predicted = all_reduce_time(name, link, numel, world_size, codec=codec, segment_bytes=segment_bytes)
    assert predicted.total == pytest.approx(simulated, rel=EXACT, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(link=links(), inner=links(), codec=codecs(), nodes=st.integers(1, 4), ranks_per_node=st.integers(1, 4))
def test_the_time_of_hierarchical_is_that_of_the_messages(
    link: LinkParams, inner: LinkParams, codec: CodecCost, nodes: int, ranks_per_node: int
) -> None:
    world_size = nodes * ranks_per_node
    inner = LinkParams(alpha=inner.alpha, beta=inner.beta, gamma=0.0, sync=0.0, overhead=link.overhead)
    programs = tasks_of(schedules.hierarchical(world_size, ranks_per_node), 7.0 * world_size, codec)
    simulated = max(simulate_messages(programs, Network(link=link, inner=inner, ranks_per_node=ranks_per_node)))
    predicted = all_reduce_time(
        "hierarchical",
        link,
        7.0 * world_size,
        world_size,
        codec=codec,
        inner=inner,
        ranks_per_node=ranks_per_node,
        cards=ranks_per_node,
    )
    assert predicted.total == pytest.approx(simulated, rel=EXACT, abs=1e-12)


@given(link=links(), world_size=st.integers(1, 9), nbytes=st.floats(0, 1e4))
def test_all_ranks_of_a_ring_at_once_are_the_ranks_one_by_one(link: LinkParams, world_size: int, nbytes: float) -> None:
    programs = tasks_of(schedules.ring(world_size), nbytes / 4, uncompressed(link.gamma))
    one_by_one = simulate_messages(programs, Network(link=link))
    assert simulate_ring(link, nbytes, world_size) == pytest.approx(np.array(one_by_one), rel=EXACT, abs=1e-12)
    assert max(one_by_one) == pytest.approx(ring_all_reduce_time(link, nbytes, world_size), rel=EXACT, abs=1e-12)


@settings(deadline=None)
@given(world_size=st.integers(2, 9), data=st.data())
def test_slow_links_and_slow_ranks_of_a_ring(world_size: int, data: st.DataObject) -> None:
    factors = np.array(data.draw(st.lists(st.floats(0.5, 1.9), min_size=world_size, max_size=world_size)))
    slow = {(rank, (rank + 1) % world_size): factor for rank, factor in enumerate(factors)}
    programs = tasks_of(schedules.ring(world_size), 10.0 * world_size, uncompressed(0.25))
    one_by_one = simulate_messages(programs, Network(link=LINK, slow=slow))
    link = LinkParams(alpha=1.0, beta=2.0, gamma=0.25, sync=0.0)
    assert simulate_ring(link, 40.0 * world_size, world_size, slow_links=factors).max() == pytest.approx(
        max(one_by_one), rel=EXACT
    )


def test_one_slow_link_slows_the_whole_ring() -> None:
    slow = np.ones(100)
    slow[17] = 3.0
    link = LinkParams(alpha=0.0, beta=1.0, gamma=0.0, sync=0.0)
    alone = simulate_ring(link, 100.0, 100).max()
    assert simulate_ring(link, 100.0, 100, slow_links=slow).max() == pytest.approx(3 * alone, rel=0.02)
    assert simulate_ring(link, 100.0, 100, slow_sums=slow).max() == alone


def test_senders_meet_at_one_card() -> None:
    """Three messages of 8 s to one rank: each leaves at once, they arrive one after the other."""
    link = LinkParams(alpha=1.0, beta=2.0, gamma=0.0, sync=0.0)
    senders = [[Task(sends=((3, 4.0),))] for _ in range(3)]
    ends = simulate_messages([*senders, [Task(source=rank) for rank in range(3)]], Network(link=link))
    assert ends == [8.0, 8.0, 8.0, 25.0]


def test_memory_is_not_overwritten_before_it_has_left() -> None:
    link = LinkParams(alpha=0.0, beta=1.0, gamma=0.0, sync=0.0)
    tasks = [Task(sends=((1, 10.0),), memory=0), Task(seconds=1.0, memory=0), Task(seconds=1.0, memory=1)]
    assert simulate_messages([tasks, [Task(source=0)]], Network(link=link)) == [12.0, 10.0]


def test_a_deadlock_is_named() -> None:
    with pytest.raises(ValueError, match="programs must not wait for ever; rank 0 waits for rank 1"):
        simulate_messages([[Task(source=1)], [Task(source=0)]], Network(link=LINK))


def test_impossible_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="slow must be finite and above 0; got 0"):
        Network(link=LINK, slow={(0, 1): 0.0})
    with pytest.raises(ValueError, match="slow_links must be world_size numbers above 0"):
        simulate_ring(LINK, 1.0, 3, slow_links=np.ones(2))
