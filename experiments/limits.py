"""Best case that the links allow: the time of an iteration's traffic, from the rates that were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from experiments.testbed.links import Link, rate_name, rate_text, time_text
from timing_model.collective_time import ring_all_reduce_bytes
from timing_model.presets import PAYLOAD_SHARE

SLOW_LINK = 500e6
"""Rate in bit/s up to which the wire is the limit; targets are tighter there than above, where CPUs count too."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes of a testbed and their links, as asked for."""

    nodes: int
    link: Link
    slow_nodes: Mapping[int, float] = field(default_factory=dict)
    """Rates in bit/s of the nodes whose link differs."""
    nproc_per_node: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.nproc_per_node

    @property
    def rates(self) -> list[float]:
        """Rate of every node's link, in bit/s."""
        return [self.slow_nodes.get(node, self.link.rate) for node in range(self.nodes)]

    @property
    def uniform(self) -> bool:
        """True if all links have one rate, and neither latency nor loss."""
        return not self.link.delays and len(set(self.rates)) == 1

    @property
    def slug(self) -> str:
        """Text for file names: "4x200mbit"."""
        text = f"{self.nodes}x{rate_name(self.link.rate)}"
        if self.nproc_per_node > 1:
            text += f"_{self.nproc_per_node}-ranks"
        if self.link.latency:
            text += "_" + time_text(self.link.latency).replace(" ", "")
        if self.link.loss:
            text += f"_{100 * self.link.loss:g}pc-lost"
        return text + "".join(f"_node{node}-{rate_name(rate)}" for node, rate in self.slow_nodes.items())

    def describe(self) -> str:
        """Describe the cluster for people: "4 nodes at 200 Mbit/s"."""
        text = f"{self.nodes} nodes at {rate_text(self.link.rate)}"
        if self.nproc_per_node > 1:
            text += f", {self.nproc_per_node} ranks each"
        if self.link.latency:
            text += f", {time_text(self.link.latency)} latency"
        if self.link.loss:
            text += f", {100 * self.link.loss:g} % lost"
        return text + "".join(f", node {node} at {rate_text(rate)}" for node, rate in self.slow_nodes.items())


def wire_seconds(nbytes: float, rate: float) -> float:
    """Return the seconds that ``nbytes`` take at ``rate`` bit/s in full packets, with Ethernet, IP and TCP headers.

    >>> round(wire_seconds(1448, rate=8.0))
    1514
    """
    return 8 * nbytes / PAYLOAD_SHARE / rate


def ring_limit(cluster: Cluster, nbytes: float) -> float:
    """Return the least time of an uncompressed all-reduce of ``nbytes``, in seconds: 2(p-1)/p n / rate with headers.

    p is the number of nodes, since ranks of one node can add up their gradients first. The slowest link decides.

    >>> cluster = Cluster(nodes=4, link=Link(rate=200e6))
    >>> round(ring_limit(cluster, 7.2e6), 4)
    0.4517
    """
    return wire_seconds(ring_all_reduce_bytes(nbytes, cluster.nodes), min(cluster.rates))


def server_time(cluster: Cluster, nbytes: float, *, servers: int, colocated: bool) -> float | None:
    """Return the seconds of one round of a synchronous parameter server: all gradients in, then all weights out.

    Dedicated ``servers`` are the last nodes, and each takes n/s from w = p - s workers: max(1, w/s) n beta each way.
    timing.md writes p for w, since its p are the workers. Colocated servers are on the first workers' nodes: each has
    p - 1 remote workers, and its node's worker exchanges with the s - 1 other servers. One server next to worker 0
    takes 2 (p-1) n beta. Headers are counted. Returns None for several ranks a node, whose placement would matter.

    The time is not a limit: a worker that has its weights early sends its next gradient while others still wait for
    theirs, and NICs are full-duplex. If all do so in turn, p n beta remain of 2 (p-1) n beta.
    """
    if cluster.nproc_per_node > 1:
        return None
    rates = cluster.rates
    share = nbytes / servers
    if colocated:
        # Bytes that node i's NIC receives as a server, or sends as a worker, while gradients travel.
        loads = [share * (cluster.nodes - 1) if node < servers else nbytes for node in range(cluster.nodes)]
    else:
        workers = cluster.nodes - servers
        loads = [nbytes if node < workers else share * workers for node in range(cluster.nodes)]
    return 2 * max(wire_seconds(load, rate) for load, rate in zip(loads, rates, strict=True))


def textbook_server_time(cluster: Cluster, nbytes: float, *, servers: int) -> float:
    """Return timing.md's 2 max(1, p/s) n beta, in seconds, for p nodes that are all workers, and separate servers."""
    return 2 * wire_seconds(max(1.0, cluster.nodes / servers) * nbytes, min(cluster.rates))
