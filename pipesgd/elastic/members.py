"""Membership of this process in an elastic run: a thread that drives the protocol, and what other threads ask of it.

The protocol (``pipesgd.membership.protocol``) decides who continues after a member was lost. It has no clock, no
connections and no threads; all of these are here. Three threads meet:

- the thread of this class beats, hears, and lets the protocol take its steps;
- the communication thread sums units. ``check`` interrupts it, and ``next_record`` takes it through a change;
- the main thread begins iterations, and waits in ``begin`` while a change is under way.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipesgd.comm.greeting import Wrap
from pipesgd.elastic.control import ControlConnections
from pipesgd.elastic.leaving import HANDED_OVER_SECONDS, Leaving
from pipesgd.elastic.letters import Goodbye, OfLeaving, Result, Value
from pipesgd.elastic.missed import is_missed
from pipesgd.errors import DeadlineExceeded, LeftBehind, RunError
from pipesgd.exit import EXIT_FAILED
from pipesgd.membership import generation, heartbeat
from pipesgd.membership.change import State, is_led
from pipesgd.membership.generation import Record, Span, first_record
from pipesgd.membership.messages import (
    Action,
    Beat,
    Decided,
    Enter,
    Leave,
    Message,
    Prepare,
    Results,
    Send,
    Stop,
    Supply,
    Take,
)
from pipesgd.membership.peers import SILENT_SECONDS, TICK_SECONDS, Peers
from pipesgd.membership.protocol import Member
from pipesgd.process import say
from pipesgd.ranks import Ranks

CONNECTED_SECONDS = 0.005
"""Seconds between two looks whether all members are connected."""
HANGS_SECONDS = 5.0
"""Seconds that a process that hangs has to notice that it was left behind, before it is ended."""
STOPPED_SECONDS = 2.0
"""Seconds by which a tick is late if this process was stopped."""
TRIP_SECONDS = 2.0
"""Seconds for which a change counts as led after the last sign of that: a ballot begins with a round trip."""
GOODBYE_SECONDS = 2.0
"""Seconds in which the last letters must have left."""

Event = Callable[[Any, float], None]


class Interrupted(Exception):  # noqa: N818 (what happened)
    """The work of the communication thread is over, since a change of members has begun."""


class Members:
    """The membership of this process, from the ranks that a job began with on.

    It connects them. Until all have called ``start``, a member that is lost ends all others.

    Args:
        ranks: those ranks, whose numbers are the ids of the members. Collective.
        wrap: function that puts TLS on a socket; None for connections in clear.
        least: least number of members that train.
        wait: seconds for which a member without a majority waits for the others to come back.
        silence: seconds without a sign of life after which a member is lost, the same for all.
    """

    def __init__(self, ranks: Ranks, wrap: Wrap | None, *, least: int, wait: float, silence: float):
        self.me = ranks.rank
        self._standing = ranks.standing
        self.least = least
        self.wait = wait
        self._silence = silence
        self.interrupt: Callable[[], None] = lambda: None
        """Function that ends what the communication thread waits for, and lets it call ``next_record``."""
        self.result_of: Callable[[int], Result | None] = lambda unit: None
        """Function that returns the result of a unit that this process still has; else None."""
        self.record = first_record(range(ranks.world_size))
        """Newest generation that the communication thread has entered."""
        self.history: list[tuple[Record, float]] = [(self.record, time.time())]
        """All generations that it has entered, and when."""
        self.why_out: str | None = None
        """Reason why the others continue without this process; None if it is a member."""
        self.failure: BaseException | None = None
        """Error of which this membership has ended, if it has."""
        self.why_alone: str | None = None
        """Reason why this process is the only member of its generation, which is no majority's and is there to end in
        order; None if it is not."""
        self._alone: tuple[str, Callable[[int], Record]] | None = None
        """The reason, and the generation, by the number of iterations that have begun."""
        self.stop_at: int | None = None
        """Iteration that nobody begins, since all members were asked to stop; None if they were not."""
        self._changed = threading.Condition()
        self._orders: deque[Take | Enter | Leave] = deque()
        """Actions that the communication thread has not carried out yet."""
        self.has_started = False
        """True once a member may be lost."""
        self._stops = self._stopped = self._entered = 0
        """Number of times that the sums were to stop, that they have stopped, and that they have continued."""
        self._begun = 0
        self._values: dict[tuple[int, str], str] = {}
        """Values that members share, by generation and key."""
        self._events: deque[Event] = deque()
        self._answered: set[int] = set()
        """Members whose first heartbeat was answered at once, so that their lease begins."""
        self.is_summing: Callable[[], bool] = lambda: False
        """Function that returns True while the communication thread does a unit: this rank is in it then."""
        self._hung: tuple[Any, float] | None = None
        """Phase in which this process hangs, and the time at which it began to leave therefore."""
        self._awake_since = time.monotonic()
        """Time from which on this process has run without a stop."""
        self._stuck_since = self._led = time.monotonic()
        """Times of the newest ticks at which a majority was in reach, and at which a change was led."""
        self._is_stuck = self._lacks_quorum = False
        self._is_over = False
        """True once a member has done its work: all have, so nobody is missed any more."""
        self._is_closed = False
        self._member: Member | None = None
        """State machine, from the start on."""
        self._early: list[tuple[int, Message]] = []
        """Messages that came before the start, from members that had started."""
        self._ended_early: list[int] = []
        """Members that ended while this one was starting."""
        self._control = ControlConnections(
            ranks, wrap, on_letter=self._hear, on_sign=self._on_sign, on_end=self._on_end, on_break=self._on_break
        )
        self.leaving = Leaving(self.me, self._control.send, self._post, lambda: self._standing.timeout)
        """Way in which this process leaves if it is asked to stop."""
        self._thread = threading.Thread(target=self._run, name="pipesgd-members", daemon=True)
        self._thread.start()

    def wait_for_connections(self, seconds: float) -> None:
        """Return when there is a connection to every other member.

        Raises:
            DeadlineExceeded: one was not there within ``seconds``.
            RunError: the process of one has ended.
        """
        end = time.monotonic() + seconds
        while missing := sorted({*self.record.members} - {self.me, *self._control.connected}):
            if self.failure is not None:
                raise self.failure
            if time.monotonic() >= end:
                reason = self._control.unanswered(missing[0], seconds)
                raise DeadlineExceeded(rank=self.me, peer=missing[0], operation="connection", reason=reason)
            time.sleep(CONNECTED_SECONDS)

    def start(self, first: Record) -> None:
        """Survive losses from now on. All members have met, and hold ``first``, generation 0, alike."""
        with self._changed:
            self.record, self.history, self.has_started = first, [(first, time.time())], True
        contacts = list(first.members)

        def begin(nothing: Member | None, now: float) -> None:
            peers = Peers(self.me, now, self._silence)
            self._member = Member(self.me, first, now, least=self.least, contacts=contacts, peers=peers)
            self._member.beat_to([peer for peer in contacts if peer != self.me], now)
            early, self._early = self._early, []
            for peer, message in early:
                self._member.receive(peer, message, now)
            for peer in self._ended_early:
                self._member.gone(peer, now)

        self._post(begin)

    # ---- For the communication thread

    @property
    def is_interrupted(self) -> bool:
        """True if a change has begun that ``next_record`` has not ended."""
        return self._stops > self._entered or self.why_out is not None

    def check(self) -> None:
        """Raise ``Interrupted`` if ``is_interrupted``."""
        if self.is_interrupted:
            raise Interrupted

    def holds(self, unit: int, settled: int) -> None:
        """Note that this rank has done ``unit``, and has with it the means of ``settled`` iterations."""
        if self.has_started:  # nobody waits for it
            self._events.append(lambda member, now: member.holds(unit, now, settled))

    def trouble(self, peer: int | None) -> None:
        """Note that a sum has failed, at the connection to ``peer`` if that is known: a change must follow."""
        suspect = self.me if peer is None or peer not in self.record.members else peer
        if self.has_started:
            self._post(lambda member, now: member.broken(suspect, now))

    def next_record(self, take: Callable[[int, Result], None]) -> Record:
        """Stop, take results that others have and this process does not, and return the generation to enter.

        If no majority was in reach for ``wait`` seconds, it is one of this process alone: see ``why_alone``.

        Raises:
            LeftBehind: the others continue without this process.
        """
        since: float | None = None
        while True:
            if not self.has_started:
                raise self.failure or RunError(f"rank {self.me}: a change of members before training has begun")
            if self.failure is not None:
                raise self.failure
            if self._is_over or self.why_out is not None:
                raise LeftBehind(self.me, self.why_out or "the others have ended", None)
            with self._changed:
                if not self._orders and self._stops == self._stopped:
                    if self._is_stuck and since is None:
                        since = time.monotonic()
                    self._changed.wait(TICK_SECONDS)
                if not self._is_stuck:
                    since = None
                order = self._orders.popleft() if self._orders else None
                if order is None and self._stops > self._stopped:
                    self._stopped = self._stops
                    self._post(lambda member, now, begun=self._begun: member.stopped(begun, now))  # type: ignore[misc]
                    continue
                if isinstance(order, Enter):
                    self._entered += 1
                    self.record = order.record
                    if self._alone is not None:
                        self.why_alone, _ = self._alone
                    self.history.append((order.record, time.time()))
                    self._values = {key: one for key, one in self._values.items() if key[0] >= order.record.number}
                    self._changed.notify_all()
                    return order.record
                if isinstance(order, Leave):
                    self.failure = self.failure or LeftBehind(self.me, order.why, None)  # before anybody asks for it
                    self.why_out = self.why_out or order.why
                    self._changed.notify_all()
            if isinstance(order, Leave):
                raise LeftBehind(self.me, order.why, None)
            if isinstance(order, Take):
                assert isinstance(order.result, Result)
                take(order.unit, order.result)
            if since is not None and time.monotonic() >= since + self._patience():
                since = None
                self._post(self._go_alone)

    # ---- For the main thread

    def span_alone(self, done: int) -> Span:
        """Return the layout of samples after ``done`` iterations where this process is alone: see ``why_alone``.

        Others may have begun more iterations before: then those of this process are given out again.
        """
        assert self._alone is not None
        _, following = self._alone
        record = following(done)
        span = record.spans[-1]
        own = (record.slice_of(iteration, self.me) for iteration in range(done, span.first))
        return replace(span, first=done, given_back=span.given_back + tuple(one for one in own if one is not None))

    def begin(self, iteration: int) -> Record:
        """Note that this rank begins ``iteration``, after waiting while a change is under way.

        Returns the generation that it belongs to.

        Raises:
            Interrupted: there is no such generation: what the communication thread does has failed, and says why.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stops == self._entered or self.why_out is not None or self._is_closed)
            if self.why_out is not None or self._is_closed:
                raise Interrupted
            if iteration != self.stop_at and len(self.record.span(iteration).members) >= self.least:  # it is computed
                self._begun = iteration + 1
            return self.record

    def leave(self, left_out: Sequence[memoryview]) -> bool:
        """Hand over ``left_out``, and wait until the others continue without this process, or all end together.

        Returns False if this member still has ``left_out``.
        """
        is_given = self.leaving.hand_over(left_out)
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self.why_out or self._is_closed or self._alone) or self.stop_at is not None,
                HANDED_OVER_SECONDS,
            )
        return is_given

    def stop_listening(self) -> None:
        """Let signals be no request to leave any more: training is done."""
        self.leaving.signal = lambda: None

    def give_up(self, failure: BaseException) -> None:
        """Let ``begin`` fail from now on: what the communication thread does has failed."""
        with self._changed:
            self.failure = self.failure or failure
            self.why_out = self.why_out or str(failure)
            self._changed.notify_all()

    # ---- Values that members share

    def share(self, generation: int, key: str, value: str | None) -> None:
        """Let all members of ``generation`` know ``value``; None deletes it."""
        members = self.record.members
        self._keep(generation, key, value)
        letter = Value(generation, key, value)

        def send(member: Member, now: float) -> None:
            for peer in members:
                if peer != self.me:
                    self._control.send(peer, letter)

        self._post(send)

    def shared(self, generation: int, keys: Sequence[str]) -> dict[str, str]:
        """Return those of the values of ``generation`` with these ``keys`` that are known."""
        with self._changed:
            return {key: self._values[generation, key] for key in keys if (generation, key) in self._values}

    # ---- The end

    def close(self, *, in_order: bool) -> None:
        """End the membership: ``in_order`` if all members have done their work; else the others continue."""
        self._is_over = self._is_over or in_order
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._control.wake()
        self._thread.join(2 * GOODBYE_SECONDS)

    # ---- The thread

    def _post(self, event: Event) -> None:
        self._events.append(event)
        self._control.wake()

    def _run(self) -> None:
        try:
            self._drive()
        except BaseException as failure:  # noqa: BLE001 (nobody else would hear of it)
            self.give_up(RunError(f"rank {self.me}: its membership has failed: {failure!r}"))
            self.interrupt()
        finally:
            self.leaving.end()
            self._control.close()

    def _drive(self) -> None:
        due = time.monotonic()
        while not self._is_closed:
            now = time.monotonic()
            if now > due + STOPPED_SECONDS:
                self._awake_since = now
            if now >= due and not self._is_over and (member := self._member) is not None:
                self._look_for_signals()
                member.tick(clock())
                self._note_state(member)
                self._look_for_hang(member, self._share_standing(member.record))
            due = due if now < due else now + TICK_SECONDS
            while self._events and self._alone is None:
                self._events.popleft()(self._member, clock())
            if self._alone is not None:
                return  # whatever the others decide, and whoever comes back, this member takes no part
            if self._member is not None:
                self._carry_out(self._member.actions)
            if not self._events:
                self._control.poll(due)
        if self._is_over:
            while self._events:  # the others may still need the last values
                self._events.popleft()(self._member, clock())
            for peer in self._control.connected:
                self._control.send(peer, Goodbye())
            self._control.flush(GOODBYE_SECONDS)

    def _carry_out(self, actions: list[Action]) -> None:
        while actions:
            action = actions.pop(0)
            if self._is_over:
                continue
            match action:
                case Send():
                    self._control.send(action.to, action.message)
                case Supply():
                    self._supply(action)
                case Stop():
                    with self._changed:
                        self._stops += 1
                        self._changed.notify_all()
                    self.interrupt()
                case Take() | Enter() | Leave():
                    if isinstance(action, Enter) and action.record.ends and self.stop_at is None:
                        self.stop_at = action.record.first
                        self.leaving.end(action.record.members)
                    with self._changed:
                        self._orders.append(action)
                        if isinstance(action, Leave) and self._stops == self._stopped:
                            self._stops += 1  # it was left behind without being asked
                        self._changed.notify_all()
                    if isinstance(action, Enter):
                        self._control.last_word = Decided(action.record)
                        for lost in action.record.lost:
                            self._control.forget(lost.member)
                    if isinstance(action, Leave):
                        self.leaving.end()
                        self.interrupt()

    def _supply(self, action: Supply) -> None:
        units = range(action.first, action.last + 1)
        results = {unit: result for unit in units if (result := self.result_of(unit)) is not None}
        if len(results) == len(units) and self._member is not None and not self._control.is_busy(action.to):
            settled = self._member.settled
            self._control.send(action.to, Results(action.generation, action.ballot, results, settled))

    def _hear(self, peer: int, letter: Message | OfLeaving | Value | Goodbye) -> None:
        match letter:
            case Value():
                self._keep(letter.generation, letter.key, letter.value)
            case _ if isinstance(letter, OfLeaving):
                self.leaving.hear(peer, letter, self._member, clock())
                self._look_for_signals()
            case Goodbye():
                self._is_over = True
            case _ if self._member is None:
                self._early.append((peer, letter))
            case _:
                if isinstance(letter, Prepare) and self.leaving.all_asked(self._member):
                    self._member.vote.leaves = True
                self._member.receive(peer, letter, clock())
                if isinstance(letter, Beat) and peer not in self._answered:
                    self._answered.add(peer)
                    self._member.beat_to([peer], clock())

    def _on_sign(self, peer: int) -> None:
        if self._member is not None:
            self._member.peers.hear(peer, clock())

    def _on_end(self, peer: int) -> None:
        if self._member is not None:
            self._member.gone(peer, clock())
        elif self.has_started:
            self._ended_early.append(peer)
        elif not self._is_over:
            text = "has ended before training has begun, or a firewall refuses connections to it"
            self.give_up(RunError(f"rank {self.me}: the process of rank {peer} {text}"))
            self.interrupt()

    def _go_alone(self, member: Member, now: float) -> None:
        """Be the only member of the next generation, unless a majority has come back."""
        self._carry_out(member.actions)  # what others had is taken first
        self._note_state(member)
        if not self._is_stuck:
            return
        record, me, base, settled = member.record, self.me, member.newest, member.settled
        why = {peer: member.peers.why(peer, now) for peer in record.members}

        def following(begun: int) -> Record:
            return generation.next_record(record, [me], (), base=base, settled=settled, begun=begun, why=why)

        with self._changed:
            self._alone = f"{self._here()}: no majority came back within {self._patience():g} s", following
            self._orders.append(Enter(following(self._begun)))
            self._changed.notify_all()

    def _patience(self) -> float:
        """Return the seconds for which a majority may take to come back: few, once this process was asked to stop."""
        is_asked = self._lacks_quorum and self.leaving.is_overdue(clock())
        return min(self.wait, HANDED_OVER_SECONDS) if is_asked else self.wait

    def _on_break(self, peer: int) -> None:
        if self._member is not None:
            self._member.broken(peer, clock())

    def _keep(self, generation: int, key: str, value: str | None) -> None:
        with self._changed:
            if value is None:
                self._values.pop((generation, key), None)
            elif generation >= self.record.number:
                self._values[generation, key] = value
                self._changed.notify_all()

    def _look_for_signals(self) -> None:
        if self._member is not None and self.stop_at is None:
            self.leaving.look(self._member, clock())

    def _share_standing(self, record: Record) -> heartbeat.Beat:
        """Let the others know what this process does, and return it: who makes progress is waited for longer."""
        own = self._standing.beat(time.monotonic())
        if self.me in record.members:
            self.share(record.number, _beat_key(record, self.me), own.encode())
        return own

    def _look_for_hang(self, member: Member, own: heartbeat.Beat) -> None:
        """Leave if this process does nothing while all others have waited for it: they would all end otherwise."""
        record, now = member.record, time.monotonic()
        keys = [_beat_key(record, one) for one in record.members if one != self.me]
        told = self.shared(record.number, keys)
        others = [beat for text in told.values() if (beat := heartbeat.Beat.decode(text.encode()))]
        awake = now - self._awake_since  # time in which this process was stopped is no reproach
        all_told = len(others) == len(keys) and not self.is_summing()
        hangs = all_told and is_missed(replace(own, seconds=min(own.seconds, awake)), others, self._standing.timeout)
        if hangs and not member.vote.leaves and member.state is State.ACTIVE:
            say(f"rank {self.me}: {own.place()}, while all others wait for it: it leaves")
            self._hung = self._standing.phase, now
            member.leave(clock())
        if self._hung is None:
            return
        phase, left = self._hung
        if phase != self._standing.phase:  # it has continued
            self._hung = None
        elif now > left + HANGS_SECONDS:
            say(f"rank {self.me}: its main thread does not end, so the process ends at once")
            os._exit(EXIT_FAILED)

    def _note_state(self, member: Member) -> None:
        """Say once when no majority is in reach, or again when one is."""
        now = time.monotonic()
        if member.state is not State.STUCK:
            self._stuck_since = now
        if is_led(member.vote, member.proposal, clock()):
            self._led = now
        here = member.peers.living(member.record.members, clock())
        is_stuck = self._lacks_quorum = not generation.is_quorum(here, member.record.members, member.peers.certain)
        # Or messages do not cross. Before, some may be silent and not lost yet, or get a result, as long as a sum.
        longer = self._standing.timeout if now < self._led + TRIP_SECONDS else self._silence - SILENT_SECONDS
        is_stuck = is_stuck or (member.state is State.STUCK and now >= self._stuck_since + longer)
        if is_stuck and not self._is_stuck:
            say(f"{self._here()}: no majority. Waiting for the others (--wait {self.wait:g}); the state is kept")
        self._is_stuck = is_stuck

    def _here(self) -> str:
        member, now = self._member, clock()
        assert member is not None
        members = member.record.members
        here = len(member.peers.living(members, now))
        return f"rank {self.me}: {here} of {len(members)} ranks of generation {member.record.number} are here"


def _beat_key(record: Record, member: int) -> str:
    """Return the key of a member's heartbeats among the values of a generation."""
    return f"beat/{record.members.index(member)}"


def clock() -> float:
    """Return seconds of a clock that runs while the machine sleeps: a lease ends meanwhile, too."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
