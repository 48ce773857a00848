"""Idle TCP connections between the ranks, which the kernel ends together with a rank's process."""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from pipesgd.errors import UserInputError
from pipesgd.membership.address import own_address
from pipesgd.membership.sealed import forged
from pipesgd.membership.sockets import close, numeric, opened
from pipesgd.membership.store import MalformedValue, decode, present

GREETING = struct.Struct("<8sI32s")
"""First bytes of a connection: magic, rank, and the proof that the sender has read the listener's address."""
MAGIC = b"pipesgd\1"
GOODBYE = b"\1"
"""Byte from a rank that ends by itself: its end is no loss, and if it has failed, the reason is in the store."""

BEAT = b"\2"
"""Byte that says that a rank's watcher runs."""

CONNECT_SECONDS = 30.0
"""Seconds within which both ends of a connection must greet each other."""
ATTEMPT_SECONDS = 1.0
"""Shortest time for one attempt to connect."""
MOST_STRANGERS = 64
"""Number of accepted connections without a greeting, in addition to one from each rank; the oldest makes room."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 127}
"""Packets that keep routers from forgetting an idle connection; a link may be cut for an hour."""


@dataclass(eq=False)
class _Link:
    """A connection, from its first packet on."""

    sock: socket.socket
    until: float
    """Time at which the greeting must be done."""
    rank: int | None = None
    """Rank at the other end; None if that has connected to this rank and not greeted yet."""
    greeting: bytes = b""
    """Greeting to send as soon as there is a connection."""
    answer: bytes = b""
    """Answer to the greeting that must come; empty if the other end greets."""
    received: bytearray = field(default_factory=bytearray)
    is_up: bool = False
    """True once both ends know each other."""
    has_left: bool = False
    """True once the other end has said goodbye."""


class Neighbours:
    """Connections of this rank to all others, by which it notices within milliseconds that a process has ended.

    Nothing is sent while all is well, but with a secret, where ``beat`` is called. The kernel closes a process's
    connections when that ends, whatever it was doing; a rank that ends by itself says goodbye before. That a machine is
    gone or a process is stopped, no kernel tells: heartbeats do. The watcher's thread uses these methods:

    1. ``meet`` puts this rank's address into the store and looks for the others'. Of two ranks, the one that comes
       later finds the other, so one look is enough.
    2. ``wait`` connects, accepts, greets and reads, until a process has ended, whose rank is among ``ended`` then.
    3. ``say_goodbye`` and ``close``.

    ``say`` gets a line about a rank that cannot be reached. Lines name each rank by its ``number``. A single rank has
    no connections.
    """

    def __init__(self, rank: int, world_size: int, say: Callable[[str], None], number: Callable[[int], int] = int):
        self.ended = frozenset[int]()
        """Ranks whose processes have ended without a goodbye."""
        self.heard: dict[int, float] = {}
        """Times at which ``beat`` of another rank was heard last."""
        self._rank = rank
        self._world_size = world_size
        self._say = say
        self._number = number
        self._token = secrets.token_bytes(32)
        """Value that only those know who have read this rank's address in the store."""
        self._links: list[_Link] = []
        self._has_left = False
        self._wake, self._woken = opened(socket.socketpair)
        self._address: str | None = None
        self._listener: socket.socket | None = None
        self._published = False
        self._wanted: dict[int, float] = {}
        """Ranks to which this one must connect, and the times at which it gives up."""
        self._found: dict[int, tuple[str, int, bytes]] = {}
        """Host, port and token of ranks to connect to now."""
        if world_size > 1:
            threading.Thread(target=self._find_address, name="address of this rank", daemon=True).start()

    def meet(self, store: dist.Store) -> None:
        """Publish this rank's address, and read those of ranks to connect to; after a goodbye, withdraw the address."""
        if self._has_left or self._listener is None:
            if self._published:
                store.set(_key(self._rank), "")
            return
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        if not self._published:
            host, port = self._listener.getsockname()[:2]
            store.set(_key(self._rank), json.dumps([host, port, self._token.hex()]))
            self._published = True
            self._wanted = dict.fromkeys(others, time.monotonic() + CONNECT_SECONDS)
        missing = self._wanted.keys() - {link.rank for link in self._links}
        values = present(store, [_key(rank) for rank in missing]) if missing else {}
        found = {rank: _decoded(values.get(_key(rank), b"")) for rank in missing}
        self._found = {rank: place for rank, place in found.items() if place is not None}
        unread = {rank for rank in missing if forged(store, [_key(rank)])}  # it will publish its address again
        for rank in missing - self._found.keys() - unread:
            del self._wanted[rank]  # it will find this rank

    def wait(self, seconds: float) -> None:
        """Attend to the connections for some seconds, or until another process ends, or ``wake`` is called."""
        end = time.monotonic() + seconds
        if self._address is not None:
            self._listen(self._address)
            self._address = None
            return  # so that the address is published at once
        while self._found:
            self._connect(*self._found.popitem())
        before, listener = self.ended, self._listener
        while self.ended is before and (left := end - time.monotonic()) > 0:
            self._drop_late()
            links, poll = {link.sock.fileno(): link for link in self._links}, select.poll()
            poll.register(self._woken, select.POLLIN)
            if listener is not None:
                poll.register(listener, select.POLLIN)
            for fd, link in links.items():
                poll.register(fd, select.POLLOUT if link.greeting else select.POLLIN)
            for fd, _ in poll.poll(math.ceil(left * 1000)):
                if fd in links:
                    if links[fd] in self._links:  # else it was dropped meanwhile
                        self._attend(links[fd])
                elif fd == self._woken.fileno():
                    self._woken.recv(4096)
                    return
                elif listener is not None and not self._accept(listener):
                    listener = None  # tried again in the next wait, as when too many files are open

    def wake(self) -> None:
        """End a ``wait`` of another thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\1")

    def beat(self) -> None:
        """Tell the other ranks that this one's watcher runs, which somebody may hide from them in the store."""
        for link in self._links:
            if link.is_up:
                _send(link, BEAT)

    def say_goodbye(self) -> None:
        """Tell the other ranks that the end of this process, which may come now, is no loss. Any thread may call it."""
        self._has_left = True
        for link in list(self._links):
            if link.is_up or (link.answer and not link.greeting):
                _send(link, GOODBYE)

    def close(self) -> None:
        """Say goodbye, and close all connections."""
        self.say_goodbye()
        for one in (*(link.sock for link in self._links), self._listener, self._wake, self._woken):
            if one is not None:
                close(one)
        self._links, self._listener = [], None

    # ---- connecting ----

    def _find_address(self) -> None:
        with contextlib.suppress(UserInputError):  # which ends the run as soon as the ranks exchange their addresses
            self._address = own_address().shown  # a name server may take its time for it
            self.wake()

    def _listen(self, address: str) -> None:
        try:
            family, place = numeric(address.partition(" ")[0], 0)
            (listener,) = opened(lambda: (socket.socket(family, socket.SOCK_STREAM),))
            listener.bind(place)
            listener.listen(1024)
            listener.setblocking(False)
            self._listener = listener
        except OSError as problem:
            rank = self._number(self._rank)
            self._say(
                f"warning: rank {rank} cannot listen at {address} ({problem.strerror or problem}): that its process "
                "has ended is noticed only by who communicates with it, or by its missing heartbeats"
            )

    def _connect(self, rank: int, place: tuple[str, int, bytes]) -> None:
        """Begin to connect to ``rank``."""
        host, port, token = place
        try:
            family, address = numeric(host, port)
            (sock,) = opened(lambda: (socket.socket(family, socket.SOCK_STREAM),))
        except OSError as problem:
            self._failed(rank, f"{host}: {problem.strerror or problem}")
            return
        sock.setblocking(False)
        greeting = GREETING.pack(MAGIC, self._rank, _proof(token, "greeting", self._rank, rank))
        answer = _proof(token, "answer", rank, self._rank)
        until = max(self._wanted[rank], time.monotonic() + ATTEMPT_SECONDS)
        link = _Link(sock, until, rank, greeting, answer)
        self._links.append(link)
        try:
            sock.connect(address)
        except BlockingIOError:
            pass
        except OSError as problem:
            self._drop(link, problem.strerror or str(problem))

    def _accept(self, listener: socket.socket) -> bool:
        """Accept a connection, if that is possible."""
        strangers = [link for link in self._links if link.rank is None]
        if len(strangers) >= MOST_STRANGERS + self._world_size:
            self._drop(strangers[0])
        try:
            (sock,) = opened(lambda: (listener.accept()[0],))
        except OSError:
            return False
        sock.setblocking(False)
        self._links.append(_Link(sock, time.monotonic() + CONNECT_SECONDS))
        return True

    def _drop_late(self) -> None:
        for link in [link for link in self._links if not link.is_up and time.monotonic() > link.until]:
            self._drop(link, f"no answer in {CONNECT_SECONDS:g} s")

    def _drop(self, link: _Link, problem: str = "") -> None:
        """Close a connection that does not tell of the end of a process."""
        self._links.remove(link)
        close(link.sock)
        if link.rank is not None:
            self._failed(link.rank, problem)

    def _failed(self, rank: int, problem: str) -> None:
        """Note that a connection to ``rank`` has failed: it is tried again for a while."""
        if any(link.is_up and link.rank == rank for link in self._links):
            self._wanted.pop(rank, None)
        elif time.monotonic() >= self._wanted.setdefault(rank, time.monotonic() + CONNECT_SECONDS):
            del self._wanted[rank]
            self._say(
                f"warning: rank {self._number(self._rank)} cannot connect to rank {self._number(rank)} ({problem}): "
                "that its process has ended is noticed only by who communicates with it, or by its missing heartbeats"
            )

    # ---- connections ----

    def _attend(self, link: _Link) -> None:
        """Send the greeting of ``link``, or read what has come."""
        needed = len(link.answer) or GREETING.size
        try:
            if link.greeting:
                link.sock.send(link.greeting)
                link.greeting = b""
                return
            got = link.sock.recv(16 if link.is_up else needed - len(link.received))
        except BlockingIOError:
            return
        except ConnectionResetError:
            got = b""
        except OSError as problem:  # refused; or cut for so long that the kernel has given up: nobody has ended
            self._drop(link, problem.strerror or str(problem))
            return
        if link.is_up and got:
            link.has_left = link.has_left or GOODBYE in got
            if BEAT in got and link.rank is not None:
                self.heard[link.rank] = time.monotonic()
        elif link.is_up:
            self._links.remove(link)
            close(link.sock)
            if not link.has_left and link.rank is not None:
                self.ended |= {link.rank}
        elif not got:
            self._drop(link, "the connection was closed")
        else:
            link.received += got
            if len(link.received) == needed:
                self._greet(link)

    def _greet(self, link: _Link) -> None:
        """Check who is at the other end, and answer if that has greeted."""
        rank = link.rank
        if rank is not None:
            if not hmac.compare_digest(link.received, link.answer):
                self._drop(link, "another program listens there")
                return
        else:
            magic, rank, proof = GREETING.unpack(link.received)
            expected = _proof(self._token, "greeting", rank, self._rank)
            if magic != MAGIC or not hmac.compare_digest(proof, expected) or rank >= self._world_size:
                self._drop(link)
                return
            _send(link, _proof(self._token, "answer", self._rank, rank))
        link.rank, link.is_up = rank, True
        self._wanted.pop(rank, None)
        link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every system
                link.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if self._has_left:
            _send(link, GOODBYE)


def _key(rank: int) -> str:
    return f"listens/{rank}"


def _decoded(value: bytes) -> tuple[str, int, bytes] | None:
    """Return the host, port and token that a rank has published; None for anything else."""
    with contextlib.suppress(MalformedValue, ValueError):
        match decode(value):
            case [str(host), int(port), str(token)] if 0 < port < 65536:
                return host, port, bytes.fromhex(token)
    return None


def _proof(token: bytes, what: str, sender: int, receiver: int) -> bytes:
    return hmac.digest(token, f"{what} {sender} {receiver}".encode(), "sha256")


def _send(link: _Link, data: bytes) -> None:
    with contextlib.suppress(OSError):  # if the other end is gone, reading tells
        link.sock.send(data)
