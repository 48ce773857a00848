"""Control connections between members: letters, breaks, ends of processes, strangers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _links import DEADLINE, ranks_of_threads, run
from _waiting import wait_until

from pipesgd.comm.greeting import HELLO, MAGIC
from pipesgd.elastic.control import ControlConnections
from pipesgd.elastic.letters import Wish
from pipesgd.ranks import Ranks


class Member:
    """Control connections in a thread of their own, and what has happened to them."""

    def __init__(self, ranks: Ranks):
        self.letters: list[tuple[int, Any]] = []
        self.ended: list[int] = []
        self.broken: list[int] = []
        self.orders: list[Callable[[], object]] = []
        self.control = ControlConnections(
            ranks,
            None,
            on_letter=lambda peer, letter: self.letters.append((peer, letter)),
            on_sign=lambda peer: None,
            on_end=self.ended.append,
            on_break=self.broken.append,
        )
        self.is_over = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.is_over:
            while self.orders:
                self.orders.pop(0)()
            self.control.poll(time.monotonic() + 1)
        self.control.close()

    def do(self, order: Callable[[], object]) -> None:
        self.orders.append(order)
        self.control.wake()

    def end(self) -> None:
        self.is_over = True
        self.control.wake()
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()

    def place(self) -> tuple[str, int]:
        found: tuple[str, int] = self.control._listener.getsockname()
        return found


@contextlib.contextmanager
def members(number: int) -> Iterator[list[Member]]:
    found = run(ranks_of_threads(number), Member)
    try:
        wait_until(lambda: all(len(one.control.connected) == number - 1 for one in found))
        yield found
    finally:
        for one in found:
            if not one.is_over:
                one.end()


def test_letters_arrive_in_order_at_those_they_are_for() -> None:
    with members(3) as (one, two, three):
        for number in range(100):
            one.do(lambda number=number: one.control.send(2, Wish(str(number))))
        two.do(lambda: two.control.send(2, Wish("two")))
        wait_until(lambda: len(three.letters) == 101)
        assert [letter for peer, letter in three.letters if peer == 0] == [Wish(str(number)) for number in range(100)]
        assert (one.letters, two.letters) == ([], [])


def test_a_large_letter_arrives_whole() -> None:
    with members(2) as (one, two):
        text = "x" * 5_000_000
        one.do(lambda: one.control.send(1, Wish(text)))
        wait_until(lambda: two.letters == [(0, Wish(text))])


@pytest.mark.parametrize("by", [0, 1])
def test_a_connection_that_breaks_is_made_again_and_told_once(by: int) -> None:
    with members(2) as both:
        peer = both[by].control._peers[1 - by]
        both[by].do(lambda: peer.sock.shutdown(socket.SHUT_RDWR))  # type: ignore[union-attr]
        wait_until(lambda: [one.broken for one in both] == [[1], [0]])
        wait_until(lambda: all(one.control.connected for one in both))
        both[0].do(lambda: both[0].control.send(1, Wish("again")))
        wait_until(lambda: both[1].letters == [(0, Wish("again"))])
        assert [one.ended for one in both] == [[], []]


def say_last_and_reset(two: Member) -> None:
    peer = two.control._peers[0]
    two.control.send(0, Wish("last"))
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # type: ignore[union-attr]
    two.control._ended(0, peer)


def test_a_connection_that_is_reset_while_letters_leave_is_made_again() -> None:
    with members(2) as (one, two):

        def say_and_reset() -> None:  # in the thread that would receive the large letter
            wait_until(lambda: one.control.is_busy(1))
            say_last_and_reset(two)

        two.do(say_and_reset)
        one.do(lambda: one.control.send(1, Wish("x" * 50_000_000)))
        wait_until(lambda: two.broken == [0] and one.broken == [1])
        wait_until(lambda: two.control.connected == [0] and one.control.connected == [1])
        assert (one.letters, one.ended, two.ended) == ([(1, Wish("last"))], [], [])


def test_what_has_come_before_an_end_is_read_though_sending_fails() -> None:
    with members(2) as (one, two):
        peer, reads_nothing = two.control._peers[0], threading.Event()

        def send_late() -> None:
            reads_nothing.set()
            wait_until(lambda: peer.sock is None)
            one.control.send(1, Wish("late"))

        one.do(send_late)
        assert reads_nothing.wait(DEADLINE)
        two.do(lambda: say_last_and_reset(two))
        wait_until(lambda: one.letters == [(1, Wish("last"))])
        wait_until(lambda: two.control.connected == [0] and one.control.connected == [1])
        assert (one.ended, two.ended) == ([], [])


@pytest.mark.parametrize("who", [0, 2])
def test_who_has_no_listener_any_more_has_ended(who: int) -> None:
    with members(3) as three:
        three[who].end()
        others = [one for rank, one in enumerate(three) if rank != who]
        wait_until(lambda: all(one.ended == [who] for one in others), 1.0)
        assert [one.broken for one in others] == [[], []]


@pytest.mark.parametrize("by", [0, 1])
def test_who_was_left_behind_is_told_even_if_it_waits_to_be_called(by: int) -> None:
    with members(2) as both:
        both[by].control.last_word = Wish("you were left behind")
        both[by].do(lambda: both[by].control.forget(1 - by))
        wait_until(lambda: both[1 - by].letters[:1] == [(by, Wish("you were left behind"))])
        assert both[by].ended == []


def test_strangers_change_nothing() -> None:
    with members(2) as (one, two):
        hello = HELLO.pack(MAGIC, one.control._session, 1, bytes(32), bytes(32))
        texts = [b"", bytes(92), hello[:50], hello, hello + bytes(32), b"GET / HTTP/1.1\r\n\r\n"]
        made = []
        for number in range(300):
            sock = socket.create_connection(one.place())
            sock.sendall(texts[number % len(texts)])
            made.append(sock)
        one.do(lambda: one.control.send(1, Wish("amid strangers")))
        two.do(lambda: two.control.send(0, Wish("amid strangers")))
        wait_until(
            lambda: one.letters == [(1, Wish("amid strangers"))] and two.letters == [(0, Wish("amid strangers"))]
        )
        assert (one.ended, one.broken, two.ended, two.broken) == ([], [], [], [])
        for sock in made:
            sock.close()


def test_what_is_no_letter_ends_the_connection_alone() -> None:
    with members(2) as (one, two):
        peer = one.control._peers[1]
        one.do(lambda: peer.sock.sendall(b"\xff" * 100))  # type: ignore[union-attr]
        wait_until(lambda: two.broken == [0])
        wait_until(lambda: two.control.connected == [0] and one.control.connected == [1])
        assert (two.letters, two.ended) == ([], [])
