"""Shared parts of the figures of the paper: a table, panels drawn from it, and a command.

Most figures are a module ``experiments/figNN_name.py`` with ``compute(...)``, which returns the table, and
``plot(rows, axes)``, which draws the rows of one panel. Rows have a column "panel", and panels are in their order.
"""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments import command
from experiments.results import RESULTS, Panels, Row, load, save
from pipesgd.run.console import say

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class PaperFigure(Panels):
    """Name, looks and description of a figure, whose panels a column "panel" tells apart by default."""

    name: str
    """Name of the figure's files."""
    title: str
    caption: str
    """Text that describes the figure, also for somebody who does not see it."""
    by: tuple[str, ...] = ("panel",)
    panel: tuple[float, float] = (4.6, 3.4)
    abreast: int | None = 3
    columns: str = "csv"
    """Ending of the table's file: "json" if values in the table are lists."""
    module: str | None = None
    """Module that makes the table, if it has another name than the figure."""

    def table(self, folder: Path = RESULTS) -> list[Row]:
        """Return the rows that were saved."""
        return load(folder / self.file)

    def show(self, only: Sequence[str] | None = None) -> Figure | str:
        """Return, for a notebook, the figure of the saved results, or a text on how to make them if there are none.

        With ``only``, the figure has these panels alone.
        """
        rows = self.table() if (RESULTS / self.file).exists() else []
        if only is not None:
            rows = [row for name in only for row in rows if row["panel"] == name]
        return self.draw(rows) if rows else self.not_measured

    @property
    def not_measured(self) -> str:
        return f"Not measured yet: python -m experiments.{self.module or self.name} does it."

    @property
    def file(self) -> str:
        """Name of the file of the figure's table."""
        return f"{self.name}.{self.columns}"

    def publish(self, rows: list[Row], arguments: Namespace, console: Console, extra: dict[str, Any]) -> None:
        """Save table, manifest and figure."""
        path = save(self.name, rows, extra=extra, folder=arguments.output)
        figure = self.save(self.name, rows, arguments.output)
        say(console, f"wrote {path} and {figure}")


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
