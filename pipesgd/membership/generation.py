"""Generations of members: who they are, from which unit on, and which samples are whose.

A *unit* is one job of the communication thread in its serial order. A *generation* is a fixed set of members; a
``Record`` says all about it that its members must know alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple


class Ballot(NamedTuple):
    """Ballot of a proposer: ballots are ordered by number, and then by the proposer's id."""

    number: int
    member: int


NO_BALLOT = Ballot(0, -1)
"""Ballot below all that anybody proposes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Layout of slices of samples from iteration ``first`` on.

    The n-th slice of a span goes to ``members[n mod p]`` in iteration ``first + n div p``. The slices given back come
    first, in their order, and then those that nobody had, from ``fresh`` on.
    """

    first: int
    members: tuple[int, ...]
    given_back: tuple[int, ...] = ()
    fresh: int = 0

    def slice_of(self, iteration: int, member: int) -> int | None:
        """Return the number of the slice that ``member`` computes in ``iteration``; None if it computes nothing."""
        if member not in self.members:
            return None
        n = (iteration - self.first) * len(self.members) + self.members.index(member)
        return self.given_back[n] if n < len(self.given_back) else self.fresh + n - len(self.given_back)

    def rest(self, end: int) -> tuple[tuple[int, ...], int]:
        """Return what iterations before ``end`` leave: the slices still given back, and the next fresh one."""
        used = (end - self.first) * len(self.members)
        return self.given_back[used:], self.fresh + max(0, used - len(self.given_back))


@dataclass(frozen=True, slots=True)
class Lost:
    """Member that a change left behind, the reason, and its slices of units above the base, which are given back."""

    member: int
    why: str
    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Generation ``number``: its members hold the result of every unit up to ``base``, and the same weights there.

    Iterations from ``first`` on use the last span, those before it the older ones. A unit may be a whole gradient, a
    part of one, or an exchange of something else; the base completes the gradients of all iterations below ``settled``.
    """

    number: int
    members: tuple[int, ...]
    """Ids in the order of the ring. The first one is the senior. An id is never given twice."""
    base: int
    first: int
    spans: tuple[Span, ...]
    lost: tuple[Lost, ...] = ()
    """Members of the generation before that are not in this one."""
    settled: int = 0
    ends: bool = False
    """True if all members have asked to leave: nobody begins iteration ``first``."""

    def span(self, iteration: int) -> Span:
        """Return the span of ``iteration``, which must not be settled."""
        return next(span for span in reversed(self.spans) if span.first <= iteration)

    def slice_of(self, iteration: int, member: int) -> int | None:
        """Return the number of the slice that ``member`` computes in ``iteration``; None if it computes nothing."""
        return self.span(iteration).slice_of(iteration, member)

    def contributors(self, iteration: int) -> tuple[int, ...]:
        """Return the members with a gradient of ``iteration``: their number is the divisor. Others add zeros."""
        return tuple(member for member in self.span(iteration).members if member in self.members)


def first_record(members: Iterable[int], start: int = 0, given_back: tuple[int, ...] = (), fresh: int = 0) -> Record:
    """Return generation 0, whose members hold nothing yet, and begin with iteration ``start``; see ``Span``."""
    ids = tuple(members)
    return Record(
        number=0, members=ids, base=-1, first=start, spans=(Span(start, ids, given_back, fresh),), settled=start
    )


def is_quorum(those: Collection[int], members: tuple[int, ...], certain: Set[int] = frozenset()) -> bool:
    """Return True if ``those`` may decide what follows a generation of ``members``.

    They may if they are more than half of the members; or half with the senior; or all members that are not
    ``certain`` to have died before they could have called anybody silent. Two such sets have a member in common, or
    one of them is dead and has decided nothing without the other.

    >>> is_quorum({0}, (0, 1)), is_quorum({1}, (0, 1)), is_quorum({1}, (0, 1), certain={0})
    (True, False, True)
    """
    present = sum(member in those for member in members)
    if 2 * present > len(members) or (2 * present == len(members) and members[0] in those):
        return True
    return present > 0 and all(member in those or member in certain for member in members)


def next_record(
    old: Record,
    stay: Iterable[int],
    joiners: Iterable[int],
    *,
    base: int,
    settled: int,
    begun: int,
    why: Mapping[int, str],
) -> Record:
    """Return the generation after ``old``.

    Nobody may have begun an iteration from ``first`` on, so that its samples can be laid out again. Slices of gradients
    that the base does not complete, and that only a lost member could compute, are given back: no slice is lost, and
    none is used twice.

    Args:
        old: the generation that ends.
        stay: members of ``old`` that hold all units up to ``base``.
        joiners: newcomers that hold them, too.
        base: the newest unit that anybody holds who stays.
        settled: the number of iterations, from iteration 0 on, whose gradients the base completes.
        begun: the largest number of iterations that one of them has begun.
        why: reasons why members are lost.
    """
    first = max(begun, old.first, settled)
    members = (*stay, *joiners)
    given_back, fresh = old.spans[-1].rest(first)
    lost = []
    for member in old.members:
        if member not in members:
            owned = (old.slice_of(iteration, member) for iteration in range(settled, first))
            lost.append(Lost(member, why.get(member, ""), tuple(one for one in owned if one is not None)))
            given_back += lost[-1].slices
    spans = [span for span in old.spans if span.first < first]
    while len(spans) > 1 and spans[1].first <= settled:
        spans.pop(0)
    spans.append(Span(first, members, given_back, fresh))
    return Record(old.number + 1, members, base, first, tuple(spans), tuple(lost), settled)
