"""A tree of processes with network, process and mount namespaces of its own, which cannot outlive its maker.

A tiny process, the holder, is the first process of a new PID namespace, in a new network namespace (the
*switch*); the nodes are further network namespaces, which ``ip netns`` names in a ``/run`` that only this tree
sees. Nothing of the tree exists on the host. If the thread that made it ends, even by ``kill -9``, the kernel
kills ``unshare`` (``PR_SET_PDEATHSIG``), and with it the holder (``--kill-child``) and everything in its PID
namespace; the interfaces vanish with the namespaces that held them. So there are no leftovers that the next start
would have to look for. (The signal is bound to the *thread*: make a tree in a thread that lives as long as the tree.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import InvalidInputError, TestbedFailedError

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "util-linux",
}
"""Tools that are needed, and the packages that have them."""

CLONE_NEWNET = 0x40000000
"""Kind of namespace, as in <sched.h>."""
START_SECONDS = 10.0
"""Seconds to wait for a namespace, which takes milliseconds to make even on a busy machine."""

# The shell that waits for "sleep" waits for every orphan inside, too, so that none stays a zombie.
HOLDER = """
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/run && mkdir -p /var/run/netns && ip link set lo up || exit 1
echo ready
sleep infinity & wait
"""


class Process(subprocess.Popen[Any]):
    """A process in the namespaces. Signals go to it, not to the ``nsenter`` that waits for it and ends as it does."""

    def __init__(self, words: Sequence[str], **options: Any):
        super().__init__(words, **options)
        # A signal can only be sent once the process inside exists.
        deadline = time.perf_counter() + START_SECONDS
        while not children(self.pid) and self.poll() is None and time.perf_counter() < deadline:
            time.sleep(0.0005)

    def send_signal(self, sig: int) -> None:
        """Send ``sig`` to the process inside, if it has not ended."""
        if self.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            for child in children(self.pid):
                os.kill(child, sig)
            if sig in (signal.SIGKILL, signal.SIGCONT):
                os.kill(self.pid, signal.SIGCONT)  # nsenter stops when the process inside is stopped

    def kill_tree(self) -> None:
        """End the process inside and everything that it started, at once."""
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process starts no others while we look
            for pid in descendants(self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if self.poll() is None:
            os.kill(self.pid, signal.SIGCONT)


def join_network(path: str) -> None:
    """Move this thread, and what it starts from now on, into the network namespace at ``path``; needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(path).open("rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{path} cannot be entered")


def children(pid: int) -> list[int]:
    """Return the processes that process ``pid`` started and that have not been waited for."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            found += map(int, tasks.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the children of process ``pid``, their children, and so on."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


class Namespaces:
    """The tree of processes and namespaces; ``close`` ends it.

    Raises:
        InvalidInputError: this system, or this user, cannot have namespaces, or tools are missing.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise InvalidInputError(
                f"the testbed must run on Linux, since it is made of namespaces; got {sys.platform}"
            )
        self._tools = find_tools()
        failures = []
        for user in ([], ["--user", "--map-root-user"]) if os.geteuid() == 0 else (["--user", "--map-root-user"],):
            try:
                self._holder = self._hold(user)
            except OSError as failure:
                failures.append(str(failure))
            else:
                break
        else:
            raise InvalidInputError(
                "the testbed must be run by root or where users may make namespaces of their own; "
                f"here they cannot be made: {'; '.join(dict.fromkeys(failures))}"
            )
        own = ["--user", "--preserve-credentials"] if user else []
        self._first = children(self._holder.pid)[0]
        self._enter = [self._tools["nsenter"], "--target", str(self._first), *own, "--mount", "--net", "--pid", "--"]

    def _hold(self, user: Sequence[str]) -> subprocess.Popen[str]:
        """Start the holder. Raises ``OSError`` with the message of ``unshare`` or the holder if it does not come up."""
        words = [self._tools["setpriv"], "--pdeathsig", "KILL", self._tools["unshare"], *user, "--net", "--pid"]
        words += ["--mount", "--mount-proc", "--fork", "--kill-child=SIGKILL", "sh", "-c", HOLDER]
        # In its own session, so that a Ctrl-C does not reach it. Its outputs are pipes that only we hold.
        holder = subprocess.Popen(
            words,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert holder.stdout is not None
        if holder.stdout.readline() == "ready\n":
            return holder
        _, said = holder.communicate()
        raise OSError(" ".join(said.split()) or f"unshare ended with exit code {holder.returncode}")

    @property
    def environment(self) -> dict[str, str]:
        """Environment of this process, plus the folders in which an ordinary user's shell does not look for ``tc``."""
        return {**os.environ, "PATH": search_path()}

    def start(self, node: int | None, words: Sequence[str], **options: Any) -> Process:
        """Start a process on ``node``, or at the switch if that is None; ``options`` are those of ``Popen``.

        The process dies with the ``nsenter`` that waits for it. A Ctrl-C on the terminal does not reach it.
        """
        folder = Path(options.pop("cwd", None) or ".").resolve()  # entering a mount namespace leads to its root
        where = [] if node is None else [self._tools["ip"], "netns", "exec", str(node)]
        inside = [self._tools["setpriv"], "--pdeathsig", "KILL", "sh", "-c", 'cd -- "$0" && exec "$@"', str(folder)]
        return Process([*self._enter, *where, *inside, *words], start_new_session=True, **options)

    def run(self, script: str) -> str:
        """Run the shell ``script`` at the switch, and return what it prints.

        Raises:
            TestbedFailedError: the script failed; the message holds what it wrote to stderr.
        """
        words = [*self._enter, "sh", "-e"]
        done = subprocess.run(words, input=script, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise TestbedFailedError(f"the testbed's links cannot be set: {' '.join(done.stderr.split())}")
        return done.stdout

    def close(self) -> None:
        """End everything inside, at once; nothing of it is left when this returns."""
        if self._holder.poll() is None:
            # The first process inside ends when all others have ended, and unshare ends after it.
            os.kill(self._first, signal.SIGKILL)
            self._holder.communicate()


def search_path() -> str:
    """Return the folders where tools are looked for, joined as in PATH."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def find_tools() -> dict[str, str]:
    """Return the path of each of ``TOOLS``. Raises ``InvalidInputError`` naming those that are missing."""
    paths = {tool: shutil.which(tool, path=search_path()) for tool in TOOLS}
    missing = [tool for tool, path in paths.items() if path is None]
    if missing:
        packages = " and ".join(dict.fromkeys(TOOLS[tool] for tool in missing))
        raise InvalidInputError(
            f"the testbed needs the tools {', '.join(TOOLS)}; missing: {', '.join(missing)} ({packages})"
        )
    return {tool: path for tool, path in paths.items() if path is not None}
