"""Shared parts of the pictures that pages show: a table, a message, panels drawn from the table, and a command.

Most figures are a module ``experiments/figNN_name.py`` with ``compute(...)``, which returns the table, ``plot(rows,
axes)``, which draws the rows of one panel, and ``message(rows)``, the sentence that the picture shows, with its numbers
from the rows. Rows have a column "panel", and panels are in their order.

A picture is drawn as wide as pages show it, at a browser's 96 px an inch: text of 9 pt is 12 px high there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments import command
from experiments.results import RESULTS, Row, grouped, load, save
from experiments.style import styled
from pipesgd.run.console import say

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE_PX, PHONE_PX = 748, 368
"""Widths at which pages show pictures on a desktop's screen and on a phone's, in px."""
PX_PER_INCH = 96
LETTERS_PER_INCH = 13
"""Letters of a message that fit into an inch."""


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """Name, message and looks of a picture, with one panel for the rows of each value in some columns."""

    name: str
    """Name of the picture, and of its table unless ``table_name`` is another."""
    title: str
    """Name of the picture for people."""
    caption: str
    """Text that describes the picture, also for somebody who does not see it."""
    message: Callable[[list[Row]], str]
    """Function that returns what the rows show, in a sentence, which stands above the panels."""
    plot: Callable[[list[Row], Axes], Axes]
    """Function that draws the rows of one panel."""
    height: float
    """Height of a line of panels, in inches."""
    abreast: int = 1
    """Largest number of panels in a line."""
    by: tuple[str, ...] = ("panel",)
    """Columns that tell the panels apart."""
    has: Callable[[Row], bool] = lambda row: True
    """Function that says whether pages show a row; notebooks may show all of them."""
    share_y: bool = False
    """True if the panels of a line have the same vertical axis."""
    shown_px: int = PAGE_PX
    """Width at which pages show it, in px."""
    columns: str = "csv"
    """Ending of the table's file: "json" if values in the table are lists."""
    table_name: str = ""
    module: str | None = None
    """Module that makes the table, if it has another name than the figure."""

    def table(self, folder: Path = RESULTS) -> list[Row]:
        """Return the rows that were saved."""
        return load(folder / self.file)

    def show(self, only: Sequence[str] | None = None) -> Figure | str:
        """Return, for a notebook, the figure of the saved results, or a text on how to make them if there are none.

        With ``only``, the figure has these panels alone, in this order, and no message.
        """
        rows = self.table() if (RESULTS / self.file).exists() else []
        if not rows:
            return self.not_measured
        chosen = None if only is None else [row for name in only for row in rows if row["panel"] == name]
        figure = self.draw(rows) if chosen is None else self.draw_panels(chosen)
        figure.set_dpi(PX_PER_INCH)
        return figure

    def draw(self, rows: Iterable[Row]) -> Figure:
        """Return the figure that pages show."""
        rows = [row for row in rows if self.has(row)]
        return self.draw_panels(rows, self.message(rows))

    def draw_panels(self, rows: Iterable[Row], message: str = "") -> Figure:
        """Return a figure of all panels of the rows. A notebook displays it."""
        # Imported here, since only one rank draws, at the end. pyplot would keep figures in a global list.
        from matplotlib.figure import Figure

        panels = list(grouped(rows, *self.by).values())
        lines = -(-len(panels) // self.abreast)
        width = self.shown_px / PX_PER_INCH
        with styled():
            figure = Figure(figsize=(width, self.height * lines), layout="constrained")
            places = figure.subplots(lines, -(-len(panels) // lines), squeeze=False, sharey=self.share_y).flat
            for own, axes in itertools.zip_longest(panels, places):
                if own is None:
                    axes.remove()
                else:
                    self.plot(own, axes)
            if message:
                folded = textwrap.fill(message, round(LETTERS_PER_INCH * width))
                figure.suptitle(folded, x=0.004, ha="left", fontsize="medium", fontweight="bold")
        return figure

    def save(self, rows: Iterable[Row], folder: Path = RESULTS) -> Path:
        """Write the picture into ``folder``; return its path."""
        figure, path = self.draw(rows), folder / f"{self.name}.png"
        with styled():
            # The metadata leave out the version, so that a file changes only if the drawing does.
            figure.savefig(path, dpi="figure", metadata={"Software": None})
        return path

    @property
    def not_measured(self) -> str:
        return f"Not measured yet: python -m experiments.{self.module or self.name} does it."

    @property
    def file(self) -> str:
        """Name of the file of the figure's table."""
        return f"{self.table_name or self.name}.{self.columns}"

    def publish(self, rows: list[Row], arguments: Namespace, console: Console, extra: dict[str, Any]) -> None:
        """Save table, manifest and figure."""
        path = save(self.name, rows, extra=extra, folder=arguments.output)
        say(console, f"wrote {path} and {self.save(rows, arguments.output)}")


def legend_below(axes: Axes, ncols: int, handles: Sequence[Artist] | None = None) -> None:
    """Draw one legend below all panels when the first panel asks for it, of what that panel drew or of ``handles``."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    if figure.legends:
        return
    if handles is None:
        handles = axes.get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols)


def sources(names: Sequence[str], folder: Path = RESULTS) -> dict[str, Any]:
    """Return, for the manifest, the result files that a table was made from, with hashes of their contents."""
    return {"made_from": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16] for name in names}}


def manifest(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the manifest of a result."""
    found: dict[str, Any] = json.loads((folder / f"{name}.manifest.json").read_text(encoding="utf-8"))
    return found


def parse(name: str, description: str | None, words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Parse the options that every figure has. Raises ``UserInputError``."""
    return checked(name, command.parser(name, description), words, by_torchrun)


def checked(name: str, options: command.Parser, words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Parse and check ``words``. Raises ``UserInputError``."""
    arguments = command.parse(options, words)
    command.check_alone(name, by_torchrun, "it starts torchrun itself where it needs ranks")
    return arguments
