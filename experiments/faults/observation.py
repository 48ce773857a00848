"""Lines, ends and losses of a run that a fault has hit, as they were observed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The outcome of a fault. Seconds count from the fault."""

    lines: list[list[float | str]]
    """Seconds and text of every line that was printed."""
    ended: float | None
    """Seconds until the last process had ended; None if some had to be killed."""
    went_on: bool
    """True if the run made progress after the fault."""
    orphans: int
    """Number of processes that were left, and then killed."""
    iterations_lost: int | None
    """Iterations done, but in no checkpoint; None if there is no checkpoint."""
    files_lost: list[str]
    """Checkpoint files that were whole before, but whose content is nowhere below the folder now."""
    deadline: float
    """``--timeout`` of the run, in seconds."""
    problem: str = ""
    """Reason why the fault could not be injected; empty if it could."""

    def after(self) -> Iterator[tuple[float, str]]:
        """Yield the lines from the fault on."""
        for seconds, text in self.lines:
            if float(seconds) >= 0.0:
                yield float(seconds), str(text)
