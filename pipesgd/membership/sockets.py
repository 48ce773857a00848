"""Sockets that no child process keeps: its life would hide the end of this process from the other ranks."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

Place = tuple[str, int] | tuple[str, int, int, int]
"""Address and port, as sockets take them; of IPv6 with flow and scope."""

_forks = threading.Lock()
"""Held while a socket is made or closed, and while this process forks."""
_open = set[socket.socket]()
"""Sockets that a forked child closes."""


def opened(make: Callable[[], tuple[socket.socket, ...]]) -> tuple[socket.socket, ...]:
    """Return the new sockets that ``make`` makes, which no child process will hold."""
    with _forks:
        made = make()
        _open.update(made)
    return made


def close(one: socket.socket) -> None:
    """Close a socket that ``opened`` has returned."""
    with _forks:
        _open.discard(one)
        one.close()


def replace(one: socket.socket, make: Callable[[], socket.socket]) -> socket.socket:
    """Return what ``make`` makes of a socket that ``opened`` has returned, and which it may close if it fails."""
    with _forks:
        try:
            made = make()
        except BaseException:
            _open.discard(one)
            one.close()
            raise
        _open.discard(one)
        _open.add(made)
    return made


def numeric(host: str, port: int) -> tuple[int, Place]:
    """Return the family and the place of an address in numbers, without asking a name server."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return family, place  # type: ignore[return-value]


def _close_in_child() -> None:
    for one in _open:
        one.close()
    _open.clear()
    _forks.release()


os.register_at_fork(before=_forks.acquire, after_in_parent=_forks.release, after_in_child=_close_in_child)
