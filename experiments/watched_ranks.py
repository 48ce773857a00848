"""Forked ranks of a run that are watched: when each process ends, as the kernel tells it, and what they print."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

LOOK_SECONDS = 0.02


class WatchedRanks:
    """Ranks 0 to ``world_size`` - 1, whose output goes to ``folder/log``; none is left at the end of the context.

    Args:
        fork: function that forks the process of a rank and returns its id.
    """

    def __init__(self, folder: Path, world_size: int, fork: Callable[[int], int]):
        self.pids: dict[int, int] = {}
        """Processes that have not ended, by rank."""
        self.codes: dict[int, int] = {}
        """Exit code of each rank that has ended, negative for a signal."""
        self.ends: dict[int, float] = {}
        """Time at which it had ended, in seconds of ``time.monotonic``."""
        self.lines: list[tuple[float, str]] = []
        """Lines that the ranks have printed since then, and when they were read."""
        self._text = b""
        self._log = (folder / "log").open("a+b", buffering=0)
        self._ranks: dict[int, int] = {}
        self._poll = select.poll()
        try:
            for rank in range(world_size):
                self.pids[rank] = fork(rank)
                fd = os.pidfd_open(self.pids[rank])
                self._ranks[fd] = rank
                self._poll.register(fd, select.POLLIN)
        except BaseException:
            self.close()
            raise

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, if its process has not ended."""
        if rank in self.pids:
            os.kill(self.pids[rank], number)

    def look(self, seconds: float = LOOK_SECONDS) -> None:
        """Note ends of processes, for which it waits some seconds at most, and lines."""
        for fd, _ in self._poll.poll(seconds * 1000):
            rank = self._ranks.pop(fd)
            self.ends[rank] = time.monotonic()
            self._poll.unregister(fd)
            os.close(fd)
            _, status = os.waitpid(self.pids.pop(rank), 0)
            self.codes[rank] = os.waitstatus_to_exitcode(status)
        *whole, self._text = (self._text + self._log.read()).split(b"\n")
        self.lines += [(time.monotonic(), line.decode(errors="replace")) for line in whole]

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Return True once ``until`` returns True, and False if it has not after this many seconds."""
        self.look(0.0)
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() >= end:
                return False
            self.look()
        return True

    def wait_for_all(self, seconds: float) -> bool:
        """Return True once all processes have ended, and False if they have not after this many seconds."""
        return self.wait(lambda: not self.pids, seconds)

    def said(self, text: str) -> float | None:
        """Return the time at which the first line with this text came; None if there is none."""
        return next((when for when, line in self.lines if text in line), None)

    def close(self) -> None:
        """Kill the ranks that are left."""
        for rank in [*self.pids]:
            self.signal(rank, signal.SIGKILL)
        while self._ranks:
            self.look()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
