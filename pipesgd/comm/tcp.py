"""Messages over TCP connections of our own: one between any two ranks, in clear or with TLS.

No thread moves bytes: whoever waits for a message moves all messages of this rank, from and to the tensors' own memory,
while the kernel's buffers work on their own. Each message is a frame:

    length of the body 4 | iteration 4 | number in its direction 4 | call 1 | kind 1 | reserved 2 | body

little-endian. The receiver knows all of it beforehand, and compares as soon as these 16 bytes are there: a wrong frame
is never added up, nor waited for to its end. A rank that ends in order says goodbye, and to whom it has lost if that is
why, so that who outlives a failure is never taken for its cause.

Linux alone has all that this needs: other systems are refused in one line.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipesgd.comm.greeting import Wrap, connect
from pipesgd.comm.headers import CALLS
from pipesgd.comm.transport import CountedTransport, Pending
from pipesgd.errors import CommunicationError, DeadlineExceeded, OutOfStepError, PeerFailed, RunError, UserInputError
from pipesgd.membership.sockets import close, opened
from pipesgd.membership.store import MalformedValue, decode
from pipesgd.membership.watcher import ENDED_SECONDS, ended_text
from pipesgd.ranks import Ranks

FRAME = struct.Struct("<IIIBBH")
DATA, MEETING, GOODBYE, LOSS = range(4)
"""Kinds of frames. The body of a loss is JSON: a rank that was lost, and why."""
CONTROL = 255
"""Call of a frame that belongs to none, such as a header."""

LARGEST_TEXT = 4096
"""Bytes of the largest body of a loss."""
BODY_SECONDS = 0.1
"""Seconds that the rest of such a body is waited for."""
LOOK_SECONDS = 0.5
"""Seconds after which a wait looks at what has arrived, although the kernel has not woken it."""
MOST_SILENT_SECONDS = 30
"""Longest time without a packet on a connection."""
TLS_RECORD_BYTES = 16384
"""Bytes of the largest record of TLS: a frame and the beginning of its body leave in one."""
LEAST_WAKE_BYTES, MOST_WAKE_BYTES = 16 << 10, 256 << 10
"""Bytes that must have arrived, if they are outstanding, before a wait looks at them: half of what is outstanding, but
neither less nor more than these. Small pieces would each wake Python; a whole message would keep its sender waiting."""

GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_HAS_LEFT = "it has closed its connections"


@dataclass(frozen=True)
class _Loss:
    """The reason why messages with a peer, or all of them, can no longer arrive."""

    reason: str
    lost: int | None = None
    """Rank that the peer has lost itself, as its goodbye says; the peer, if it fails for a reason of its own."""
    is_reported: bool = False
    """True if that rank itself has said so."""
    late: bool = False
    """True if a deadline has passed."""
    of_call: tuple[str, int] | None = None
    """Call and iteration that the peer is at, if they are other ones."""
    may_be_a_consequence: bool = False
    """True if the peer may have closed the connection because of another rank."""


def _told(body: bytes, peer: int) -> _Loss | None:
    """Return what the body of a loss says that came from ``peer``; None if it is malformed."""
    with contextlib.suppress(MalformedValue):
        match decode(body):
            case [int(lost), str(reason)]:
                return _Loss(reason, lost=lost, is_reported=lost == peer)
    return None


def _body(lost: int, reason: str) -> bytes:
    """Return the body of a loss, whose reason is cut if it is too long."""
    while len(body := json.dumps([lost, reason]).encode()) > LARGEST_TEXT:
        reason = reason[: len(reason) // 2]
    return body


class _Message:
    """A message under way, in either direction; a ``Pending``."""

    __slots__ = (
        *("before", "body", "buffers", "expected", "head", "is_done", "is_outgoing", "links", "loss", "operation"),
        "peer",
    )

    def __init__(
        self,
        links: TcpLinks,
        peer: _Peer,
        body: memoryview,
        expected: tuple[int, int, int, int, int],
        operation: str,
        before: Callable[[], None] | None,
        *,
        outgoing: bool,
    ):
        self.links, self.peer, self.body, self.expected = links, peer, body, expected
        self.operation, self.before, self.is_outgoing = operation, before, outgoing
        self.head: bytearray | None = None
        """Frame to receive; None once it is compared, or if the message is sent."""
        self.buffers: list[memoryview] = []
        """Memory that is still to be sent or filled."""
        self.is_done = False
        self.loss: _Loss | None = None

    def wait(self) -> None:
        if self.before is not None:
            self.before()
        self.links.finish(self)

    def move(self, nbytes: int) -> None:
        """Record that this many bytes have been sent or filled."""
        buffers = self.buffers
        while buffers and nbytes >= len(buffers[0]):
            nbytes -= len(buffers.pop(0))
        if nbytes:
            buffers[0] = buffers[0][nbytes:]


class _Peer:
    """The connection to another rank, and the messages that wait for it."""

    def __init__(self, rank: int, sock: socket.socket):
        self.rank = rank
        self.sock = sock
        self.fd = sock.fileno()
        self.is_secure = isinstance(sock, ssl.SSLSocket)
        self.outgoing: deque[_Message] = deque()
        self.incoming: deque[_Message] = deque()
        self.sent = self.received = 0
        self.events = 0
        """Events that it is polled for."""
        self.loss: _Loss | None = None
        self._wake_bytes = 1

    def send(self) -> None:
        """Send what the connection takes."""
        try:
            while self.outgoing:
                message = self.outgoing[0]
                while message.buffers:
                    if self.is_secure:
                        message.move(self.sock.send(message.buffers[0]))
                    else:
                        message.move(self.sock.sendmsg(message.buffers, (), socket.MSG_NOSIGNAL))
                message.is_done = True
                self.outgoing.popleft()
        except _BLOCKED:
            return
        except OSError as problem:
            self._hear_why()
            self.end(_Loss(_words(problem), may_be_a_consequence=True))

    def receive(self) -> None:
        """Receive what has arrived of the messages that are waited for."""
        try:
            while self.incoming:
                message = self.incoming[0]
                while message.buffers:
                    if self.is_secure:
                        got = self.sock.recv_into(message.buffers[0])
                    else:
                        got = self.sock.recvmsg_into(message.buffers)[0]
                    if not got:
                        self.end(_Loss("it has closed the connection", may_be_a_consequence=True))
                        return
                    message.move(got)
                    if message.head is not None and len(message.buffers) <= (1 if len(message.body) else 0):
                        if not self._matches(message):
                            return
                        message.head = None
                message.is_done = True
                self.incoming.popleft()
        except _BLOCKED:
            return
        except OSError as problem:
            self.end(_Loss(_words(problem), may_be_a_consequence=True))

    def end(self, loss: _Loss) -> None:
        """Let all messages, those to come as well, fail with this ``loss``, unless there was one before."""
        self.loss = self.loss or loss
        for messages in (self.incoming, self.outgoing):
            for message in messages:
                message.loss, message.is_done = self.loss, True
            messages.clear()

    def set_wake_bytes(self) -> None:
        """Let the kernel wake a wait when enough has arrived of the message that is outstanding."""
        message = self.incoming[0]
        left = sum(map(len, message.buffers))
        # A frame is looked at as soon as it is there: a message that is shorter than expected has no more bytes.
        enough = 1 if message.head is not None else min(left, max(LEAST_WAKE_BYTES, min(left // 2, MOST_WAKE_BYTES)))
        if enough != self._wake_bytes and not self.is_secure:
            self._wake_bytes = enough
            with contextlib.suppress(OSError):  # some containers' kernels do not have it: then every packet wakes
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)

    def _matches(self, message: _Message) -> bool:
        """Compare the frame that has come with that of ``message``; if it is another one, end this connection."""
        assert message.head is not None
        length, iteration, number, call, kind, _ = FRAME.unpack(message.head)
        if (length, iteration, number, call, kind) == message.expected:
            return True
        _, own_iteration, own_number, own_call, own_kind = message.expected
        if kind == GOODBYE:
            loss = _Loss(_HAS_LEFT, may_be_a_consequence=True)
        elif kind == LOSS and length <= LARGEST_TEXT:
            loss = self._loss_of_peer(message, length)
        elif (kind, number) == (own_kind, own_number) and (call, iteration) != (own_call, own_iteration):
            at = CALLS[call] if call < len(CALLS) else "the header"
            loss = _Loss(f"it is at {at} in iteration {iteration}", of_call=(at, iteration))
        else:
            expected, got = (
                f"{found[0]} bytes, kind {found[4]}, number {found[2]}"
                for found in (message.expected, (length, iteration, number, call, kind))
            )
            loss = _Loss(f"a frame of {expected} must come; got one of {got}")
        self.end(loss)
        return False

    def _loss_of_peer(self, message: _Message, length: int) -> _Loss:
        """Read the body of a loss, which came with its frame, or is left out."""
        text = bytes(message.body[: len(message.body) - sum(map(len, message.buffers))])[:length]
        end = time.monotonic() + BODY_SECONDS
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        while len(text) < length and (left := end - time.monotonic()) > 0:
            try:
                more = self.sock.recv(length - len(text))
            except _BLOCKED:
                poll.poll(1000 * left)
            except OSError:
                break
            else:
                if not more:
                    break
                text += more
        return _told(text, self.rank) or _Loss(_HAS_LEFT, may_be_a_consequence=True)

    def _hear_why(self) -> None:
        """Find out whether the peer, which takes no more, has said why."""
        if self.incoming:
            self.receive()
        else:
            with contextlib.suppress(OSError):
                data = self.sock.recv(FRAME.size + LARGEST_TEXT)
                if len(data) >= FRAME.size and FRAME.unpack_from(data)[4] == LOSS:
                    self.loss = _told(data[FRAME.size :], self.rank) or self.loss


class TcpLinks:
    """Connections to all ranks, for one thread; see ``Links``. All ranks make these together.

    Args:
        ranks: the ranks.
        timeout: seconds that a rank waits for another one in any one operation.
        wrap: function that puts TLS on a socket; None for connections in clear.

    Raises:
        UserInputError: the system is not Linux.
        CommunicationError: not every rank could be reached.
    """

    def __init__(self, ranks: Ranks, timeout: float, wrap: Wrap | None = None):
        if not hasattr(select, "POLLRDHUP") or not hasattr(socket, "TCP_USER_TIMEOUT"):
            raise UserInputError("transport must be gloo on this system, since tcp and tls need Linux")
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._ranks = ranks
        self._timeout = timeout
        self._loss: _Loss | None = None
        """Reason why nothing more is waited for."""
        self._is_closed = False
        self._using = threading.Lock()
        """Held by the thread that uses the connections: a goodbye may come from another one."""
        outside = ranks.rank >= ranks.world_size  # this rank is not among ``ranks``, the first ones of the job
        self._interrupt, self._interrupted = opened(socket.socketpair)
        try:
            connected = {} if outside else connect(ranks, timeout, wrap)
        except BaseException:
            close(self._interrupt)
            close(self._interrupted)
            raise
        self._peers = {rank: _Peer(rank, sock) for rank, sock in connected.items()}
        self._by_fd = {peer.fd: peer for peer in self._peers.values()}
        for sock in connected.values():
            _set_options(sock, timeout)
        self._poll = select.poll()
        self._poll.register(self._interrupted, select.POLLIN)
        self._forget = ranks.at_goodbye(self.say_goodbye)

    def control(self, before_sends: Callable[[int], None]) -> TcpTransport:
        return TcpTransport(self, lambda: None, before_sends)

    def messages(self, before_waits: Callable[[], None], before_sends: Callable[[int], None]) -> TcpTransport:
        return TcpTransport(self, before_waits, before_sends)

    def wait_for_all(self) -> None:
        """Return when all ranks have called this: each hears, in log2(p) rounds, from twice as many others."""
        distance, what, nothing = 1, "last meeting of all ranks", torch.empty(0, dtype=torch.uint8, device="cpu")
        while distance < self.world_size:
            to, come_from = ((self.rank + sign * distance) % self.world_size for sign in (1, -1))
            sent = self.begin(nothing, to, 0, what, None, kind=MEETING, outgoing=True)
            self.begin(nothing, come_from, 0, what, None, kind=MEETING, outgoing=False).wait()
            sent.wait()
            distance *= 2

    def push(self) -> None:
        for peer in self._peers.values():
            if peer.outgoing:  # no thread moves bytes while nothing is waited for
                self.finish(peer.outgoing[-1])

    def abort(self, error: BaseException) -> None:
        peer = error.peer if isinstance(error, CommunicationError) else None
        reason = error.reason if isinstance(error, CommunicationError) else str(error)
        self._loss = self._loss or _Loss(reason, lost=self._place(peer), is_reported=isinstance(error, PeerFailed))
        self._end_wait()

    def say_goodbye(self, why: str = "", lost: int | None = None) -> None:
        """Tell the others that this rank ends in order, or why it fails, and whom it has lost; for any thread.

        That is what ended a wait, or ``why``, and the number of the rank that is ``lost``.
        """
        if not self._using.acquire(timeout=ENDED_SECONDS):
            return
        try:
            loss = self._loss or (_Loss(why, lost=self.rank if lost is None else self._place(lost)) if why else None)
            body = b"" if loss is None or loss.lost is None else _body(loss.lost, loss.reason)
            frame = FRAME.pack(len(body), 0, 0, CONTROL, LOSS if body else GOODBYE, 0) + body
            for peer in self._peers.values():
                if (
                    not peer.outgoing and peer.loss is None
                ):  # in the middle of a message it would be taken for its bytes
                    with contextlib.suppress(OSError, ValueError):
                        peer.sock.send(frame)
                    peer.end(_Loss("this rank has left"))
        finally:
            self._using.release()
        self._end_wait()

    def _place(self, number: int | None) -> int | None:
        """Return the rank, among these, of the rank with this number; None if it is another one."""
        numbers = [self._ranks.number(rank) for rank in range(self.world_size)]
        return numbers.index(number) if number in numbers else None

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._forget()
        self.say_goodbye()
        for one in (*(peer.sock for peer in self._peers.values()), self._interrupt, self._interrupted):
            close(one)

    def begin(
        self,
        tensor: Tensor,
        rank: int,
        tag: int,
        operation: str,
        before: Callable[[], None] | None,
        *,
        outgoing: bool,
        kind: int = DATA,
    ) -> Pending:
        """Begin to send or receive ``tensor``, whose memory is contiguous; see ``Transport``."""
        peer = self._peers[rank]
        body = tensor.reshape(-1).view(torch.uint8).numpy().data
        number = peer.sent if outgoing else peer.received
        iteration, call = divmod(tag - 1, len(CALLS)) if tag else (0, CONTROL)
        expected = (len(body), iteration, number & 0xFFFFFFFF, call, kind)
        message = _Message(self, peer, body, expected, operation, before, outgoing=outgoing)
        with self._using:
            if peer.loss is not None or self._loss is not None:
                message.loss, message.is_done = self._loss or peer.loss, True
            elif outgoing:
                peer.sent += 1
                frame = FRAME.pack(*expected, 0)
                if peer.is_secure:
                    first = TLS_RECORD_BYTES - FRAME.size
                    message.buffers = [memoryview(frame + bytes(body[:first])), body[first:]]
                else:
                    message.buffers = [memoryview(frame), body]
                if not message.buffers[-1]:
                    message.buffers.pop()
                peer.outgoing.append(message)
                peer.send()
            else:
                peer.received += 1
                message.head = bytearray(FRAME.size)
                message.buffers = [memoryview(message.head), *([body] if len(body) else [])]
                peer.incoming.append(message)
        return message

    def finish(self, message: _Message) -> None:
        """Move messages until this one has been moved.

        Raises:
            OutOfStepError: its peer is in another call or iteration.
            CommunicationError: its peer is lost, or silent for longer than the deadline.
        """
        if not message.is_done:
            with self._using:
                (message.peer.send if message.is_outgoing else message.peer.receive)()
        end = time.monotonic() + self._timeout
        while not message.is_done and self._loss is None:
            ready = self._poll_all(min(end - time.monotonic(), LOOK_SECONDS))
            with self._using:
                for silent in [] if ready else self._peers.values():  # Linux before 5.12 may not wake at SO_RCVLOWAT
                    silent.receive()
                for fd, event in ready:
                    peer = self._by_fd.get(fd)
                    if peer is None:
                        self._interrupted.recv(4096)
                        continue
                    if event & (select.POLLIN | GONE):
                        peer.receive()
                    if event & (select.POLLOUT | GONE):
                        peer.send()
            if not (ready or message.is_done) and time.monotonic() >= end:
                self._loss = self._loss or _Loss(f"no answer within {self._timeout:g} s", late=True)
        loss = message.loss or (None if message.is_done else self._loss)
        if loss is not None:
            raise self._error(message, loss)

    def _end_wait(self) -> None:
        """Let the thread that waits look at what has changed."""
        with contextlib.suppress(OSError):
            self._interrupt.send(b"\1")

    def _poll_all(self, seconds: float) -> list[tuple[int, int]]:
        with self._using:
            for peer in self._peers.values():
                events = (select.POLLIN if peer.incoming else 0) | (select.POLLOUT if peer.outgoing else 0)
                if peer.incoming:
                    peer.set_wake_bytes()
                if events != peer.events:
                    peer.events = events
                    if events:
                        self._poll.register(peer.fd, events)
                    else:
                        self._poll.unregister(peer.fd)
        return self._poll.poll(max(0, math.ceil(seconds * 1000)))

    def _error(self, message: _Message, loss: _Loss) -> RunError:
        """Return the error of a message that has failed, which names whoever has failed first as far as is known."""
        peer, operation = message.peer.rank, message.operation
        if loss.of_call is not None:
            _, iteration, _, call, _ = message.expected
            own = CALLS[call] if call < len(CALLS) else "the header"
            return OutOfStepError(self.rank, own, iteration, peer, *loss.of_call)
        reason, lost = loss.reason, loss.lost
        if loss.may_be_a_consequence and lost is None and (ended := self._ranks.ended(within=ENDED_SECONDS)):
            lost = None if peer in ended else ended[0]
            reason = ended_text(self._ranks.number(peer if lost is None else lost))
        if lost == self.rank:
            reason = f"it has lost this rank: {reason}"
        elif lost is not None and (lost != peer or loss.is_reported):
            self._loss = self._loss or _Loss(reason, lost=lost)
            return PeerFailed(rank=self.rank, peer=lost, operation=operation, reason=reason)
        kind = DeadlineExceeded if loss.late else CommunicationError
        self._loss = self._loss or _Loss(reason, lost=peer)
        return kind(rank=self.rank, peer=peer, operation=operation, reason=reason)


class TcpTransport(CountedTransport):
    """Transport over the connections of ``links``, which all transports of these share, in the order of their calls."""

    def __init__(self, links: TcpLinks, before_waits: Callable[[], None], before_sends: Callable[[int], None]):
        super().__init__(links.rank, links.world_size, 0, before_sends)
        self._links = links
        self.before_waits = before_waits

    def _begin(self, tensor: Tensor, peer: int, operation: str, *, outgoing: bool) -> Pending:
        return self._links.begin(tensor, peer, self.tag, operation, self.before_waits, outgoing=outgoing)


def wrap_of(transport: str, ranks: Ranks) -> Wrap | None:
    """Return the function that puts TLS on sockets of ``transport``; None for connections in clear.

    Raises:
        UserInputError: the ``ranks`` have no secret with a certificate, which TLS needs.
    """
    if transport != "tls":
        return None
    from pipesgd.comm.tls import tls

    return tls(ranks.secret)


def _set_options(sock: socket.socket, timeout: float) -> None:
    """Let the kernel end a connection when the other machine has not answered for twice ``timeout`` seconds.

    Waits end before; but the kernel also counts the time in which a rank that is late takes nothing. Connections that
    are silent for minutes would be forgotten by firewalls. Kernels of some containers do not have all options.
    """
    tcp = socket.IPPROTO_TCP
    pause = min(max(1, int(timeout / 4)), MOST_SILENT_SECONDS)
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    for level, name, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (tcp, socket.TCP_KEEPIDLE, pause),
        (tcp, socket.TCP_KEEPINTVL, pause),
        (tcp, socket.TCP_USER_TIMEOUT, min(math.ceil(2000 * timeout), 2**31 - 1)),
    ):
        with contextlib.suppress(OSError):
            sock.setsockopt(level, name, value)


def _words(problem: OSError) -> str:
    return f"the connection has failed: {problem.strerror or problem}"
