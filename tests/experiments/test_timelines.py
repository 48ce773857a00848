"""Timelines: nobody does two things at once, they last as long as the formulas say, and the picture shows them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from matplotlib.figure import Figure

from experiments.timelines import (
    COMMUNICATION,
    COMPUTATION,
    GRADIENT,
    HEIGHT,
    SERVER,
    UPDATE,
    Span,
    pipelined,
    plot_timeline,
    with_server,
)
from timing_model.all_reduce import CollectiveTime
from timing_model.iteration import job_time, pipelined_iteration_time
from timing_model.params import ComputeTimes

TIMES = ComputeTimes(update=0.5, forward=1.0, backward=2.0)
KINDS = [with_server, *(partial(pipelined, width=width) for width in (1, 2, 3))]


@pytest.mark.parametrize("timeline", KINDS)
def test_nobody_does_two_things_at_once(timeline: Callable[..., list[Span]]) -> None:
    spans = timeline(TIMES, 2.0, world_size=3, iterations=6)
    # A server's NIC sends and receives at once.
    rows = [lambda span: span.what in COMMUNICATION and span.what != GRADIENT, lambda span: span.what == GRADIENT]
    for who in ("rank 0", "rank 1", "rank 2", SERVER):
        for row in (*rows, lambda span: span.what in (COMPUTATION, UPDATE)):
            own = sorted((span for span in spans if span.who == who and row(span)), key=lambda span: span.start)
            assert all(before.end <= after.start + 1e-12 for before, after in itertools.pairwise(own))
            assert all(span.end >= span.start for span in own)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("t_comm", [1.0, 6.0])
def test_a_timeline_lasts_as_long_as_the_job(width: int, t_comm: float) -> None:
    """The first K iterations are excepted: they have nothing to update with."""
    spans = pipelined(TIMES, t_comm, world_size=2, iterations=20, width=width)
    iteration = pipelined_iteration_time(TIMES, CollectiveTime(t_comm, t_comm, 0.0), width)
    lasts = max(span.end for span in spans)
    job = job_time(iteration, 20, t_comm)
    assert job - width * TIMES.update <= lasts <= job


def test_the_server_serves_one_after_the_other() -> None:
    spans = with_server(TIMES, 2.0, world_size=3, iterations=1)
    own = [(span.what, span.start, span.end) for span in spans if span.who == SERVER]
    assert own == [
        *[("gradient", 3.0 + 2.0 * number, 5.0 + 2.0 * number) for number in range(3)],
        ("update", 9.0, 9.5),
        *[("weights", 9.5 + 2.0 * number, 11.5 + 2.0 * number) for number in range(3)],
    ]


@pytest.mark.parametrize("timeline", KINDS)
def test_the_picture_shows_every_span_in_its_row(timeline: Callable[..., list[Span]]) -> None:
    spans = timeline(TIMES, 2.0, world_size=2, iterations=3)
    axes = plot_timeline(spans, Figure().subplots(), title="a", end=30.0)
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == ([SERVER] if timeline is with_server else []) + ["rank 0", "rank 1"]
    bars = {
        (
            lanes[round(bar.get_y() + HEIGHT / 2)],
            container.get_label(),
            round(bar.get_x(), 9),
            round(bar.get_width(), 9),
        )
        for container in axes.containers
        for bar in container
    }
    assert bars == {(s.who, s.what, round(s.start, 9), round(s.end - s.start, 9)) for s in spans}
    assert axes.get_xlabel() == "time (s)"
    assert axes.get_xlim() == (0, 30.0)
