"""Best case that the links allow: the time of an iteration's traffic, from the rates that were asked for."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.testbed.links import Link, rate_text
from timing_model.collective_time import ring_all_reduce_bytes
from timing_model.presets import PAYLOAD_SHARE


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes of a testbed and their links, as asked for."""

    nodes: int
    link: Link

    def describe(self) -> str:
        """Describe the cluster for people: "4 nodes at 200 Mbit/s"."""
        return f"{self.nodes} nodes at {rate_text(self.link.rate)}"


def wire_seconds(nbytes: float, rate: float) -> float:
    """Return the seconds that ``nbytes`` take at ``rate`` bit/s in full packets, with Ethernet, IP and TCP headers.

    >>> round(wire_seconds(1448, rate=8.0))
    1514
    """
    return 8 * nbytes / PAYLOAD_SHARE / rate


def ring_limit(cluster: Cluster, nbytes: float) -> float:
    """Return the least time of an uncompressed all-reduce of ``nbytes``, in seconds.

    On p nodes it is 2(p-1)/p n / rate, with headers.

    >>> cluster = Cluster(nodes=4, link=Link(rate=200e6))
    >>> round(ring_limit(cluster, 7.2e6), 4)
    0.4517
    """
    return wire_seconds(ring_all_reduce_bytes(nbytes, cluster.nodes), cluster.link.rate)
