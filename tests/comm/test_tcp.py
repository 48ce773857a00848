"""Connections of our own: who may connect, what a frame must be, and what is told of who is gone."""

from __future__ import annotations

import re
import select
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from _links import DEADLINE, OWN_TRANSPORTS, new_secret, ranks_of_threads, run, secured
from _ranks import error_of

from pipesgd.comm import greeting, tcp
from pipesgd.comm.connections import Connections
from pipesgd.comm.greeting import HELLO, MAGIC
from pipesgd.comm.tcp import CONTROL, DATA, FRAME, GOODBYE, LOSS, TcpLinks
from pipesgd.errors import CommunicationError, DeadlineExceeded, PeerFailed, UserInputError
from pipesgd.membership.secret import Secret
from pipesgd.membership.sockets import close
from pipesgd.ranks import Ranks
from pipesgd.sections import Wire, default_transport

pytestmark = pytest.mark.slow  # a certificate is made by a command

own_transports = pytest.mark.parametrize("transport", OWN_TRANSPORTS)


def connected(ranks: Ranks, transport: str = "tcp") -> Connections:
    return Connections("ring", secured(ranks, transport), timeout=ranks.timeout, transport=transport)


def sum_of_ones(connections: Connections) -> float:
    reduce, flat = connections.all_reduce(), torch.ones(100)
    connections.run("step", 0, lambda: reduce(flat))
    connections.wait_for_all()
    connections.close()
    return float(flat.mean())


# ---- Frames


def _links(connections: Connections) -> TcpLinks:
    links = connections._links
    assert isinstance(links, TcpLinks)
    return links


def _after_a_frame(ranks: Ranks, transport: str, frame: bytes) -> Any:
    """Let rank 1 write ``frame``, where rank 0 waits for the first message, of 100 numbers in iteration 0."""
    connections = connected(ranks, transport)
    answer = None
    if ranks.rank == 1:
        _links(connections)._peers[0].sock.send(frame)
    else:
        connections._transport.tag = 1 + 1  # the call "step" of iteration 0
        flat = torch.ones(100)
        answer = error_of(connections.transport.receive(flat, 1, "chunk 0").wait)
    ranks.all_gather_object("done", None)
    connections.close()
    return answer


WRONG = {
    "shorter": (
        FRAME.pack(8, 0, 0, 1, DATA, 0) + bytes(8),
        "a frame of 400 bytes, kind 0, number 0 must come; got one of",
    ),
    "longer": (FRAME.pack(1 << 31, 0, 0, 1, DATA, 0), "got one of 2147483648 bytes, kind 0, number 0"),
    "another number": (FRAME.pack(400, 0, 7, 1, DATA, 0), "got one of 400 bytes, kind 0, number 7"),
    "another kind": (FRAME.pack(400, 0, 0, 1, 77, 0), "got one of 400 bytes, kind 77, number 0"),
    "noise": (bytes(range(7, 23)), "must come; got one of"),
    "another iteration": (
        FRAME.pack(400, 5, 0, 1, DATA, 0),
        "rank 0 is at step in iteration 0, but rank 1 is at step in",
    ),
    "another call": (FRAME.pack(8, 0, 0, 3, DATA, 0), "rank 0 is at step in iteration 0, but rank 1 is at flush in"),
    "goodbye": (FRAME.pack(0, 0, 0, CONTROL, GOODBYE, 0), "it has closed its connections"),
    "a loss": (
        FRAME.pack(16, 0, 0, CONTROL, LOSS, 0) + b'[3, "it is gone"]'[:16].ljust(16),
        "it has closed its connections",
    ),
    "a loss of nobody": (FRAME.pack(4, 0, 0, CONTROL, LOSS, 0) + b"what", "it has closed its connections"),
    "a loss of this rank": (
        FRAME.pack(19, 0, 0, CONTROL, LOSS, 0) + b'[0, "it is silent"]',
        "it has lost this rank: it is silent",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@own_transports
def test_a_wrong_frame_is_refused_as_soon_as_it_is_there(transport: str, wrong: str) -> None:
    """The deadline is far beyond that of the test: nobody waits for the bytes that a wrong frame announces."""
    frame, message = WRONG[wrong]
    answer, _ = run(ranks_of_threads(2, timeout=1000.0), _after_a_frame, transport, frame)
    assert message in answer, answer


def _told_of_a_loss(ranks: Ranks, reason: str) -> Any:
    connections = connected(ranks)
    answer = None
    if ranks.rank == 1:
        connections.abort(PeerFailed(rank=1, peer=2, operation="step", reason=reason))
        connections.close()
    if ranks.rank == 0:
        flat = torch.ones(100)
        answer = error_of(connections.transport.receive(flat, 1, "chunk 0").wait)
    ranks.all_gather_object("done", None)
    connections.close()
    return answer


@pytest.mark.parametrize(("reason", "told"), [("its process has ended", 21), ("\N{SKULL}" * 2000, 250)])
def test_who_has_lost_another_rank_names_it_in_its_goodbye(reason: str, told: int) -> None:
    answer, *_ = run(ranks_of_threads(3, timeout=1000.0), _told_of_a_loss, reason)
    assert answer == f"PeerFailed: rank 0: stopped in receive of chunk 0: rank 2 has failed: {reason[:told]}"


def _told_why(ranks: Ranks, lost: int | None) -> Any:
    connections = connected(ranks)
    answer = None
    if ranks.rank == 1:
        ranks.say_goodbye("the disk is full", lost)
    if ranks.rank == 0:
        answer = error_of(connections.transport.receive(torch.ones(100), 1, "chunk 0").wait)
    ranks.all_gather_object("done", None)
    connections.close()
    return answer


@pytest.mark.parametrize(("lost", "named"), [(None, 1), (2, 2)])
def test_who_fails_says_why_in_its_goodbye(lost: int | None, named: int) -> None:
    answer, *_ = run(ranks_of_threads(3, timeout=1000.0), _told_why, lost)
    assert answer == f"PeerFailed: rank 0: stopped in receive of chunk 0: rank {named} has failed: the disk is full"


@pytest.mark.parametrize(("rest", "reason"), [(12, "its process has ended"), (4, "it has closed its connections")])
def test_a_reason_is_read_whole_although_it_comes_in_two_packets(rest: int, reason: str) -> None:
    here, there = socket.socketpair()
    text = b'[2, "its process has ended"]'
    with here, there:
        here.setblocking(False)
        peer = tcp._Peer(1, here)
        message = tcp._Message(None, peer, memoryview(bytearray(text[:16])), (0,) * 5, "", None, outgoing=False)  # type: ignore[arg-type]
        later = threading.Timer(0.02, lambda: (there.sendall(text[16 : 16 + rest]), there.close()))
        later.start()
        told = peer._loss_of_peer(message, len(text))
        later.join()
    assert told.reason == reason


def _says_goodbye(ranks: Ranks) -> Any:
    connections = connected(ranks)
    answer = None
    if ranks.rank == 1:
        ranks.say_goodbye()  # as a rank does that ends because of an error
        answer = error_of(connections.transport.send(torch.ones(1), 0, "chunk 0").wait)
    else:
        answer = error_of(connections.transport.receive(torch.ones(1), 1, "chunk 0").wait)
    ranks.all_gather_object("done", None)
    connections.close()
    return answer


def test_every_orderly_end_says_goodbye_and_sends_nothing_afterwards() -> None:
    one, other = run(ranks_of_threads(2, timeout=1000.0), _says_goodbye)
    assert one.endswith("receive of chunk 0 with rank 1 failed: it has closed its connections")
    assert other.endswith("send of chunk 0 with rank 0 failed: this rank has left")


# ---- Greetings


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return new_secret(tmp_path, certificate=True)


@own_transports
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("has_secret", [True, False])
def test_ranks_connect_by_both_versions_of_ip_with_and_without_a_secret(
    transport: str, host: str, has_secret: bool, secret: Secret
) -> None:
    all_ranks = ranks_of_threads(3, secret if has_secret or transport == "tls" else None)
    for ranks in all_ranks:
        ranks._addresses = [f"{host} (lo)"] * 3
    assert run(all_ranks, lambda ranks: sum_of_ones(connected(ranks, transport))) == [3.0] * 3


def with_other_secret(all_ranks: list[Ranks], secret: Secret) -> list[Ranks]:
    """Give the last rank another secret for its connections, although the store is sealed with that of the others."""
    all_ranks[-1].secret = secret
    return all_ranks


@pytest.mark.parametrize("transport", OWN_TRANSPORTS)
def test_another_secret_or_certificate_is_told_at_once_on_both_sides(
    transport: str, secret: Secret, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "DEFAULT_TIMEOUT", 2.0)  # DDP's is half an hour
    all_ranks = with_other_secret(ranks_of_threads(2, secret, timeout=60.0), new_secret(tmp_path, certificate=True))
    listening, calling = run(all_ranks, lambda ranks: connected(ranks, transport))
    assert isinstance(calling, CommunicationError)
    assert not isinstance(calling, DeadlineExceeded)
    what = "it has another secret" if transport == "tcp" else "it has another certificate"
    assert re.match(rf"rank 1: connection with rank 0 failed: 127\.0\.0\.1:\d+: .*{what}", str(calling)), calling
    assert isinstance(listening, DeadlineExceeded)
    where = r" at 127\.0\.0\.1:\d+, where rank 0 listens; refused a connection from 127\.0\.0\.1:\d+ \("
    assert re.search(rf"with rank 1 failed: no answer within 2 s{where}", str(listening)), listening
    if transport == "tls":
        said = capfd.readouterr().err
        assert re.search(rf"warning: rank 0 refuses a connection from 127\.0\.0\.1:\d+: .*{what}", said), said


def test_tls_needs_a_secret_and_a_certificate(tmp_path: Path) -> None:
    for secret, message in (
        (None, "secret-file must be given with transport tls, or PIPESGD_SECRET_FILE be set; got none ('pipesgd keys"),
        (new_secret(tmp_path), "secret-file must hold a certificate with transport tls; got none in"),
    ):
        ranks = ranks_of_threads(1, secret)[0]
        with pytest.raises(UserInputError, match=re.escape(message)):
            Connections("ring", ranks, timeout=1.0, transport="tls")


def strangers(place: tuple[str, int], session: bytes) -> list[socket.socket]:
    """Return connections of strangers to a listener: silent, closed at once, noise, half greetings, wrong proofs."""
    hello = HELLO.pack(MAGIC, session, 2, bytes(32), bytes(32))
    texts = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(92),
        hello[:50],
        hello,
        hello + bytes(32),
        b"\x16\x03\x01\x02\x00\x01",
    ]
    made = []
    for number in range(300):
        sock = socket.create_connection(place)
        sock.settimeout(DEADLINE)
        sock.send(texts[number % len(texts)]) if number % len(texts) else None
        if number % 5 == 0:
            sock.close()
        else:
            made.append(sock)
    return made


@own_transports
def test_strangers_at_the_port_keep_no_rank_from_connecting(
    transport: str, secret: Secret, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank comes when there are more strangers than a listener holds, one of which claims to be it."""
    listening = threading.Event()
    places: list[Any] = []
    begin = greeting._Meeting.connections

    def late(self: Any) -> Any:
        if self._ranks.rank == 0:
            places.append((self._places[0], self._session))
            listening.set()
        if self._ranks.rank == 2:
            assert may_come.wait(DEADLINE)
        return begin(self)

    may_come = threading.Event()
    monkeypatch.setattr(greeting._Meeting, "connections", late)
    made: list[socket.socket] = []

    def annoy() -> None:
        assert listening.wait(DEADLINE)
        made.extend(strangers(*places[0]))
        may_come.set()

    thread = threading.Thread(target=annoy)
    thread.start()
    try:
        found = run(ranks_of_threads(3, secret), lambda ranks: sum_of_ones(connected(ranks, transport)))
    finally:
        thread.join()
        for sock in made:
            sock.close()
    assert found == [3.0] * 3
    said = capfd.readouterr().err
    assert re.search(
        r"warning: rank 0 has refused \d+ connections that were no rank's, first from 127\.0\.0\.1:\d+", said
    )


def test_other_systems_are_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "POLLRDHUP")
    with pytest.raises(UserInputError, match="transport must be gloo on this system, since tcp and tls need Linux"):
        connected(ranks_of_threads(1)[0])


def test_what_goes_with_no_other_transport_than_gloo_is_refused() -> None:
    with pytest.raises(
        UserInputError, match="transport must be left out with --all-reduce native, torch's own; got 'tcp'"
    ):
        Wire(transport="tcp", all_reduce="native")
    with pytest.raises(
        UserInputError, match="connections must be left out with --transport tls, which has one to each"
    ):
        Wire(transport="tls", connections=2)
    with pytest.raises(
        UserInputError, match=r"transport must be one of gloo, tcp, tls; got 'tpc' \(did you mean tcp\?\)"
    ):
        Wire(transport="tpc")
    with pytest.raises(UserInputError, match="segment-bytes must be at most 1,073,741,824; got 1,073,741,825"):
        Wire(segment_bytes=(1 << 30) + 1)


def test_what_tcp_has_not_is_over_gloo_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    wires = Wire(all_reduce="native"), Wire(connections=2), Wire(rate_limit="50mbit")
    assert [wire.transport_on("cpu") for wire in (*wires, Wire())] == ["gloo", "gloo", "gloo", "tcp"]
    assert Wire().transport_on("cuda") == "gloo"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_transport("ring") == "gloo"


def _ends_before_it_connects(ranks: Ranks) -> str:
    if ranks.rank == 0:
        return error_of(greeting.connect, ranks, 1000.0, None)
    listener, *_ = greeting.listeners(ranks, "sockets")
    close(listener)
    return ""


def test_a_rank_that_ends_while_the_others_connect_is_named_before_their_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ranks, "ended", lambda ranks, within=0.0: [1])
    answer, _ = run(ranks_of_threads(2, timeout=1000.0), _ends_before_it_connects)
    assert answer.startswith("CommunicationError: rank 0: connection with rank 1 failed: its process has ended"), answer


def _flush_behind_a_message(ranks: Ranks) -> list[bool]:
    """Let rank 0 flush while its connection to rank 1 takes no more; return whether something is still to be sent."""
    connections, flat = connected(ranks), torch.zeros(16 << 20)
    if ranks.rank == 0:
        connections.transport.send(flat, 1, "more than the kernel takes")
    if ranks.rank == 1:
        connections.transport.receive(flat, 0, "more than the kernel takes").wait()
    connections.run("flush", 0, lambda: None)
    left = [bool(peer.outgoing) for peer in _links(connections)._peers.values()]
    ranks.all_gather_object("done", None)
    connections.close()
    return left


def test_a_call_ends_when_the_kernel_has_all_that_it_sends() -> None:
    """No thread would send its header afterwards, for which the next rank waits."""
    assert run(ranks_of_threads(3), _flush_behind_a_message) == [[False] * 2] * 3


def test_a_wait_ends_although_the_kernel_does_not_wake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 5.12 may let a wait sleep that has asked for many bytes at once."""

    def never(peer: tcp._Peer) -> None:
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 20)

    monkeypatch.setattr(tcp._Peer, "set_wake_bytes", never)
    assert run(ranks_of_threads(2), lambda ranks: sum_of_ones(connected(ranks))) == [2.0] * 2


def test_connections_work_without_the_options_that_a_kernel_does_not_have() -> None:
    options: dict[int, int] = {}

    class Kernel:
        def setsockopt(self, level: int, name: int, value: int) -> None:
            options[name] = value
            if name != socket.TCP_NODELAY:
                raise OSError(92, "Protocol not available")

    tcp._set_options(Kernel(), 1800.0)  # type: ignore[arg-type]
    assert options[socket.TCP_KEEPIDLE] == options[socket.TCP_KEEPINTVL] == 30
    assert options[socket.TCP_USER_TIMEOUT] == 3_600_000  # the waits of 1,800 s end before


def test_connections_leave_no_file_open() -> None:
    before = set(Path("/proc/self/fd").iterdir())

    def once(ranks: Ranks) -> None:
        connections = connected(ranks)
        sum_of_ones(connections)

    assert run(ranks_of_threads(3), once) == [None] * 3
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 1  # the one that lists them


def test_a_wait_looks_at_half_of_what_is_outstanding_and_at_frames_at_once() -> None:
    """With fewer bytes than it waits for, the kernel would not wake a wait for a message that is too short."""
    here, there = socket.socketpair()
    with here, there:
        peer = tcp._Peer(1, here)
        found = []
        for filled in (0, 16, 16 + (1 << 20), 16 + (2 << 20) - (40 << 10), 16 + (2 << 20) - 5):
            message = tcp._Message(None, peer, memoryview(bytearray(2 << 20)), (0,) * 5, "", None, outgoing=False)  # type: ignore[arg-type]
            message.head = bytearray(16) if filled < 16 else None
            message.buffers = [memoryview(bytearray(16)), message.body]
            message.move(filled)
            peer.incoming.clear()
            peer.incoming.append(message)
            peer.set_wake_bytes()
            found.append(peer._wake_bytes)
    assert found == [1, 256 << 10, 256 << 10, 20 << 10, 5]
