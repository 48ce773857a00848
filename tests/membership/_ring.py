"""Members whose messages a test delivers one by one, in the order that it wants."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable

from pipesgd.membership.generation import Record, first_record
from pipesgd.membership.messages import Enter, Leave, Message, Results, Send, Stop, Supply, Take
from pipesgd.membership.protocol import Member

UNIT = 0
"""Unit that ``ahead`` hold."""


class Ring:
    """Members of generation 0, whose wires hold what nobody has delivered yet.

    Args:
        number: number of members.
        ahead: those that have completed ``UNIT``.
        member_class: class of all members.
        least: least number of members that train.
    """

    def __init__(
        self, number: int, *, ahead: Collection[int] = (), member_class: type[Member] = Member, least: int = 1
    ):
        self.now = 100.0
        record = first_record(range(number))
        self.members = {who: member_class(who, record, self.now, least=least) for who in range(number)}
        self.wires: dict[tuple[int, int], collections.deque[Message]] = collections.defaultdict(collections.deque)
        self.results: dict[int, dict[int, object]] = {who: {} for who in range(number)}
        self.entered: dict[int, Record] = {}
        self.left: dict[int, Leave] = {}
        self.gone: set[int] = set()
        for who in ahead:
            self.complete(who, UNIT)

    def complete(self, who: int, unit: int) -> None:
        """Let the ring of ``who`` complete ``unit``."""
        self.results[who][unit] = f"result of {unit}"
        self.members[who].holds(unit, self.now)
        self.act(who)

    def act(self, who: int) -> None:
        """Carry out what ``who`` asks for."""
        member = self.members[who]
        while member.actions:
            match member.actions.pop(0):
                case Send(to=to, message=message):
                    if to not in self.gone:
                        self.wires[who, to].append(message)
                case Stop():
                    member.stopped(member.newest + 2, self.now)
                case Supply(to=to, generation=generation, ballot=ballot, first=first, last=last):
                    found = {unit: self.results[who][unit] for unit in range(first, last + 1)}
                    self.wires[who, to].append(Results(generation, ballot, found, max(found) + 1))
                case Take(unit=unit, result=result):
                    self.results[who][unit] = result
                case Enter(record=record):
                    self.entered[who] = record
                case Leave() as leave:
                    self.left[who] = leave

    def deliver(self, source: int, to: int) -> Message:
        """Deliver the oldest message from ``source`` to ``to``; return it."""
        message = self.wires[source, to].popleft()
        self.members[to].receive(source, message, self.now)
        self.act(to)
        return message

    def deliver_all(self, among: Iterable[int] | None = None) -> None:
        """Deliver all messages among these members, by default all of them, until there are none."""
        among = set(self.members if among is None else among) - self.gone
        while pairs := [pair for pair, wire in self.wires.items() if wire and among.issuperset(pair)]:
            self.deliver(*pairs[0])

    def lose(self, who: int) -> None:
        """Let what ``who`` has sent and what was sent to it get lost."""
        for pair, wire in self.wires.items():
            if who in pair:
                wire.clear()

    def kill(self, who: int, *, told: Iterable[int]) -> None:
        """End the process of ``who``; those ``told`` learn of it at once."""
        self.gone.add(who)
        self.lose(who)
        for other in told:
            self.members[other].gone(who, self.now)
            self.act(other)

    def tick(self, who: int) -> None:
        self.members[who].tick(self.now)
        self.act(who)

    def pass_time(self, seconds: float, among: Iterable[int]) -> None:
        """Let ``seconds`` pass, in which these members alone hear each other."""
        among = list(among)
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            for who in among:
                self.tick(who)
            self.deliver_all(among)
