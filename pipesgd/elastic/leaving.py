"""Members that were asked to stop leave: one alone hands over what its codec has left out; or all end together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pipesgd.elastic.letters import LeftOut, Result, Taken, Wish
from pipesgd.membership.change import State
from pipesgd.membership.protocol import Member

SIGNALS_SECONDS = 2.0
"""Seconds in which all members must be asked to stop to end together, with a checkpoint of all."""
HANDED_OVER_SECONDS = 10.0
"""Seconds in which another member must have what was left out; after them this one leaves all the same."""


class Leaving:
    """Leaving of one member, all in its members' thread.

    Args:
        me: id of this member.
        send: function that sends a letter to a member.
        post: function that lets the members' thread call a function with the member and the time.
    """

    def __init__(
        self, me: int, send: Callable[[int, Any], None], post: Callable[[Callable[[Member, float], None]], None]
    ):
        self.signal: Callable[[], str | None] = lambda: None
        """Function that returns the name of the signal that has asked this process to stop, if one has."""
        self.give_away: Callable[[Callable[[Result | None], None]], None] = lambda then: then(None)
        """Function that calls its argument, between two sums, with what the codec has left out of them, which this
        process does not have from then on."""
        self.take_over: Callable[[Result], bool] = lambda result: False
        """Function that takes what another member has left out; it returns False if it cannot."""
        self.taken_over: set[int] = set()
        """Members that have left, and whose share this one has taken over."""
        self._me, self._send, self._post = me, send, post
        self._wishes: dict[int, float] = {}
        """Times at which members were asked to stop by a signal."""
        self._since: float | None = None
        """Time at which this member has begun to hand over."""
        self._is_given = False

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
        if self.all_asked(member):
            if not member.vote.leaves:
                member.leave(now)
        elif now >= self._wishes[self._me] + SIGNALS_SECONDS:
            self.leave(member, now)

    def leave(self, member: Member, now: float) -> None:
        """Leave alone, once another member has what was left out. It is to be called again until this one is out."""
        if self._since is None:
            self._since = now
            self.give_away(lambda left_out: self._post(functools.partial(self._hand_over, left_out)))
        elif (self._is_given or now >= self._since + HANDED_OVER_SECONDS) and not member.vote.leaves:
            member.leave(now)

    def hear(self, peer: int, letter: Wish | LeftOut | Taken, member: Member | None, now: float) -> None:
        """Take a letter of another member about leaving."""
        match letter:
            case Wish():
                self._wishes.setdefault(peer, now)
            case LeftOut() if self.take_over(letter.result):
                self.taken_over.add(peer)
                self._send(peer, Taken())
            case Taken() if member is not None and self._since is not None:
                self._is_given = True
                self.leave(member, now)

    def all_asked(self, member: Member) -> bool:
        """Return True if all members are known to have been asked to stop."""
        return all(peer in self._wishes for peer in member.record.members)

    def _hand_over(self, left_out: Result | None, member: Member, now: float) -> None:
        """Send what was left out to the first member that stays, which will be the first of all."""
        to = next((one for one in member.record.members if one != self._me and one not in self._wishes), None)
        if left_out is not None and to is not None:
            self._send(to, LeftOut(left_out))
        else:
            self._is_given = True
            self.leave(member, now)
