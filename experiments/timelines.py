"""Timelines of a few iterations: who computes and who communicates, from when to when; simulated, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.style import GREEN, ORANGE, SKY, YELLOW
from timing_model.params import ComputeTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPUTATION, UPDATE, ALL_REDUCE, GRADIENT, WEIGHTS = (
    "forward and backward",
    "update",
    "all-reduce",
    "gradient",
    "weights",
)
COMMUNICATION = (ALL_REDUCE, GRADIENT, WEIGHTS)
SERVER = "server"
COLOURS = {COMPUTATION: SKY, UPDATE: GREEN, ALL_REDUCE: ORANGE, GRADIENT: ORANGE, WEIGHTS: YELLOW}
"""Colours by what happens in a span."""
HEIGHT = 0.4
"""Height of a bar; every rank, and the server, has two rows in a height of 1."""
NARROWEST_NUMBER = 0.015
"""Smallest share of the axes at which the number of its iteration is written into a bar."""


@dataclass(frozen=True, slots=True)
class Span:
    """Activity of one rank, or of the server, in one iteration."""

    who: str
    """Name of the rank or the server: "rank 0", or "server"."""
    what: str
    iteration: int
    start: float
    """Seconds since the first iteration began."""
    end: float


def pipelined(times: ComputeTimes, t_comm: float, *, world_size: int, iterations: int, width: int) -> list[Span]:
    """Return the activities of all ranks in the first iterations of a pipeline; width 1 is synchronous.

    Args:
        times: computation times; an update follows the arrival of a sum, so there is none before the first sum.
        t_comm: time of an all-reduce, in s.
        world_size: number of ranks.
        iterations: number of iterations.
        width: width of the pipeline.

    >>> times = ComputeTimes(update=1.0, forward=1.0, backward=2.0)
    >>> for span in pipelined(times, 2.0, world_size=1, iterations=2, width=1):
    ...     print(span.what, span.start, span.end)
    forward and backward 0.0 3.0
    all-reduce 3.0 5.0
    update 5.0 6.0
    forward and backward 6.0 9.0
    all-reduce 9.0 11.0
    """
    spans: list[Span] = []
    free, arrived, ranks = 0.0, [0.0] * width, [f"rank {rank}" for rank in range(world_size)]
    for iteration in range(iterations):
        begin = max(free, arrived[iteration])
        computes = begin + (times.update if iteration >= width else 0.0)
        free = computes + times.forward + times.backward
        start = max(free, arrived[-1])
        arrived.append(start + t_comm)
        for who in ranks:
            spans += [Span(who, UPDATE, iteration, begin, computes)] if iteration >= width else []
            spans.append(Span(who, COMPUTATION, iteration, computes, free))
        spans += [Span(who, ALL_REDUCE, iteration, start, arrived[-1]) for who in ranks]
    return spans


def with_server(times: ComputeTimes, t_comm: float, *, world_size: int, iterations: int) -> list[Span]:
    """Return the activities of all ranks and of a parameter server in the first iterations.

    Gradients come in and weights go out one after the other, each in ``t_comm`` s; the server applies the mean when all
    gradients are there.
    """
    spans: list[Span] = []
    free = [0.0] * world_size
    for iteration in range(iterations):
        received = 0.0
        for rank, start in enumerate(free):
            free[rank] = start + times.forward + times.backward
            spans.append(Span(f"rank {rank}", COMPUTATION, iteration, start, free[rank]))
            begin = max(free[rank], received)
            received = begin + t_comm
            spans += [Span(who, GRADIENT, iteration, begin, received) for who in (f"rank {rank}", SERVER)]
        sent = received + times.update
        spans.append(Span(SERVER, UPDATE, iteration, received, sent))
        for rank in range(world_size):
            spans += [Span(who, WEIGHTS, iteration, sent, sent + t_comm) for who in (f"rank {rank}", SERVER)]
            free[rank] = sent = sent + t_comm
    return spans


def plot_timeline(spans: Sequence[Span], axes: Axes, *, title: str, end: float) -> Axes:
    """Draw a bar for every span: a rank's computation, and below it its communication; iterations are numbered.

    The server's upper row shows what comes in, its lower row what goes out: its NIC does both at once.

    Args:
        spans: activities; at least one.
        axes: axes to draw on.
        title: title of the axes.
        end: end of the time axis, in s, so that several plots can be compared.
    """
    ranks = sorted({span.who for span in spans if span.who != SERVER}, key=lambda who: int(who.split()[1]))
    lanes = [*([SERVER] if any(span.who == SERVER for span in spans) else []), *ranks]
    for what, colour in COLOURS.items():
        chosen = [span for span in spans if span.what == what]
        if not chosen:
            continue
        middles = [lanes.index(span.who) + HEIGHT / 2 * (1 if _is_below(span) else -1) for span in chosen]
        axes.barh(
            middles,
            [span.end - span.start for span in chosen],
            left=[span.start for span in chosen],
            height=HEIGHT,
            color=colour,
            edgecolor="white",
            label=what,
        )
        for span, middle in zip(chosen, middles, strict=True):
            if span.end - span.start > NARROWEST_NUMBER * end and span.end <= end and what != UPDATE:
                axes.text(
                    (span.start + span.end) / 2, middle, str(span.iteration), ha="center", va="center", fontsize="small"
                )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set(title=title, xlabel="time (s)", xlim=(0, end))
    axes.grid(visible=False)
    return axes


def _is_below(span: Span) -> bool:
    return span.what in COMMUNICATION and not (span.who == SERVER and span.what == GRADIENT)
