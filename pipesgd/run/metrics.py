"""Measurements of a run: a line per iteration, TensorBoard events, and statistics for the summary at the end."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BufferedRandom
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesgd.errors import warn
from pipesgd.run.event_file import EventFile
from pipesgd.run.files import Appender, reason, write_atomically

if TYPE_CHECKING:
    from pipesgd.strategy import StepReport

SECONDS = ("iteration", "loading", "compute", "communication", "exposed", "update")
ADDED_SECONDS = ("loading",)
"""Names in ``SECONDS`` that a run of the previous version, which may be resumed, did not record."""


@dataclass(frozen=True, kw_only=True)
class IterationMetrics:
    """One line of metrics.jsonl, written by rank 0."""

    iteration: int
    epoch: int
    loss: float
    """Mean loss of rank 0's batch."""
    lr: float
    samples_per_second: float
    """Samples per second of all ranks together."""
    seconds: dict[str, float]
    """Durations: iteration = loading + compute + exposed + update, where loading is the wait for the batch, exposed is
    communication that was waited for, and update includes prediction; communication is the all-reduce of the applied
    gradients, hidden or not."""
    wire_bytes: int
    """Bytes that rank 0 sent."""
    skipped: int
    """Updates left out because their gradient was not finite."""
    nonfinite_ranks: tuple[int, ...] = ()
    """Ranks whose own gradients were not finite in the skipped updates."""
    width: int = 1
    """Width at which this iteration's gradient was applied: less than --width where it is synchronous."""
    fell_back: bool = False
    """True if the guard has found that staleness hurts, so that a period at width 1 begins."""
    prediction_cosine: float | None = None
    """Cosine between rank 0's gradient, which took the place of the mean in flight, and that mean when it arrived. With
    local steps, of movements, at width 1 too: it falls as ranks drift apart within a window."""
    prediction_error: float | None = None
    """Length of the difference between the two, as a multiple of the mean's length."""
    test_accuracy: float | None = None
    """Share of the test set's labels predicted rightly, after an iteration that an evaluation follows; None if the loss
    measures no accuracy."""
    test_loss: float | None = None
    """Mean loss of a sample of the test set in the same evaluation."""


def step_seconds(report: StepReport, iteration_seconds: float, loading: float) -> dict[str, float]:
    """Return the ``SECONDS`` of one iteration that took ``iteration_seconds`` and waited ``loading`` for its batch."""
    exposed, update = report.seconds("wait"), report.seconds("update") + report.seconds("predict")
    return {
        "iteration": iteration_seconds,
        "loading": loading,
        "compute": iteration_seconds - loading - exposed - update,
        "communication": report.seconds("communication"),
        "exposed": exposed,
        "update": update,
    }


def scalars_of(metrics: IterationMetrics) -> dict[str, float | None]:
    """Return the numbers of an iteration by the names of TensorBoard's curves; None for those that are not known."""
    return {
        "train/loss": metrics.loss,
        "train/lr": metrics.lr,
        "train/samples_per_second": metrics.samples_per_second,
        "prediction/cosine": metrics.prediction_cosine,
        "prediction/error": metrics.prediction_error,
        "test/accuracy": metrics.test_accuracy,
        "test/loss": metrics.test_loss,
        **{f"seconds/{name}": value for name, value in metrics.seconds.items()},
    }


SLOW_SHARE = 0.05
"""Smallest share of an iteration that a slow rank must cost to be named."""


def slowest_rank(compute: Sequence[float | None], iteration: float) -> tuple[int, float] | None:
    """Return the rank that computes longest, and the seconds by which it exceeds the median of the others.

    Returns None if these are at most ``SLOW_SHARE`` of ``iteration``, the seconds that an iteration takes on all ranks,
    since they wait for the slowest.
    """
    known = [(seconds, rank) for rank, seconds in enumerate(compute) if seconds is not None]
    if len(known) < 2 or iteration <= 0:
        return None
    longest, rank = max(known)
    extra = longest - float(np.median([seconds for seconds, other in known if other != rank]))
    return (rank, extra) if extra > SLOW_SHARE * iteration else None


def number_of(place: int, summary: Mapping[str, Any]) -> int:
    """Return the number of the rank at ``place`` in the lists ``..._of_ranks`` of a ``summary``: others may be lost."""
    with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
        return int(summary["ranks"][place])
    return place


class History:
    """Numbers of a run's iterations that its summary needs: some bytes for each, since a run may take days."""

    COUNTS = ("wire_bytes", "skipped", "width")

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in (*SECONDS, *self.COUNTS)}

    def put(self, iteration: int, seconds: Mapping[str, float], *counts: int) -> None:
        """Record the numbers of an iteration: its ``SECONDS``, as far as known, and its ``COUNTS``."""
        for name, value in (*seconds.items(), *zip(self.COUNTS, counts, strict=True)):
            if (column := self._columns.get(name)) is not None:
                column.extend(itertools.repeat(math.nan, iteration + 1 - len(column)))
                column[iteration] = value

    def known(self, name: str, start: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the numbers of this name, in order, of all iterations from ``start`` on that have one."""
        column = np.array(self._columns[name])[start:]
        known: np.ndarray[Any, np.dtype[np.float64]] = column[~np.isnan(column)]
        return known


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard events below ``output``. A failure to write does not end the run.

    Lines from ``start`` on, which an interrupted run may have left, are dropped, since these iterations are run again.
    An earlier metrics.jsonl that cannot be read in full, or of which no line would be left, is kept under another name.
    """

    def __init__(self, output: Path, *, start: int):
        path = output / "metrics.jsonl"
        self.history = History()
        """Numbers of all iterations that the file has."""
        self.dropped = 0
        """Lines of iterations that are run again."""
        try:
            write_atomically(path, lambda file: self._keep(path, start, file))
        except OSError as failure:
            warn(f"{reason(failure, path)}; training continues, and lines of repeated iterations appear twice")
            self._keep(path, start, None)  # the failure may have come before the last line
        self._lines = Appender(path)
        self._events = EventFile(output / "tensorboard", start=start)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._events.close()

    def _keep(self, path: Path, start: int, file: BufferedRandom | None) -> None:
        """Record the lines of ``path`` before ``start``, one by one, and copy them to ``file``, if there is one.

        Raises ``OSError`` if they cannot be copied.
        """
        lines, kept = MetricsLines(path), 0
        self.dropped = 0  # of this reading: the first may have failed
        for text, line in lines:
            if line["iteration"] >= start:
                self.dropped += 1
                continue
            kept += 1
            self.history.put(line["iteration"], line["seconds"], *(line[name] for name in History.COUNTS))
            if file is not None:
                file.write(text + b"\n")
        if file is not None and (not lines.whole or (self.dropped and not kept)):
            why = "holds only iterations that are run again" if lines.whole else "could not be read in full"
            warn(f"{path} {why}; it is kept as {_keep_aside(path).name}")

    def record(self, metrics: IterationMetrics) -> None:
        counts = (getattr(metrics, name) for name in History.COUNTS)
        self.history.put(metrics.iteration, metrics.seconds, *counts)
        # JSON has no NaN: a loss that is not finite is written as null.
        losses = {"loss": metrics.loss, "test_loss": metrics.test_loss}
        finite = {name: loss if loss is not None and math.isfinite(loss) else None for name, loss in losses.items()}
        self._lines.write((json.dumps(asdict(metrics) | finite) + "\n").encode())
        self._add(metrics.iteration, scalars_of(metrics))

    def record_last(self, iterations: int, accuracy: float | None, loss: float) -> None:
        """Write the evaluation after all ``iterations`` into the events: metrics.jsonl has no line for it.

        It is the event of one more iteration, which voids that of an earlier attempt at the end of the run.
        """
        self._add(iterations, {"test/accuracy": accuracy, "test/loss": loss})

    def _add(self, iteration: int, scalars: Mapping[str, float | None]) -> None:
        self._events.add(iteration, {name: value for name, value in scalars.items() if value is not None})

    def drop(self) -> None:
        """Forget lines that are not written yet: the file is another rank's now."""
        self._lines.drop()

    def flush(self) -> None:
        """Write all metrics to the disk, so that those of a checkpoint written next are there too."""
        self._lines.flush()
        self._events.flush()


class MetricsLines:
    """Lines of the metrics.jsonl at ``path`` and what they say, read one by one; none if there is no file.

    A last line that a crash cut short is left out. Damaged lines elsewhere are left out with one warning.
    """

    def __init__(self, path: Path):
        self._path = path
        self.whole = True
        """False if something was left out of the lines that were read, other than a last line that was cut short."""

    def __iter__(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        damaged = 0
        try:
            with self._path.open("rb") as file:
                for text in file:
                    line = _line(text.decode(errors="replace"))
                    if line is not None:
                        yield text.rstrip(b"\r\n"), line
                    elif text.strip() and text.endswith(b"\n"):
                        damaged += 1
        except FileNotFoundError:
            pass
        except OSError as failure:
            self.whole = False
            warn(f"{reason(failure, self._path)}; the rest of its metrics is left out")
        if damaged:
            self.whole = False
            warn(f"{damaged} damaged line{'s' if damaged > 1 else ''} of {self._path} left out")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return what the lines of a metrics.jsonl say, one for each iteration, the newest; see ``MetricsLines``."""
    return list({line["iteration"]: line for _, line in MetricsLines(path)}.values())


def _keep_aside(path: Path) -> Path:
    """Give the file at ``path`` a second name, which stays when ``path`` is replaced. Raises ``OSError``."""
    for number in itertools.count(1):
        aside = path.with_name(f"{path.name}.aside-{number}")
        with contextlib.suppress(FileExistsError):
            os.link(path, aside, follow_symlinks=False)
            break
    return aside


def _line(text: str) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl; return None if it is damaged."""
    try:
        line = json.loads(text)
        seconds = [line["seconds"][name] for name in SECONDS if name in line["seconds"] or name not in ADDED_SECONDS]
        numbers = [line["samples_per_second"], line["lr"], *seconds]
        counts = [line[name] for name in ("iteration", "epoch", "wire_bytes", "skipped")]
        whole = all(type(count) is int and count >= 0 for count in counts)
        numbers += counts
        optional = [line.get(name) for name in ("loss", "test_loss", "test_accuracy")]
        numbers += [number for number in optional if number is not None]
        finite = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return line if whole and finite else None


def statistics(values: Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float | None]:
    """Return median, mean and 95th percentile; None for each without values."""
    numbers = np.array(values, dtype=float)
    if not numbers.size:
        return {"median": None, "mean": None, "p95": None}
    return {
        "median": float(np.median(numbers)),
        "mean": float(numbers.mean()),
        "p95": float(np.percentile(numbers, 95)),
    }
