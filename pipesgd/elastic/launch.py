"""Start of the ranks of one machine of an elastic run, whose ranks are not ended when one of them is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from types import FrameType

from pipesgd.process import say, signal_name, variables_of_rank

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that the ranks get, too."""


def launch_elastic(
    program: str, words: Sequence[str], *, ranks: int, machine: int, machines: int, host: str, port: int | None
) -> int:
    """Start this machine's ``ranks``, wait for the end of all of them, and return an exit code.

    It is 0 if a rank has done its work, and else that of the rank that ended last.

    Args:
        program: path of the program.
        words: its arguments.
        ranks: number of ranks on each machine.
        machine: number of this machine, from 0.
        machines: number of machines.
        host: address of machine 0.
        port: port at which ranks meet there; None if this is the only machine.
    """
    first = machine * ranks
    port = _free_port(host) if port is None else port
    started: dict[int, subprocess.Popen[bytes]] = {}
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if len(started) < ranks:
            early.append(number)
            return
        for process in started.values():
            if process.returncode is None:  # not send_signal, which would wait for one that has just ended
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    codes: dict[int, int] = {}
    try:
        for local in range(ranks):
            own = variables_of_rank(
                first + local, machines * ranks, local_rank=local, local_world_size=ranks, host=host, port=port
            )
            started[first + local] = subprocess.Popen([program, *words], env=os.environ | own)
        for number in early:
            forward(number, None)
        of_process = {process.pid: rank for rank, process in started.items()}
        last = 0
        while of_process:
            pid, status = os.wait()
            if (rank := of_process.pop(pid, None)) is None:
                continue
            last = codes[rank] = os.waitstatus_to_exitcode(status)
            started[rank].returncode = last
            if last < 0:
                say(f"the process of rank {rank} was ended by {signal_name(-last)}")
    except BaseException:
        for process in started.values():
            if process.returncode is None:
                process.kill()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if 0 in codes.values() else last if last > 0 else 128 - last


def _free_port(host: str) -> int:
    """Return a port at which nothing listens now."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port
