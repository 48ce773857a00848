"""The panels of a figure, and checks that apply to all of them."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import style
from experiments.figures import PaperFigure
from experiments.results import Row


def panels(figure: PaperFigure, rows: list[Row]) -> dict[str, Axes]:
    """Return every panel, drawn alone."""
    found = {}
    for name in dict.fromkeys(row["panel"] for row in rows):
        with style.styled():
            axes = Figure().add_subplot()
            assert figure.plot([row for row in rows if row["panel"] == name], axes) is axes
        found[name] = axes
    return found


def labels(axes: Axes) -> set[str]:
    return set(axes.get_legend_handles_labels()[1])


def check_axes(axes: Axes) -> None:
    """Check that both axes say what they show and in which unit, if there is one."""
    assert axes.get_title(loc="left")
    ticks_have_names = any(label.get_text().isidentifier() for label in axes.get_yticklabels())
    for text in (axes.get_xlabel(), *([] if ticks_have_names else [axes.get_ylabel()])):
        assert text
        if text.startswith("time"):
            assert "(s)" in text or "(ns)" in text
