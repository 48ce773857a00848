"""A torchrun on every node, started and ended together."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from .namespaces import Process

PORT = 29500
"""Port of the rendezvous, on node 0: a testbed has its own ports, so every job may use the same one."""
GRACE_SECONDS = 20.0
"""Seconds that the other nodes have to notice by themselves that one has failed."""
TERMINATE_SECONDS = 10.0
"""Seconds that a torchrun and its ranks have to end once they are asked to."""


def torchrun_words(
    words: Sequence[str], *, node: int, nodes: int, nproc_per_node: int, address: str, options: Sequence[str]
) -> list[str]:
    """Return the command for host ``node`` of ``nodes``; ``address`` is host 0's. Later ``options`` win."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={node}"]
    start += [f"--nproc-per-node={nproc_per_node}", f"--rdzv-endpoint={address}:{PORT}"]
    return [*start, *options, *words]


def torchrun_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with every library's traffic on the node's link, and one thread a rank as in torchrun."""
    interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "eth0")
    return {"OMP_NUM_THREADS": "1", **environment, **interfaces}


class Job:
    """The processes of one torchrun on each node, in the nodes' order."""

    def __init__(self, processes: list[Process]):
        self.processes = processes

    def wait(self, timeout: float | None = None) -> list[int]:
        """Wait until every torchrun has ended; return the exit codes in the nodes' order.

        When one fails, the others have some seconds to end by themselves, and are then terminated.

        Raises:
            subprocess.TimeoutExpired: some did not end within ``timeout`` seconds; the job continues.
        """
        deadline = math.inf if timeout is None else time.perf_counter() + timeout
        given_up = math.inf
        while running := self.running():
            if given_up == math.inf and any(process.returncode for process in self.processes):
                given_up = time.perf_counter() + GRACE_SECONDS
            if not ends_by(min(deadline, given_up), running):
                if given_up > deadline:
                    raise subprocess.TimeoutExpired(running[0].args, timeout or 0.0)
                self.terminate()
        return [process.wait() for process in self.processes]

    def running(self) -> list[Process]:
        """Return the processes that have not ended."""
        return [process for process in self.processes if process.poll() is None]

    def terminate(self, number: int = signal.SIGTERM) -> None:
        """Send signal ``number`` to each torchrun, which ends its ranks; those left after some seconds are killed."""
        for process in self.running():
            process.send_signal(number)
        deadline = time.perf_counter() + TERMINATE_SECONDS
        while (running := self.running()) and ends_by(deadline, running):
            pass
        for process in running:
            process.kill_tree()
        for process in self.processes:
            process.wait()


def ends_by(deadline: float, processes: Iterable[Process]) -> bool:
    """Wait until one of ``processes`` ends; return True if it does before ``deadline`` of ``time.perf_counter``."""
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        for process in processes:
            handle = os.pidfd_open(process.pid)
            stack.callback(os.close, handle)
            poll.register(handle, select.POLLIN)
        seconds = max(0.0, deadline - time.perf_counter())
        return bool(poll.poll(None if seconds == math.inf else math.ceil(seconds * 1e3)))
