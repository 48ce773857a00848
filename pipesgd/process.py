"""This process: the agent that it must not outlive, and its last line. Imports nothing that takes long."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

EXIT_TERMINATED = 143

_PARENT_SECONDS = 0.5
_the_end = threading.Lock()
_parent: int | None = None


def begin() -> None:
    """What a rank does before anything else: it takes seconds to import torch, and more to find the other ranks.

    Under torchrun the first rank of each machine says that it is there, and every rank ends when its agent does.
    Further calls do nothing.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _parent is not None:
        return
    _follow_parent()
    if os.environ.get("LOCAL_RANK") == "0":
        rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        say(f"starting rank {rank} of {world_size}, which meets the others at {where}")


def _follow_parent() -> None:
    """End this process when its parent has died, whatever it does then: there must be no orphans.

    A thread looks for that. A stopped process runs no threads, so the kernel is asked to wake it (Linux).
    """
    global _parent
    _parent = os.getppid()
    if _adopted_by_init():
        _parent = 0  # it died before this process could look: nobody's number
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGCONT)

    def look() -> None:
        while not is_orphan():
            time.sleep(_PARENT_SECONDS)
        end_if_orphan()

    threading.Thread(target=look, name="parent of this process", daemon=True).start()


def _adopted_by_init() -> bool:
    """True if the parent is the system's first process, and that is no Python, as torchrun is: torchrun has died."""
    try:
        return os.getppid() == 1 and Path("/proc/1/exe").readlink() != Path("/proc/self/exe").readlink()
    except PermissionError:
        return True  # it is another user's
    except OSError:
        return False  # not Linux


def is_orphan() -> bool:
    """True if the parent has died that ``begin`` was called under."""
    return _parent is not None and os.getppid() != _parent


def end_if_orphan(within: float = 0.0) -> None:
    """End this process with a line of its own if its parent has died, or dies within so many seconds."""
    until = time.monotonic() + within
    while not is_orphan():
        if _parent is None or time.monotonic() >= until:
            return
        time.sleep(0.01)
    if claim_the_end():
        rank = os.environ.get("RANK", "0")
        what = f"torchrun's agent (process {_parent}) has died" if _parent else "torchrun's agent has died"
        say(f"error: rank {rank}: {what}")
        os._exit(EXIT_TERMINATED)


def claim_the_end() -> bool:
    """True for the first caller alone, who says why this process ends and ends it."""
    return _the_end.acquire(blocking=False)


def say(line: str) -> None:
    """Write ``line`` to stderr in one piece, since other ranks write to the same screen, and without what steers it."""
    shown = "".join(char if char.isprintable() else _escaped(char) for char in line)
    try:
        sys.stderr.write(shown + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # nobody is left to read it


def _escaped(char: str) -> str:
    return " " if char == "\n" else char.encode("unicode_escape").decode()


def write_error_file(text: str, trace: str, *, cause: bool) -> None:
    """Tell torchrun why this rank ends, in the file that it has named, so that its own report says so too.

    Of the message it shows the ``trace`` alone, if there is one. Of all ranks that fail torchrun reports the one with
    the earliest time, in whole seconds. Unless this rank is the ``cause`` of the failure, its time is set behind that
    of the one that is.
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
