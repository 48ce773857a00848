"""Start and end of this process, which must not outlive torchrun's agent. Imports nothing that takes long.

``pipesgd.ranks`` and this module alone read the variables that torchrun sets: this one before torch is imported.
"""

from __future__ import annotations

import codecs
import ctypes
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO

EXIT_TERMINATED = 143
EXIT_UNREAD = 141
"""Exit code of a process whose output nobody has read to its end, as after ``| head``: what shells say of SIGPIPE."""

_PARENT_SECONDS = 0.5
_the_end = threading.Lock()
_parent: int | None = None


def begin() -> None:
    """Prepare a rank before anything else: importing torch takes seconds, and finding the other ranks takes more.

    Under torchrun the first rank of each machine reports that it is starting, and every rank ends when its agent does.
    Further calls do nothing.
    """
    if not under_torchrun() or _parent is not None:
        return
    _follow_parent()
    if os.environ.get("LOCAL_RANK") == "0":
        world_size = os.environ.get("WORLD_SIZE")
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        say(f"starting rank {own_rank()} of {world_size}, which meets the others at {where}")


def own_rank() -> str:
    """Return this rank's number as torchrun has set it, before the ranks have met; "0" without torchrun."""
    return os.environ.get("RANK", "0")


def is_first_of_machine() -> bool:
    """Return True on the first rank of each machine that torchrun has started ranks on, and without torchrun."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def under_torchrun() -> bool:
    """Return True if torchrun's agent has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts_left() -> int:
    """Return how often torchrun still restarts all ranks if this one ends with another exit code than 0."""
    most, done = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return max(0, most - done)


def _follow_parent() -> None:
    """End this process when its parent has died, whatever it is doing: there must be no orphans.

    A thread checks for that. A stopped process runs no threads, so the kernel is asked to wake it (Linux).
    """
    global _parent
    _parent = os.getppid()
    if _adopted_by_init():
        _parent = 0  # the parent died before this process could look; no process has this number
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGCONT)

    def look() -> None:
        while not is_orphan():
            time.sleep(_PARENT_SECONDS)
        end_if_orphan()

    threading.Thread(target=look, name="parent of this process", daemon=True).start()


def _adopted_by_init() -> bool:
    """Return True if the parent is process 1 and not Python, unlike torchrun, which must have died then."""
    try:
        return os.getppid() == 1 and Path("/proc/1/exe").readlink() != Path("/proc/self/exe").readlink()
    except PermissionError:
        return True  # it is another user's
    except OSError:
        return False  # not Linux


def is_orphan() -> bool:
    """Return True if the process that was the parent when ``begin`` was called has died."""
    return _parent is not None and os.getppid() != _parent


def end_if_orphan(within: float = 0.0) -> None:
    """End this process with a line of its own if its parent has died, or dies in the next ``within`` seconds."""
    until = time.monotonic() + within
    while not is_orphan():
        if _parent is None or time.monotonic() >= until:
            return
        time.sleep(0.01)
    if claim_the_end():
        what = f"torchrun's agent (process {_parent}) has died" if _parent else "torchrun's agent has died"
        say(f"error: rank {own_rank()}: {what}")
        os._exit(EXIT_TERMINATED)


def claim_the_end() -> bool:
    """Return True for the first caller only, which reports why this process ends and ends it."""
    return _the_end.acquire(blocking=False)


def accept_all_text() -> None:
    """Let standard output take any text: bytes of file names as they are, and what its encoding lacks as escapes."""

    def write(error: UnicodeError) -> tuple[str | bytes, int]:
        try:
            return codecs.lookup_error("surrogateescape")(error)
        except UnicodeError:
            return codecs.lookup_error("backslashreplace")(error)

    codecs.register_error("pipesgd", write)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="pipesgd")


def answer(text: str, file: IO[str] | None = None) -> int:
    """Print a text that was asked for, to standard output or ``file``, and return the exit code (``let_go``)."""
    accept_all_text()
    stream = file or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        return let_go(stream)
    return 0


def let_go(stream: IO[str]) -> int:
    """Send to nowhere what is written to a stream that nobody reads any more, and return the exit code that says so.

    It is ``EXIT_UNREAD``, but 0 under torchrun, which takes any other code of a rank for a failure: it would end all
    ranks, and report that at length.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return 0 if under_torchrun() else EXIT_UNREAD


def is_terminal(stream: IO[str]) -> bool:
    """Return True if the stream's file is a terminal that has not hung up."""
    try:
        return os.isatty(stream.fileno())
    except (OSError, ValueError):  # it has no file, or is closed
        return False


def say(line: str) -> None:
    """Write ``line`` to stderr in one piece, since other ranks write there too, and without control characters."""
    write_to_stderr("".join(char if char.isprintable() else _escaped(char) for char in line) + "\n")


def write_to_stderr(text: str) -> None:
    """Write ``text`` to stderr as it is."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # nobody is left to read it


def _escaped(char: str) -> str:
    return " " if char == "\n" else char.encode("unicode_escape").decode()


def write_error_file(text: str, trace: str, *, cause: bool) -> None:
    """Write why this rank ends to the file that torchrun has named, so that torchrun's own report says so too.

    torchrun shows only the ``trace`` of the message, if there is one. Among ranks that fail, it reports the one with
    the earliest time, in whole seconds. Unless this rank is the ``cause`` of the failure, its time is set later than
    that of the rank that is.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    seconds = int(time.time()) + (0 if cause else 10)
    message = {"message": text, "extraInfo": {"py_callstack": trace or text, "timestamp": str(seconds)}}
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError as problem:
        say(f"warning: torchrun's error file {path} could not be written: {problem}")
