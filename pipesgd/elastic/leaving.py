"""Members that were asked to stop leave: one alone hands over what its codec has left out; or all end together.

A member that leaves alone begins no iteration any more. Its main thread hands over in small letters, so that no step of
a change is held up, and it leaves when another member says that it has all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pipesgd.elastic.letters import LeftOut, More, Piece, Taken, Wish
from pipesgd.membership.change import State
from pipesgd.membership.protocol import Member

SIGNALS_SECONDS = 2.0
"""Seconds in which all members must be asked to stop to end together, with a checkpoint of all."""
HANDED_OVER_SECONDS = 5.0
"""Seconds after these in which another member must have what was left out; then this one leaves all the same."""
PIECE_BYTES = 256 << 10
PIECES_AHEAD = 2
"""Number of pieces that are sent before the first one is answered."""


class Leaving:
    """Leaving of one member, in its members' thread but for ``hand_over``.

    Args:
        me: id of this member.
        send: function that sends a letter to a member.
        post: function that lets the members' thread call a function with the member and the time.
    """

    def __init__(self, me: int, send: Callable[[int, Any], None], post: Callable[[Callable[[Any, float], None]], None]):
        self.signal: Callable[[], str | None] = lambda: None
        """Function that returns the name of the signal that has asked this process to stop, if one has."""
        self.take_over: Callable[[Sequence[bytes]], bool] = lambda parts: False
        """Function that takes what another member has left out; it returns False if it cannot."""
        self.is_due = False
        """True once this member is to leave alone: its main thread is to hand over, and to begin no iteration."""
        self.taken_over: dict[int, int] = {}
        """Members that have what others had left out, by the ids of these."""
        self._me, self._send, self._post = me, send, post
        self._wishes: dict[int, float] = {}
        """Times at which members were asked to stop by a signal."""
        self._is_ready = False
        """True if there is nothing to hand over any more."""
        self._sending: _Sending | None = None
        self._arrived: dict[int, list[bytes]] = {}
        """Pieces that have come, by the member that leaves."""

    def look(self, member: Member, now: float) -> None:
        """Leave some time after a signal has asked this process to stop, or at once if all were asked."""
        signal = self.signal()
        if signal is None or member.state is State.OUT:
            return
        if self._me not in self._wishes:
            self._wishes[self._me] = now
            for peer in member.record.members:
                if peer != self._me:
                    self._send(peer, Wish(signal))
        all_asked = self.all_asked(member)
        due = self._wishes[self._me] + SIGNALS_SECONDS
        is_late = now >= due + HANDED_OVER_SECONDS
        self.is_due = self.is_due or (now >= due and not all_asked)
        if self._sending is not None:
            if all_asked or is_late:
                self._end_sending(False)
            elif self._sending.to not in member.record.members or self._sending.to in self._wishes:
                self._send_to_first(self._sending, member)
        if (all_asked or is_late or (self.is_due and self._is_ready)) and not member.vote.leaves:
            member.leave(now)

    def hear(self, peer: int, letter: Wish | Piece | More | LeftOut | Taken, member: Member | None, now: float) -> None:
        """Take a letter of another member about leaving."""
        match letter:
            case Wish():
                self._wishes.setdefault(peer, now)
            case Piece():
                if letter.number == 0:
                    self._arrived[peer] = []
                if letter.number == len(self._arrived.get(peer, ())):
                    self._arrived[peer].append(letter.data)
                    self._send(peer, More())
            case LeftOut() if member is not None:
                parts = letter.parts_of(b"".join(self._arrived.pop(peer, ())))
                if parts is not None and self.take_over(parts):
                    for other in member.record.members:
                        if other != self._me:
                            self._send(other, Taken(peer, self._me))
                    self.taken_over[peer] = self._me
            case More():
                if self._sending is not None and peer == self._sending.to:
                    self._send_next(self._sending)
            case Taken():
                self.taken_over[letter.member] = letter.by
                self._is_ready = self._is_ready or letter.member == self._me

    def all_asked(self, member: Member) -> bool:
        """Return True if all members are known to have been asked to stop."""
        return all(peer in self._wishes for peer in member.record.members)

    def hand_over(self, parts: Sequence[memoryview]) -> bool:
        """Give ``parts``, which this member's codec has left out, to another one, before it leaves. By the main thread.

        Returns False if this member still has them: all end together, or there was not enough time.
        """
        sending = _Sending(b"".join(parts), tuple(len(part) for part in parts))
        self._post(functools.partial(self._begin, sending))
        try:
            return sending.is_given.result(HANDED_OVER_SECONDS + SIGNALS_SECONDS)
        except TimeoutError:  # the members' thread has ended; or not, and must not give them any more
            return not sending.is_given.cancel() and sending.is_given.result()

    def _begin(self, sending: _Sending, member: Member, now: float) -> None:
        self._sending = sending
        if sending.data:
            self._send_to_first(sending, member)
        else:
            self._is_ready = True
            self._end_sending(False)
        self.look(member, now)

    def _send_to_first(self, sending: _Sending, member: Member) -> None:
        """Begin to send to the first member that stays."""
        others = [one for one in member.record.members if one != self._me and one not in self._wishes]
        if not others:
            self._end_sending(False)
            return
        sending.to, sending.sent, sending.answered = others[0], 0, -PIECES_AHEAD
        for _ in range(PIECES_AHEAD):
            self._send_next(sending)

    def _send_next(self, sending: _Sending) -> None:
        """Send the next piece, or after the last one's answer the letter by which the receiver takes them all."""
        sending.answered += 1
        begin = sending.sent * PIECE_BYTES
        if begin < len(sending.data):
            self._send(sending.to, Piece(sending.sent, sending.data[begin : begin + PIECE_BYTES]))
            sending.sent += 1
        if sending.answered == sending.sent:
            self._end_sending(True)

    def _end_sending(self, is_given: bool) -> None:
        """Tell the main thread what has become of it; if all of it has arrived, let the receiver take it."""
        sending, self._sending = self._sending, None
        if sending is not None and sending.is_given.set_running_or_notify_cancel():
            if is_given:
                self._send(sending.to, LeftOut(sending.lengths))
            sending.is_given.set_result(is_given)


class _Sending:
    """Values that are being handed over."""

    def __init__(self, data: bytes, lengths: tuple[int, ...]):
        self.data, self.lengths = data, lengths
        self.is_given: Future[bool] = Future()
        self.to = -1
        self.sent = 0
        """Number of pieces that were sent."""
        self.answered = 0
        """Number of pieces that have arrived; negative while the first ones are sent."""
