"""A picture of a timeline, as in the first figure of the Pipe-SGD paper. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from timing_model.trace import ALL_REDUCE, COMMUNICATION, COMPUTATION, GRADIENT, SERVER, UPDATE, WEIGHTS, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    COMPUTATION: "#56B4E9",
    UPDATE: "#009E73",
    ALL_REDUCE: "#E69F00",
    GRADIENT: "#E69F00",
    WEIGHTS: "#F0E442",
}
"""Okabe and Ito's."""
HEIGHT = 0.4
"""Of a bar; everybody has two rows in a height of 1."""
NARROWEST_NUMBER = 0.015
"""Share of the axes that a bar must have for the number of its iteration to be written into it."""


def plot_timeline(spans: Sequence[Span], axes: Axes, *, title: str = "", end: float | None = None) -> Axes:
    """Draw a bar for every span: a rank's computation, and below it its communication; iterations are numbered.

    The server has what comes in above, and below it what goes out: its card does both at once.

    Args:
        spans: what ``spans.timeline`` gives; at least one.
        axes: to draw on.
        title: of the axes.
        end: of the time axis, in s, so that several can be compared; by default the last span's.

    Raises:
        ValueError: there is no span.
    """
    if not spans:
        raise ValueError("spans must be at least one; got none")
    ranks = sorted({span.who for span in spans if span.who != SERVER}, key=lambda who: int(who.split()[1]))
    lanes = [*([SERVER] if any(span.who == SERVER for span in spans) else []), *ranks]
    end = max(span.end for span in spans) if end is None else end
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
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4, frameon=False)
    return axes


def _is_below(span: Span) -> bool:
    return span.what in COMMUNICATION and not (span.who == SERVER and span.what == GRADIENT)
