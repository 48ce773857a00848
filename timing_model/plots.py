"""Pictures of answers, plans and simulations. This module alone needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from timing_model.iteration import IterationTime
from timing_model.trace import ALL_REDUCE, COMMUNICATION, COMPUTATION, GRADIENT, SERVER, UPDATE, WEIGHTS, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {
    "compute": ("computation", "#56B4E9"),
    "wire": ("waiting for the network", "#E69F00"),
    "codec": ("waiting for codec and sums", "#CC79A7"),
    "jitter": ("jitter and slow ranks", "#999999"),
    "loading": ("loading batches", "#009E73"),
    "inside": ("collectives inside islands", "#F0E442"),
}
"""Labels of an iteration's parts, and their colours, which are Okabe and Ito's."""
FORMATS = (".pdf", ".png", ".svg")


def check_plot(path: Path | None) -> None:
    """Raise ``ValueError``, before anything is computed, if a picture could not be written to ``path``."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise ValueError(f"plot must end in one of {', '.join(FORMATS)}; got {path}")
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"plot must be a file in an existing folder; got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"plot must be left out where matplotlib is not installed (pip install matplotlib does it); got {path}"
        )


def save_plot(path: Path, draw: Callable[[Axes], object], *, height: float = 4.0) -> None:
    """Draw on new axes and write the file. Raises ``ValueError`` if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    try:
        figure.savefig(path, dpi=150)
    except OSError as failure:
        raise ValueError(f"plot must be a file to write; got {path}: {failure.strerror}") from None


def plot_parts(names: Sequence[str], iterations: Sequence[IterationTime], axes: Axes, *, title: str = "") -> Axes:
    """Draw a bar for every iteration, cut into its parts; the first one is at the top."""
    lefts = [0.0] * len(names)
    for part, (label, colour) in PARTS.items():
        lengths = [max(0.0, getattr(one, part)) for one in iterations]
        axes.barh(range(len(names)), lengths, left=lefts, color=colour, label=label)
        lefts = [left + length for left, length in zip(lefts, lengths, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="time of an iteration (s)")
    figure = axes.get_figure()
    assert figure is not None
    figure.suptitle(title)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return axes


# ---- A timeline, as in the first figure of the Pipe-SGD paper

COLOURS = {
    COMPUTATION: "#56B4E9",
    UPDATE: "#009E73",
    ALL_REDUCE: "#E69F00",
    GRADIENT: "#E69F00",
    WEIGHTS: "#F0E442",
}
"""Okabe and Ito's colours, by what happens in a span."""
HEIGHT = 0.4
"""Height of a bar; every rank, and the server, has two rows in a height of 1."""
NARROWEST_NUMBER = 0.015
"""Smallest share of the axes at which the number of its iteration is written into a bar."""


def plot_timeline(spans: Sequence[Span], axes: Axes, *, title: str = "", end: float | None = None) -> Axes:
    """Draw a bar for every span: a rank's computation, and below it its communication; iterations are numbered.

    The server's upper row shows what comes in, its lower row what goes out: its NIC does both at once.

    Args:
        spans: result of ``trace.timeline``; at least one.
        axes: axes to draw on.
        title: title of the axes.
        end: end of the time axis, in s, so that several plots can be compared; by default the last span's.

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
