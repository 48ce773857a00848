"""The emulated cluster: nodes, each with one NIC, on cables of a given rate, at one switch."""

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
from .namespaces import Namespaces, Process, children
from .wiring import DELAY_LINE, MOST_NODES, NETEM, NETWORK

FOLDER = Path(__file__).resolve().parent


class Traffic(NamedTuple):
    """Bytes that have passed through a node's NIC, all headers included."""

    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The path from ``node`` to the next node, as measured there (the last node's next is node 0)."""

    node: int
    address: str
    rate_asked: float
    """Rate asked for in bit/s: the lower one of the two links on the path."""
    rate: float | None
    """Rate of one TCP stream's payload in bit/s; None if too little arrived to tell."""
    latency: float
    """Latency in seconds, one way: half of the median round trip of a small message."""
    congestion_control: str
    """Congestion control that TCP uses on ``node``."""

    @property
    def rate_with_headers(self) -> float | None:
        """Rate on the link in bit/s, to compare with what was asked."""
        return None if self.rate is None else self.rate / PAYLOAD_SHARE


class Testbed:
    """A cluster of ``nodes`` nodes, numbered from 0, at one switch; ``slow_nodes`` have another link rate (bit/s).

    A token bucket at both ends of each link limits what its node sends, and what all others together send to the node.
    Nothing of the cluster is on the host, and it does not outlive this process: see ``namespaces``.

    Raises:
        InvalidInputError: the testbed cannot be made of these values, on this system, or by this user.
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
        """Rate of each node's link, in bit/s."""
        for node, rate in (slow_nodes or {}).items():
            self._check_node("slow-node", node)
            self.rates[node] = Link(rate=rate).rate
        self.delays_by: str | None = None
        """Maker of latency and loss: "netem" or "delay line"; None if there are none."""
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
        """Return the IPv4 address of ``node``."""
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

    # ---- processes on the nodes ----

    def start(self, node: int, words: Sequence[str], **options: Any) -> Process:
        """Start a process on ``node``: a ``subprocess.Popen`` with these ``options``, whose signals reach the process.

        A Ctrl-C on the terminal does not reach the process, and it ends with the testbed at the latest.
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
        """Start one of our own scripts, without site-packages, which takes a quarter of the time."""
        words = [sys.executable, "-I", "-S", str(FOLDER / script), *map(str, arguments)]
        return self._start(node, words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    # ---- links ----

    def measure(self) -> list[Measured]:
        """Measure each node's path to the next, one after the other, in 0.4 s and 17 times the round trip each.

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
        """Set the link of ``node`` to ``rate`` bit/s from now on."""
        self._check_node("node", node)
        self.rates[node] = Link(rate=rate).rate
        self._run(wiring.limits(node, self.link, self.rates[node], self.delays_by, "change"))

    def cut(self, node: int) -> None:
        """Drop everything to and from ``node`` from now on, silently; its NIC notices nothing."""
        self._check_node("node", node)
        self._run([f"ip link set n{node} nomaster"])

    def split(self, parts: Sequence[Sequence[int]]) -> None:
        """Cut the nodes into ``parts`` from now on, silently: the nodes of a part reach each other alone."""
        self._run(
            command
            for number, part in enumerate(parts[1:], 1)
            for command in (*wiring.switch(f"switch{number}"), *wiring.move(part, f"switch{number}"))
        )

    def mute(self, node: int) -> None:
        """Drop everything that ``node`` sends from now on, silently; it still receives what others send."""
        self._check_node("node", node)
        self._run(wiring.mute(node, [other for other in range(self.nodes) if other != node]))

    def restore(self, node: int) -> None:
        """Reconnect a node that ``cut`` or ``mute`` has cut off."""
        self._check_node("node", node)
        self._run([*wiring.move([node], wiring.SWITCH), *wiring.unmute(node)])

    def join(self) -> None:
        """Reconnect all nodes that ``split`` has parted."""
        self._run(wiring.move(range(self.nodes), wiring.SWITCH))

    def network(self, node: int) -> str:
        """Return the path of the network of ``node``, which a process of this machine may join: see ``namespaces``."""
        process = self.start(node, ["sh", "-c", "echo there; sleep infinity"], stdout=subprocess.PIPE, text=True)
        _line(process, node)  # from here on it is in the node's namespace
        return f"/proc/{children(process.pid)[0]}/ns/net"

    def traffic(self) -> list[Traffic]:
        """Return the bytes that have passed through each node's link since it was made."""
        commands = (
            command
            for node in range(self.nodes)
            for command in (f"tc -n {node} -s -j qdisc show dev eth0", f"tc -s -j qdisc show dev n{node}")
        )
        # The interfaces' own counters count headers only once for many packets that are handed over in one piece.
        ends = [_bytes(line) for line in self._run(commands).splitlines()]
        return [Traffic(*pair) for pair in zip(ends[::2], ends[1::2], strict=True)]

    # ---- the end ----

    def close(self) -> None:
        """End everything at once."""
        self._inside.close()
        for process in self._processes:
            with process:  # this closes its pipes too
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the jobs through their torchruns, then everything else at once."""
        try:
            for job in self._jobs:
                job.terminate(signal.SIGINT if isinstance(value, KeyboardInterrupt) else signal.SIGTERM)
        finally:
            self.close()


def _line(script: Process, node: int | None) -> str:
    """Return the next line that our ``script`` prints; raises ``TestbedFailedError`` if it ends without one."""
    assert script.stdout is not None
    line: str = script.stdout.readline()
    if not line:
        place = "at the switch" if node is None else f"on node {node}"
        raise TestbedFailedError(
            f"a script of the testbed {place} ended with exit code {script.wait()}, without a word"
        )
    return line.strip()


def _bytes(line: str) -> int:
    """Return the bytes that the token bucket has let through, from ``tc``'s report about an interface."""
    return next(int(entry["bytes"]) for entry in json.loads(line) if entry["kind"] == "tbf")
