"""Start and end of this process, which must not outlive torchrun's agent. Imports nothing that takes long.

``pipesgd.ranks`` and this module alone read the variables that torchrun sets: this one before torch is imported.
"""

from __future__ import annotations

import codecs
import ctypes
import io
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, NamedTuple

EXIT_TERMINATED = 143
EXIT_UNREAD = 141
"""Exit code of a process whose output nobody has read to its end, as after ``| head``: what shells say of SIGPIPE."""

OWN_LAUNCHER = "PIPESGD_LAUNCHED"
"""Variable of processes that pipesgd.launch --elastic has started, without torchrun's agent."""
QUIET = "PIPESGD_QUIET"
"""Variable that silences the lines of doors and loops, if it is set and not empty."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets all or none; those that follow from them have a default."""

_LARGEST = 2**31 - 1
_PARENT_SECONDS = 0.5
_the_end = threading.Lock()
_parent: int | None = None


def begin() -> None:
    """Prepare a rank before anything else: importing torch takes seconds, and finding the other ranks takes more.

    Under torchrun the first rank of each machine reports that it is starting, and every rank ends when its agent does.
    Further calls do nothing.
    """
    if follow_launcher() and os.environ.get("LOCAL_RANK") == "0":
        world_size = os.environ.get("WORLD_SIZE")
        where = at_port(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
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


def at_port(host: str, port: int | str) -> str:
    """Return a place in the network as it is usually written.

    >>> at_port("10.0.0.1", 29500), at_port("fd00::1", 29500)
    ('10.0.0.1:29500', '[fd00::1]:29500')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Launched(NamedTuple):
    """Place of this process in a job, as its launcher has set it."""

    rank: int
    world_size: int
    host: str
    """Name or address of the machine that holds the store."""
    port: int
    restarts: int
    """Number of times that torchrun has restarted the job."""


def launched() -> Launched:
    """Return what the launcher's variables say of this process, all of which are read here.

    Raises:
        ValueError: one of them is missing, is no number, or contradicts another.
    """
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        given = ", ".join(name for name in LAUNCHER_VARIABLES if name in os.environ)
        raise ValueError(f"torchrun's variables must be set all or none; got {given} without {', '.join(missing)}")
    world_size = _number("WORLD_SIZE", 1, _LARGEST)
    host = os.environ["MASTER_ADDR"].strip()
    if not host:
        raise ValueError("MASTER_ADDR must be the name or the address of rank 0's machine; got ''")
    local_rank()
    _number("TORCHELASTIC_MAX_RESTARTS", 0, _LARGEST, "0")
    return Launched(
        rank=_number("RANK", 0, world_size - 1, why=f" (WORLD_SIZE is {world_size})"),
        world_size=world_size,
        host=host,
        port=_number("MASTER_PORT", 0 if world_size == 1 else 1, 65535),
        restarts=_number("TORCHELASTIC_RESTART_COUNT", 0, _LARGEST, "0"),
    )


def launched_ranks() -> int:
    """Return the number of ranks that a launcher says it has started, 1 without one."""
    return _number("WORLD_SIZE", 1, _LARGEST, "1")


def variables_of_first(world_size: int) -> dict[str, str]:
    """Return what torchrun would set for rank 0 of this many ranks on machines of their own."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
        **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "plan",
    }


def variables_of_rank(
    rank: int, world_size: int, *, local_rank: int, local_world_size: int, host: str, port: int
) -> dict[str, str]:
    """Return what a launcher sets for a rank, as torchrun does, but for torchrun's own affairs."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        OWN_LAUNCHER: "1",
    }


def ends_by_exception() -> bool:
    """Return True at the end of a program that an exception has ended; an interactive session has seen many."""
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")


def signal_name(number: int) -> str:
    """Return the name of a signal; that of a real-time signal without one is its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def local_rank() -> int:
    """Return this rank's number among those on its machine, 0 if it is not set; ``ValueError`` if it cannot be."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return _number("LOCAL_RANK", 0, _LARGEST, "0")
    size = local_world_size()
    return _number("LOCAL_RANK", 0, size - 1, "0", why=f" (LOCAL_WORLD_SIZE is {size})")


def local_world_size() -> int:
    """Return the number of ranks on this machine, 1 if it is not set; ``ValueError`` if it cannot be."""
    return _number("LOCAL_WORLD_SIZE", 1, _LARGEST, "1")


def _number(name: str, least: int, most: int, otherwise: str = "", *, why: str = "") -> int:
    text = os.environ.get(name, otherwise)
    if not re.fullmatch(r"\s*[0-9]{1,10}\s*", text, re.ASCII) or not least <= int(text) <= most:
        must = f"a whole number from {least} to {most}" if least < most else str(least)
        raise ValueError(f"{name} must be {must}{why}; got {text!r}")
    return int(text)


def agent_holds_store() -> bool:
    """Return True if torchrun's agent holds the store in which ranks meet, and rank 0 need not."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def speaks_for_machine() -> bool:
    """Return True if this rank reports what concerns its whole machine: the first one there, as far as is known."""
    return os.environ.get("LOCAL_RANK", own_rank()) == "0"


def restarts_left() -> int:
    """Return how often torchrun still restarts all ranks if this one ends with another exit code than 0."""
    most, done = (_number(f"TORCHELASTIC_{name}", 0, _LARGEST, "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return max(0, most - done)


def follow_launcher() -> bool:
    """End this process when the launcher that started it has died, whatever it is doing: there must be no orphans.

    A thread checks for that. A stopped process runs no threads, so the kernel is asked to wake it (Linux). Return False
    if there is no launcher, or an earlier call has seen to that.
    """
    global _parent
    if _parent is not None or not (under_torchrun() or OWN_LAUNCHER in os.environ):
        return False
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
    return True


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
        who = "torchrun's agent" if under_torchrun() else "the launcher"
        what = f"{who} (process {_parent}) has died" if _parent else f"{who} has died"
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
