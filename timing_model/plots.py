"""Pictures of answers, plans and simulations. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from timing_model.iteration import IterationTime

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {
    "compute": ("computation", "#56B4E9"),
    "wire": ("waiting for the network", "#E69F00"),
    "codec": ("waiting for codec and sums", "#CC79A7"),
    "jitter": ("waiting for slow ranks", "#999999"),
}
"""Okabe and Ito's colours."""
FORMATS = (".pdf", ".png", ".svg")


def check_plot(path: Path | None) -> None:
    """Raise ``ValueError`` if a picture could not be written there: before anything is computed."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise ValueError(f"plot must end in one of {', '.join(FORMATS)}; got {path}")
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"plot must be a file in a folder that is there; got {path}")
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
    """A bar for every iteration, cut into its parts; the first one is at the top."""
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
