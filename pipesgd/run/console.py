"""Terminal output of a run: a progress bar while it lasts, and a table at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from pipesgd.errors import warn
from pipesgd.process import answer, let_go
from pipesgd.ranks import Ranks
from pipesgd.run.metrics import SECONDS, IterationMetrics, number_of, slowest_rank
from pipesgd.strategy import hidden_share
from timing_model.units import format_bytes

PLAIN_LINE_SECONDS = 10.0
"""Seconds between two lines of progress, which replace the bar if output is not a terminal (a log file)."""

LEAST_BAR = 10
"""Smallest width of the bar itself, in columns: on a narrow terminal, figures are left out to make room for it."""

SMOOTHING = 0.05
"""Weight of the newest iteration in the figures that the bar shows."""


class Screen(Console):
    """The console of a command's output, which nobody need read: a run whose progress is lost, as after ``| head``,
    continues, since what it is for is in its files."""

    exit_code = 0
    """Exit code of a command that did what it was asked to (``pipesgd.process.let_go``)."""

    def answer(self, text: str) -> None:
        """Print a text that was asked for, as it is, and flush."""
        self.exit_code = answer(text, self.file)

    def on_broken_pipe(self) -> None:
        """Print nothing any more, and say so on stderr; the base class would end this process."""
        self._let_go("nobody reads standard output any more")

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as failure:  # a terminal that has hung up, or a full disk
            self._let_go(f"standard output cannot be written any more ({failure.strerror})")

    def _let_go(self, why: str) -> None:
        self.quiet = True
        self.exit_code = let_go(self.file)
        warn(f"{why}: the run continues without it")


def screen(ranks: Ranks, file: IO[str] | None = None) -> Screen:
    """Return the console for a command's output: rank 0's standard output, or ``file``; other ranks print nothing."""
    return Screen(file=file, quiet=ranks.rank != 0)


def say(console: Console, *lines: str) -> None:
    """Print lines as they are: unbroken, without colours, brackets and all."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def say_sentences(console: Console, *lines: str) -> None:
    """Print lines that are long, broken between words on a terminal and unbroken elsewhere."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=not console.is_terminal, markup=False)


class ProgressBar:
    """Iterations, loss, test accuracy, samples/s and hidden communication, as a bar or as lines in a log."""

    def __init__(self, console: Console, *, total: int, start: int):
        self._console = console
        self._total = total
        self._smooth: dict[str, float] = {}
        self._accuracy: float | None = None
        self._spoke = time.monotonic()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total, completed=start, figures="")

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def record(self, metrics: IterationMetrics) -> None:
        """Show that this iteration is done."""
        done = metrics.iteration + 1
        now = {"loss": metrics.loss, "samples_per_second": metrics.samples_per_second, **metrics.seconds}
        for name, value in now.items():
            before = self._smooth.get(name, value)
            # A mean with a loss that is not finite would never be finite again.
            self._smooth[name] = before + SMOOTHING * (value - before) if math.isfinite(before) else value
        if metrics.test_accuracy is not None:
            self._accuracy = metrics.test_accuracy
        if self._console.is_terminal:
            others = f"training {self._total}/{self._total} 0:00:00  "
            room = self._console.width - len(others) - LEAST_BAR - 1
            self._progress.update(self._task, completed=done, figures=self._figures(room))
        elif time.monotonic() - self._spoke > PLAIN_LINE_SECONDS:
            self._spoke = time.monotonic()
            left = (self._total - done) * self._smooth["iteration"]
            say(self._console, f"iteration {done}/{self._total}: {self._figures()}, {left:.0f} s left")

    def record_last(self, iterations: int, accuracy: float | None, loss: float) -> None:
        """Do nothing, since the closing table shows them."""

    def flush(self) -> None:
        """Do nothing, since no output is buffered."""

    def _figures(self, room: float = math.inf) -> str:
        """Return the figures, the most important ones first, as far as they fit into ``room`` columns."""
        figures = [f"loss {self._smooth['loss']:.3f}"]
        if self._accuracy is not None:
            figures.append(f"accuracy {self._accuracy:.1%}")
        hidden = hidden_share(self._smooth["communication"], self._smooth["exposed"])
        if hidden is not None:
            figures.append(f"{hidden:.0%} hidden")
        figures.append(f"{self._smooth['samples_per_second']:,.0f} samples/s")
        while figures and len(", ".join(figures)) > room:
            figures.pop()
        return ", ".join(figures)


def late_line(late: int, iterations: int, start: int) -> str:
    """Say how many of all ``iterations`` were late, in a run whose first ``start`` ones were to be synchronous.

    >>> late_line(late=3, iterations=5, start=2)
    '3 of 5 iterations; the first 2 were synchronous'
    >>> late_line(late=0, iterations=2, start=4)
    'none: the run ended in its synchronous start'
    """
    if not late and start >= iterations:
        return "none: the run ended in its synchronous start"
    first = f"; the first {start} were synchronous" if start else ""
    return f"{late} of {iterations} iterations{first}"


def show_summary(console: Console, summary: dict[str, Any], written: Iterable[Path]) -> None:
    """Print the closing table, and the files that were ``written``."""
    table = Table(title=None, show_header=False, box=None, pad_edge=False)
    final, seconds = summary["final"], summary["seconds"]
    ranks = summary["world_size"]
    table.add_row("trained", f"{summary['iterations']} iterations on {ranks} rank{'s' if ranks > 1 else ''}")
    table.add_row("wall clock", f"{summary['wall_seconds']:.1f} s")
    if summary["late_iterations"] is not None:
        late = late_line(summary["late_iterations"], summary["iterations"], summary["synchronous_start"])
        table.add_row("late gradients", late)
    left_out = f", without {final['train_losses_left_out']} not finite" if final["train_losses_left_out"] else ""
    train_loss = "not finite" if final["train_loss"] is None else f"{final['train_loss']:.4f}{left_out}"
    table.add_row("loss, last epoch", train_loss)
    if final["test_accuracy"] is not None:
        table.add_row("test accuracy", f"{final['test_accuracy']:.2%}")
    table.add_row("test loss", "not finite" if final["test_loss"] is None else f"{final['test_loss']:.4f}")
    middle = "mean" if (summary["local_steps"] or 1) > 1 else "median"  # few iterations exchange anything then
    for name in SECONDS:
        if seconds[name][middle] is not None:
            figures = f"{seconds[name][middle] * 1e3:.2f} ms {middle}, {seconds[name]['p95'] * 1e3:.2f} ms p95"
            table.add_row("exposed loading" if name == "loading" else name, figures)
    slow = slowest_rank(summary["compute_seconds_of_ranks"], seconds["iteration"]["median"] or 0.0)
    if slow is not None:
        rank, extra = number_of(slow[0], summary), slow[1]
        share = f"{extra / seconds['iteration']['median']:.0%} of an iteration"
        table.add_row("slowest rank", f"rank {rank}: {extra * 1e3:.2f} ms more computation, {share}")
    hidden = hidden_share(seconds["communication"]["mean"] or 0.0, seconds["exposed"]["mean"] or 0.0)
    if hidden is not None and ranks > 1:
        table.add_row("hidden", f"{hidden:.0%} of communication")
    own = summary["nonfinite_gradients_of_ranks"].values()  # with local steps, rank 0 knows only of its own
    if skipped := max([summary["skipped_updates"], *own]):
        table.add_row("skipped updates", str(skipped))
    if summary["wire_bytes_per_iteration"] is not None:
        table.add_row("sent per iteration", f"{format_bytes(summary['wire_bytes_per_iteration'])} by rank 0")
    table.add_row("replicas", "bit-identical" if summary["replicas_identical"] else "each rank has its own weights")
    console.print(table)
    say(console, *(f"wrote {path}" for path in written))
