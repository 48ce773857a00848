"""Control connections of a member: one to every other member, over which heartbeats and the steps of a change go.

They are connections of their own, so that the gradients of an iteration hold up no heartbeat; only sums that a change
hands over travel here, too. They are made as those of messages are: each end proves that it is a member. A connection
that ends is made again for as long as the other process lives. That a process has ended is known from its machine,
which refuses connections to the listener that every member has open until its end. So nobody is taken for dead because
a cable is unplugged; but somebody is where a firewall between the machines refuses connections.
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from pipesgd.comm.greeting import AGAIN_SECONDS, Greeter, Wrap, greeting_secret, listeners, reached
from pipesgd.elastic.letters import HEAD, MOST_TEXT, Goodbye, decoded, encode
from pipesgd.membership.sockets import Place, close, opened
from pipesgd.membership.store import MalformedValue
from pipesgd.ranks import Ranks

CALL_SECONDS = 5.0
"""Seconds that one attempt to connect may take."""
TOLD_SECONDS = 0.2
"""Seconds after which an ended connection is reported whose other process is not known to have ended: usually that is
known in a millisecond, and says more."""
TOLD_AGAIN_SECONDS = 1.0
"""Seconds between two tries to tell a member that it was left behind."""
KEPT_SECONDS = 3600
"""Seconds for which a connection is kept on which nothing is acknowledged; its member is lost much sooner."""
RESENT_SECONDS = 1.0
"""Seconds between two tries to send what was not acknowledged, at most: TCP doubles them, so that after a cut of two
seconds it would be silent for a third one."""
TCP_RTO_MAX_MS = 44
"""TCP's option for this, of Linux since 6.15; Python has no name for it."""
PIECE = 1 << 20
"""Bytes that are received at once."""

_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(eq=False)
class _Peer:
    """Another member: the connection to it, if there is one, and what is under way."""

    sock: socket.socket | None = None
    outgoing: deque[memoryview] = field(default_factory=deque)
    incoming: bytearray = field(default_factory=bytearray)
    is_dead: bool = False
    """True if its process has ended."""
    is_behind: bool = False
    """True if it was left behind, and is only to be told."""
    has_left: bool = False
    """True if it has said goodbye."""
    again: float = math.inf
    """Time at which to connect, or to ask its machine whether it lives."""
    since: float = -math.inf
    """Time at which it was connected."""
    tell: float = math.inf
    """Time at which to report that the connection has ended."""


class ControlConnections(Greeter):
    """The control connections of one member, all in the thread that calls ``poll``.

    Args:
        ranks: all ranks that the job began with, whose numbers are the ids of the members. Collective.
        wrap: function that puts TLS on a socket; None for connections in clear.
        on_letter: called with the id of a member and each letter of it.
        on_sign: called with the id of a member from which bytes have come.
        on_end: called with the id of a member whose process has ended.
        on_break: called with the id of a member to which the connection has ended, and whose process may live.
    """

    def __init__(
        self,
        ranks: Ranks,
        wrap: Wrap | None,
        *,
        on_letter: Callable[[int, Any], None],
        on_sign: Callable[[int], None],
        on_end: Callable[[int], None],
        on_break: Callable[[int], None],
    ):
        listener, places, tokens = listeners(ranks, "listeners of members")
        super().__init__(
            ranks.rank, places, tokens, listener, secret=greeting_secret(ranks), wrap=wrap, number=ranks.number
        )
        self.last_word: Any = Goodbye()
        """Letter to members that were left behind, and come again."""
        self._on_letter, self._on_sign, self._on_end, self._on_break = on_letter, on_sign, on_end, on_break
        self._peers = {rank: _Peer() for rank in range(ranks.world_size) if rank != ranks.rank}
        for rank, peer in self._peers.items():
            if rank < ranks.rank:
                peer.again = 0.0
        self._wakes, self._wake = opened(socket.socketpair)
        self._wakes.setblocking(False)
        self._wake.setblocking(False)

    # ---- For other threads

    def wake(self) -> None:
        """End the ``poll`` that may be waiting. Any thread may call this."""
        with contextlib.suppress(OSError):  # it is full, so it wakes all the same; or closed
            self._wake.send(b"\1")

    # ---- For the thread that polls

    @property
    def connected(self) -> list[int]:
        """Members to which there is a connection."""
        return [rank for rank, peer in self._peers.items() if peer.sock is not None]

    def send(self, rank: int, letter: Any) -> None:
        """Send ``letter`` to a member; without a connection to it, it is dropped."""
        peer = self._peers.get(rank)
        if peer is None or peer.sock is None:
            return
        peer.outgoing += [memoryview(one) for one in encode(letter)]
        self._send(peer)

    def is_busy(self, rank: int) -> bool:
        """Return True if a large letter to a member has not left yet."""
        return sum(map(len, self._peers[rank].outgoing)) > PIECE

    def forget(self, rank: int) -> None:
        """Have no more to do with a member that was left behind, but to tell it if it is back."""
        peer = self._peers[rank]
        peer.is_behind = True
        peer.tell = math.inf
        # Lower ranks wait to be called, also those who were cut off and do not know what has become of the others.
        peer.again = math.inf if peer.is_dead or rank > self._rank else time.monotonic()
        self._drop(peer)

    def poll(self, until: float) -> None:
        """Wait for events until then, and handle them."""
        now = time.monotonic()
        due = min([until, *self.ends, *(min(peer.again, peer.tell) for peer in self._peers.values())])
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        of_peers: dict[int, int] = {}
        for rank, peer in self._peers.items():
            if peer.sock is not None:
                of_peers[peer.sock.fileno()] = rank
                poll.register(peer.sock, select.POLLIN | (select.POLLOUT if peer.outgoing else 0))
        for fd, events in self.waits_for().items():
            poll.register(fd, events)
        for fd, event in poll.poll(max(0.0, due - now) * 1000 + 0.5):
            if fd == self._wakes.fileno():
                self._wakes.recv(4096)
            elif fd not in of_peers:
                self.handle(fd)
            elif (peer := self._peers[of_peers[fd]]).sock is not None and peer.sock.fileno() == fd:
                if event & select.POLLOUT:
                    self._send(peer)
                if event & ~select.POLLOUT:
                    self._receive(of_peers[fd], peer)
        now = time.monotonic()
        self.expire(now)
        for rank, peer in self._peers.items():
            if now >= peer.tell:
                peer.tell = math.inf
                self._on_break(rank)
            if now >= peer.again:
                peer.again = math.inf
                self._begin_call(rank, now + CALL_SECONDS, self._call if rank < self._rank else self._ask)

    def flush(self, seconds: float) -> None:
        """Send what is still to be sent, for some seconds at most."""
        end = time.monotonic() + seconds
        while any(peer.outgoing and peer.sock is not None for peer in self._peers.values()):
            if time.monotonic() >= end:
                return
            self.poll(end)

    def close(self) -> None:
        super().close()
        for peer in self._peers.values():
            self._drop(peer)
        close(self._wakes)
        close(self._wake)

    # ---- Connections

    def _may_come(self, rank: int) -> bool:
        return True  # a second connection takes the place of one that the other end has given up

    def _connected(self, rank: int, sock: socket.socket) -> None:
        peer = self._peers[rank]
        if peer.sock is not None:  # the other end has given that one up
            self._receive(rank, peer)
        if peer.is_dead or peer.is_behind:  # it does not know yet that it was left behind
            # Again, until its process has ended: this may not arrive.
            peer.again = time.monotonic() + TOLD_AGAIN_SECONDS if rank < self._rank else math.inf
            with contextlib.suppress(OSError):
                sock.send(b"".join(encode(self.last_word)))
            close(sock)
            return
        was_broken = peer.sock is not None or peer.tell < math.inf
        self._drop(peer)
        peer.sock, peer.since = sock, time.monotonic()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            # Else the number of tries ends the connection, which then takes seconds in place of minutes.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEPT_SECONDS * 1000)
            with contextlib.suppress(OSError):  # this kernel has no such option
                sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, int(RESENT_SECONDS * 1000))
        peer.again = peer.tell = math.inf
        self._on_sign(rank)
        if was_broken:
            self._on_break(rank)  # it lives, but bytes may be missing

    def _not_connected(self, rank: int, problem: Exception, reason: str) -> None:
        peer = self._peers[rank]
        if peer.is_dead or peer.sock is not None:
            return
        if isinstance(problem, OSError) and problem.errno == errno.ECONNREFUSED:
            peer.is_dead = True
            peer.again = peer.tell = math.inf
            if not peer.is_behind:
                self._on_end(rank)
        elif not peer.is_behind:
            peer.again = time.monotonic() + AGAIN_SECONDS
        elif rank < self._rank:
            peer.again = time.monotonic() + TOLD_AGAIN_SECONDS

    def _ask(self, attempt: Any, place: Place) -> Generator[int, None, int]:
        """Ask the machine of a higher rank, which connects itself, whether its listener is still there."""
        yield from reached(attempt.sock, place)
        raise OSError(errno.EISCONN, "it is there")

    def _drop(self, peer: _Peer) -> None:
        if peer.sock is not None:
            close(peer.sock)
        peer.sock = None
        peer.outgoing.clear()
        peer.incoming.clear()

    def _ended(self, rank: int, peer: _Peer) -> None:
        """Find out whether a member has died, after its connection has ended."""
        self._drop(peer)
        if peer.has_left:
            peer.is_dead = True
            return
        now = time.monotonic()
        # At once; but who was left behind is told so with each connection, until its end.
        peer.again, peer.tell = max(now, peer.since + AGAIN_SECONDS), now + TOLD_SECONDS

    # ---- Bytes

    def _send(self, peer: _Peer) -> None:
        assert peer.sock is not None
        try:
            while peer.outgoing:
                data = peer.outgoing[0]
                sent = peer.sock.send(data) if len(data) else 0
                if sent < len(data):
                    peer.outgoing[0] = data[sent:]
                else:
                    peer.outgoing.popleft()
        except _BLOCKED:
            return
        except OSError:  # receiving finds the end, after what has come before it
            peer.outgoing.clear()
            with contextlib.suppress(OSError):
                socket.socket.shutdown(peer.sock, socket.SHUT_RDWR)  # not TLS's own, which would read on in clear

    def _receive(self, rank: int, peer: _Peer) -> None:
        assert peer.sock is not None
        try:
            while True:
                data = peer.sock.recv(PIECE)
                if not data:
                    raise ConnectionResetError
                peer.incoming += data
                if len(data) < PIECE and not getattr(peer.sock, "pending", int)():
                    break
        except _BLOCKED:
            pass
        except OSError:
            self._take_letters(rank, peer)
            if peer.sock is not None:
                self._ended(rank, peer)
            return
        self._on_sign(rank)
        self._take_letters(rank, peer)

    def _take_letters(self, rank: int, peer: _Peer) -> None:
        while len(peer.incoming) >= HEAD.size:
            length, behind = HEAD.unpack_from(peer.incoming)
            if length > MOST_TEXT:
                self._ended(rank, peer)
                return
            end = HEAD.size + length + behind
            if len(peer.incoming) < end:
                return
            text = bytes(peer.incoming[HEAD.size : HEAD.size + length])
            data = bytes(peer.incoming[HEAD.size + length : end])
            del peer.incoming[:end]
            try:
                letter = decoded(text, data)
            except MalformedValue:
                self._ended(rank, peer)
                return
            if isinstance(letter, Goodbye):
                peer.has_left = True
            self._on_letter(rank, letter)
            if peer.sock is None:  # the letter has ended the connection
                return
