"""The address at which other ranks reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pipesgd.checks import check_one_of
from pipesgd.errors import UserInputError


class Address(NamedTuple):
    """Place of a rank in the network."""

    shown: str
    """Address, and its interface if that is known: "10.0.0.2 (eth0)"."""
    others: str
    """Interfaces of the machine but loopback, with their addresses: "eth0 (10.0.0.2), wlan0 (10.1.0.2)"."""
    network: str
    """Name of what shares one loopback interface: the machine, or a network namespace of it."""

    @property
    def host(self) -> str:
        """Address alone; empty if the interface has none, or its address is not known."""
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(self.shown.partition(" ")[0]))
        return ""

    @property
    def stays_near(self) -> bool:
        """True if other machines cannot reach it."""
        return self.host != "" and _stays_near(self.host)


def own_address() -> Address:
    """Return the address at which gloo makes this rank reachable.

    gloo takes the interface that GLOO_SOCKET_IFNAME names, else the address that the host's name resolves to, else
    loopback; a slow or wrong NIC is a common cause of a slow job. Only Linux tells which address an interface has;
    elsewhere the interface is not named.

    Raises:
        UserInputError: GLOO_SOCKET_IFNAME names an interface that does not exist, or has an empty name in it.
    """
    chosen = _chosen_interfaces()
    addresses = _interface_addresses(chosen)
    if chosen:
        names = dict.fromkeys([*(name for _, name in socket.if_nameindex()), *addresses])
        for one in chosen:
            check_one_of("GLOO_SOCKET_IFNAME", one, list(names))
        shown = f"{addresses.get(chosen[0], ['no address'])[0]} ({chosen[0]})"
    else:
        address = _address_of_own_name()
        # Hosts often have an entry 127.0.1.1 for their own name: any such address is loopback's.
        same = {address, "127.0.0.1"} if address.startswith("127.") else {address}
        interfaces = [name for name, own in addresses.items() if same & {*own}]
        shown = f"{address} ({interfaces[0]})" if interfaces else address
    usable = {name: own[0] for name, own in addresses.items() if not _stays_near(own[0])}
    return Address(shown, ", ".join(f"{name} ({own})" for name, own in usable.items()), _network())


def unreachable(addresses: Sequence[Address], number: Callable[[int], int] = int) -> str | None:
    """Return what is wrong with the first address of a rank that ranks elsewhere cannot reach; None if there is none.

    ``addresses`` are those of all ranks, in their order, and ``number`` returns the number that messages name one by.
    """
    if len({one.network for one in addresses}) == 1:
        return None
    firsts: dict[str, int] = {}
    for rank, found in enumerate(addresses):
        first = firsts.setdefault(found.host, rank)
        if not found.host or (not found.stays_near and addresses[first].network == found.network):
            continue
        what = "must have an address that other machines can reach"
        if not found.stays_near:
            what = f"must have another address than rank {number(first)} on another machine"
        choice = f"one of {found.others}" if found.others else "which has no address yet"
        return (
            f"rank {number(rank)} {what}; got {found.shown}, which its machine's name or GLOO_SOCKET_IFNAME "
            f"stands for: set the latter there to the interface of your network, {choice}"
        )
    return None


def _address_of_own_name() -> str:
    """Return the first address of the host's own name that a socket can be bound to, as gloo does; else loopback's.

    One that is valid on a single link is passed over, unlike by gloo: without its link, nobody can use it.
    """
    with contextlib.suppress(OSError, UnicodeError):  # the latter for a name that is none by its length
        for family, kind, protocol, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            if _is_of_one_link(str(place[0])):
                continue
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as own:
                own.bind(place)
                return str(place[0])
    return "127.0.0.1"


def _network() -> str:
    """Return a name that is the same for processes with the same loopback interface only."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{machine} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # not Linux, or no /proc
        return socket.gethostname()


def _chosen_interfaces() -> list[str]:
    """Return the names in GLOO_SOCKET_IFNAME, which gloo separates by commas, the last of which may end it."""
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    names = given.removesuffix(",").split(",") if given else []
    if not all(names):
        raise UserInputError(f"GLOO_SOCKET_IFNAME must be names of interfaces, with commas between; got {given!r}")
    return names


def _stays_near(address: str) -> bool:
    """Return True if other machines cannot use ``address``: loopback's, or one that is valid on a single link."""
    return ipaddress.ip_address(address).is_loopback or _is_of_one_link(address)


def _is_of_one_link(address: str) -> bool:
    """Return True if ``address`` is one of IPv6 that is valid on a single link, which it does not name."""
    return (own := ipaddress.ip_address(address)).version == 6 and own.is_link_local


def _interface_addresses(more: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the addresses of every network interface that has one, IPv4 first; on other systems than Linux, none.

    Names of ``more`` that the system does not list, such as labels of second addresses (eth0:1), are asked for, too.
    """
    if sys.platform != "linux":
        return {}
    import fcntl  # not on every system

    get_interface_address = 0x8915  # SIOCGIFADDR
    found: dict[str, list[str]] = {}
    names = dict.fromkeys([*(name for _, name in socket.if_nameindex()), *more])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in names:
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, get_interface_address, struct.pack("256s", name.encode()))
                found[name] = [socket.inet_ntoa(answer[20:24])]
    for name, own in _ipv6_addresses():
        found.setdefault(name, []).append(own)
    return {name: found[name] for name in names if name in found}


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Return each interface's name with one of its IPv6 addresses, those that other machines can use first."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:  # a kernel without IPv6
        return []
    found = [(line[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0]))) for line in map(str.split, lines)]
    return sorted(found, key=lambda one: _stays_near(one[1]))
