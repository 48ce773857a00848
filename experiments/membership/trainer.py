"""A simulated rank that trains: it drives the production state machine as the training loop does.

A gradient is an integer that depends on its slice of samples and on the weights at the beginning of its iteration. The
codec rounds to multiples of ``STEP`` and keeps what it leaves out (error feedback). The ring goes hop by hop, and
another rank begins each unit. The optimizer has momentum. All of it is exact: a bit that differs is a mistake.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pipesgd.membership.generation import NO_BALLOT, Record
from pipesgd.membership.messages import (
    Enter,
    FeedLog,
    FeedSnapshot,
    Forget,
    Leave,
    Log,
    Message,
    Results,
    Send,
    Snapshot,
    Start,
    Stop,
    Supply,
    Take,
)
from pipesgd.membership.newcomer import Newcomer
from pipesgd.membership.protocol import Member

STEP = 8
"""Values that the codec sends are multiples of this."""
FACTOR = 2520
"""Factor of a mean, so that it is whole: all numbers from 1 to 10 divide it."""
LOG_KEPT = 8
"""Newest results, and states after units, that a rank keeps to feed newcomers."""
RESULTS_KEPT = 2
"""Newest results that it keeps for members that are behind."""
MOST = 9
"""Largest number of members."""


class Weights(NamedTuple):
    """Weights, momentum, and a digest of all that was applied."""

    weights: int
    momentum: int
    digest: int


class Frame(NamedTuple):
    """Message in the ring: a partial sum, or the mean on its way to the others."""

    is_mean: bool
    generation: int
    unit: int
    value: object


class Mean(NamedTuple):
    """Result of a unit: the sum of a generation's ring, and its divisor."""

    generation: int
    total: int
    divisor: int


class Part(NamedTuple):
    """Contribution of one rank to a sum."""

    value: int
    before: int
    """Residual that was added."""
    after: int
    """Residual that is left if the sum is completed."""
    slice: int | None
    """Slice that the gradient is of; None if the rank had none."""


class Judge(Protocol):
    """Watcher of all ranks, which checks what must hold."""

    def see_part(self, who: int, generation: int, unit: int, part: Part) -> None:
        """Note what ``who`` adds."""

    def see_sum(self, generation: int, unit: int, total: int, divisor: int) -> None:
        """Note a sum to which all have added."""

    def see_mean(self, who: int, generation: int, unit: int, mean: Mean, state: Weights) -> None:
        """Note the state of ``who`` after it has applied ``mean``."""

    def see_record(self, record: Record) -> None:
        """Note a record that somebody calls decided."""

    def see_entry(self, who: int, record: Record, state: Weights) -> None:
        """Note the state with which ``who`` enters a generation."""

    def see_unfit(self, who: int, record: Record, newest: int, *, was_levelled: bool) -> None:
        """Note that ``who`` leaves since it does not hold exactly the base of ``record``, which names it."""

    def see_snapshot(self, who: int, donor: int, unit: int) -> None:
        """Note that ``who`` starts from the state of ``donor``."""


class Network(Protocol):
    """Carrier of what a rank sends, and clock of what it does."""

    def send(self, source: int, to: int, body: Message | Frame) -> None:
        """Deliver ``body``, sooner or later or never."""

    def compute(self, who: int, iteration: int) -> None:
        """Let ``who`` compute, and call ``computed``."""

    def stop_soon(self, who: int) -> None:
        """Let the sums of ``who`` end, and call ``stop``."""

    def leave(self, who: int, why: str) -> None:
        """End the process of ``who``."""


class Trainer:
    """A rank, from its start to its end.

    Args:
        machine: its state machine, which is a newcomer or a member.
        network: what it sends goes there.
        judge: watcher of what it does.
        width: iterations in flight.
        least: least number of members that train.
    """

    member_class: type[Member] = Member

    def __init__(self, machine: Member | Newcomer, network: Network, judge: Judge, *, width: int, least: int):
        self.me = machine.me
        self.member = machine if isinstance(machine, Member) else None
        self.machine = machine
        self.width = width
        self.least = least
        self.newest = -1
        self.state = Weights(0, 0, 0)
        self.residual = 0
        self.begun = 0
        self.is_computing = False
        self.is_summing = self.member is not None
        """True from the entry into a generation until the sums have ended."""
        self._network = network
        self._judge = judge
        self._states = {-1: self.state}
        self._results: dict[int, Mean] = {}
        self._tentative: dict[tuple[int, int], int] = {}
        self._own: dict[int, tuple[int, int]] = {}
        """Own gradient and its slice, by unit, until the mean is held."""
        self._computed_from: tuple[int | None, int] = (None, 0)
        self._inbox: dict[tuple[int, int, bool], object] = {}
        self._added: set[tuple[int, int]] = set()

    # ---- Events

    def start(self, now: float) -> None:
        """Begin to train."""
        self._go_ahead(now)
        self.act(now)

    def receive(self, source: int, body: Message | Frame, now: float) -> None:
        """Take a message of ``source``."""
        if isinstance(body, Frame):
            self._receive_frame(body, now)
        else:
            self.machine.receive(source, body, now)
        self.act(now)

    def computed(self, iteration: int, now: float) -> None:
        """Take the gradient of ``iteration``."""
        self.is_computing = False
        own, weights = self._computed_from
        if iteration > self.newest and own is not None:
            self._own[iteration] = ((own * 7919 + weights) % 997 - 498, own)
        self._go_ahead(now)
        self.act(now)

    def stop(self, now: float) -> None:
        """End the sums: the communication thread has been interrupted."""
        assert self.member is not None
        self.is_summing = False
        self.member.stopped(self.begun, now)
        self.act(now)

    def ask_to_leave(self, now: float) -> None:
        """Ask the others to continue without this rank, if it is a member."""
        if self.member is not None:
            self.member.leave(now)
        self.act(now)

    def tick(self, now: float) -> None:
        """Let time pass."""
        self.machine.tick(now)
        self.act(now)

    def gone(self, peer: int, now: float) -> None:
        """Note that a process has ended."""
        self.machine.gone(peer, now)
        self.act(now)

    def broken(self, peer: int, now: float) -> None:
        """Note that a connection has ended."""
        self.machine.broken(peer, now)
        self.act(now)

    # ---- Actions

    def act(self, now: float) -> None:
        """Carry out what the state machine asks for."""
        while self.machine.actions:
            actions = list(self.machine.actions)
            self.machine.actions.clear()
            for action in actions:
                match action:
                    case Send():
                        if (record := getattr(action.message, "record", None)) is not None:
                            self._judge.see_record(record)
                        self._network.send(self.me, action.to, action.message)
                    case Stop():
                        self._network.stop_soon(self.me)
                    case Supply():
                        self._supply(action)
                    case Take():
                        assert isinstance(action.result, Mean)
                        self._take(action.unit, action.result)
                    case Enter():
                        self._enter(action.record, now)
                    case Leave():
                        self._leave(action)
                    case FeedSnapshot():
                        snapshot = Snapshot(action.unit, self._states[action.unit])
                        self._network.send(self.me, action.to, snapshot)
                    case FeedLog():
                        self._network.send(self.me, action.to, Log(action.unit, self._results[action.unit]))
                    case Start():
                        assert isinstance(action.state, Weights)
                        self.newest, self.state = action.unit, action.state
                        self._states, self._results = {action.unit: action.state}, {}
                        assert isinstance(self.machine, Newcomer)
                        assert self.machine.donor is not None
                        self._judge.see_snapshot(self.me, self.machine.donor, action.unit)
                    case Forget():
                        self.newest = -1

    def _leave(self, action: Leave) -> None:
        if action.unfit_for is not None:
            was_levelled = self.member is not None and self.member.vote.levelled != NO_BALLOT
            self._judge.see_unfit(self.me, action.unfit_for, self.newest, was_levelled=was_levelled)
        self._network.leave(self.me, action.why)

    def _supply(self, action: Supply) -> None:
        units = range(action.first, action.last + 1)
        if action.first > self.newest - RESULTS_KEPT and all(unit in self._results for unit in units):
            results = {unit: self._results[unit] for unit in units}
            self._network.send(self.me, action.to, Results(action.generation, action.ballot, results, action.last + 1))

    def _enter(self, record: Record, now: float) -> None:
        if isinstance(self.machine, Newcomer):
            self.begun = record.first
            self.member = self.machine = self._become_member(self.machine, record, now)
        self._judge.see_record(record)
        self._judge.see_entry(self.me, record, self.state)
        self._tentative.clear()
        self._inbox = {key: value for key, value in self._inbox.items() if key[0] >= record.number}
        self.is_summing = True
        self._go_ahead(now)

    def _become_member(self, newcomer: Newcomer, record: Record, now: float) -> Member:
        return newcomer.become_member(
            record, now, results_kept=LOG_KEPT, least=self.least, most=MOST, member_class=self.member_class
        )

    # ---- Iterations and units

    def may_sum(self) -> bool:
        """Return True if this rank adds to sums now."""
        return self.is_summing

    def _trains(self) -> bool:
        return self.member is not None and len(self.member.record.members) >= self.least

    def _go_ahead(self, now: float) -> None:
        """Begin the next iteration and the next sum, as far as possible."""
        if not self._trains():
            return
        assert self.member is not None
        if self.is_summing and not self.is_computing and self.begun <= self.newest + self.width:
            self.is_computing = True
            self._computed_from = (self.member.record.slice_of(self.begun, self.me), self.state.weights)
            self._network.compute(self.me, self.begun)
            self.begun += 1
        self._sum_up(now)

    def _receive_frame(self, frame: Frame, now: float) -> None:
        """Keep a frame of this generation, or of a later one that this rank has not entered yet."""
        if self.member is None or frame.generation >= self.member.record.number:
            self._inbox[frame.generation, frame.unit, frame.is_mean] = frame.value
            if self._trains():
                self._sum_up(now)

    def _sum_up(self, now: float) -> None:
        """Do this rank's part of the next unit: add its own, once all before it have; pass the mean on."""
        if not self.may_sum():
            return
        assert self.member is not None
        record, unit = self.member.record, self.newest + 1
        generation, ring = record.number, record.members
        here = ring.index(self.me)
        place = (here - unit) % len(ring)  # who begins differs from unit to unit
        following = ring[(here + 1) % len(ring)]
        if (generation, unit) not in self._added:
            before = (generation, unit, False)
            if place > 0 and before not in self._inbox:
                return
            contributes = self.me in record.contributors(unit)
            if contributes and unit not in self._own:
                return
            partial = self._inbox.pop(before) if place > 0 else 0
            assert isinstance(partial, int)
            value, own = self._own[unit] if contributes else (0, None)
            coded = self.encode(generation, unit, value, own, partial)
            if place < len(ring) - 1:
                self._network.send(self.me, following, Frame(False, generation, unit, coded))
                return
            mean = Mean(generation, coded, self.divisor(record, unit))
            self._judge.see_sum(generation, unit, coded, mean.divisor)
            if len(ring) > 1:
                self._network.send(self.me, following, Frame(True, generation, unit, mean))
            self._complete(unit, mean, now)
        elif (generation, unit, True) in self._inbox:
            mean = self._inbox.pop((generation, unit, True))  # type: ignore[assignment]
            if place < len(ring) - 2:
                self._network.send(self.me, following, Frame(True, generation, unit, mean))
            self._complete(unit, mean, now)

    def encode(self, generation: int, unit: int, value: int, own: int | None, partial: int) -> int:
        """Return the encoded partial sum. The residual stays what it was until the result is held."""
        before = self.residual
        total = value + before + partial
        coded = total // STEP * STEP
        self._added.add((generation, unit))
        self._tentative[generation, unit] = total - coded
        self._judge.see_part(self.me, generation, unit, Part(value, before, total - coded, own))
        return coded

    def divisor(self, record: Record, unit: int) -> int:
        """Return the divisor of a unit's sum."""
        return len(record.contributors(unit))

    def _complete(self, unit: int, mean: Mean, now: float) -> None:
        self._take(unit, mean)
        assert self.member is not None
        self.member.holds(unit, now)
        self._go_ahead(now)

    def _take(self, unit: int, mean: Mean) -> None:
        """Hold the result of ``unit``: only now the residual changes, and the own gradient may go."""
        self.residual = self._tentative.get((mean.generation, unit), self.residual)
        self._tentative.clear()
        self._own.pop(unit, None)
        self.state = self.update(unit, mean)
        self.newest, self._states[unit], self._results[unit] = unit, self.state, mean
        self._states.pop(unit - LOG_KEPT - 1, None)
        self._results.pop(unit - LOG_KEPT, None)
        generation = -1 if self.member is None else self.member.record.number
        self._judge.see_mean(self.me, generation, unit, mean, self.state)

    def update(self, unit: int, mean: Mean) -> Weights:
        """Return the state after ``mean``; a unit that nobody has a gradient of any more updates nothing."""
        weights, momentum, digest = self.state
        if mean.divisor:
            momentum = momentum * 9 // 10 + mean.total * (FACTOR // mean.divisor)
            weights -= momentum
        return Weights(weights, momentum, hash((digest, unit, mean.total, mean.divisor)))
