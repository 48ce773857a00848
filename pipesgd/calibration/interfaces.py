"""Network interfaces that the ranks use, and those that they should have used."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipesgd.calibration.groups import Placement
from pipesgd.ranks import Ranks

FASTER = 2.0
"""Ratio of speeds from which on another interface should probably have been used."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Interface at which gloo makes a rank reachable, and the speeds of all interfaces of its host."""

    address: str
    """Address and interface, e.g. "10.0.0.2 (eth0)"."""
    speeds: dict[str, int]
    """Mbit/s of the host's interfaces that are up and report it; empty where the system reports nothing."""

    @property
    def name(self) -> str:
        """Name of the interface, or the address where the name is not known."""
        return self.address.rpartition("(")[2].rstrip(")")


def interfaces_of(ranks: Ranks) -> list[Interface]:
    """Return every rank's interface. Collective."""
    own = Interface(address=ranks.addresses()[ranks.rank], speeds=_speeds())
    return [Interface(**one) for one in ranks.all_gather_object("network interface", asdict(own))]


def wrong_interfaces(interfaces: Sequence[Interface], where: Sequence[Placement]) -> list[str]:
    """Return a line for every node that the others could reach faster."""
    several = where[-1].node > 0
    lines = []
    for rank, one in enumerate(interfaces):
        if not several or where[rank].local_rank:  # one line per node is enough
            continue
        used = one.speeds.get(one.name)
        fastest = max(one.speeds, key=lambda name: one.speeds[name], default=None)
        if used and fastest and one.speeds[fastest] >= FASTER * used:
            lines.append(
                f"wrong interface? rank {rank} is at {one.address} with {used} Mbit/s, while {fastest} is up with "
                f"{one.speeds[fastest]} Mbit/s; GLOO_SOCKET_IFNAME={fastest} chooses it"
            )
    return lines


def _speeds() -> dict[str, int]:
    """Return the Mbit/s of this host's interfaces that are up, by name; those that do not report it are left out."""
    if sys.platform != "linux":
        return {}
    found = {}
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        try:
            if (folder / "operstate").read_text().strip() == "up":
                found[name] = int((folder / "speed").read_text())
        except (OSError, ValueError):  # loopback and tunnels have no speed
            continue
    return {name: speed for name, speed in found.items() if speed > 0}
