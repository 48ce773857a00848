"""Runs of ``pipesgd.train`` whose ranks are forked from this process and killed at a chosen place; Linux only.

A rank that torchrun starts spends seconds on imports; a forked one trains at once. This process does for the ranks
what torchrun's agent does: it ends the others when one has failed, and starts all of them again. The store runs in a
separate process: forks of the process that serves it would share its sockets, and now and then a rank waited forever
for the answer to its first request.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipesgd.exit import run_and_exit
from pipesgd.run.checkpoint import Checkpoints

train: Any = importlib.import_module("pipesgd.train")
training: Any = importlib.import_module("pipesgd.training")

TRAINING = "training"
PHASES: dict[str, tuple[Any, str]] = {
    TRAINING: (training, "forward_backward"),
    "checkpoint": (Checkpoints, "save"),
    "resume": (Checkpoints, "load_newest"),
    "evaluation": (training, "evaluate"),
}
"""Phases in which a rank can be killed, with the function called; a kill in training may also hit what follows it."""
IMPORTED_LATE = ("torch._dynamo", "torch.utils.tensorboard", "typeguard")
DURATIONS_FILE = "durations.json"
DEADLINE_SECONDS = 120.0
"""Seconds after which an attempt counts as hung."""
POLL_SECONDS = 0.005
SURVIVORS_END_WITH = (0, 1, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes that a rank may have after another one was killed, apart from the signal that it gets itself."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The kill of a rank during a phase."""

    phase: str
    rank: int
    call: int
    """Number of the call, from 0."""
    seconds: float
    """Seconds from the start of the call to the kill, which comes at the call's end if that is earlier."""
    all_ranks: bool
    """True if all ranks are killed as soon as this one is, as when a machine loses power; else they get SIGTERM."""


def arm(kill: Kill) -> None:
    """Arrange for this process to be killed as ``kill`` says.

    The kernel's timer kills it: nothing in this process handles SIGALRM, so it ends as abruptly as by SIGKILL.
    """

    def before(call: int) -> None:
        if call == kill.call:
            signal.setitimer(signal.ITIMER_REAL, max(kill.seconds, 1e-6))

    def after(call: int) -> None:
        if call == kill.call and kill.phase != TRAINING:
            os.kill(os.getpid(), signal.SIGKILL)

    _surround(kill.phase, before, after)


def record() -> dict[str, list[float]]:
    """Record the seconds of every call from now on; return the lists that they are added to, by phase."""
    durations: dict[str, list[float]] = {phase: [] for phase in PHASES}
    begins: dict[str, float] = {}

    def surround(phase: str) -> None:
        def before(call: int) -> None:
            begins[phase] = time.perf_counter()

        def after(call: int) -> None:
            durations[phase].append(time.perf_counter() - begins[phase])

        _surround(phase, before, after)

    for phase in PHASES:
        surround(phase)
    return durations


def _surround(phase: str, before: Callable[[int], None], after: Callable[[int], None]) -> None:
    owner, name = PHASES[phase]
    function, calls = getattr(owner, name), itertools.count()

    def surrounded(*arguments: Any, **named: Any) -> Any:
        call = next(calls)
        before(call)
        result = function(*arguments, **named)
        after(call)
        return result

    setattr(owner, name, surrounded)


def import_all() -> None:
    """Import here what every rank would otherwise import for itself while it runs."""
    for name in IMPORTED_LATE:
        importlib.import_module(name)


def run(
    words: str,
    world_size: int | Sequence[int],
    folder: Path,
    kills: Sequence[Kill],
    *,
    deadline: float = DEADLINE_SECONDS,
) -> int | None:
    """Run ``words``, with a restart after each kill; output goes to ``folder/log``, files to ``folder/run``.

    ``world_size`` may be one for each attempt, of which there is one more than kills. An attempt that takes longer than
    ``deadline`` seconds counts as hung.

    Returns the number of kills that hit, or None if the run failed or hung otherwise.
    """
    sizes = [world_size] * (len(kills) + 1) if isinstance(world_size, int) else world_size
    with store() as port:
        return _attempts(words, sizes, folder, kills, port, deadline)


def _attempts(
    words: str, sizes: Sequence[int], folder: Path, kills: Sequence[Kill], port: int, deadline: float
) -> int | None:
    for attempt, (world_size, kill) in enumerate(zip(sizes, [*kills, None], strict=True)):
        pids = [_fork(words, rank, world_size, folder, port, attempt, kill) for rank in range(world_size)]
        number = signal.SIGKILL if kill is not None and kill.all_ranks else signal.SIGTERM
        codes, first, late = _wait(pids, number, deadline)
        if late:
            return None
        if all(code == 0 for code in codes):
            return attempt
        if kill is None or kill.rank not in first or codes[kill.rank] not in (-signal.SIGALRM, -signal.SIGKILL):
            return None
        survivors = [code for rank, code in enumerate(codes) if rank != kill.rank]
        if not set(survivors) <= {*SURVIVORS_END_WITH, -number}:
            return None
    raise AssertionError("the last attempt has no kill")


@contextlib.contextmanager
def store() -> Iterator[int]:
    """Yield the port of a store in a separate process, which ends with the context or with this process."""
    here, there = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            here.close()
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            there.sendall(store.port.to_bytes(2))
            there.recv(1)
        finally:
            os._exit(0)
    there.close()
    with here:
        yield int.from_bytes(here.recv(2))
    os.waitpid(pid, 0)


def _fork(words: str, rank: int, world_size: int, folder: Path, port: int, attempt: int, kill: Kill | None) -> int:
    def train_here() -> object:
        durations = record()
        if kill is not None and kill.rank == rank:
            arm(kill)
        code = trained(words, folder)
        if rank == 0:
            (folder / DURATIONS_FILE).write_text(json.dumps(durations), encoding="utf-8")
        return code

    return fork_rank(train_here, rank, world_size, folder, port, attempt)


def fork_rank(do: Callable[[], object], rank: int, world_size: int, folder: Path, port: int, attempt: int = 0) -> int:
    """Fork a process that calls ``do`` as a rank of a job, with one thread, and return its id.

    Its output goes to ``folder/log``, where an exception is printed. It ends with the code that ``do`` returns, or
    with 1 if that is none.
    """
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        sys.stdout = sys.stderr = log = (folder / "log").open("a", buffering=1, encoding="utf-8")
        for stream in (1, 2):  # so output that Python does not write goes there, too
            os.dup2(log.fileno(), stream)
        os.environ.update(rank_environment(rank, world_size, port, attempt))
        torch.set_num_threads(1)
        try:
            code = do()
        except BaseException:  # noqa: BLE001 (the process ends, and says why)
            traceback.print_exc()
    finally:
        os._exit(code if isinstance(code, int) else 1)  # skips the parent's clean-up


def trained(words: str, folder: Path) -> object:
    """Run ``pipesgd.train`` with ``words``, whose files go to ``folder/run``, and return its exit code."""
    try:
        run_and_exit(train.train, [*words.split(), "--output", str(folder / "run")])
    except SystemExit as end:
        return end.code


def rank_environment(rank: int, world_size: int, port: int, attempt: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


def _wait(pids: Sequence[int], number: signal.Signals, seconds: float) -> tuple[list[int], set[int], bool]:
    """Wait until all ranks have ended; when one has failed, the others get ``number``, and SIGKILL at the deadline.

    Returns the ranks' exit codes, the ranks that had failed before any got a signal, and whether the deadline passed.
    """
    codes: dict[int, int] = {}
    first: set[int] = set()
    deadline, late = time.monotonic() + seconds, False
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        running = [pid for rank, pid in enumerate(pids) if rank not in codes]
        late = late or (bool(running) and time.monotonic() > deadline)
        failed = {rank for rank, code in codes.items() if code}
        if late or (failed and not first):
            for pid in running:
                os.kill(pid, signal.SIGKILL if late else number)
            first = first or failed
        time.sleep(POLL_SECONDS)
    return [codes[rank] for rank in range(len(pids))], first, late
