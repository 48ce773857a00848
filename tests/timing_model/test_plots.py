"""Timelines: nobody does two things at once, they last as long as the formulas say, and the picture shows them."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.figure import Figure

from timing_model.all_reduce import CollectiveTime
from timing_model.iteration import job_time, pipelined_iteration_time
from timing_model.params import ComputeTimes, Noise
from timing_model.plots import HEIGHT, plot_timeline
from timing_model.trace import COMMUNICATION, COMPUTATION, GRADIENT, SERVER, STRATEGIES, UPDATE, Span, timeline

TIMES = ComputeTimes(update=0.5, forward=1.0, backward=2.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_nobody_does_two_things_at_once(strategy: str, width: int) -> None:
    noise = Noise(cv=0.3, slow_ranks=(1.2,))
    spans = timeline(strategy, TIMES, 2.0, world_size=3, iterations=6, width=width, noise=noise)
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
    spans = timeline("pipelined", TIMES, t_comm, world_size=2, iterations=20, width=width)
    iteration = pipelined_iteration_time(TIMES, CollectiveTime(t_comm, t_comm, 0.0), width)
    lasts = max(span.end for span in spans)
    job = job_time(iteration, 20, t_comm)
    assert job - width * TIMES.update <= lasts <= job


def test_the_server_serves_one_after_the_other() -> None:
    spans = timeline("parameter-server", TIMES, 2.0, world_size=3, iterations=1)
    own = [(span.what, span.start, span.end) for span in spans if span.who == SERVER]
    assert own == [
        *[("gradient", 3.0 + 2.0 * number, 5.0 + 2.0 * number) for number in range(3)],
        ("update", 9.0, 9.5),
        *[("weights", 9.5 + 2.0 * number, 11.5 + 2.0 * number) for number in range(3)],
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_picture_shows_every_span_in_its_row(strategy: str) -> None:
    spans = timeline(strategy, TIMES, 2.0, world_size=2, iterations=3)
    axes = plot_timeline(spans, Figure().subplots(), title=strategy)
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == ([SERVER] if strategy == "parameter-server" else []) + ["rank 0", "rank 1"]
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
    assert axes.get_xlim() == (0, max(span.end for span in spans))


def test_impossible_timelines_are_refused() -> None:
    with pytest.raises(ValueError, match="strategy must be one of parameter-server, synchronous, pipelined; got ring"):
        timeline("ring", TIMES, 1.0, world_size=2, iterations=1)
    with pytest.raises(ValueError, match="iterations must be a whole number of at least 1; got 0"):
        timeline("pipelined", TIMES, 1.0, world_size=2, iterations=0)
    no_spans: list[Span] = []
    with pytest.raises(ValueError, match="spans must be at least one; got none"):
        plot_timeline(no_spans, Figure().subplots())
