"""Redraw every picture from the existing results and write docs/gallery.md, without measuring anything.

python -m experiments.gallery        experiments/results/*.png, docs/gallery.md
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import (
    accuracy,
    archived_figures,
    command,
    fig01_schedules,
    fig02_breakdown,
    fig05_timing_model,
    fig06_all_reduces,
    fig07_layerwise,
    fig08_codecs,
    figures,
    first_screen,
)
from experiments.results import REPOSITORY, RESULTS
from experiments.systems import pictures
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

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
"""Pictures of the page."""
OTHERS = (first_screen.NARROW, accuracy.FIGURE, archived_figures.LOCAL_STEPS_TIME)
"""Pictures of other pages alone."""
DOCS = REPOSITORY / "docs"
PAGE, PICTURES = "gallery.md", "../experiments/results"
HEAD = """# Gallery

The README's picture, and pictures drawn after the questions of the Pipe-SGD paper, not after its figures: the paper's
body is not at hand. `make figures` draws them and writes this page. Notebooks explain them (`make open-notebooks`):
[the method](../notebooks/1_the_method.ipynb), [the timing model](../notebooks/2_the_timing_model.ipynb),
[convergence](../notebooks/3_convergence.ipynb), [compression](../notebooks/4_compression.ipynb), [a plan of your own
job](../notebooks/5_plan_your_own_job.ipynb).
"""


def page(results: Path = RESULTS) -> str:
    """Return the text of docs/gallery.md."""
    parts = [HEAD]
    for one in FIGURES:
        parts.append(f"## {one.title}\n")
        if not (results / one.file).exists():
            parts.append(f"{one.caption}\n\n{one.not_measured}\n")
            continue
        made = figures.manifest(one.name, results)
        message = one.message([row for row in one.table(results) if one.has(row)])
        parts += [
            f"![{message}]({PICTURES}/{one.name}.png)\n",
            f"{one.caption}\n",
            f"`experiments/results/{one.file}`, {made['started'][:10]}.\n",
        ]
    return "\n".join(parts)


def write(console: Console, docs: Path = DOCS, results: Path = RESULTS) -> None:
    """Draw every picture that has results, and write the page."""
    for one in (*FIGURES, *OTHERS):
        if (results / one.file).exists():
            say(console, f"drew {one.save(one.table(results), results).name}")
    (docs / PAGE).write_text(page(results), encoding="utf-8")
    say(console, f"wrote docs/{PAGE}")


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.Parser(prog="python -m experiments.gallery", description=__doc__, allow_abbrev=False)
    ranks.raise_together("options", lambda: options.parse_args(words))
    write(console)


if __name__ == "__main__":
    command.run(main)
