"""Protocol by which the members that survive agree on the next generation, without input, output or a clock.

Events are methods of ``Member``; actions wait in ``actions`` for whoever drives it. A change is one decree of Paxos:
the members of generation g are the acceptors, the values are records of generation g + 1. No disk is needed, since an
id that has died never comes back. Two things are added: a promise *freezes* a member, so that what it holds is final,
and those behind are *levelled* before the vote.

What holds at all times, whatever dies, stops or is cut off:

1. At most one record of each number is decided, and only a decided one is entered.
2. Whoever enters a generation holds exactly the units up to its base, and the same bits as the others.
3. A member that has promised sums nothing in its generation any more. So a generation completes at most one unit
   above the next one's base, at a member that has not promised, and nobody who continues has it.
4. The base of a decided record is never below what a member of it holds: whoever holds more leaves, as if dead.
5. Each slice of samples is in exactly one unit of the history, or waits to be given out.
6. While members that may decide are alive and reach each other, a change ends.

The phases of a change, where the first living member proposes:

1. prepare: everybody freezes, and promises. It says what it has accepted, holds and has begun;
2. wait for every member that is not lost; those who answer must be a quorum;
3. a value that a promise bears is taken, unless a later ballot has levelled anybody: that one had a quorum, and found
   no value;
4. level: the base is the newest unit that anybody holds; those behind fetch what they miss, and promise again;
5. accept, by every member that is not lost; then it is decided;
6. enter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from pipesgd.membership.change import Proposal, State, Vote
from pipesgd.membership.donor import Donor
from pipesgd.membership.generation import Ballot, Record, is_quorum, next_record
from pipesgd.membership.messages import (
    Accept,
    Accepted,
    Action,
    Beat,
    Decided,
    Enter,
    Fetch,
    Join,
    Leave,
    Level,
    Message,
    Prepare,
    Promise,
    Ready,
    Refuse,
    Results,
    Send,
    Stop,
    Supply,
    Suspect,
    Take,
)
from pipesgd.membership.peers import BEAT_SECONDS, Peers, backoff

BALLOT_RETRIES = 3
"""Retries after which a proposer that got no answer begins another ballot."""
STUCK_RETRIES = 5
"""Retries after which a frozen member is called stuck."""


class Member:
    """A member of a generation, from the record that names it to one that does not.

    Whoever drives it calls ``tick`` every ``TICK_SECONDS``, ``receive`` for each message, ``gone`` and ``broken`` for
    what the network says, ``holds`` after each unit that its ring completes, and ``stopped`` after ``Stop``; after each
    call it carries out ``actions``, in their order. Iterations begin and units are summed while ``state`` is active.

    Args:
        me: id of this member.
        record: generation that names it, all units up to whose base it holds.
        now: time, in seconds.
        oldest: oldest unit whose result it holds.
        results_kept: number of newest results that it keeps.
        least: least number of members that train.
        most: largest number of members.
        contacts: ids of all processes known, who are asked in turn while no quorum is in reach.
        peers: what a newcomer has heard before.
    """

    def __init__(
        self,
        me: int,
        record: Record,
        now: float,
        *,
        oldest: int = 0,
        results_kept: int = 2,
        least: int = 1,
        most: int = 64,
        contacts: Sequence[int] = (),
        peers: Peers | None = None,
    ):
        self.me = me
        self.record = record
        self.newest = record.base
        """Newest unit whose result this member holds."""
        self.settled = 0
        """Number of iterations whose gradients were complete when the ring last completed a unit here."""
        self.least = least
        self.contacts = list(contacts)
        self.peers = Peers(me, now) if peers is None else peers
        self.actions: list[Action] = []
        self.proposal: Proposal | None = None
        """Change that this member leads."""
        self.vote = Vote(control=now)
        """State of this member in the change that may be under way."""
        self._most = most
        self._is_out = False
        self._begun = 0
        self._beaten = self._well = now
        self._donor = Donor(self.actions, oldest=oldest, results_kept=results_kept)
        self._enter(record, now)

    @property
    def state(self) -> State:
        """State of this member."""
        if self._is_out:
            return State.OUT
        if self.vote.is_frozen:
            return State.STUCK if self.vote.is_stuck else State.FROZEN
        return State.PAUSED if len(self.record.members) < self.least else State.ACTIVE

    # ---- Events

    def holds(self, unit: int, now: float, settled: int | None = None) -> None:
        """Note that the ring has completed ``unit``. Everybody has added to it, so everybody holds the one before.

        It completes the gradients of ``settled`` iterations, by default those up to ``unit``.
        """
        assert not self.vote.has_stopped
        assert unit == self.newest + 1
        self.newest, self.settled = unit, unit + 1 if settled is None else settled
        self._donor.learn(self.newest, stable=unit - 1)

    def stopped(self, begun: int, now: float) -> None:
        """Note that the sums have ended, and that ``begun`` iterations have begun: final in this generation."""
        self.vote.has_stopped, self._begun = True, begun
        if self.vote.awaiting is not None:
            self._adopt(self.vote.awaiting, now)
        elif not self._is_out:
            self._promise(now)

    def leave(self, now: float) -> None:
        """Ask to be left out of the next generation. A record that names this member answers no: nobody would stay."""
        self.vote.leaves = True
        if not (self._is_out or self.vote.is_frozen):
            self._propose(now)

    def gone(self, peer: int, now: float) -> None:
        """Note that the process of ``peer`` has ended, as the kernel of its machine or its supervisor says."""
        self.peers.bury(peer, now)
        self._donor.drop(peer)
        if peer in self.record.members or self.proposal is not None:
            self._suspect(now)

    def broken(self, peer: int, now: float) -> None:
        """Note that a connection to ``peer`` has ended. That accuses nobody, but bytes may be missing."""
        if peer in self.record.members:
            self._suspect(now)

    def receive(self, source: int, message: Message, now: float) -> None:
        """Note a message of ``source``."""
        if self._is_out:
            return
        self.peers.hear(source, now)
        match message:
            case Beat():
                self.peers.hear_beat(source, message, now)
                self._learn(source, message.record, now)
                if message.record.number == self.record.number and not self._is_out:
                    self._hear_newest(source, message.newest)
            case Decided():
                self._adopt(message.record, now)
            case Suspect():
                self._learn(source, message.record, now)
                if message.record.number == self.record.number:
                    self._suspect(now)
            case Prepare():
                self._on_prepare(source, message, now)
            case Promise() if (proposal := self._own(message)) is not None:
                proposal.promises[source] = message
                self._advance(now)
            case Refuse() if self.proposal is not None and message.generation == self.record.number:
                if message.ballot > self.proposal.ballot:
                    self.vote.promised = max(self.vote.promised, message.ballot)
                    self.proposal, self.vote.control = None, now
            case Level() if message.ballot == self.vote.promised and message.generation == self.record.number:
                self.vote.control = now
                late = self.vote.late
                if late is not None and {*range(self.newest + 1, message.base + 1)} <= late.results.keys():
                    self._take(dataclasses.replace(late, ballot=message.ballot), now)
                else:
                    fetch = Fetch(message.generation, message.ballot, self.newest + 1, message.base)
                    self._answer(message.holder, fetch, now)
                    self.vote.fetches = True
            case Fetch():
                self.actions.append(Supply(source, message.generation, message.ballot, message.first, message.last))
            case Results() if message.generation == self.record.number and self._counts(message.ballot):
                self._take(message, now)
            case Results() if message.generation == self.record.number:
                self.vote.late = message  # it took longer than its ballot; a newer one asks for the same
            case Accept() if message.generation == self.record.number and message.ballot >= self.vote.promised:
                self.vote.promised, self.vote.control = message.ballot, now
                self.vote.accepted, self.vote.accepted_in = message.value, message.ballot
                self._answer(source, Accepted(message.generation, message.ballot), now)
            case Accepted() if (proposal := self._own(message)) is not None:
                proposal.accepted.add(source)
                self._advance(now)
            case Join():
                self._donor.begin(source)
            case Ready():
                self._donor.hear_ready(source, message.newest, now)
            case _:
                pass  # answers to a ballot, or of a donor, that is over

    def tick(self, now: float) -> None:
        """Do what is due by time. To be called every ``TICK_SECONDS``."""
        if self._is_out:
            return
        self.vote.control += self.peers.wake(now)
        if now - self._beaten >= BEAT_SECONDS:
            self._beat(now)
        if not self.vote.is_frozen:
            self._well = now
        elif now - self._well > STUCK_RETRIES * self._retry(now):
            self.vote.is_stuck = True
        silent = any(self.peers.is_lost(member, now) for member in self.record.members)
        if self.proposal is not None:
            self._tick_proposal(self.proposal, now)
        elif self.vote.is_frozen or self.vote.suspicious is not None or silent:
            self._tick_suspicious(silent, now)
        elif self.vote.leaves:
            self._propose(now)
        else:
            self._admit(now)

    # ---- Heartbeats

    def _beat(self, now: float) -> None:
        self._beaten = now
        self.beat_to((*self._others(), *self._donor.fed()), now)

    def beat_to(self, peers: Iterable[int], now: float) -> None:
        """Send heartbeats to ``peers`` before they are due: the sooner one is answered, the sooner a lease begins."""
        count = self.peers.count_beat(now)
        for peer in peers:
            self._send(peer, Beat(self.record, count, *self.peers.echo(peer, now), self.newest))

    def _hear_newest(self, source: int, newest: int) -> None:
        """Note what a member holds: units that all members hold are stable."""
        self._held[source] = newest
        if all(member in self._held for member in self._others()):
            stable = min([self.newest, *(self._held[member] for member in self._others())])
            self._donor.learn(self.newest, stable=stable)

    def _learn(self, source: int, record: Record, now: float) -> None:
        """Enter a newer generation; tell whoever is in an older one."""
        if record.number < self.record.number:
            self._send(source, Decided(self.record))
        else:
            self._adopt(record, now)

    # ---- 0. Suspicion

    def _suspect(self, now: float) -> None:
        """Let the first living member propose the next generation: something is wrong with this one."""
        if self._is_out:
            return
        if self.vote.suspicious is None:
            self.vote.suspicious = now
        if self.proposal is not None:
            self._advance(now)
        elif not self.vote.is_frozen or self.vote.promised.member in self.peers.dead:
            first = self.peers.living(self.record.members, now)[0]
            if first == self.me:
                self._propose(now)
            else:
                self._send(first, Suspect(self.record))

    def _tick_suspicious(self, silent: bool, now: float) -> None:
        """Propose when those before this member have had the time to do it."""
        place = self.peers.living(self.record.members, now).index(self.me)
        if self.vote.is_frozen:
            since, patience = self.vote.control, backoff(self.vote.promised, self._retry(now)) * (1 + place)
        else:
            since = max(self.vote.control, now - 0.5 if self.vote.suspicious is None else self.vote.suspicious)
            patience = 0.7 * self._retry(now) * place
        if now - since >= patience:
            self._propose(now)
        elif silent and not self.vote.is_frozen:
            self._suspect(now)

    # ---- 1. Prepare, promise

    def _propose(self, now: float, joiners: tuple[int, ...] = ()) -> None:
        ballot = Ballot(self.vote.promised.number + 1, self.me)
        self.proposal = Proposal(ballot, joiners, since=now, sent=now)
        prepare = Prepare(self.record, ballot)
        for peer in (*self._others(), *joiners):
            self._send(peer, prepare)
        self._on_prepare(self.me, prepare, now)

    def _on_prepare(self, source: int, message: Prepare, now: float) -> None:
        self._learn(source, message.record, now)
        if self._is_out or self.vote.awaiting is not None or message.record.number < self.record.number:
            return
        if message.ballot < self.vote.promised:
            self._send(source, Refuse(self.record.number, self.vote.promised))
            return
        if message.ballot > self.vote.promised and message.ballot.member != self.me:
            self.proposal = None
        self.vote.promised, self.vote.control = message.ballot, now
        if not self.vote.is_frozen:
            self.vote.is_frozen = True
            self.actions.append(Stop())
        elif self.vote.has_stopped:
            self._promise(now)

    def _promise(self, now: float) -> None:
        """Answer the newest ballot, now that what this member holds is final."""
        promise = Promise(
            self.record.number,
            self.vote.promised,
            self.vote.accepted,
            self.vote.accepted_in,
            self.newest,
            self._begun,
            self.vote.levelled,
            self.vote.leaves,
            self.settled,
        )
        self._answer(self.vote.promised.member, promise, now)

    # ---- 2. to 5. The proposer's side

    def _advance(self, now: float) -> None:
        """Take the next step of this member's proposal, if everybody has answered who is not lost."""
        proposal, members = self.proposal, self.record.members
        assert proposal is not None
        if proposal.value is None:
            proposal.value = self._choose(proposal, now)
            if proposal.value is None or self.proposal is not proposal:
                return
            others = self.peers.living(self._others(), now)
            # Its own acceptance comes last: it may decide, and what follows is of another generation.
            for member in (*others, self.me):
                self._answer(member, Accept(self.record.number, proposal.ballot, proposal.value), now)
            return
        if any(member not in proposal.accepted for member in self.peers.living(members, now)):
            return
        if self._may_decide(proposal.accepted):
            value = proposal.value
            for member in dict.fromkeys((*members, *value.members)):
                if member != self.me:
                    self._send(member, Decided(value))
            self._adopt(value, now)

    def _choose(self, proposal: Proposal, now: float) -> Record | None:
        """Return the value of this ballot, or None if something must be waited for."""
        living = self.peers.living(self.record.members, now)
        stay = [member for member in living if member in proposal.promises]
        if len(stay) < len(living) or not self._may_decide(stay):
            return None
        value = self._value_to_take(proposal)
        if value is not None:
            return value
        base = max(proposal.promises[member].newest for member in stay)
        if self._falls(proposal, base):
            self._propose(now, proposal.joiners)  # who held it is lost, but it may be on its way to others
            return None
        proposal.base = base
        if proposal.complete is None:
            proposal.complete = now
        answered = [one for one in proposal.joiners if one in proposal.promises and one not in self.peers.dead]
        for one in answered:
            proposal.joiners_since.setdefault(one, now)
        waiting = [member for member in stay if proposal.promises[member].newest < base]
        if now <= proposal.joiners_until(self._retry(now)):
            waiting += [
                one
                for one in proposal.joiners
                if one not in self.peers.dead and (one not in answered or proposal.promises[one].newest < base)
            ]
        self._level(proposal, [member for member in waiting if member in proposal.promises], base, stay, now)
        if waiting or self.proposal is not proposal:
            return None
        # If nobody would stay, nobody leaves: the record names all of them, and they end together.
        members = [member for member in stay if not proposal.promises[member].leaves] or stay
        room = max(0, self._most - len(members))
        joiners = [one for one in answered if proposal.promises[one].newest == base][:room]
        promises = [proposal.promises[member] for member in stay]
        begun = max(promise.begun for promise in promises)
        settled = max(promise.settled for promise in promises if promise.newest == base)
        ends = all(promise.leaves for promise in promises)
        return dataclasses.replace(
            self._next_record(members, joiners, base, settled, begun, now), ends=ends or self.record.ends
        )

    def _may_decide(self, those: Collection[int]) -> bool:
        return is_quorum(those, self.record.members, self.peers.certain)

    def _value_to_take(self, proposal: Proposal) -> Record | None:
        """Return the value accepted in the highest ballot that is not void, if there is one.

        A ballot that has levelled anybody had a quorum, and found no older value: none was decided, nor ever will be.
        """
        promises = [promise for member, promise in proposal.promises.items() if member in self.record.members]
        void = self._void_below(promises)
        accepted = [one for one in promises if one.accepted is not None and one.accepted_in >= void]
        return max(accepted, key=lambda one: one.accepted_in).accepted if accepted else None

    def _void_below(self, promises: Sequence[Promise]) -> Ballot:
        return max(promise.levelled for promise in promises)

    def _falls(self, proposal: Proposal, base: int) -> bool:
        """Return True if members were levelled to more than ``base`` in this ballot."""
        return base < proposal.base

    def _level(self, proposal: Proposal, behind: Sequence[int], base: int, stay: Sequence[int], now: float) -> None:
        """Let those ``behind`` fetch what they miss from a member that holds it."""
        for member in behind:
            if proposal.told.get(member) != base:
                proposal.told[member] = base
                holder = next(one for one in stay if proposal.promises[one].newest == base)
                self._answer(member, Level(self.record.number, proposal.ballot, base, holder), now)

    def _next_record(
        self, stay: Sequence[int], joiners: Sequence[int], base: int, settled: int, begun: int, now: float
    ) -> Record:
        why = {member: self.peers.why(member, now) or "it asked to leave" for member in self.record.members}
        return next_record(self.record, stay, joiners, base=base, settled=settled, begun=begun, why=why)

    def _tick_proposal(self, proposal: Proposal, now: float) -> None:
        retry = self._retry(now)
        if now - proposal.sent >= retry:
            if now - proposal.since >= BALLOT_RETRIES * retry:
                self._propose(now)
                return
            proposal.sent = now
            self._ask_again(proposal)
            if self.vote.is_stuck:
                self._donor.give_up()  # a member that is stuck is no donor
            if self.contacts:  # perhaps the others have continued elsewhere
                self.contacts.append(self.contacts.pop(0))
                self._send(self.contacts[-1], Suspect(self.record))
        self._advance(now)

    def _ask_again(self, proposal: Proposal) -> None:
        for peer in (*self._others(), *proposal.joiners):
            if peer not in proposal.promises:
                self._send(peer, Prepare(self.record, proposal.ballot))
            elif proposal.value is not None and peer not in proposal.accepted and peer in self.record.members:
                self._send(peer, Accept(self.record.number, proposal.ballot, proposal.value))
        proposal.told.clear()

    # ---- 4. Levelling, at those behind

    def _counts(self, ballot: Ballot) -> bool:
        """Return True if results for ``ballot`` count: what this member has told a later ballot must stay true."""
        return ballot == self.vote.promised

    def _take(self, message: Results, now: float) -> None:
        self.vote.control, self.vote.fetches = now, False
        for unit in sorted(message.results):
            if unit == self.newest + 1:
                self.newest, self.settled, self.vote.levelled = unit, message.settled, message.ballot
                self.actions.append(Take(unit, message.results[unit]))
        self._promise(now)

    # ---- 6. Enter

    def _adopt(self, record: Record, now: float) -> None:
        """Enter a decided generation, or leave."""
        if record.number <= self.record.number or self._is_out:
            return
        if self.me not in record.members:
            self._go(f"generation {record.number} is without it")
        elif self.vote.is_frozen and not self.vote.has_stopped:
            self.vote.awaiting = record
        elif self._fits(record):
            self.record = record
            self._enter(record, now)
            self.actions.append(Enter(record))
            self._beat(now)
            if self.peers.dead & set(record.members):
                self._suspect(now)
        else:
            self._go(f"holds unit {self.newest}, not {record.base}, the base of generation {record.number}", record)

    def _fits(self, record: Record) -> bool:
        return self.newest == record.base

    def _go(self, why: str, unfit_for: Record | None = None) -> None:
        self._is_out = True
        self.proposal = None
        self.actions.append(Leave(why, unfit_for))

    def _enter(self, record: Record, now: float) -> None:
        """Forget what was of the generation before."""
        self.vote = Vote(control=now)
        self.settled = record.settled
        self._held: dict[int, int] = {}
        self.proposal = None
        self.peers.hear_all(record.members, now)
        self._donor.enter(record.members, self.newest)

    # ---- Newcomers

    def _admit(self, now: float) -> None:
        """Propose newcomers that are ready: after a unit of this generation, so that they never stop the training."""
        size = len(self.record.members)
        if size < self._most and (self.newest > self.record.base or size < self.least):
            joiners = self._donor.take_ready(now)
            if joiners:
                self._propose(now, joiners)

    # ---- Small things

    def _others(self) -> list[int]:
        return [member for member in self.record.members if member != self.me]

    def _retry(self, now: float) -> float:
        return self.peers.retry_seconds(self._others(), now)

    def _own(self, answer: Promise | Accepted) -> Proposal | None:
        """Return this member's proposal if ``answer`` is one to it."""
        proposal = self.proposal
        if proposal is None or (answer.generation, answer.ballot) != (self.record.number, proposal.ballot):
            return None
        return proposal

    def _send(self, to: int, message: Message) -> None:
        self.actions.append(Send(to, message))

    def _answer(self, to: int, message: Message, now: float) -> None:
        """Send ``message``, or let this member have it at once if it is for itself."""
        if to == self.me:
            self.receive(self.me, message, now)
        else:
            self._send(to, message)
