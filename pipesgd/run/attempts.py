"""Attempts of a run: when each began and ended, and why, as lines of attempts.jsonl.

An attempt writes a line when its training begins, and one when it ends. One whose rank 0 is killed writes no second
line. Lines are never deleted when a run is resumed, so they say what metrics.jsonl, whose lines are those of the
iterations that count, does not: that a run failed on the way.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesgd.errors import warn
from pipesgd.run.files import Appender, reason

if TYPE_CHECKING:
    from pipesgd.membership.heartbeat import Standing

PATIENCE_SECONDS = 1.0
"""Longest time in s that a rank which ends waits for its line: the disk may be what has failed."""


@dataclass(kw_only=True)
class Attempt:
    """An attempt of a run, as its lines say."""

    begun: float
    """Time when training began, in s since 1970."""
    start: int
    """Iteration that it began with."""
    world_size: int
    run_again: int
    """Iterations of earlier attempts that it ran again, as far as metrics.jsonl had their lines."""
    versions: dict[str, str]
    ended: float | None = None
    """Time when it ended; None if it wrote no line then."""
    iteration: int | None = None
    """Iteration that it ended in; None if it is not known."""
    why: str | None = None
    """Line with which rank 0 ended; None if the attempt finished the run, or wrote no line at its end."""


class Attempts:
    """Writes the lines of an attempt, on rank 0. A failure to write does not end the run."""

    def __init__(self, path: Path, standing: Standing):
        self._lines = Appender(path)
        self._standing = standing

    def begin(self, *, start: int, world_size: int, run_again: int, versions: dict[str, str]) -> None:
        """Write that training begins, and from now on the line with which this rank ends, if it fails."""
        self._write(begun=time.time(), start=start, world_size=world_size, run_again=run_again, versions=versions)
        self._standing.last_words = self.fail

    def finish(self) -> None:
        """Write that the run is finished."""
        self._end(None)

    def fail(self, why: str) -> None:
        """Write the line with which this rank ends, as long as that takes no longer than ``PATIENCE_SECONDS``."""
        thread = threading.Thread(target=self._end, args=(why,), daemon=True)
        thread.start()
        thread.join(PATIENCE_SECONDS)

    def _end(self, why: str | None) -> None:
        self._write(ended=time.time(), iteration=self._standing.iteration, why=why)

    def _write(self, **values: Any) -> None:
        self._lines.write(json.dumps(values).encode() + b"\n")
        self._lines.flush()


def read_attempts(path: Path) -> list[Attempt]:
    """Return the attempts that the file at ``path`` tells of, in order; none if there is no file.

    Lines that are damaged are left out with a warning.
    """
    attempts: list[Attempt] = []
    for line in _lines(path):
        if "begun" in line:
            attempts.append(Attempt(**line))
        elif attempts:
            attempts[-1].ended, attempts[-1].iteration, attempts[-1].why = line["ended"], line["iteration"], line["why"]
    return attempts


_KINDS: tuple[dict[str, Any], ...] = (
    {"begun": float, "start": int, "world_size": int, "run_again": int, "versions": dict},
    {"ended": float, "iteration": int | None, "why": str | None},
)
"""Types of the values of both kinds of lines."""


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that are whole."""
    damaged = 0
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as failure:
        warn(f"{reason(failure, path)}; the attempts of the run are left out")
        return
    for text in texts:
        try:
            line = json.loads(text)
            whole = any(
                line.keys() == kinds.keys() and all(isinstance(line[name], kind) for name, kind in kinds.items())
                for kinds in _KINDS
            )
        except (ValueError, AttributeError, RecursionError):
            whole = False
        if whole:
            yield line
        else:
            damaged += 1
    if damaged:
        warn(f"{damaged} damaged line{'s' if damaged > 1 else ''} of {path} left out")
