"""Redraw every figure from the existing results and write docs/gallery.md, without measuring anything.

python -m experiments.gallery        experiments/results/*.png, docs/gallery.md, docs/gallery/*.png
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from experiments import (
    accuracy,
    command,
    fig01_schedules,
    fig02_breakdown,
    fig05_timing_model,
    fig06_all_reduces,
    fig07_layerwise,
    fig08_codecs,
    figures,
    first_screen,
    local_steps_accuracy,
    loops_on_links,
)
from experiments.results import REPOSITORY, RESULTS, Row, load
from experiments.systems import pictures
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

Draw = Callable[[str, list[Row], Path], Path]

FIGURES = (
    first_screen.FIGURE,
    fig01_schedules.FIGURE,
    fig02_breakdown.FIGURE,
    pictures.CONVERGENCE,
    pictures.SPEEDUPS,
    fig05_timing_model.FIGURE,
    fig06_all_reduces.FIGURE,
    fig07_layerwise.FIGURE,
    fig08_codecs.FIGURE,
)
DOCS = REPOSITORY / "docs"
PAGE, PICTURES = "gallery.md", "gallery"
DPI = 75
"""Dots per inch of the pictures on the page: enough for a screen."""
HEAD = """# Gallery

The README's picture, and the figures of the Pipe-SGD paper reproduced with this code. `make figures` draws them and
writes this page; the notebooks in `notebooks/` explain them.
"""
DRAWN: dict[str, Draw] = {
    "bench_gpu": loops_on_links.draw,
    "bench_torchft": loops_on_links.draw,
    "local_steps_accuracy": local_steps_accuracy.draw,
    "accuracy": accuracy.draw,
}
"""Functions that draw other figures, by the names of their results. Results that no page shows have no figure, and the
figures of archived experiments stay as they are."""


def all_drawn(results: Path = RESULTS) -> dict[str, Callable[[Path], Path]]:
    """Return, by name, a function that draws each figure for which there are results into a folder."""
    draw: dict[str, Draw] = DRAWN | {one.name: one.save for one in FIGURES}
    names = [manifest.name.removesuffix(".manifest.json") for manifest in sorted(results.glob("*.manifest.json"))]
    return {
        name: partial(draw[name], name, load(next(results.glob(f"{name}.[cj]s*")))) for name in names if name in draw
    }


def page(results: Path = RESULTS) -> str:
    """Return the text of docs/gallery.md."""
    parts = [HEAD]
    for one in FIGURES:
        parts.append(f"## {one.title}\n")
        if not (results / one.file).exists():
            parts.append(f"{one.caption}\n\n{one.not_measured}\n")
            continue
        made = figures.manifest(one.name, results)
        parts += [
            f"![{one.title}]({PICTURES}/{one.name}.png)\n",
            f"{one.caption}\n",
            f"`experiments/results/{one.file}`, {made['started'][:10]}.\n",
        ]
    return "\n".join(parts)


def write(console: Console, docs: Path = DOCS, results: Path = RESULTS) -> None:
    """Draw every figure that has results, and write the page."""
    for draw in all_drawn(results).values():
        say(console, f"drew {draw(results).name}")
    (docs / PICTURES).mkdir(exist_ok=True)
    for one in FIGURES:
        if (results / one.file).exists():
            one.save(one.name, one.table(results), docs / PICTURES, dpi=DPI)
    (docs / PAGE).write_text(page(results), encoding="utf-8")
    say(console, f"wrote docs/{PAGE}")


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.Parser(prog="python -m experiments.gallery", description=__doc__, allow_abbrev=False)
    ranks.raise_together("options", lambda: options.parse_args(words))
    write(console)


if __name__ == "__main__":
    command.run(main)
