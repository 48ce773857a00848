"""Cells of a comparison: each is one run of one contender, kept in a file of its own as soon as it is done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import pipesgd
from experiments.contenders import Contender
from experiments.paired import median, turns
from experiments.results import REPOSITORY, provenance, write_json
from pipesgd.run.console import say
from pipesgd.run.metrics import SECONDS, read_metrics
from pipesgd.run.output import METRICS_FILE, SUMMARY_FILE

AFTER_EVALUATION = 2
"""Iterations after an evaluation whose own time does not count: the gradients that they wait for arrived meanwhile. A
pipeline of width 2 is as before then; a wider one would take many more iterations to fill again."""
FEWEST_UNDISTURBED = 0.25
"""Share of a run's iterations that must not follow an evaluation, for those that do to count as much as their mean."""
UNTIMED_ITERATIONS = 2
"""Number of iterations at the start of a run that a cell leaves out of what it says of iterations."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Outcome of one run. Without ``failure`` no field is None, except a loss that was not finite."""

    contender: str
    index: int
    """Index of the round, or the seed where accuracy is compared."""
    started: str
    failure: str | None = None
    """Reason why the run has no results; None if it succeeded."""
    iteration_s: float | None = None
    """Median iteration of the slowest rank, in seconds."""
    iteration_s_of_ranks: list[float] = field(default_factory=list)
    """Median iteration of every worker, in seconds."""
    iterations_s: list[float] = field(default_factory=list)
    """Seconds of rank 0's iterations, without the first ``UNTIMED_ITERATIONS``."""
    medians_s: dict[str, float] = field(default_factory=dict)
    """Medians of rank 0's compute, communication, exposed and update, in seconds, over the same iterations."""
    wire_bytes: float | None = None
    """Bytes that rank 0 sends in an iteration, the median over the same iterations."""
    loss: float | None = None
    """Mean loss of the last epoch."""
    points: list[list[float]] = field(default_factory=list)
    """Seconds of training, and the test accuracy after them: at every evaluation, and at the end of the run."""


def read_run(folder: Path) -> dict[str, Any]:
    """Return the fields of ``Cell`` that the run in ``folder`` determines.

    Seconds of training are the sum of rank 0's iterations: no evaluation is in them. Where another rank is slower,
    as with an asynchronous server, all ranks wait for it at every evaluation: hence they are multiplied by the slowest
    rank's median iteration over rank 0's.
    """
    summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    lines = read_metrics(folder / METRICS_FILE)
    timed = lines[UNTIMED_ITERATIONS:]
    paces = summary["iteration_seconds_of_ranks"]
    accuracies = [line["test_accuracy"] for line in lines]
    seconds = undisturbed([line["seconds"]["iteration"] for line in lines], accuracies)
    clock = [at * max(paces) / paces[0] for at in accumulate(seconds)]
    accuracies[-1] = summary["final"]["test_accuracy"]
    return {
        "iteration_s": max(paces),
        "iteration_s_of_ranks": paces,
        "iterations_s": [line["seconds"]["iteration"] for line in timed],
        "medians_s": {name: median([line["seconds"][name] for line in timed]) for name in SECONDS[1:]},
        "wire_bytes": median([line["wire_bytes"] for line in timed]),
        "loss": summary["final"]["train_loss"],
        "points": [[at, accuracy] for at, accuracy in zip(clock, accuracies, strict=True) if accuracy is not None],
    }


def undisturbed(seconds: Sequence[float], accuracies: Sequence[float | None]) -> list[float]:
    """Return the ``seconds`` of iterations, as if none of them had followed an evaluation (an accuracy).

    A gradient in flight travels on during an evaluation, off the clock, so the next ``AFTER_EVALUATION`` iterations
    wait less for it than they would have: they count as much as the mean of the others, without the first
    ``UNTIMED_ITERATIONS``. With fewer others than ``FEWEST_UNDISTURBED``, all count as they are.

    >>> undisturbed([2.0, 2.0, 4.0, 4.0, 0.5, 0.5, 4.0], [None, None, None, 0.8, None, None, 0.9])
    [2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    """
    follows = [
        any(accuracy is not None for accuracy in accuracies[max(0, at - AFTER_EVALUATION) : at])
        for at in range(len(seconds))
    ]
    others = [
        one for one, after in zip(seconds[UNTIMED_ITERATIONS:], follows[UNTIMED_ITERATIONS:], strict=True) if not after
    ]
    if len(others) < FEWEST_UNDISTURBED * len(seconds):
        return list(seconds)
    mean = sum(others) / len(others)
    return [mean if after else one for one, after in zip(seconds, follows, strict=True)]


class Cells:
    """The cells in a folder whose name is a hash of everything that their figures depend on."""

    def __init__(self, parent: Path, key: Any):
        text = json.dumps([key, sources(), _machine()], sort_keys=True, default=repr)
        self.folder = parent / hashlib.sha256(text.encode()).hexdigest()[:16]

    def stem(self, contender: Contender, index: int) -> Path:
        """Return the path of a cell's files, without the suffixes that distinguish them."""
        name = re.sub(r"[^a-z0-9]+", "-", contender.name.lower()).strip("-")
        # The name alone may collide: "a b" and "a, b".
        digest = hashlib.sha256(contender.name.encode()).hexdigest()[:4]
        return self.folder / f"{name}-{digest}-{index}"

    def file(self, contender: Contender, index: int) -> Path:
        return self.stem(contender, index).with_suffix(".json")

    def load(self, contender: Contender, index: int) -> Cell | None:
        """Return the cell if it is finished, else None."""
        found = self.read(self.file(contender, index))
        return None if found is None else Cell(**found)

    def save(self, contender: Contender, cell: Cell) -> None:
        """Save ``cell``."""
        write_json(self.file(contender, cell.index), dataclasses.asdict(cell))

    @staticmethod
    def read(path: Path) -> Any:
        """Return what ``write_json`` wrote; None if there is no such file."""
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def forget(self) -> None:
        """Delete all cells."""
        shutil.rmtree(self.folder, ignore_errors=True)


def sources(*own: Path) -> str:
    """Return a hash of the measured code and links and of ``own``, an experiment's files, whether committed or not."""
    digest = hashlib.sha256()
    for root in (Path(pipesgd.__file__).parent, REPOSITORY / "experiments" / "testbed", *own):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _machine() -> dict[str, Any]:
    found = provenance()
    return {name: found[name] for name in ("versions", "machine")}


def order(contenders: Sequence[Contender], indices: Iterable[int]) -> list[tuple[Contender, int]]:
    """Return the order of the runs: every round has all contenders, and each comes first equally often."""
    return [(contender, index) for index in indices for contender in turns(contenders, index)]


def complete(
    cells: Cells,
    todo: Sequence[tuple[Contender, int]],
    run: Callable[[Contender, int], Cell],
    console: Console,
) -> Iterator[Cell]:
    """Yield the cells of ``todo``; those that are missing are run and kept."""
    missing = [(contender, index) for contender, index in todo if not cells.file(contender, index).exists()]
    done, begin = 0, time.perf_counter()
    with _bar(console) as bar:
        task = bar.add_task("", total=len(todo), completed=len(todo) - len(missing), what="", left="")
        for contender, index in todo:
            cell = cells.load(contender, index)
            if cell is None:
                bar.update(task, what=contender.name, refresh=True)
                cell = run(contender, index)
                cells.save(contender, cell)
                done += 1
                pace = (time.perf_counter() - begin) / done
                left = f", {timedelta(seconds=round(pace * (len(missing) - done)))} left"
                bar.update(task, advance=1, left=left)
                if cell.failure or not console.is_terminal:
                    where = f"{len(todo) - len(missing) + done}/{len(todo)}"
                    say(console, f"{where} {contender.name}, {index}: {_outcome(cell)}{left}")
            yield cell


def _outcome(cell: Cell) -> str:
    if cell.iteration_s is None:
        return f"failed: {cell.failure}"
    return f"{cell.iteration_s * 1e3:.1f} ms an iteration"


def _bar(console: Console) -> Progress:
    columns = (TextColumn("comparing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    texts = (TextColumn("{task.fields[what]}{task.fields[left]}"),)
    # Only once a second, since the measured runs use the same cores.
    return Progress(
        *columns, *texts, console=console, refresh_per_second=1, transient=True, disable=not console.is_terminal
    )
