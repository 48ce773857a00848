"""A newcomer, from its first request to the record that names it, without input, output or a clock."""

from __future__ import annotations

from collections.abc import Sequence

from pipesgd.membership.generation import NO_BALLOT, Ballot, Record
from pipesgd.membership.messages import (
    Action,
    Beat,
    BeginAgain,
    Decided,
    Enter,
    Fetch,
    Forget,
    Join,
    Leave,
    Level,
    Log,
    Message,
    Prepare,
    Promise,
    Ready,
    Results,
    Send,
    Snapshot,
    Start,
    Take,
)
from pipesgd.membership.peers import Peers
from pipesgd.membership.protocol import Member

JOIN_SECONDS = 2.0
"""Seconds between two requests to be fed."""
FORGET_SECONDS = 7.0
"""Seconds without a message of its donor after which a newcomer looks for another one."""


class Newcomer:
    """A process that follows the training of a generation until a record names it.

    It answers its present donor alone: a former one knows nothing of a newcomer that has begun again. Results that it
    gets when it is levelled are held only once the record names it, since their ballot may come to nothing.

    Whoever drives it calls ``tick``, ``receive`` and ``gone`` as with ``Member``. After the action ``Enter`` it calls
    ``become_member``.

    Args:
        me: id of this process, which was never given before.
        now: time, in seconds.
        contacts: ids of processes that may be members, which are asked in turn.
    """

    def __init__(self, me: int, now: float, *, contacts: Sequence[int]):
        self.me = me
        self.contacts = list(contacts)
        self.newest = -1
        """Newest unit whose result this newcomer holds."""
        self.donor: int | None = None
        self.actions: list[Action] = []
        self.peers = Peers(me, now)
        self._oldest = 0
        self._asked = now - JOIN_SECONDS
        self._control = now
        self._slot = -1
        """Number of the generation whose change this newcomer has taken part in."""
        self._promised: Ballot = NO_BALLOT
        self._pending: dict[int, object] = {}
        self._is_over = False

    def become_member(
        self,
        record: Record,
        now: float,
        *,
        results_kept: int = 2,
        least: int = 1,
        most: int = 64,
        member_class: type[Member] = Member,
    ) -> Member:
        """Return this process as a member of ``record``, which the action ``Enter`` named."""
        return member_class(
            self.me,
            record,
            now,
            oldest=self._oldest,
            results_kept=results_kept,
            least=least,
            most=most,
            contacts=self.contacts,
            peers=self.peers,
        )

    def receive(self, source: int, message: Message, now: float) -> None:
        """Note a message of ``source``."""
        if self._is_over:
            return
        self.peers.hear(source, now)
        match message:
            case Beat():
                self.peers.hear_beat(source, message, now)
                if source == self.donor:
                    self._control = now
                self._adopt(message.record)
            case Decided():
                self._adopt(message.record)
            case Prepare():
                self._on_prepare(source, message, now)
            case Level() if message.ballot == self._promised:
                self._control = now
                fetch = Fetch(message.generation, message.ballot, self.newest + 1, message.base)
                self._send(message.holder, fetch)
            case Results() if (message.generation, message.ballot) == (self._slot, self._promised):
                self._control = now
                self._pending.update(message.results)  # two holders may answer in another order than asked
                self._promise()
            case Snapshot() if self.donor is None:
                self.donor, self._control = source, now
                self.newest, self._oldest = message.unit, message.unit + 1
                self.actions.append(Start(message.unit, message.state))
                self._send(source, Ready(self.newest))
            case Log() if source == self.donor and message.unit == self.newest + 1:
                self._control = now
                self._hold(message.unit, message.result)
            case BeginAgain() if source == self.donor:
                self._start_again()
            case _:
                pass  # of a donor or a ballot that is over

    def gone(self, peer: int, now: float) -> None:
        """Note that the process of ``peer`` has ended."""
        self.peers.bury(peer, now)
        if peer == self.donor and not self._is_over:
            self._start_again()

    def broken(self, peer: int, now: float) -> None:
        """Note that a connection to ``peer`` has ended: what was lost is sent again."""

    def tick(self, now: float) -> None:
        """Do what is due by time. To be called every ``TICK_SECONDS``."""
        if self._is_over:
            return
        self._control += self.peers.wake(now)
        if self.donor is not None and now - self._control > FORGET_SECONDS:
            self._start_again()
        elif self.donor is not None:
            self._send(self.donor, Ready(self.newest))
        elif now - self._asked >= JOIN_SECONDS and self.contacts:
            self._asked = now
            self.contacts.append(self.contacts.pop(0))
            self._send(self.contacts[-1], Join())

    def _on_prepare(self, source: int, message: Prepare, now: float) -> None:
        self._adopt(message.record)
        if self._is_over or source != self.donor:
            return
        if (message.record.number, message.ballot) < (self._slot, self._promised):
            return
        self._pending = {}
        self._slot, self._promised, self._control = message.record.number, message.ballot, now
        self._promise()

    def _promise(self) -> None:
        newest = max([self.newest, *self._pending])
        said = Promise(self._slot, self._promised, None, NO_BALLOT, newest, 0, NO_BALLOT, leaves=False, settled=0)
        self._send(self._promised.member, said)

    def _adopt(self, record: Record) -> None:
        """Enter a generation that names this newcomer."""
        if self.me not in record.members:
            if self._slot < record.number:
                self._pending = {}  # decided without this newcomer
            return
        self._is_over = True
        for unit in range(self.newest + 1, record.base + 1):
            if unit in self._pending:
                self._hold(unit, self._pending[unit])
        if self.newest == record.base:
            self.actions.append(Enter(record))
        else:
            self._leave(f"holds unit {self.newest}, not {record.base}, the base of generation {record.number}", record)

    def _hold(self, unit: int, result: object) -> None:
        self.newest = unit
        self.actions.append(Take(unit, result))

    def _start_again(self) -> None:
        """Look for another donor: under another id if a record may name this one by now."""
        if self._slot >= 0:
            self._leave("its donor is lost, and a generation may name it")
            return
        self.donor, self.newest = None, -1
        self.actions.append(Forget())

    def _leave(self, why: str, unfit_for: Record | None = None) -> None:
        self._is_over = True
        self.actions.append(Leave(why, unfit_for))

    def _send(self, to: int, message: Message) -> None:
        self.actions.append(Send(to, message))
