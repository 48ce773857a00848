"""Comparison of strategies on the same emulated links, in the same minutes.

    python -m experiments.compare --nodes 4 --rate 200mbit --workload mlp
    python -m experiments.compare --nodes 4 --rate 200mbit --workload mlp --time-to-accuracy 0.88 --epochs 10

Every cell is a run of pipesgd.train by torchrun on the nodes of one testbed. Contenders take turns: in every
round each runs once, in rotated order, and ratios compare times of the same round. The time of a cell is the
median iteration of its slowest rank. The limit is the longer of local's time and the wire's: 2(p-1)/p n / rate
for p nodes and a gradient of n = 4 x parameters bytes, times 1514/1448 for the headers of full packets.

With --time-to-accuracy each round is a seed, with the same samples in the same order for all contenders.

The cell of a failed run says why it failed. Finished cells are kept in runs/compare/, by a hash of the code,
the machine, the links and all arguments: repeating the command runs only what is missing.

compare_<workload>_<nodes>x<rate>.{csv,png,manifest.json}, or accuracy_....{json,png,manifest.json}
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import accuracies, command, iteration_times
from experiments.cells import Cell, Cells, complete, order, read_run
from experiments.compare_plan import Plan, parse
from experiments.contenders import Contender
from experiments.results import Row, save, save_panels, write_json
from experiments.testbed import Testbed
from experiments.testbed.__main__ import show as show_links
from experiments.testbed_jobs import run_job
from pipesgd.errors import RunError
from pipesgd.exit import Terminated
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from pipesgd.run.output import SUMMARY_FILE

CELLS = Path("runs/compare")
"""Folder of the cells, relative to the folder that the command is started in (as in pipesgd.train)."""
LINKS_FILE = "links.json"


@command.testbed_errors_as_ours()
def compute(plan: Plan, cells: Cells, console: Console) -> list[Cell]:
    """Return all cells of the plan; those that are missing are run now.

    Raises:
        UserInputError: no testbed can be made here.
    """
    todo = order(plan.contenders, plan.indices)
    found = [cell for one, index in todo if (cell := cells.load(one, index)) is not None]
    if found:
        failed = sum(cell.failure is not None for cell in found)
        text = f"{len(found)} of {len(todo)} cells are there from before" + (f", {failed} failed" if failed else "")
        say(console, f"{text}; --fresh runs them again, or deletion of their files in {cells.folder}")
    if len(found) == len(todo):
        return found
    try:
        with Testbed(
            nodes=plan.cluster.nodes, link=plan.cluster.link, slow_nodes=dict(plan.cluster.slow_nodes)
        ) as testbed:
            measured = testbed.measure()
            write_json(cells.folder / LINKS_FILE, [dataclasses.asdict(one) for one in measured])
            show_links(testbed, measured)
            return list(complete(cells, todo, partial(run_cell, testbed, plan, cells), console))
    except (KeyboardInterrupt, Terminated):
        done = sum(cells.file(one, index).exists() for one, index in todo)
        say(console, f"stopped with {done} of {len(todo)} cells done; the same command continues")
        raise


def run_cell(testbed: Testbed, plan: Plan, cells: Cells, contender: Contender, index: int) -> Cell:
    """Run one cell on the testbed's nodes; keep its output in a log, and only the figures from its folder."""
    stem = cells.stem(contender, index)
    folder, log = stem.with_suffix(".run"), stem.with_suffix(".log")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed comparison
    started = datetime.now(UTC).isoformat(timespec="seconds")
    words = ["-m", "pipesgd.train", *contender.words, "--seed", str(plan.seed(index)), "--output", str(folder)]
    figures: dict[str, Any] = {}
    try:
        failure = run_job(testbed, words, log, deadline=plan.deadline, nproc_per_node=plan.cluster.nproc_per_node)
        if failure is None and not (folder / SUMMARY_FILE).exists():
            failure = f"ended without a {SUMMARY_FILE}"
        if failure is None:
            figures = read_run(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Cell(contender=contender.name, index=index, started=started, failure=failure, **figures)


def draw(name: str, rows: list[Row], title: str, folder: Path) -> Path:
    """Write the figure of iterations or of accuracies."""
    if "target_accuracy" in rows[0]:
        return save_panels(name, [partial(accuracies.plot, rows, title=title)], size=(9.0, 5.0), folder=folder)
    size = (9.0, 1.8 + 0.4 * len(rows))
    return save_panels(name, [partial(iteration_times.plot, rows, title=title)], size=size, folder=folder)


def publish(plan: Plan, cells: Sequence[Cell], links: Any) -> None:
    """Save rows, manifest and figure, and print the rows."""
    title = f"{plan.workload}, {plan.cluster.describe()}"
    extra = {
        **plan.describe(),
        "links_measured": links,
        "cells_started": {"first": min(cell.started for cell in cells), "last": max(cell.started for cell in cells)},
    }
    if plan.target is None:
        rows = iteration_times.summarize(plan.contenders, cells, plan.cluster, plan.gradient_bytes)
        extra["against_servers"] = iteration_times.against_servers(rows, cells)
        heading = f"{title}; iterations: median over rounds ({len(plan.indices)}), IQR of all of rank 0's"
        iteration_times.show(rows, heading)
        lines = iteration_times.notes(rows, cells, plan.cluster)
    else:
        rows = accuracies.summarize(plan.contenders, cells, plan.target)
        extra["medians"] = accuracies.medians(rows)
        accuracies.show(rows, f"{title}: seconds to {plan.target:.1%} test accuracy")
        lines = accuracies.notes(rows)
    path = save(plan.name, rows, extra=extra, folder=plan.output)
    draw(plan.name, rows, title, plan.output)
    console = Console()
    say(console, *lines, f"wrote {path}")


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    plan = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun, __doc__))
    cells = Cells(CELLS.resolve(), plan.key())
    if plan.fresh:
        cells.forget()
    done = ranks.raise_together("testbed", lambda: compute(plan, cells, console))
    publish(plan, done, cells.read(cells.folder / LINKS_FILE))
    if all(cell.failure for cell in done):
        raise RunError(f"a contender must get through; all failed, the first: {done[0].failure}")


if __name__ == "__main__":
    command.run(main)
