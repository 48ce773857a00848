"""Members that were asked to stop leave: one alone hands over what its codec has left out; or all end together.

A member that leaves alone begins no iteration any more. Its main thread hands over in small letters, so that no step of
a change is held up, and it leaves when another member says that it has all of it.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from pipesgd.elastic.letters import LeftOut, More, OfLeaving, Piece, Taken, Wish
from pipesgd.membership.change import State
from pipesgd.membership.peers import TICK_SECONDS
from pipesgd.membership.protocol import Member

SIGNALS_SECONDS = 2.0 + TICK_SECONDS
"""Seconds in which all members must be asked to stop to end together, with a checkpoint of all; each looks for signals
twice a second."""
HANDED_OVER_SECONDS = 5.0
"""Seconds after these in which another member must have what was left out; then this one leaves all the same. With
short deadlines, half of one: the others wait for this one meanwhile."""
WISH_SECONDS = 1.0
"""Seconds between two messages that this member was asked to stop: one may not arrive."""
PIECE_BYTES = 256 << 10
PIECES_AHEAD = 2
"""Number of pieces that are sent before the first one is answered."""


class Sums(Protocol):
    """Sums whose codec may leave something out."""

    def left_out(self) -> Sequence[memoryview]:
        """Return the bytes of what this member's next gradient would get in addition; nothing is summed meanwhile."""

    def forget_left_out(self) -> None:
        """Forget it, since another member has it."""

    def take_over(self, parts: Sequence[bytes]) -> bool:
        """Give this member's next gradient what another one has left out; return False if that cannot be. In the
        members' thread."""


class Leaving:
    """Leaving of one member, in its members' thread but for ``hand_over``.

    Args:
        me: id of this member.
        send: function that sends a letter to a member.
        post: function that lets the members' thread call a function with the member and the time.
        deadline: function that returns the seconds that a member waits for another one.
    """

    def __init__(
        self,
        me: int,
        send: Callable[[int, Any], None],
        post: Callable[[Callable[[Any, float], None]], None],
        deadline: Callable[[], float],
    ):
        self.signal: Callable[[], str | None] = lambda: None
        """Function that returns the name of the signal that has asked this process to stop, if one has."""
        self.sums: Sums | None = None
        """Sums of this member whose codec may leave something out; None without any."""
        self.is_due = False
        """True once this member is to leave alone: its main thread is to hand over, and to begin no iteration."""
        self.taken_over: dict[int, int] = {}
        """Members that have what others had left out, by the ids of these."""
        self._me, self._send, self._post, self._deadline = me, send, post, deadline
        self._wishes: dict[int, float] = {}
        """Times at which members were asked to stop by a signal."""
        self._told = -math.inf
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
        self._wishes.setdefault(self._me, now)
        all_asked = self.all_asked(member)
        if now >= self._told + WISH_SECONDS or (all_asked and not member.vote.leaves):
            self._told = now
            # Before anybody begins to leave: what others have told may be on its way still.
            for peer in member.record.members:
                if peer != self._me:
                    self._send(peer, Wish(signal, tuple(self._wishes)))
        due = self._wishes[self._me] + SIGNALS_SECONDS
        is_late = now >= due + min(HANDED_OVER_SECONDS, self._deadline() / 2)
        self.is_due = self.is_due or (now >= due and not all_asked)
        if (sending := self._sending) is not None:
            if sending.to not in member.record.members or (sending.to in self._wishes and not sending.is_given):
                self._send_to_first(sending, member)
            if all_asked or is_late:
                self.end()
        if (all_asked or is_late or (self.is_due and self._is_ready)) and not member.vote.leaves:
            member.leave(now)

    def hear(self, peer: int, letter: OfLeaving, member: Member | None, now: float) -> None:
        """Take a letter of another member about leaving."""
        match letter:
            case Wish():
                for one in (peer, *letter.asked):
                    self._wishes.setdefault(one, now)
            case Piece() if self._me not in self._wishes:
                if letter.number == 0:
                    self._arrived[peer] = []
                if letter.number == len(self._arrived.get(peer, ())):
                    self._arrived[peer].append(letter.data)
                    self._send(peer, More())
            case LeftOut() if member is not None and not self.is_due:  # else its own may be on the way already
                parts = letter.parts_of(b"".join(self._arrived.pop(peer, ())))
                if parts is not None and self.sums is not None and self.sums.take_over(parts):
                    for other in member.record.members:
                        if other != self._me:
                            self._send(other, Taken(peer, self._me))
                    self.taken_over[peer] = self._me
            case More():
                if self._sending is not None and peer == self._sending.to:
                    self._send_next(self._sending)
            case Taken():
                self.taken_over[letter.member] = letter.by
                if letter.member == self._me:
                    self._is_ready = True
                    self.end()

    def is_overdue(self, now: float) -> bool:
        """Return True once this process was asked to stop, and the others have had the time to be asked, too."""
        return now >= self._wishes.get(self._me, math.inf) + SIGNALS_SECONDS

    def all_asked(self, member: Member) -> bool:
        """Return True if all members are known to have been asked to stop."""
        return all(peer in self._wishes for peer in member.record.members)

    def hand_over(self, parts: Sequence[memoryview]) -> bool:
        """Give ``parts``, which this member's codec has left out, to another one, before it leaves. By the main thread.

        Returns False if this member still has them: all end together, or there was not enough time.
        """
        sending = _Sending(b"".join(parts), tuple(len(part) for part in parts))
        self._post(functools.partial(self._begin, sending))
        sending.has_ended.wait(HANDED_OVER_SECONDS + SIGNALS_SECONDS)
        return sending.give_up()

    def end(self, members: Collection[int] | None = None) -> None:
        """Let the main thread wait for no answer any more, in a generation of these ``members``."""
        if (sending := self._sending) is not None:
            sending.is_given = sending.is_given and (members is None or sending.to in members)
            sending.has_ended.set()
        self._sending = None

    def _begin(self, sending: _Sending, member: Member, now: float) -> None:
        self._sending = sending
        if sending.data:
            self._send_to_first(sending, member)
        else:
            self._is_ready = True
            self.end()
        self.look(member, now)

    def _send_to_first(self, sending: _Sending, member: Member) -> None:
        """Begin to send to the first member that stays."""
        others = [one for one in member.record.members if one != self._me and one not in self._wishes]
        sending.is_given = False  # who may have taken it before is lost
        if not others:
            self.end()
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
        if sending.answered == sending.sent and sending.give():
            self._send(sending.to, LeftOut(sending.lengths))


class _Sending:
    """Values that are being handed over."""

    def __init__(self, data: bytes, lengths: tuple[int, ...]):
        self.data, self.lengths = data, lengths
        self.to = -1
        self.sent = 0
        """Number of pieces that were sent."""
        self.answered = 0
        """Number of pieces that have arrived; negative while the first ones are sent."""
        self.is_given = False
        """True once the receiver is to take them."""
        self.has_ended = threading.Event()
        self._is_given_up = False
        self._lock = threading.Lock()

    def give(self) -> bool:
        """Return True if the receiver may take them: the main thread waits for it."""
        with self._lock:
            self.is_given = not self._is_given_up
            return self.is_given

    def give_up(self) -> bool:
        """Return True if the receiver was told to take them; else it will not be."""
        with self._lock:
            self._is_given_up = True
            return self.is_given
