"""The longest path, which exploits that ranks do the same, compared with a simulator of every message."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from timing_model import critical_path, schedules
from timing_model.all_reduce import all_reduce_time, messages_meet
from timing_model.collective_time import ring_all_reduce_time
from timing_model.params import CodecCost, LinkParams, PlacedLink
from timing_model.schedules import (
    SCHEDULES,
    SEGMENTS_AHEAD,
    Schedule,
    segments_of,
)
from timing_model.simulate_messages import Network, Task, priced, simulate_messages, steps_of

EXACT = 1e-9
SECONDS = st.floats(0, 1)
RATES = st.one_of(st.just(math.inf), st.floats(1, 1e5))
"""Rate limits, in bytes a second."""
LINK = LinkParams(alpha=1.0, beta=2.0, gamma=0.5, sync=0.0)
WORLD_SIZES = st.one_of(st.integers(1, 9), st.sampled_from((13, 16, 32)))


def tasks_of(
    parts: Sequence[Schedule], numel: float, codec: CodecCost, *, segments: int = 1, ahead: int | None = None
) -> list[list[Task]]:
    """Return all ranks' programs for a collective of ``numel`` values, given their schedules."""
    steps = [steps_of(schedule, segments, ahead) for schedule in parts]
    return priced(steps, numel / parts[0].chunks / segments, codec)


@st.composite
def links(draw: st.DrawFn) -> LinkParams:
    return LinkParams(alpha=draw(SECONDS), beta=draw(SECONDS), gamma=draw(SECONDS), sync=0.0, overhead=draw(SECONDS))


@st.composite
def codecs(draw: st.DrawFn) -> CodecCost:
    operations = {name: draw(SECONDS) for name in ("encode", "decode", "add", "hop", "call")}
    return CodecCost(name="", bits=draw(st.floats(1, 32)), **operations)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(deadline=None, max_examples=60)
@given(
    link=links(),
    codec=codecs(),
    world_size=WORLD_SIZES,
    each=st.floats(0.1, 100),
    segments=st.integers(1, 4),
)
def test_the_time_is_that_of_the_messages(
    name: str, link: LinkParams, codec: CodecCost, world_size: int, each: float, segments: int
) -> None:
    parts = [SCHEDULES[name](rank, world_size) for rank in range(world_size)]
    numel = each * parts[0].chunks
    segment_bytes = max(1, math.ceil(codec.wire_bytes(each) / segments))
    segments = segments_of(codec.wire_bytes(each), segment_bytes)
    ahead = SEGMENTS_AHEAD if messages_meet(name, world_size) else None
    programs = tasks_of(parts, numel, codec, segments=segments, ahead=ahead)
    simulated = max(simulate_messages(programs, Network(link=link)))
    predicted = all_reduce_time(name, link, numel, world_size, codec=codec, segment_bytes=segment_bytes)
    assert predicted.total == pytest.approx(simulated, rel=EXACT, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    link=links(),
    inner=links(),
    codec=codecs(),
    nodes=st.integers(1, 6),
    ranks_per_node=st.integers(1, 6),
    segments=st.integers(1, 3),
)
def test_the_time_of_hierarchical_is_that_of_the_messages(
    link: LinkParams, inner: LinkParams, codec: CodecCost, nodes: int, ranks_per_node: int, segments: int
) -> None:
    world_size = nodes * ranks_per_node
    inner = LinkParams(alpha=inner.alpha, beta=inner.beta, gamma=0.0, sync=0.0, overhead=link.overhead)
    segment_bytes = math.ceil(codec.wire_bytes(7.0) / segments)
    segments = segments_of(codec.wire_bytes(7.0), segment_bytes)
    parts = [schedules.hierarchical(rank, world_size, ranks_per_node) for rank in range(world_size)]
    programs = tasks_of(parts, 7.0 * world_size, codec, segments=segments)
    nodes = (PlacedLink(link=link), PlacedLink(link=inner, node=ranks_per_node))
    simulated = max(simulate_messages(programs, Network(link=link, placed=nodes)))
    predicted = all_reduce_time(
        "hierarchical",
        link,
        7.0 * world_size,
        world_size,
        codec=codec,
        segment_bytes=segment_bytes,
        inner=inner,
        ranks_per_node=ranks_per_node,
        nics=ranks_per_node,
    )
    assert predicted.total == pytest.approx(simulated, rel=EXACT, abs=1e-12)


PASSED_ON = {
    "ring": critical_path.ring,
    "gather ring": critical_path.gather_ring,
    "many nodes": partial(critical_path.hierarchical, ranks_per_node=3),
    "large nodes": partial(critical_path.hierarchical, ranks_per_node=80),
}


@pytest.mark.parametrize("name", PASSED_ON)
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    link=links(),
    inner=links(),
    codec=codecs(),
    segments=st.integers(1, 4),
)
def test_steps_that_are_left_out_are_as_those_before(
    name: str,
    link: LinkParams,
    inner: LinkParams,
    codec: CodecCost,
    segments: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rings of 240 ranks are computed step by step, and up to the step from which all steps are alike."""
    costs = critical_path.SegmentCosts(
        work=codec.seconds(1.0),
        alpha=link.alpha,
        transfer=link.beta,
        overhead=link.overhead,
        inner_alpha=inner.alpha,
        inner_transfer=inner.beta,
    )
    short = PASSED_ON[name](costs, 240, segments)
    with monkeypatch.context() as patch:
        patch.setattr(critical_path, "EVEN", -1.0)
        long = PASSED_ON[name](costs, 240, segments)
    assert short == pytest.approx(long, rel=EXACT)


def test_a_large_ring_is_the_closed_form() -> None:
    link = LinkParams(alpha=3e-5, beta=8e-10, gamma=2e-10, sync=1e-4, overhead=1e-6)
    for world_size in (1000, 4097):
        closed = ring_all_reduce_time(link, 1e8, world_size)
        assert all_reduce_time("ring", link, 2.5e7, world_size).total == pytest.approx(closed, rel=EXACT)


def test_senders_meet_at_one_card() -> None:
    """Three messages of 8 s to one rank leave at once; they arrive one after the other."""
    link = LinkParams(alpha=1.0, beta=2.0, gamma=0.0, sync=0.0)
    senders = [[Task(sends=((3, 4.0),))] for _ in range(3)]
    ends = simulate_messages([*senders, [Task(source=rank) for rank in range(3)]], Network(link=link))
    assert ends == [8.0, 8.0, 8.0, 25.0]


def test_memory_is_not_overwritten_before_it_has_left() -> None:
    link = LinkParams(alpha=0.0, beta=1.0, gamma=0.0, sync=0.0)
    tasks = [Task(sends=((1, 10.0),), memory=0), Task(seconds=1.0, memory=0), Task(seconds=1.0, memory=1)]
    assert simulate_messages([tasks, [Task(source=0)]], Network(link=link)) == [12.0, 10.0]


def test_a_message_leaves_when_its_receive_is_posted() -> None:
    """A notice takes 1 s, except for receives that are posted at the start."""
    link = LinkParams(alpha=1.0, beta=1.0, gamma=0.0, sync=0.0)
    sends = [Task(sends=((1, 4.0),)), Task(sends=((1, 4.0),))]
    early = [Task(posts=(0, 0)), Task(seconds=10.0), Task(source=0), Task(source=0)]
    assert simulate_messages([sends, early], Network(link=link)) == [8.0, 10.0]
    late = [Task(posts=(0,)), Task(seconds=10.0, posts=(0,)), Task(source=0), Task(source=0)]
    assert simulate_messages([sends, late], Network(link=link)) == [15.0, 16.0]


def test_what_nobody_waits_for_leaves_the_wire_to_others_and_keeps_its_memory() -> None:
    link = LinkParams(alpha=0.0, beta=1.0, gamma=0.0, sync=0.0)
    first = [Task(sends=((2, 10.0),), memory=0), Task(memory=0, seconds=5.0)]
    second = [Task(sends=((2, 10.0),)), Task(sends=((2, 10.0),))]
    in_order = [Task(posts=(1,)), Task(source=1, posts=(1,)), Task(source=1, posts=(0,)), Task(source=0)]
    assert simulate_messages([first, second, in_order], Network(link=link)) == [35.0, 20.0, 30.0]
    at_once = [Task(source=1), Task(source=1), Task(source=0)]
    assert simulate_messages([first, second, at_once], Network(link=link)) == [15.0, 20.0, 30.0]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("segments", [1, 4, 9])
def test_where_all_do_the_same_receives_are_posted_in_time(name: str, segments: int) -> None:
    """Latency and work are half a segment's wire time. A known gap: more segments than receives, several partners."""
    link = LinkParams(alpha=0.3, beta=1.0, gamma=0.0, sync=0.0)
    codec = CodecCost(name="", bits=8.0, encode=0.1, decode=0.1, add=0.1, hop=0.2)
    for world_size in (2, 4, 8):
        parts = [SCHEDULES[name](rank, world_size) for rank in range(world_size)]
        free, posted = (
            max(
                simulate_messages(
                    tasks_of(parts, float(parts[0].chunks * segments), codec, segments=segments, ahead=ahead),
                    Network(link=link),
                )
            )
            for ahead in (None, SEGMENTS_AHEAD)
        )
        if segments > SEGMENTS_AHEAD and world_size > 2 and name in ("halving-doubling", "all-to-all"):
            assert free < posted < 1.3 * free
        else:
            assert posted == pytest.approx(free, rel=EXACT)


def test_a_deadlock_is_named() -> None:
    with pytest.raises(ValueError, match="programs must not wait for ever; rank 0 waits for rank 1"):
        simulate_messages([[Task(sends=((1, 1.0),))], [Task(posts=(2,))], []], Network(link=LINK))
    with pytest.raises(ValueError, match="programs must not wait for ever; rank 0 waits for rank 1"):
        simulate_messages([[Task(source=1)], [Task(source=0)]], Network(link=LINK))


@pytest.mark.parametrize("name", ["ring", "halving-doubling", "all-to-all", "hierarchical"])
def test_placed_links_of_nodes_are_those_of_the_formula(name: str) -> None:
    """Nodes of two ranks with another link inside; ranks that are alike everywhere but in how that is said."""
    outer = LinkParams(alpha=1e-4, beta=1e-8, gamma=1e-10, sync=0.0, overhead=1e-5)
    inner = LinkParams(alpha=1e-5, beta=1e-9, gamma=1e-10, sync=0.0, overhead=1e-5)
    alike = (PlacedLink(link=outer),)
    if name != "hierarchical":
        one_by_one = all_reduce_time(name, outer, 1e5, 4, placed=alike, segment_bytes=1 << 30)
        assert one_by_one == pytest.approx(all_reduce_time(name, outer, 1e5, 4, segment_bytes=1 << 30))
        return
    nodes = (*alike, PlacedLink(link=inner, node=2))
    times = [
        all_reduce_time(name, outer, 1e5, 6, ranks_per_node=2, segment_bytes=1 << 30, **options).total
        for options in ({"placed": nodes}, {"inner": inner, "nics": 2})
    ]
    assert times[0] == pytest.approx(times[1])


def test_an_uplink_limits_what_its_rank_sends_and_a_downlink_what_it_receives() -> None:
    usual = LinkParams(alpha=0.0, beta=1e-8, gamma=0.0, sync=0.0)
    slow = dataclasses.replace(usual, beta=5e-8)

    def seconds(*placed: PlacedLink) -> list[float]:
        """Return when each rank has sent to the next one and received from the one before."""
        programs = [[Task(sends=(((rank + 1) % 3, 1e8),)), Task(source=(rank - 1) % 3)] for rank in range(3)]
        return simulate_messages(programs, Network(link=usual, placed=(PlacedLink(link=usual), *placed)))

    assert seconds() == pytest.approx([1.0, 1.0, 1.0])
    assert seconds(PlacedLink(link=slow, senders=(0,))) == pytest.approx([5.0, 5.0, 1.0])
    assert seconds(PlacedLink(link=slow, receivers=(0,))) == pytest.approx([5.0, 1.0, 5.0])
    assert seconds(PlacedLink(link=slow, node=2)) == pytest.approx([5.0, 5.0, 1.0])
    with pytest.raises(ValueError, match="link must lead from rank 0 to rank 1, which is sent to; none of them does"):
        simulate_messages(
            [[Task(sends=((1, 8.0),))], [Task(source=0)]],
            Network(link=usual, placed=(PlacedLink(link=usual, senders=(1,)),)),
        )
