"""What a run measures of itself: a line per iteration, TensorBoard events, and the summary at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pipesgd.strategies.base import StepReport

SECONDS = ("iteration", "compute", "communication", "exposed", "update")


@dataclass(frozen=True, kw_only=True)
class IterationMetrics:
    """One line of metrics.jsonl, of rank 0."""

    iteration: int
    epoch: int
    loss: float
    """Of rank 0's batch."""
    lr: float
    samples_per_second: float
    """All ranks together."""
    seconds: dict[str, float]
    """iteration = compute + exposed + update, where exposed is the communication that was waited for, and predicting
    is part of the update; communication is the all-reduce of what was applied, hidden or not."""
    wire_bytes: int
    """Bytes that rank 0 sent."""
    skipped: int
    """Updates left out since their gradient was not finite."""
    prediction_cosine: float | None = None
    """Between rank 0's gradient, which stood for the mean in flight, and that mean when it had arrived."""
    prediction_error: float | None = None
    """Length of their difference, in lengths of the mean."""
    test_accuracy: float | None = None
    """After the last iteration of an epoch: share of the test set's labels predicted rightly."""
    test_loss: float | None = None
    """Likewise: mean loss of a label of the test set."""


def step_seconds(report: StepReport, iteration_seconds: float) -> dict[str, float]:
    """The five durations of one iteration that took ``iteration_seconds``."""
    exposed, update = report.seconds("wait"), report.seconds("update") + report.seconds("predict")
    return {
        "iteration": iteration_seconds,
        "compute": iteration_seconds - exposed - update,
        "communication": report.seconds("communication"),
        "exposed": exposed,
        "update": update,
    }


def hidden_share(communication: float, exposed: float) -> float | None:
    """Share of the communication that the computation did not wait for; None without communication."""
    return None if communication <= 0 else max(0.0, 1 - exposed / communication)


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard events below ``output``.

    Lines from ``start`` on, which an interrupted run may have left, are dropped: the iterations are run anew.
    """

    def __init__(self, output: Path, *, start: int):
        # Imported here: it takes a second, and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        self._path = output / "metrics.jsonl"
        kept = [line for line in read_metrics(self._path) if line["iteration"] < start]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._file = self._path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(output / "tensorboard"), purge_step=start)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._events.close()

    def record(self, metrics: IterationMetrics) -> None:
        # NaN is no JSON: a loss that is not a number is written as null.
        losses = {"loss": metrics.loss, "test_loss": metrics.test_loss}
        finite = {name: loss if loss is not None and math.isfinite(loss) else None for name, loss in losses.items()}
        self._file.write(json.dumps(asdict(metrics) | finite) + "\n")
        scalars = {
            "train/loss": metrics.loss,
            "train/lr": metrics.lr,
            "train/samples_per_second": metrics.samples_per_second,
            "prediction/cosine": metrics.prediction_cosine,
            "prediction/error": metrics.prediction_error,
            "test/accuracy": metrics.test_accuracy,
            "test/loss": metrics.test_loss,
            **{f"seconds/{name}": value for name, value in metrics.seconds.items()},
        }
        for name, value in scalars.items():
            if value is not None:
                self._events.add_scalar(name, value, metrics.iteration)

    def flush(self) -> None:
        """Bring what was written to disk, so that a checkpoint written next has its metrics there too."""
        self._file.flush()
        self._events.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; none if there is no file. A line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines and not lines[-1].endswith("}"):
        lines.pop()
    return [json.loads(line) for line in lines]


def statistics(values: Iterable[float]) -> dict[str, float | None]:
    """Median, mean and 95th percentile; None without values."""
    array = np.array(list(values), dtype=float)
    if not array.size:
        return {"median": None, "mean": None, "p95": None}
    return {
        "median": float(np.median(array)),
        "mean": float(array.mean()),
        "p95": float(np.percentile(array, 95)),
    }
