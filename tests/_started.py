"""Commands that a test starts, watches and ends: launchers in sessions of their own, with their ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from pathlib import Path

from _ranks import start_module
from _waiting import wait_until


class Started:
    """A launcher, which need not import torch again, with its ranks, which do; what it prints is read as it comes."""

    def __init__(self, folder: Path, module: str, *words: str):
        self.lines: list[str] = []
        self._grown = threading.Condition()
        self._ended = False
        printed = Path(tempfile.mkdtemp(dir=folder))
        os.mkfifo(printed / "stdout")
        (printed / "stderr").hardlink_to(printed / "stdout")
        self._reader = threading.Thread(target=self._read, args=(printed / "stdout",), daemon=True)
        self._reader.start()
        self.process = start_module(module, *words, folder=folder, printed=printed)

    def _read(self, pipe: Path) -> None:
        with pipe.open(encoding="utf-8") as file:
            for line in file:
                with self._grown:
                    self.lines.append(line.rstrip())
                    self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    def wait_for(self, text: str, timeout: float = 60.0) -> str:
        """Wait for a line that contains ``text`` and return the first one."""

        def found() -> str | None:
            return next((line for line in self.lines if text in line), None)

        with self._grown:
            assert self._grown.wait_for(lambda: found() or self._ended, timeout), self.lines
        line = found()
        assert line is not None, self.lines
        return line

    @property
    def pid(self) -> int:
        """Return the number of the launcher's process."""
        assert self.process.pid is not None
        return self.process.pid

    def rank_pids(self) -> dict[int, int]:
        """Return the process of every rank: the children of the launcher that have a RANK."""
        found = {}
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
                found.update({rank: int(pid) for rank in ranks})
        return found

    def finish(self, timeout: float = 60.0) -> int:
        """Wait for the end and return the exit code; ``lines`` then has all that was printed."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, self.lines
        self._reader.join(10)
        return self.process.exitcode

    def end(self) -> None:
        """Kill the launcher and its ranks, if they are still there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its own session: only the launcher and the ranks
        self.process.join(10)
        self._reader.join(10)


def gone(pid: int) -> bool:
    """Return True if the process has ended; a zombie, which nobody has waited for yet, has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids: list[int]) -> None:
    """Wait until all these processes have ended."""
    wait_until(lambda: all(map(gone, pids)), 30)
