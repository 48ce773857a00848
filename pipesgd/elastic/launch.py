"""Start of the ranks of one machine of an elastic run, whose ranks are not ended when one of them is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from pipesgd.errors import UserInputError, named
from pipesgd.exit import EXIT_TRY_AGAIN
from pipesgd.process import say, signal_name, variables_of_rank

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the ranks get, too; but not SIGHUP under nohup, which ignores it."""
LEFT_SECONDS = 60.0
"""Seconds after the newest end of a rank for which nothing is done about one that is stopped, and was left behind."""


def launch_elastic(
    program: str, words: Sequence[str], *, ranks: int, machine: int, machines: int, host: str, port: int | None
) -> int:
    """Start this machine's ``ranks``, wait for the end of all of them, and return an exit code.

    It is 0 if a rank has done its work, and else that of the rank that ended last by itself.

    Args:
        program: path of the program.
        words: its arguments.
        ranks: number of ranks on each machine.
        machine: number of this machine, from 0.
        machines: number of machines.
        host: address of machine 0.
        port: port at which ranks meet there; None if this is the only machine.

    Raises:
        UserInputError: the program cannot be started.
    """
    first = machine * ranks
    port = _free_port(host) if port is None else port
    started: dict[int, subprocess.Popen[bytes]] = {}
    early: list[int] = []
    killed: set[int] = set()

    def forward(number: int, frame: FrameType | None) -> None:
        if len(started) < ranks:
            early.append(number)
            return
        for process in started.values():
            if process.returncode is None:  # not send_signal, which would wait for one that has just ended
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def look_for_stopped(code: int) -> None:
        """See to ranks that are stopped some time after one has ended with ``code``."""
        left = {rank: process for rank, process in started.items() if process.returncode is None}
        stopped = {rank: process for rank, process in left.items() if _is_stopped(process.pid)}
        if code not in (0, EXIT_TRY_AGAIN) and code <= 128:  # a loss: the others continue, or somebody has stopped all
            if stopped and len(stopped) == len(left):
                say(f"all that is left on this machine is stopped ({named(list(stopped))}): continue or kill it")
            return
        for rank, process in stopped.items():
            killed.add(rank)
            say(f"rank {rank} is stopped {LEFT_SECONDS:g} s after another one had ended: it is killed")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heard = [number for number in FORWARDED if number != signal.SIGHUP or not under_nohup]
    before = {number: signal.signal(number, forward) for number in heard}
    codes: dict[int, int] = {}
    end = threading.Timer(LEFT_SECONDS, look_for_stopped)
    try:
        for local in range(ranks):
            own = variables_of_rank(
                first + local, machines * ranks, local_rank=local, local_world_size=ranks, host=host, port=port
            )
            try:
                started[first + local] = subprocess.Popen([program, *words], env=os.environ | own)
            except OSError as problem:
                raise UserInputError(f"program must be one that runs; got {program}: {problem.strerror}") from None
        for number in early:
            forward(number, None)
        of_process = {process.pid: rank for rank, process in started.items()}
        last = 0
        while of_process:
            pid, status = os.wait()
            if (rank := of_process.pop(pid, None)) is None:
                continue
            code = codes[rank] = started[rank].returncode = os.waitstatus_to_exitcode(status)
            last = last if rank in killed else code
            end.cancel()
            end = threading.Timer(LEFT_SECONDS, look_for_stopped, [code])
            end.daemon = True
            end.start()
            if code < 0:
                say(f"the process of rank {rank} was ended by {signal_name(-code)}")
    except BaseException:
        for process in started.values():
            if process.returncode is None:
                process.kill()
        raise
    finally:
        end.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if 0 in codes.values() else last if last > 0 else 128 - last


def _is_stopped(pid: int) -> bool:
    """Return True if Linux says that this process is stopped, as by SIGSTOP: it would never end by itself."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _free_port(host: str) -> int:
    """Return a port at which nothing listens now."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port
