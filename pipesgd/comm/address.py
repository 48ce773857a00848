"""The address at which other ranks reach this one."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys


def network_address() -> str:
    """Return the address at which gloo makes this rank reachable, and its interface: "10.0.0.2 (eth0)".

    gloo takes the interface that GLOO_SOCKET_IFNAME names, else the address that the host's name resolves to, else
    loopback; a slow or wrong NIC is a common cause of a slow job. Only Linux tells which address an interface has;
    elsewhere the interface is not named.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    addresses = _interface_addresses()
    if interface:
        return f"{addresses.get(interface, 'no address')} ({interface})"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    # Hosts often have an entry 127.0.1.1 for their own name: any such address is loopback's.
    names = [name for name, own in addresses.items() if own == address or {own[:4], address[:4]} == {"127."}]
    return f"{address} ({names[0]})" if names else address


def _interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of every network interface that has one; on other systems than Linux, none."""
    if sys.platform != "linux":
        return {}
    import fcntl  # not on every system

    get_interface_address = 0x8915  # SIOCGIFADDR
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, get_interface_address, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
