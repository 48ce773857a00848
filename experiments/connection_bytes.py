"""Bytes that reach ranks, by the kernel's own counts: inside a node, and between nodes.

Two counts, since each leaves something out:

- *payload*: what TCP has delivered on the connections of this process, exact to the byte: no headers, nothing that was
  sent twice. Connections to the store of the job, by which ranks meet and give heartbeats, are left out.
- *interfaces*: what lo and eth0 of this node have received from all processes: with headers, acknowledgements and the
  store. Headers of packets that the kernel hands over in one piece count once.

Ranks of one node have one address, by which gloo connects them, and the kernel delivers what is for the node's own
address over loopback. Hence a connection whose two ends have the same address is inside.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from experiments.loops_on_links import Meter
from pipesgd.ranks import Ranks

BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received, 8 bytes, in the kernel's struct tcp_info (include/uapi/linux/tcp.h; Linux 4.1)."""
INTERFACES = Path("/proc/self/net/dev")
"""Counts of the interfaces of this process's network namespace."""


def meters(ranks: Ranks) -> dict[str, Meter]:
    """Return meters of the bytes that all ranks receive in a block, by the name of the count."""
    store = store_port(ranks.store)
    counts: dict[str, Callable[[], int]] = {
        "inside_payload": partial(payload, inside=True, but=store),
        "between_payload": partial(payload, inside=False, but=store),
        # One rank counts for its node.
        "inside_interfaces": partial(interface, "lo") if ranks.local_rank == 0 else int,
        "between_interfaces": partial(interface, "eth0") if ranks.local_rank == 0 else int,
    }
    return {name: partial(_begin, ranks, count) for name, count in counts.items()}


def _begin(ranks: Ranks, count: Callable[[], int]) -> Callable[[], float]:
    before = _while_quiet(ranks, count)
    return lambda: sum(ranks.all_gather_object("bytes received", _while_quiet(ranks, count) - before))


def _while_quiet(ranks: Ranks, count: Callable[[], int]) -> int:
    """Return ``count()`` at a time when no rank sends anything but to the store. Collective."""
    ranks.all_gather_object("all have stopped", 0)
    counted = count()
    ranks.all_gather_object("all have counted", 0)
    return counted


def payload(*, inside: bool, but: int | None = None) -> int:
    """Return the bytes that this process has received on the connections that it has now, inside or between nodes.

    Connections of the port ``but`` are left out.
    """
    return sum(nbytes for same_node, ports, nbytes in _connections() if same_node == inside and but not in ports)


def _connections() -> Iterator[tuple[bool, tuple[int, int], int]]:
    """Yield whether a TCP connection's ends have the same address, their ports, and the bytes received."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                    continue
                here, there = one.getsockname(), one.getpeername()
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
                [nbytes] = struct.unpack_from("=Q", info, BYTES_RECEIVED)
                yield here[0] == there[0], (here[1], there[1]), nbytes


def interface(name: str) -> int:
    """Return the bytes that an interface of this node has received; 0 if there is no such interface."""
    for line in INTERFACES.read_text(encoding="ascii").splitlines():
        interface_name, colon, counts = line.partition(":")
        if colon and interface_name.strip() == name:
            return int(counts.split()[0])
    return 0


def store_port(store: Any) -> int | None:
    """Return the port of the store that ``store`` is a part of; None if it is not reached by TCP."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None
