"""The model compared with the code that runs: the project's own all-reduces, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from _virtual_time import virtual_time
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesgd.codecs.floats import Uncompressed
from pipesgd.codecs.options import codec_named
from timing_model import all_reduce, collective_time
from timing_model.all_reduce import all_reduce_time, gather_time
from timing_model.params import CodecCost, LinkParams, PlacedLink, uncompressed
from timing_model.schedules import (
    SCHEDULES,
    Schedule,
    gather_ring,
    hierarchical,
)
from timing_model.simulate_messages import Network

EXACT = 1e-9
ODD = LinkParams(alpha=3e-4, beta=1.1e-8, gamma=0.7e-9, sync=0.0, overhead=2e-5)
"""Parameters of a link on which no term hides another."""
CODEC = CodecCost(name="int8", bits=8 * (1 + 4 / 64), encode=3e-9, decode=1e-9, add=1.3e-9, hop=4.1e-9, call=1e-5)
"""Costs of int8 in blocks of 64."""
DIVISIBLE = 64 * 2520
"""Number of values whose chunks and segments are whole blocks for any number of ranks here."""
SECONDS = st.floats(0, 1)


def by_name(name: str) -> Callable[[int, int], Schedule]:
    return SCHEDULES[name]


@pytest.mark.parametrize("world_size", range(1, 18))
def test_chunks_are_those_of_the_schedules(world_size: int) -> None:
    for name in SCHEDULES:
        assert all_reduce.chunks_of(name, world_size) == by_name(name)(0, world_size).chunks
    assert all_reduce.chunks_of("hierarchical", world_size) == hierarchical(0, world_size, world_size).chunks


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("segments", [1, 3, 6])
def test_the_time_is_that_of_the_code(name: str, world_size: int, segments: int) -> None:
    """Buffers are float32, with a few segments per chunk, and more than are received at a time."""
    numel = 6 * DIVISIBLE
    chunks = by_name(name)(0, world_size).chunks
    segment_bytes = 4 * numel // chunks // segments
    posted = all_reduce.messages_meet(name, world_size)
    sums = uncompressed(ODD.gamma)
    measured = virtual_time(
        by_name(name), world_size, Network(link=ODD), Uncompressed(), sums, numel, segment_bytes, posted=posted
    )
    predicted = all_reduce_time(name, ODD, numel, world_size, segment_bytes=segment_bytes)
    assert predicted.total == pytest.approx(measured, rel=EXACT, abs=1e-15)
    assert predicted.wire + predicted.codec == pytest.approx(predicted.total, rel=EXACT)


@pytest.mark.parametrize("world_size", range(2, 10))
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("segment_bytes", [1 << 30, 6000])
def test_the_time_is_that_of_the_code_with_a_codec(name: str, world_size: int, segment_bytes: int) -> None:
    codec = codec_named("int8", block=64).make("cpu")
    chunk = DIVISIBLE // by_name(name)(0, world_size).chunks
    if segment_bytes < 1 << 30:  # as many equal segments of whole blocks as possible
        segment_bytes = CODEC.wire_bytes(chunk) / next(k for k in (3, 5, 2, 7, 1) if chunk % (64 * k) == 0)
        segment_bytes = int(segment_bytes)
    posted = all_reduce.messages_meet(name, world_size)
    network = Network(link=ODD)
    measured = virtual_time(by_name(name), world_size, network, codec, CODEC, DIVISIBLE, segment_bytes, posted=posted)
    predicted = all_reduce_time(name, ODD, DIVISIBLE, world_size, codec=CODEC, segment_bytes=segment_bytes)
    assert predicted.total == pytest.approx(measured, rel=EXACT)


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4])
def test_the_time_of_hierarchical_is_that_of_the_code(world_size: int, ranks_per_node: int) -> None:
    if world_size % ranks_per_node:
        world_size *= ranks_per_node
    inner = LinkParams(alpha=4e-5, beta=1.7e-9, gamma=0, sync=0, overhead=ODD.overhead)
    schedule = partial(hierarchical, ranks_per_node=ranks_per_node)
    for nics in (1, 2):
        shared = LinkParams(
            alpha=ODD.alpha,
            beta=ODD.beta * max(1, ranks_per_node / nics),
            gamma=ODD.gamma,
            sync=0,
            overhead=ODD.overhead,
        )
        network = Network(link=shared, placed=(PlacedLink(link=shared), PlacedLink(link=inner, node=ranks_per_node)))
        numel = 11 * world_size
        measured = virtual_time(schedule, world_size, network, Uncompressed(), uncompressed(ODD.gamma), numel, 1 << 20)
        predicted = all_reduce_time(
            "hierarchical", ODD, numel, world_size, inner=inner, ranks_per_node=ranks_per_node, nics=nics
        )
        assert predicted.total == pytest.approx(measured, rel=EXACT, abs=1e-15)


@pytest.mark.parametrize("world_size", range(1, 10))
def test_the_time_of_gathering_is_that_of_the_code(world_size: int) -> None:
    numel = 60
    network = Network(link=ODD)
    measured = virtual_time(
        gather_ring, world_size, network, Uncompressed(), uncompressed(0.0), numel * world_size, 1 << 20
    )
    codec = CodecCost(name="topk", bits=32, encode=1e-6, decode=0, add=3e-6, hop=0)
    predicted = gather_time(ODD, numel, world_size, codec=codec)
    assert predicted.wire == pytest.approx(measured, rel=EXACT, abs=1e-15)
    assert predicted.codec == pytest.approx((1e-6 + world_size * 3e-6) * numel, rel=EXACT)


@settings(deadline=None, max_examples=40)
@given(
    alpha=SECONDS,
    beta=SECONDS,
    gamma=SECONDS,
    overhead=SECONDS,
    world_size=st.integers(1, 9),
    each=st.integers(1, 50),
    name=st.sampled_from(sorted(SCHEDULES)),
)
def test_the_time_is_that_of_the_code_whatever_the_link(
    alpha: float, beta: float, gamma: float, overhead: float, world_size: int, each: int, name: str
) -> None:
    link = LinkParams(alpha=alpha, beta=beta, gamma=gamma, sync=0.0, overhead=overhead)
    numel = each * by_name(name)(0, world_size).chunks
    posted = all_reduce.messages_meet(name, world_size)
    sums = uncompressed(gamma)
    measured = virtual_time(
        by_name(name), world_size, Network(link=link), Uncompressed(), sums, numel, 1 << 20, posted=posted
    )
    assert all_reduce_time(name, link, numel, world_size).total == pytest.approx(measured, rel=EXACT, abs=1e-12)


# --- Step by step -----------------------------------------------------------------------------------------------------


def step_by_step(schedule: Callable[[int, int], Schedule], world_size: int, nbytes: float, link: LinkParams) -> float:
    """Return the time if all ranks begin each step of the schedule together, and add up once all of it is there."""
    schedules = [schedule(rank, world_size) for rank in range(world_size)]
    chunk = nbytes / schedules[0].chunks
    total = 0.0
    for step in sorted({send.step for one in schedules for send in one.sends}):
        sent = [[send for send in one.sends if send.step == step] for one in schedules]
        reduced = [sum(r.step == step and r.reduce for r in one.receives) for one in schedules]
        together = len({send.peer for sends in sent for send in sends}) and max(
            len({send.peer for send in sends}) for sends in sent
        )
        total += link.alpha + link.overhead * together
        total += max(len(sends) for sends in sent) * chunk * link.beta + max(reduced) * chunk * link.gamma
    return total + (link.sync if world_size > 1 else 0.0)


@given(
    alpha=SECONDS,
    beta=SECONDS,
    gamma=SECONDS,
    sync=SECONDS,
    overhead=st.sampled_from([0.0, 0.25]),
    world_size=st.integers(1, 9),
    nbytes=st.floats(1, 1e5),
)
def test_closed_forms_are_the_schedules_step_by_step(
    alpha: float, beta: float, gamma: float, sync: float, overhead: float, world_size: int, nbytes: float
) -> None:
    link = LinkParams(alpha=alpha, beta=beta, gamma=gamma, sync=sync, overhead=overhead)
    closed = {
        "ring": collective_time.ring_all_reduce_time,
        "halving-doubling": collective_time.halving_doubling_time,
        "recursive-doubling": collective_time.recursive_doubling_time,
        "all-to-all": collective_time.all_to_all_time,
    }
    for name, formula in closed.items():
        expected = step_by_step(by_name(name), world_size, nbytes, link)
        assert formula(link, nbytes, world_size) == pytest.approx(expected, rel=EXACT, abs=1e-12)
        one_segment = all_reduce_time(name, link, nbytes / 4, world_size).total  # below two segments' size
        if name == "ring":
            assert one_segment == pytest.approx(expected, rel=EXACT, abs=1e-12)
        # The code sends one message per chunk, the formula counts one per step; and where ranks fold in, their messages
        # meet at a wire with those of others, which do not wait for that step.
        if not overhead and (world_size in (1, 2, 4, 8) or not name.endswith("doubling")):
            assert one_segment <= expected * (1 + EXACT) + 1e-12
        if name != "all-to-all":  # its messages overlap in their latency
            assert one_segment >= collective_time.lower_bound_time(link, nbytes, world_size) * (1 - EXACT) - 1e-12


@given(
    alpha=SECONDS,
    beta=SECONDS,
    gamma=SECONDS,
    overhead=SECONDS,
    nodes=st.integers(1, 4),
    ranks_per_node=st.integers(1, 4),
    nbytes=st.floats(0, 1e6),
)
def test_the_closed_form_of_hierarchical_is_the_schedule_step_by_step(
    alpha: float, beta: float, gamma: float, overhead: float, nodes: int, ranks_per_node: int, nbytes: float
) -> None:
    """There is one NIC per rank, and one kind of link: otherwise a step's time depends on the ring it belongs to."""
    link = LinkParams(alpha=alpha, beta=beta, gamma=gamma, sync=0.0, overhead=overhead)
    schedule = partial(hierarchical, ranks_per_node=ranks_per_node)
    expected = step_by_step(schedule, nodes * ranks_per_node, nbytes, link)
    closed = collective_time.hierarchical_time(
        link, link, nbytes, nodes=nodes, ranks_per_node=ranks_per_node, nics=ranks_per_node
    )
    assert closed == pytest.approx(expected, rel=EXACT, abs=1e-12)
