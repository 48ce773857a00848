"""A run as its folder tells of it: finished, failed, or still training."""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.planning.planned import Planned
from pipesgd.run.attempts import Attempt, read_attempts
from pipesgd.run.files import reason
from pipesgd.run.folder_lock import check_unused
from pipesgd.run.metrics import SECONDS, MetricsLines
from pipesgd.run.output import ATTEMPTS_FILE, METRICS_FILE, RUN_FILE, SUMMARY_FILE

Numbers = np.ndarray[Any, np.dtype[np.float64]]

NUMBERS = (
    *("iteration", "loss", "samples_per_second", "wire_bytes", "skipped", "width"),
    *("fell_back", "prediction_cosine", "test_accuracy", "test_loss"),
)
"""Fields of metrics.jsonl that are read, besides its seconds."""
_OF_SECONDS = {f"{name}_seconds": name for name in SECONDS}


class Iterations:
    """Numbers of a run's iterations, in their order, as arrays; NaN where a number is not known or not finite."""

    def __init__(self, path: Path):
        columns = {name: array("d") for name in (*NUMBERS, *_OF_SECONDS)}
        self.blamed: Counter[int] = Counter()
        """Number of updates that were left out for gradients of each rank, by rank."""
        for _, line in MetricsLines(path):
            for name, column in columns.items():
                value = number(line["seconds"].get(_OF_SECONDS[name]) if name in _OF_SECONDS else line.get(name))
                column.append(math.nan if value is None else value)
            ranks = line.get("nonfinite_ranks")
            self.blamed.update(rank for rank in (ranks if isinstance(ranks, list) else ()) if isinstance(rank, int))
        arrays = {name: np.array(column) for name, column in columns.items()}
        # A line may be there twice: the last one counts.
        _, from_end = np.unique(arrays["iteration"][::-1], return_index=True)
        self._arrays = {name: values[::-1][from_end] for name, values in arrays.items()}

    def __len__(self) -> int:
        return len(self["iteration"])

    def __getitem__(self, name: str) -> Numbers:
        return self._arrays[name]

    def known(self, name: str) -> Numbers:
        """Return the numbers of this name without NaN."""
        column = self[name]
        known: Numbers = column[~np.isnan(column)]
        return known

    @property
    def elapsed(self) -> Numbers:
        """Training time at the end of each iteration, in s, without evaluations, checkpoints and interruptions."""
        total: Numbers = np.nancumsum(self["iteration_seconds"])
        return total

    @property
    def samples(self) -> Numbers:
        """Samples that all ranks have trained on by the end of each iteration."""
        total: Numbers = np.nancumsum(np.round(self["samples_per_second"] * self["iteration_seconds"]))
        return total


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the members of an elastic run."""

    first: int
    """Iteration with which those who remain began."""
    ranks: int
    """Number of those who remain."""
    lost: list[str]
    """Ranks that were lost, and why."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Content of a run's folder."""

    path: Path
    options: dict[str, Any]
    world_size: int
    planned: Planned | None
    measured_seconds: float | None
    """Median duration of an iteration next to the plan's prediction, in s; None without a plan, or before the end."""
    summary: dict[str, Any]
    """Content of summary.json; empty if the run has not finished."""
    iterations: Iterations
    attempts: list[Attempt]
    is_in_use: bool
    """True if a job is writing to the folder now."""
    notes: list[str] = field(default_factory=list)
    """Lines about files that could not be read."""

    @property
    def name(self) -> str:
        """Name for people: the folder as it was given."""
        return str(self.path)

    @property
    def state(self) -> str:
        """State of the run: "training", "finished", after several attempts or not, or why it is "not finished"."""
        if self.is_in_use:
            return "training"
        if self.attempts:
            last = self.attempts[-1]
            if last.ended is None:
                return "not finished: rank 0 ended without a word"
            if last.why is not None:
                return f"not finished: {last.why}"
            return "finished" if len(self.attempts) == 1 else f"finished, in attempt {len(self.attempts)}"
        return "finished" if self.summary else "not finished"

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that trained last; empty if no file tells."""
        found = self.attempts[-1].versions if self.attempts else self.summary.get("versions")
        return {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}

    @property
    def changed_options(self) -> dict[str, Any]:
        """Options that are not left at their defaults, besides the folder itself."""
        usual = TrainConfig().options()
        return {
            name: value
            for name, value in self.options.items()
            if name != "output" and (name not in usual or usual[name] != value)
        }

    @property
    def changes(self) -> list[Change]:
        """Changes of the members, as far as the summary tells of them."""
        generations = self.summary.get("generations")
        found = [_change(one) for one in generations[1:]] if isinstance(generations, list) else []
        return [one for one in found if one is not None]

    def final(self, name: str) -> float | None:
        """Return a number of the summary's results, such as "test_accuracy"; None if it is not known."""
        results = self.summary.get("final")
        return number(results.get(name)) if isinstance(results, dict) else None


def read_run(path: Path, *, is_in_use: bool | None = None) -> RunFolder:
    """Read the folder of a run.

    Args:
        path: the folder.
        is_in_use: true if a job is writing to it; None asks its lock.

    Raises:
        UserInputError: there is no such folder, or no run in it.
    """
    description = _description(path)
    notes: list[str] = []
    summary = _summary(path / SUMMARY_FILE, notes)
    told = summary.get("planned") or description.get("planned")
    planned, measured = None, None
    if isinstance(told, dict):
        planned, measured = _plan(told, notes), number(told.get("measured_seconds"))
    return RunFolder(
        path=path,
        options=description["options"],
        world_size=description["world_size"],
        planned=planned,
        measured_seconds=measured,
        summary=summary,
        iterations=Iterations(path / METRICS_FILE),
        attempts=read_attempts(path / ATTEMPTS_FILE),
        is_in_use=_is_locked(path) if is_in_use is None else is_in_use,
        notes=notes,
    )


def _plan(told: dict[str, Any], notes: list[str]) -> Planned | None:
    """Return the plan, or None after a note if this version cannot use it."""
    try:
        planned = Planned.from_json({name: value for name, value in told.items() if name != "measured_seconds"})
        planned.compare(1.0)
        planned.windows([1.0])
        if number(planned.start) is None or number(planned.dense) is None:
            raise ValueError(f"its start is {planned.start!r}, and {planned.dense!r} with whole gradients")
        return dataclasses.replace(planned, why=[str(line) for line in planned.why])
    except (TypeError, ValueError, ArithmeticError, MemoryError):
        notes.append("the plan of the run is damaged or of another version, and is left out")
        return None


def _change(told: object) -> Change | None:
    """Return what the summary tells of a generation; None if it is damaged."""
    match told:
        case {"first_iteration": int(first), "members": list(members), "lost": list(lost)} if 0 <= first < 2**53:
            entries = [(one.get("rank"), one.get("why")) for one in lost if isinstance(one, dict)]
            return Change(first=first, ranks=len(members), lost=[f"rank {rank}: {why}" for rank, why in entries])
    return None


def number(value: object) -> float | None:
    """Return ``value`` as a float if it is a finite number, and None if it is anything else.

    >>> number(2), number(True), number("2"), number(math.inf)
    (2.0, 1.0, None, None)
    """
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def _description(path: Path) -> dict[str, Any]:
    """Return the content of run.json.

    Raises:
        UserInputError: there is none, or it describes no run.
    """
    try:
        found = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        inside = sorted(str(one.parent) for one in path.glob(f"*/{RUN_FILE}"))
        got = f"which has no {RUN_FILE}" if path.is_dir() else "which is no folder"
        near = f" (there are runs in it: {', '.join(inside)})" if inside else ""
        raise UserInputError(f"run must be a folder that pipesgd.train has written; got {path}, {got}{near}") from None
    except OSError as failure:
        raise UserInputError(f"run must be a folder that can be read; got {reason(failure, path)}") from None
    except (ValueError, RecursionError):
        found = None
    whole = isinstance(found, dict) and isinstance(found.get("options"), dict)
    if not whole or type(found.get("world_size")) is not int:
        raise UserInputError(
            f"run must be a folder that pipesgd.train has written; got {path}, whose {RUN_FILE} describes no run"
        )
    return dict(found)


def _summary(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as failure:
        notes.append(f"{reason(failure, path)}; it is left out")
        return {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        notes.append(f"{path.name} is damaged, and is left out")
        return {}
    return found


def _is_locked(path: Path) -> bool:
    try:
        check_unused(path)
    except UserInputError:
        return True
    return False
