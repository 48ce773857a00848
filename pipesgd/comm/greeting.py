"""Connections between ranks over TCP: one between any two, after each has proved to the other that it is a rank.

Of two ranks the higher one connects to the lower one, which listens at the address that gloo would use. Each then sends

    magic with version 8 | session 16 | rank 4 | nonce 32 | proof 32

little-endian, the higher rank with an empty proof, which it sends on its own afterwards. A proof is an HMAC-SHA256 of
the side, the session, both ranks and both nonces. Its key is made of the job's secret and of a random value that the
listener has put into the store; without a secret it shows only that who connects has read the store.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from pipesgd.errors import CommunicationError, DeadlineExceeded, warn
from pipesgd.membership.sockets import Place, close, numeric, opened, replace
from pipesgd.membership.watcher import ended_text
from pipesgd.process import at_port
from pipesgd.ranks import Ranks
from pipesgd.sections import DEFAULT_TIMEOUT

HELLO = struct.Struct("<8s16sI32s32s")
MAGIC = b"pgdwire\1"
PROOF_BYTES = 32

STRANGER_SECONDS = 5.0
"""Seconds that who has connected may take for its greeting."""
MOST_STRANGERS = 64
"""Connections without a greeting that a rank has at a time, besides one from each rank; the oldest makes room."""
LOOK_SECONDS = 0.02
"""Longest time in seconds between two looks whether a meeting is still wanted, where it may end to be."""
END_SECONDS = 1.0
"""Longest time between two looks whether the process of a rank that is missing has ended."""
AGAIN_SECONDS = 0.05
"""Seconds until a rank connects again whose connection was closed: the listener may have had too many strangers."""

Steps = Generator[int, None, int]
"""A greeting that yields the events of ``poll`` that it waits for, and returns the rank at the other end."""
Wrap = Callable[[socket.socket, bool], socket.socket]
"""Function that puts TLS on a socket; the second argument is true on the side that has accepted it."""


class _Refused(Exception):  # noqa: N818 (what happened)
    """The other end has greeted as no rank of this job does; the text says what is wrong."""


@dataclass(eq=False)
class _Attempt:
    """A connection whose greeting is not done yet."""

    sock: socket.socket
    place: str
    """Address at the other end."""
    peer: int | None
    """Rank that this one connects to; None if the other end has connected."""
    until: float
    steps: Steps = field(init=False)
    events: int = 0
    """Events that it waits for."""
    is_known: bool = False
    """True once the other end has shown that it has read the store."""


def connect(ranks: Ranks, timeout: float, wrap: Wrap | None) -> dict[int, socket.socket]:
    """Return a connection to every other rank, which does not block. Collective.

    Raises:
        DeadlineExceeded: a rank was not there within ``timeout`` seconds, or ``DEFAULT_TIMEOUT`` if that is less.
        CommunicationError: a rank has another secret or certificate, or cannot be reached.
    """
    if ranks.world_size == 1:
        return {}
    meeting = _Meeting(ranks, min(timeout, DEFAULT_TIMEOUT), wrap)  # all are there, and half an hour is for sums
    try:
        return meeting.connections()
    except BaseException as failure:
        meeting.drop()
        if isinstance(failure, CommunicationError):
            failure.name_ranks(ranks.number)
        raise
    finally:
        meeting.close()


class Greeter(ABC):
    """The attempts of a rank to connect to others, and of others to connect to it, in one thread.

    Whoever drives it polls what it ``waits_for``, and calls ``handle`` and ``expire``.

    Args:
        own: this rank.
        places: address and port of each rank's listener.
        tokens: the random value that each listener has made known to the ranks alone.
        listener: this rank's listener.
        secret: what the proofs depend on besides, the same on all ranks; empty if there is none.
        wrap: function that puts TLS on a socket; None for connections in clear.
        number: function that returns the number by which messages name a rank.
    """

    def __init__(
        self,
        own: int,
        places: Sequence[tuple[str, int]],
        tokens: Sequence[bytes],
        listener: socket.socket,
        *,
        secret: bytes,
        wrap: Wrap | None,
        number: Callable[[int], int],
    ):
        self._rank = own
        self._places = places
        self._listener = listener
        self._wrap = wrap
        self._number = number
        self._attempts: list[_Attempt] = []
        self._refusals = 0
        """Number of connections that were refused, of which there may be many in days."""
        self._refused = ""
        """Address of the first one, with the reason."""
        self._trouble = ""
        """Words on the reason why no connection can be accepted now, if there is one."""
        self._has_warned = False
        """True once a warning was given of a connection with another secret or certificate."""
        self._session = hashlib.sha256(b"".join(tokens)).digest()[:16]
        self._keys = [hmac.digest(secret, token, hashlib.sha256) for token in tokens]
        """Key of the proofs that a listener gives and takes, by its rank."""

    # ---- What happens to connections

    @abstractmethod
    def _may_come(self, rank: int) -> bool:
        """Return True if a connection from ``rank`` is expected."""

    @abstractmethod
    def _connected(self, rank: int, sock: socket.socket) -> None:
        """Take a connection to ``rank``, which does not block."""

    @abstractmethod
    def _not_connected(self, rank: int, problem: Exception, reason: str) -> None:
        """Note that this rank could not connect to ``rank``, because of a ``problem`` that ``reason`` describes."""

    # ---- For whoever drives it

    def waits_for(self) -> dict[int, int]:
        """Return the events to poll for, by descriptor."""
        return {self._listener.fileno(): select.POLLIN} | {one.sock.fileno(): one.events for one in self._attempts}

    def handle(self, fd: int) -> None:
        """Do what can be done after an event of ``fd``."""
        if fd == self._listener.fileno():
            self._accept()
            return
        for attempt in self._attempts:  # else it has made room meanwhile
            if attempt.sock.fileno() == fd:
                self._continue(attempt)
                return

    def expire(self, now: float) -> None:
        """End the attempts that take too long."""
        for one in [one for one in self._attempts if now >= one.until]:
            self._failed(one, TimeoutError(f"no greeting within {STRANGER_SECONDS:g} s"))

    def unanswered(self, rank: int, seconds: float) -> str:
        """Return the reason why there is no connection to ``rank`` if none came about within some seconds."""
        lower = min(rank, self._rank)
        place = at_port(*self._places[lower])
        return f"no answer within {seconds:g} s at {place}, where rank {self._number(lower)} listens"

    @property
    def ends(self) -> list[float]:
        """Times at which attempts take too long."""
        return [one.until for one in self._attempts]

    def call(self, rank: int, until: float) -> None:
        """Begin to connect to a lower rank."""
        self._begin_call(rank, until, self._call)

    def close(self) -> None:
        """End the listener and all attempts."""
        for one in (self._listener, *(attempt.sock for attempt in self._attempts)):
            close(one)
        self._attempts = []

    def _begin_call(self, rank: int, until: float, steps: Callable[[_Attempt, Place], Steps]) -> None:
        family, place = numeric(*self._places[rank])
        try:
            (sock,) = opened(lambda: (socket.socket(family, socket.SOCK_STREAM),))
        except OSError as problem:  # too many files are open, for now
            self._not_connected(rank, problem, str(problem))
            return
        sock.setblocking(False)
        attempt = _Attempt(sock, at_port(*self._places[rank]), rank, until)
        attempt.steps = steps(attempt, place)
        self._attempts.append(attempt)
        self._continue(attempt)

    def _accept(self) -> None:
        try:
            (sock,) = opened(lambda: (self._listener.accept()[0],))
            self._trouble = ""
        except OSError as problem:  # who connected has left, or too many files are open
            if problem.errno in (errno.EMFILE, errno.ENFILE):
                self._trouble = f"; {_words(problem)}"
                time.sleep(AGAIN_SECONDS)  # the listener stays readable
            return
        try:
            place = sock.getpeername()
        except OSError:
            close(sock)
            return
        strangers = [one for one in self._attempts if one.peer is None and not one.is_known]
        if len(strangers) >= MOST_STRANGERS + len(self._places):
            self._failed(strangers[0], _Refused("too many others connected"))
        sock.setblocking(False)
        attempt = _Attempt(sock, at_port(*place[:2]), None, time.monotonic() + STRANGER_SECONDS)
        attempt.steps = self._answer(attempt)
        self._attempts.append(attempt)
        self._continue(attempt)

    def _continue(self, attempt: _Attempt) -> None:
        """Do what can be done of a greeting now."""
        try:
            attempt.events = next(attempt.steps)
        except StopIteration as done:
            self._attempts.remove(attempt)
            self._connected(done.value, attempt.sock)
        except (_Refused, OSError) as problem:
            self._failed(attempt, problem)

    def _failed(self, attempt: _Attempt, problem: Exception) -> None:
        self._attempts.remove(attempt)
        close(attempt.sock)
        reason = _words(problem) if isinstance(problem, OSError) else str(problem)
        if attempt.peer is not None:
            self._not_connected(attempt.peer, problem, reason)
            return
        if "another" in reason and not self._has_warned:  # it will say so, too
            self._has_warned = True
            warn(f"rank {self._number(self._rank)} refuses a connection from {attempt.place}: {reason}")
        self._refusals += 1
        self._refused = self._refused or f"{attempt.place} ({reason})"

    # ---- Greetings

    def _call(self, attempt: _Attempt, place: Place) -> Steps:
        """Connect to a lower rank and greet it."""
        own, peer = self._rank, attempt.peer
        assert peer is not None
        yield from reached(attempt.sock, place)
        yield from self._secured(attempt, accepted=False)
        nonce = secrets.token_bytes(32)
        yield from _send(attempt.sock, HELLO.pack(MAGIC, self._session, own, nonce, b""))
        magic, session, rank, theirs, shown = HELLO.unpack((yield from _receive(attempt.sock, HELLO.size)))
        if (magic, session, rank) != (MAGIC, self._session, peer):
            raise _Refused("it is no rank of this job")
        if not hmac.compare_digest(shown, self._proof(b"listener", peer, own, nonce + theirs)):
            raise _Refused("it has another secret")
        yield from _send(attempt.sock, self._proof(b"caller", peer, own, nonce + theirs))
        return peer

    def _answer(self, attempt: _Attempt) -> Steps:
        """Hear the greeting of who has connected, and greet it."""
        own = self._rank
        yield from self._secured(attempt, accepted=True)
        magic, session, rank, theirs, _ = HELLO.unpack((yield from _receive(attempt.sock, HELLO.size)))
        if (magic, session) != (MAGIC, self._session) or not own < rank < len(self._places):
            raise _Refused("it is no rank of this job")
        attempt.is_known = True
        nonce = secrets.token_bytes(32)
        proof = self._proof(b"listener", own, rank, theirs + nonce)
        yield from _send(attempt.sock, HELLO.pack(MAGIC, self._session, own, nonce, proof))
        shown = yield from _receive(attempt.sock, PROOF_BYTES)
        if not hmac.compare_digest(shown, self._proof(b"caller", own, rank, theirs + nonce)):
            raise _Refused("it has another secret")
        if not self._may_come(rank):
            raise _Refused(f"rank {self._number(rank)} is connected already")
        return int(rank)

    def _secured(self, attempt: _Attempt, *, accepted: bool) -> Generator[int, None, None]:
        """Set up TLS, if there is any."""
        attempt.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wrap = self._wrap
        if wrap is None:
            return
        attempt.sock = secure = replace(attempt.sock, lambda: wrap(attempt.sock, accepted))
        assert isinstance(secure, ssl.SSLSocket)
        yield from _when_ready(secure.do_handshake)

    def _proof(self, side: bytes, listener: int, caller: int, nonces: bytes) -> bytes:
        text = side + self._session + struct.pack("<II", listener, caller) + nonces
        return hmac.digest(self._keys[listener], text, hashlib.sha256)


class _Meeting(Greeter):
    """The meeting of all ranks, at which each connects to all others."""

    def __init__(self, ranks: Ranks, seconds: float, wrap: Wrap | None):
        self._ranks = ranks
        self._seconds = seconds
        self._found: dict[int, socket.socket] = {}
        self._again: dict[int, float] = dict.fromkeys(range(ranks.rank), 0.0)
        """Ranks to connect to, and the times at which to do so."""
        self._problem: dict[int, str] = {}
        """Reason why the last attempt with a rank has failed."""
        listener, places, tokens = listeners(ranks, "sockets")
        self._end = time.monotonic() + seconds  # from when all are there
        secret = greeting_secret(ranks)
        super().__init__(ranks.rank, places, tokens, listener, secret=secret, wrap=wrap, number=ranks.number)

    def connections(self) -> dict[int, socket.socket]:
        """Return the connections to all other ranks, once all are there."""
        everybody = {*range(self._ranks.world_size)} - {self._rank}
        while missing := sorted(everybody - self._found.keys()):
            now = time.monotonic()
            if now >= self._end:
                self._give_up(missing[0])
            if gone := [rank for rank in self._ranks.ended() if rank in missing]:
                reason = ended_text(self._ranks.number(gone[0]))
                raise CommunicationError(rank=self._rank, peer=gone[0], operation="connection", reason=reason)
            for rank in [rank for rank, at in self._again.items() if at <= now]:
                del self._again[rank]
                self.call(rank, self._end)
            self._poll(min([self._end, now + END_SECONDS, *self._again.values(), *self.ends]) - now)
        if number := self._refusals:
            connections = "1 connection that was" if number == 1 else f"{number} connections that were"
            own = self._number(self._rank)
            warn(f"rank {own} has refused {connections} no rank's, first from {self._refused}")
        return self._found

    def drop(self) -> None:
        """End the connections that there are."""
        for sock in self._found.values():
            close(sock)

    def _give_up(self, peer: int) -> None:
        reason = self.unanswered(peer, self._seconds)
        if peer in self._problem:
            reason += f" ({self._problem[peer]})"
        if self._refused:
            reason += f"; refused a connection from {self._refused}"
        reason += self._trouble
        raise DeadlineExceeded(rank=self._rank, peer=peer, operation="connection", reason=reason)

    def _poll(self, seconds: float) -> None:
        poll = select.poll()
        for fd, events in self.waits_for().items():
            poll.register(fd, events)
        if (still := self._ranks.still) is not None:  # nothing wakes this thread
            still()
            seconds = min(seconds, LOOK_SECONDS)
        for fd, _ in poll.poll(max(0.0, seconds) * 1000 + 1):
            self.handle(fd)
        self.expire(time.monotonic())

    def _may_come(self, rank: int) -> bool:
        return rank not in self._found

    def _connected(self, rank: int, sock: socket.socket) -> None:
        self._found[rank] = sock

    def _not_connected(self, rank: int, problem: Exception, reason: str) -> None:
        self._problem[rank] = reason
        # Else the other end has closed the connection, which it does without a word if it has too many.
        gone = ssl.SSLEOFError | ssl.SSLZeroReturnError
        if isinstance(problem, _Refused) or (isinstance(problem, ssl.SSLError) and not isinstance(problem, gone)):
            reason = f"{at_port(*self._places[rank])}: {reason}"
            raise CommunicationError(rank=self._rank, peer=rank, operation="connection", reason=reason) from None
        self._again[rank] = time.monotonic() + AGAIN_SECONDS


def listeners(ranks: Ranks, what: str) -> tuple[socket.socket, list[tuple[str, int]], list[bytes]]:
    """Return a listener at this rank's address; and address, port and random value of every rank's. Collective.

    Raises:
        CommunicationError: nothing can listen there, or not every rank came to this exchange of ``what``.
    """
    host = ranks.addresses()[ranks.rank].partition(" ")[0]
    try:
        (listener,) = opened(lambda: (_listening(host),))
    except OSError as problem:
        reason = f"cannot listen at {host}: {_words(problem)}"
        error = CommunicationError(rank=ranks.rank, peer=None, operation="connection", reason=reason)
        error.name_ranks(ranks.number)
        raise error from problem
    try:
        everybody = ranks.all_gather_object(what, [host, listener.getsockname()[1], secrets.token_hex(32)])
    except BaseException:
        close(listener)
        raise
    places = [(str(one[0]), int(one[1])) for one in everybody]
    return listener, places, [bytes.fromhex(str(one[2])) for one in everybody]


def greeting_secret(ranks: Ranks) -> bytes:
    """Return what the proofs of ``ranks`` depend on; empty without a secret of the job."""
    return b"" if ranks.secret is None else ranks.secret.key("greetings")


def reached(sock: socket.socket, place: Place) -> Generator[int, None, None]:
    """Connect ``sock``, which does not block, to ``place``; the error is what the other machine answers."""
    number = sock.connect_ex(place)
    if number == errno.EINPROGRESS:
        yield select.POLLOUT
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        raise OSError(number, errno.errorcode.get(number, ""))


def _listening(host: str) -> socket.socket:
    family, place = numeric(host, 0)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(place)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _when_ready(act: Callable[[], int | None]) -> Generator[int, None, int]:
    """Return what ``act`` returns once the socket is ready for it."""
    while True:
        try:
            return act() or 0
        except ssl.SSLWantWriteError:
            yield select.POLLOUT
        except ssl.SSLWantReadError:
            yield select.POLLIN


def _send(sock: socket.socket, data: bytes) -> Generator[int, None, None]:
    """Send a few bytes, which fit into the buffer of a new connection."""
    if (yield from _when_ready(lambda: sock.send(data))) != len(data):
        raise OSError(errno.ENOBUFS, "the connection takes no bytes")


def _receive(sock: socket.socket, nbytes: int) -> Generator[int, None, bytes]:
    data = b""
    while len(data) < nbytes:
        try:
            more = sock.recv(nbytes - len(data))
        except (BlockingIOError, ssl.SSLWantReadError):
            yield select.POLLIN
            continue
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, "it has closed the connection")
        data += more
    return data


def _words(problem: OSError) -> str:
    if isinstance(problem, ssl.SSLError):
        reason = (problem.reason or str(problem)).lower().replace("_", " ")
        return f"TLS failed: {reason}; it has another certificate, or is no rank of this job"
    return problem.strerror or str(problem)
