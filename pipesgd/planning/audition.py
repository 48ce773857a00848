"""Auditions: the best predicted configurations train in turns, and the one that is measured to be fastest stays."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

Choices = dict[str, Any]
"""Values of all ``AUTO_OPTIONS``."""

TURN, LEAST_TURN = 12, 7
"""Most and fewest iterations that a candidate trains before it is the next one's turn."""
UNTIMED = 2
"""Iterations that do not count after a change, in addition to those in which the pipeline fills."""
SWAP = 2.0
"""Iterations that a change of the configuration is estimated to take before one was timed: a pipeline empties, and the
next one connects its ranks and fills."""
LEAST_PASSES, PASSES = 2, 5
"""Fewest and most times that it is a candidate's turn, unless another one leads: A B C, C B A, and then those that are
still about equally fast, in turns that are twice as long each time: they differ little, so these cost little but for
the changes."""
MOST_SHARE = 0.01
"""Most that an audition may add to the run, as a share of the iterations left."""
LONGEST = 0.25
"""Most iterations of an audition, as a share of those left: further passes end before that."""
PRECISE = 0.01
"""Standard error of the winner's mean, as a share of it, up to which its time is known well enough."""
T90 = 1.645
"""Half the width of a 90 % interval, in standard errors."""
LEADS = 2.0
"""Standard errors by which a candidate must lead another one for that one to be out."""
TIE, EARNED = 0.01, 1.0
"""Relative distance from the fastest, and standard errors of the difference, within which the simplest candidate is
chosen: staleness and coarser codecs cost accuracy, so a gain must be seen before they are accepted for it."""
LATE_TIE = 0.05
"""The same distance for a candidate without late gradients, from those with: that of a plan."""
AGAIN_AFTER = 60
"""Iterations between an audition and the first look at whether another one is needed; twice as many to the next."""
MOST_AUDITIONS = 3


def complete(choices: Choices) -> Choices:
    """Return ``choices`` of a run that an earlier version may have recorded, without buckets or fragments."""
    return choices | {name: choices.get(name, value) for name, value in (("buckets", "1"), ("fragments", 1))}


class Pace(NamedTuple):
    """Measured time of a candidate's iterations, in s."""

    mean: float
    median: float
    error: float
    """Standard error of the mean."""
    iterations: int
    """Number of iterations that were timed."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Return the pace of iterations, at least two, that took ``seconds``."""
        error = statistics.stdev(seconds) / math.sqrt(len(seconds))
        return cls(statistics.fmean(seconds), statistics.median(seconds), error, len(seconds))

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the mean."""
        return max(0.0, self.mean - T90 * self.error), self.mean + T90 * self.error


@dataclass(frozen=True, kw_only=True)
class Audition:
    """The auditions of a run, and which configuration trains from which iteration on: the same on all ranks.

    Candidates take turns in the run's own iterations, so nothing is trained in vain. Between two turns, all gradients
    in flight are applied. It is a value: ``decided`` returns what follows, and every rank takes over that of rank 0.
    """

    candidates: Sequence[Choices]
    """Choices to compare, the simplest first."""
    predicted: Sequence[float]
    """Seconds of an iteration that the timing model predicts for each of them."""
    iterations: int
    """Number of iterations of the whole job."""
    turn: int
    """Iterations of a turn in the present audition."""
    turns: Sequence[tuple[int, Choices]]
    """Choices by the iteration from which on they train. Turns that have been decided are never changed."""
    decision_at: int
    """Iteration before which rank 0 decides what follows."""
    begin: int
    """First iteration of the present audition."""
    passes: int
    """Passes of the present audition that are decided so far; 0 when it is over."""
    number: int = 1
    """Number of auditions so far."""
    paces: Sequence[Pace | None] = field(default_factory=list)
    """Measured times of the candidates in the newest audition; None for one that had no turn."""
    cost: float | None = None
    """Seconds that the newest audition took longer than as many iterations of its winner; None if it is not known."""

    @classmethod
    def of(
        cls, candidates: Sequence[Choices], predicted: Sequence[float], *, iterations: int, begin: int
    ) -> Self | None:
        """Return an audition that begins at an iteration with as many of the candidates as the run is long enough for.

        ``candidates`` are in order of simplicity. Those that are predicted to be slowest are left out first. Returns
        None if not even two can be compared.
        """
        kept = sorted(range(len(candidates)), key=lambda number: predicted[number])
        while len(kept) > 1:
            order = sorted(kept)
            turn = turn_of([predicted[number] for number in order], iterations - begin)
            if turn is not None:
                some = [candidates[number] for number in order]
                return cls(
                    candidates=some,
                    predicted=[predicted[number] for number in order],
                    iterations=iterations,
                    turn=turn,
                    turns=_pass([], some, begin, turn),
                    decision_at=begin + len(some) * turn,
                    begin=begin,
                    passes=1,
                )
            kept.pop()
        return None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the audition of which ``values`` are the fields, as JSON keeps them."""
        candidates = [complete(choices) for choices in values["candidates"]]
        turns = [(iteration, complete(choices)) for iteration, choices in values["turns"]]
        paces = [None if pace is None else Pace(*pace) for pace in values["paces"]]
        return cls(**{**values, "candidates": candidates, "turns": turns, "paces": paces})

    @property
    def over(self) -> bool:
        """True if a configuration was chosen."""
        return self.passes == 0

    @property
    def chosen(self) -> tuple[Choices, Pace | None]:
        """The winner of an audition that is over, and its pace; None if no candidate could be timed."""
        choices = self.turns[-1][1]
        pace = self.paces[self.candidates.index(choices)]
        assert self.over
        return choices, pace

    def at(self, iteration: int) -> Choices | None:
        """Return the choices that train in ``iteration``; None if they are those that the run began with."""
        return next((choices for first, choices in reversed(self.turns) if first <= iteration), None)

    def decided(
        self,
        seconds: Mapping[int, float],
        *,
        again: bool,
        elapsed: float | None = None,
        fallback: Container[int] = (),
    ) -> Self:
        """Return what the run does from ``decision_at``.

        Args:
            seconds: time of each iteration, as far as known.
            again: whether the iterations after an audition that is over have contradicted it.
            elapsed: seconds that the iterations of the present audition and the changes between them took, if known.
            fallback: iterations that a guard has run at width 1, which tell nothing of larger widths.
        """
        if self.over:
            return self._begun_again() if again else self._looking_later()
        counted = {number: time for number, time in seconds.items() if number not in fallback}
        paces = [self._pace(one, seconds if one["width"] == 1 else counted) for one in self.candidates]
        judged = [_judged(one, pace) for one, pace in zip(self.candidates, paces, strict=True)]
        best = self._best(judged)
        turn = self.turn * 2 ** max(0, self.passes + 1 - LEAST_PASSES)
        left = self._left(paces, judged, best, turn, elapsed)
        end = self.decision_at + len(left) * turn
        due = self.passes < LEAST_PASSES or end - self.begin <= LONGEST * (self.iterations - self.begin)
        if self.passes < PASSES and due and (len(left) > 1 or not _precise(paces[best])):
            last = self.candidates.index(self.turns[-1][1])
            order = sorted(left, key=lambda number: (number != last, -number))
            some = [self.candidates[number] for number in order]
            return dataclasses.replace(
                self,
                turns=_pass(self.turns, some, self.decision_at, turn),
                decision_at=end,
                passes=self.passes + 1,
                paces=paces,
            )
        return dataclasses.replace(
            self,
            turns=_pass(self.turns, [self.candidates[best]], self.decision_at, turn),
            decision_at=self.decision_at + AGAIN_AFTER,
            passes=0,
            paces=paces,
            cost=self._cost(paces[best], elapsed),
        )

    def _left(
        self,
        paces: Sequence[Pace | None],
        judged: Sequence[Pace | None],
        best: int,
        turn: int,
        elapsed: float | None,
    ) -> list[int]:
        """Return the numbers of the candidates that have a turn of this many iterations in the next pass.

        They are those that may still be the fastest. Their turns must be paid for by what is left of ``MOST_SHARE``;
        the slowest are left out until they are.
        """
        rivals = [number for number, pace in enumerate(judged) if not _leads(judged[best], pace, LEADS)]
        left = sorted({best, *rivals})
        if self.passes >= LEAST_PASSES:
            left = [number for number in left if number == best or paces[number] is not None]
        fastest = min([pace.mean for pace in paces if pace is not None] or self.predicted)
        if fastest <= 0:
            return left
        seconds = [guess if pace is None else pace.mean for pace, guess in zip(paces, self.predicted, strict=True)]
        spent, swap = self._spent(seconds, fastest, elapsed)
        most = MOST_SHARE * (self.iterations - self.begin) - spent
        left.sort(key=lambda number: (number != best, seconds[number]))
        while len(left) > 1 and cost_of([seconds[number] for number in left], fastest, turn, swap) > most:
            left.pop()
        return left

    def _spent(self, seconds: Sequence[float], fastest: float, elapsed: float | None) -> tuple[float, float]:
        """Return what the present audition has cost so far, and what a change costs, in iterations of the fastest.

        ``seconds`` are those of an iteration of each candidate, and ``elapsed`` those that the audition has taken:
        without them, a change is taken to cost ``SWAP``.
        """
        turns = [(at, self.candidates.index(choices)) for at, choices in self.turns if at >= self.begin]
        ends = [at for at, _ in turns[1:]] + [self.decision_at]
        excess = sum((end - at) * (seconds[one] / fastest - 1) for (at, one), end in zip(turns, ends, strict=True))
        swaps = sum(one != other for (_, one), (_, other) in pairwise(turns))
        if elapsed is None or swaps == 0:
            return excess + swaps * SWAP, SWAP
        spent = max(0.0, elapsed / fastest - (self.decision_at - self.begin))
        return spent, max(SWAP, (spent - excess) / swaps)

    def _cost(self, winner: Pace | None, elapsed: float | None) -> float | None:
        return None if winner is None or elapsed is None else elapsed - (self.decision_at - self.begin) * winner.mean

    def _begun_again(self) -> Self:
        known = [pace.mean if pace else guess for pace, guess in zip(self.paces, self.predicted, strict=True)]
        turn = turn_of(known, self.iterations - self.decision_at)
        if turn is None or self.number == MOST_AUDITIONS:
            return self._looking_later()
        return dataclasses.replace(
            self,
            turn=turn,
            turns=_pass(self.turns, self.candidates, self.decision_at, turn),
            begin=self.decision_at,
            decision_at=self.decision_at + len(self.candidates) * turn,
            passes=1,
            number=self.number + 1,
        )

    def _looking_later(self) -> Self:
        return dataclasses.replace(self, decision_at=self.decision_at + 2 * (self.decision_at - self.turns[-1][0]))

    def _pace(self, choices: Choices, seconds: Mapping[int, float]) -> Pace | None:
        """Return the pace of a candidate in the present audition; None if none of its iterations counts."""
        ends = [first for first, _ in self.turns[1:]] + [self.decision_at]
        found: list[float] = []
        before: Choices | None = None
        for (first, own), end in zip(self.turns, ends, strict=True):
            if own == choices and first >= self.begin:
                untimed = 0 if before == own else choices["width"] - 1 + UNTIMED
                found += [seconds[number] for number in range(first + untimed, end) if number in seconds]
            before = own
        return Pace.of(found) if len(found) > 1 else None

    def _best(self, paces: Sequence[Pace | None]) -> int:
        """Return the number of the simplest candidate among the fastest; that predicted to be, if none was timed."""
        known = {number: pace for number, pace in enumerate(paces) if pace is not None}
        if not known:
            return min(range(len(self.candidates)), key=lambda number: self.predicted[number])
        fastest = min(known.values(), key=lambda pace: pace.mean)
        return next(
            number
            for number, pace in known.items()
            if pace.mean <= fastest.mean * (1 + TIE) or not _leads(fastest, pace, EARNED)
        )


def turn_of(seconds: Sequence[float], iterations: int) -> int | None:
    """Return the number of iterations of a turn, for candidates whose iterations take about ``seconds``.

    None if its first ``LEAST_PASSES`` would cost more than ``MOST_SHARE`` of ``iterations``.

    >>> turn_of([0.2, 0.12, 0.125], 2000), turn_of([0.2, 0.12, 0.125], 2500)
    (None, 9)
    >>> turn_of([0.13, 0.12, 0.125], 2000), turn_of([0.2, 0.12, 0.125], 5000)
    (12, 12)
    """
    for turn in range(TURN, LEAST_TURN - 1, -1):
        if LEAST_PASSES * cost_of(seconds, min(seconds), turn) <= MOST_SHARE * iterations:
            return turn
    return None


def cost_of(seconds: Sequence[float], fastest: float, turn: int, swap: float = SWAP) -> float:
    """Return what a pass costs, in iterations of the fastest candidate: what slower ones take longer in their turns,
    and a change for each of them, which costs ``swap``.

    >>> round(cost_of([0.13, 0.12, 0.125], 0.12, 12), 3)
    7.5
    """
    excess = sum(one / fastest - 1 for one in seconds) if fastest > 0 else 0.0
    return turn * excess + len(seconds) * swap


def _pass(
    turns: Sequence[tuple[int, Choices]], order: Sequence[Choices], begin: int, turn: int
) -> list[tuple[int, Choices]]:
    """Return ``turns``, and one after the other of the choices in ``order`` from iteration ``begin`` on."""
    return [*turns, *((begin + number * turn, choices) for number, choices in enumerate(order))]


def _judged(choices: Choices, pace: Pace | None) -> Pace | None:
    """Return the pace by which a candidate is compared: with late gradients, as much slower as these may not gain."""
    if pace is None or choices["width"] == 1:
        return pace
    more = (1 + LATE_TIE) / (1 + TIE)
    return pace._replace(mean=more * pace.mean, error=more * pace.error)


def _precise(pace: Pace | None) -> bool:
    """Return True if nothing more is to be learnt of a candidate's time, or nothing can be."""
    return pace is None or pace.error <= PRECISE * pace.mean


def _leads(best: Pace | None, other: Pace | None, errors: float) -> bool:
    """Return True if ``best`` is faster than ``other`` by more than this many standard errors of the difference."""
    if best is None or other is None:
        return False
    return other.mean - best.mean > errors * math.hypot(best.error, other.error)
