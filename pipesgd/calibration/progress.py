"""Progress of a calibration, and the time that it still takes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipesgd.run.console import say

LINE_SECONDS = 5.0
"""Seconds between two lines where output is no terminal."""
BAR_SECONDS = 0.5
"""Seconds between two redraws of the bar on a terminal, between measurements: no thread draws during one."""


class Phases:
    """A bar, or lines in a log, over phases, each with its planned seconds."""

    def __init__(self, console: Console, planned: Mapping[str, float]):
        self._console = console
        self._planned = dict(planned)
        self._left = dict(planned)
        self._spoke = time.perf_counter()
        self._progress = Progress(
            TextColumn("calibrating"),
            BarColumn(),
            TextColumn("{task.fields[what]}"),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=sum(planned.values()), what="")

    def __enter__(self) -> Phases:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, phase: str, share: float) -> None:
        """Report that this share of ``phase`` is done, and all phases before it."""
        for name in self._planned:
            if name == phase:
                break
            self._left[name] = 0.0
        self._left[phase] = self._planned[phase] * (1 - share)
        now = time.perf_counter()
        terminal = self._console.is_terminal
        if now - self._spoke < (BAR_SECONDS if terminal else LINE_SECONDS):
            return
        self._spoke = now
        left = sum(self._left.values())
        text = f"{phase}, about {left:.0f} s left"
        self._progress.update(self._task, completed=sum(self._planned.values()) - left, what=text, refresh=True)
        if not terminal:
            say(self._console, f"calibrating: {text}")
