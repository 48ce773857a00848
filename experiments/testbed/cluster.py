"""The emulated cluster: nodes, each with one network interface, on cables of a given rate, at one switch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from . import wiring
from .errors import InvalidInputError, TestbedFailedError
from .jobs import Job, torchrun_environment, torchrun_words
from .links import PAYLOAD_SHARE, Link
from .namespaces import Namespaces, Process
from .wiring import DELAY_LINE, MOST_NODES, NETEM, NETWORK

FOLDER = Path(__file__).resolve().parent


class Traffic(NamedTuple):
    """What has passed through a node's network interface, all headers included."""

    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What ``node`` sees of the way to the next node (the last node's next is node 0)."""

    node: int
    address: str
    rate_asked: float
    """bit/s: the lower one of the two links on the way."""
    rate: float | None
    """bit/s of payload of one TCP stream; None if too little arrived to tell."""
    latency: float
    """Seconds, one way: half of the median round trip of a small message."""
    congestion_control: str
    """That TCP uses there."""

    @property
    def rate_with_headers(self) -> float | None:
        """bit/s on the link, to compare with what was asked."""
        return None if self.rate is None else self.rate / PAYLOAD_SHARE


class Testbed:
    """``nodes`` nodes, numbered from 0, at one switch; ``slow_nodes`` have links of another rate (bit/s).

    A token bucket at both ends of each link limits what its node sends, and what all others together send to it.
    Nothing of it is on the host, and it does not outlive this process: see ``namespaces``.

    Raises:
        InvalidInputError: it cannot be made of these values, on this system, or by this user.
        TestbedFailedError: the kernel refused a link.
    """

    def __init__(self, *, nodes: int, link: Link, slow_nodes: Mapping[int, float] | None = None):
        if not 2 <= nodes <= MOST_NODES:
            raise InvalidInputError(
                f"nodes must be from 2 to {MOST_NODES}, the number of addresses of {NETWORK}.0/24; got {nodes}"
            )
        self.nodes = nodes
        self.link = link
        self.rates = [link.rate] * nodes
        """bit/s, of each node's link."""
        for node, rate in (slow_nodes or {}).items():
            self._check_node("slow-node", node)
            self.rates[node] = Link(rate=rate).rate
        self.delays_by: str | None = None
        """What makes latency and loss: "netem", a "delay line", or nothing."""
        self._processes: list[Process] = []
        self._jobs: list[Job] = []
        self._inside = Namespaces()
        try:
            self._run([*wiring.names(nodes), *wiring.switch()])
            if link.delays:
                self.delays_by = NETEM if self._has_netem() else DELAY_LINE
            if self.delays_by == DELAY_LINE:
                self._start_delay_line()
            self._run(
                command
                for node in range(nodes)
                for command in wiring.cable(node, link, self.rates[node], self.delays_by)
            )
        except BaseException:
            self.close()
            raise

    # ---- building ----

    def _run(self, commands: Iterable[str]) -> str:
        return self._inside.run("\n".join(commands))

    @staticmethod
    def address(node: int) -> str:
        """The IPv4 address of ``node``."""
        return wiring.address(node)

    def _has_netem(self) -> bool:
        try:
            self._run(["tc qdisc add dev lo root netem delay 1ms", "tc qdisc delete dev lo root"])
        except TestbedFailedError:
            return False
        return True

    def _start_delay_line(self) -> None:
        line = self._python(None, "delay_line.py", self.nodes, self.link.latency, self.link.loss)
        said = _line(line, None)
        if said != "ready":
            raise InvalidInputError(
                f"latency and loss need netem in the kernel, or TAP devices; here there is no netem, and: {said}"
            )

    def _check_node(self, name: str, node: int) -> None:
        if not 0 <= node < self.nodes:
            raise InvalidInputError(f"{name} must be from 0 to {self.nodes - 1}, the numbers of the nodes; got {node}")

    # ---- what runs on it ----

    def start(self, node: int, words: Sequence[str], **options: Any) -> Process:
        """A process on ``node``: a ``subprocess.Popen`` with these ``options``, whose signals reach the process.

        A Ctrl-C on the terminal does not reach it, and it ends with the testbed at the latest.
        """
        self._check_node("node", node)
        return self._start(node, words, **options)

    def _start(self, node: int | None, words: Sequence[str], **options: Any) -> Process:
        process = self._inside.start(node, words, **options)
        self._processes = [*(other for other in self._processes if other.poll() is None), process]
        return process

    def torchrun(
        self,
        words: Sequence[str],
        *,
        nproc_per_node: int = 1,
        torchrun_options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Job:
        """Start one torchrun on each node, as on separate hosts: ``words`` are ``["-m", "pipesgd.train", ...]``.

        ``options`` are those of ``subprocess.Popen``, the same for all nodes.
        """
        if nproc_per_node < 1:
            raise InvalidInputError(f"nproc-per-node must be at least 1; got {nproc_per_node}")
        environment = torchrun_environment(os.environ if env is None else env)
        job = Job([])
        self._jobs = [*(other for other in self._jobs if other.running()), job]
        for node in range(self.nodes):
            line = torchrun_words(
                words,
                node=node,
                nodes=self.nodes,
                nproc_per_node=nproc_per_node,
                address=self.address(0),
                options=torchrun_options,
            )
            job.processes.append(self.start(node, line, env=environment, **{"stdin": subprocess.DEVNULL, **options}))
        return job

    def _python(self, node: int | None, script: str, *arguments: object) -> Process:
        """One of our own scripts, without site-packages: it starts in a quarter of the time."""
        words = [sys.executable, "-I", "-S", str(FOLDER / script), *map(str, arguments)]
        return self._start(node, words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    # ---- what becomes of the links ----

    def measure(self) -> list[Measured]:
        """What every node sees of the way to the next: one after the other, 0.4 s each and 17 times the round trip.

        Raises:
            TestbedFailedError: a node cannot be reached.
        """
        return [self._measure(node, (node + 1) % self.nodes) for node in range(self.nodes)]

    def _measure(self, node: int, to: int) -> Measured:
        with contextlib.ExitStack() as stack:

            def probe(place: int, *arguments: object) -> Process:
                process = stack.enter_context(self._python(place, "probe.py", *arguments))
                stack.callback(process.kill)
                return process

            server = probe(to, "serve")
            client = probe(node, "ask", self.address(to), _line(server, to))
            said = json.loads(_line(client, node))
            if "error" not in said:
                said |= json.loads(_line(server, to))
        if "error" in said:
            raise TestbedFailedError(f"node {node} cannot reach node {to}: {said['error']}")
        rate_asked = min(self.rates[node], self.rates[to])
        return Measured(
            node=node,
            address=self.address(node),
            rate_asked=rate_asked,
            rate=said["rate"],
            latency=said["round_trip"] / 2,
            congestion_control=said["congestion_control"],
        )

    def set_rate(self, node: int, rate: float) -> None:
        """Let the link of ``node`` have ``rate`` bit/s from now on."""
        self._check_node("node", node)
        self.rates[node] = Link(rate=rate).rate
        self._run(wiring.limits(node, self.link, self.rates[node], self.delays_by, "change"))

    def cut(self, node: int) -> None:
        """Lose everything to and from ``node`` from now on, in silence; its network interface notices nothing."""
        self._check_node("node", node)
        self._run([f"ip link set n{node} nomaster"])

    def restore(self, node: int) -> None:
        """Mend what ``cut`` cut."""
        self._check_node("node", node)
        self._run([f"ip link set n{node} master switch"])

    def traffic(self) -> list[Traffic]:
        """What has passed through each node's link since it was made."""
        commands = (
            command
            for node in range(self.nodes)
            for command in (f"tc -n {node} -s -j qdisc show dev eth0", f"tc -s -j qdisc show dev n{node}")
        )
        # Not the counters of the interfaces: they count the headers of many packets handed over in one piece once.
        ends = [_bytes(line) for line in self._run(commands).splitlines()]
        return [Traffic(*pair) for pair in zip(ends[::2], ends[1::2], strict=True)]

    # ---- the end ----

    def close(self) -> None:
        """End everything at once."""
        self._inside.close()
        for process in self._processes:
            with process:  # its pipes too
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the jobs as torchrun ends, then everything else at once."""
        try:
            for job in self._jobs:
                job.terminate(signal.SIGINT if isinstance(value, KeyboardInterrupt) else signal.SIGTERM)
        finally:
            self.close()


def _line(script: Process, node: int | None) -> str:
    """The next line that our ``script`` prints; raises ``TestbedFailedError`` if it ends without one."""
    assert script.stdout is not None
    line: str = script.stdout.readline()
    if not line:
        place = "at the switch" if node is None else f"on node {node}"
        raise TestbedFailedError(
            f"a script of the testbed {place} ended with exit code {script.wait()}, without a word"
        )
    return line.strip()


def _bytes(line: str) -> int:
    """What the token bucket has let through, of what ``tc`` says about an interface."""
    return next(int(entry["bytes"]) for entry in json.loads(line) if entry["kind"] == "tbf")
