"""A program that sends as many bytes as a link carries, and counts those that arrive: somebody else's use of the link.

    python -m experiments.other_traffic receive PORT FILE
    python -m experiments.other_traffic send ADDRESS PORT

One TCP connection, as of a large download. FILE holds the number of bytes that have arrived so far, for other processes
to read (``Arrived``).
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

COUNT = struct.Struct("<q")
PIECE, RETRY_SECONDS = 1 << 18, 0.1


class Arrived:
    """Bytes that have arrived so far at the receiver that writes ``path``."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._count = mmap.mmap(file.fileno(), COUNT.size, access=mmap.ACCESS_READ)

    def __int__(self) -> int:
        count: int = COUNT.unpack_from(self._count)[0]
        return count

    def rate(self) -> Callable[[], float]:
        """Return a function that returns the bytes a second that have arrived since this call."""
        before, begin = int(self), time.perf_counter()
        return lambda: (int(self) - before) / (time.perf_counter() - begin)


def make_count(path: Path) -> None:
    """Write the file of a receiver to which nothing has arrived."""
    path.write_bytes(COUNT.pack(0))


def receive(port: int, path: Path) -> None:
    """Receive one connection until it ends, and keep the number of its bytes in the file that ``make_count`` wrote."""
    buffer, arrived = bytearray(PIECE), 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), COUNT.size) as count:
        with socket.create_server(("", port)) as server:
            connection, _ = server.accept()
        with connection:
            while number := connection.recv_into(buffer):
                arrived += number
                COUNT.pack_into(count, 0, arrived)


def connect(address: str, port: int) -> socket.socket:
    """Return a connection to a receiver, which may start later: until then, it is tried again and again."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((address, port))
        time.sleep(RETRY_SECONDS)


def send(address: str, port: int) -> None:
    """Send to a receiver until the connection ends."""
    piece = bytes(PIECE)
    with connect(address, port) as connection, contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(piece)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]))
