"""State of a member, and in one change, from a generation to the next: as one that votes, and as one that proposes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pipesgd.membership.generation import NO_BALLOT, Ballot, Record
from pipesgd.membership.messages import Promise, Results

LEVEL_TRIPS, MOST_RETRIES = 4, 3
"""Round trips, and at most retries, for which a newcomer that has answered is waited for."""
LED_SECONDS = 10.0
"""Seconds since the newest step of a change after which nobody leads it: ballots follow each other every 3 s or so."""


class State(enum.Enum):
    """State of a member."""

    ACTIVE = "active"
    """It sums units and begins iterations."""
    PAUSED = "paused"
    """Fewer members than the least number are left: it begins nothing, and admits newcomers."""
    FROZEN = "frozen"
    """It has promised: its generation is over for it."""
    STUCK = "stuck"
    """It has been frozen for a while: no quorum is in reach."""
    OUT = "out"
    """The others have left it behind."""


@dataclass(slots=True)
class Vote:
    """A member's answers to ballots of its generation. Each generation begins with a new one."""

    control: float
    """Time of the newest step of a change: while there are some, others lead."""
    promised: Ballot = NO_BALLOT
    accepted: Record | None = None
    accepted_in: Ballot = NO_BALLOT
    levelled: Ballot = NO_BALLOT
    """Newest ballot in which this member was levelled."""
    is_frozen: bool = False
    """True once this member has been asked to promise."""
    has_stopped: bool = False
    """True once its sums have ended: what it holds is final."""
    is_stuck: bool = False
    suspicious: float | None = None
    """Time since which something has been wrong with the generation."""
    awaiting: Record | None = None
    """Decided generation that is entered as soon as the sums have ended."""
    leaves: bool = False
    """True if this member asks to be left out."""
    fetches: bool = False
    """True while this member waits for results that another one has."""
    late: Results | None = None
    """Results that came after the ballot that they were for."""


@dataclass(slots=True)
class Proposal:
    """A ballot of a member's own, and the answers to it."""

    ballot: Ballot
    joiners: tuple[int, ...]
    since: float
    sent: float
    """Time at which those who had not answered were last asked."""
    base: int = -2
    """Base for which members were levelled. It never falls within a ballot: a result may be on its way to others."""
    joiners_since: dict[int, float] = field(default_factory=dict)
    """Times at which newcomers answered first."""
    complete: float | None = None
    """Time at which all members had answered; newcomers are waited for a little longer."""
    promises: dict[int, Promise] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    """Base that each member was last told to fetch."""
    value: Record | None = None
    accepted: set[int] = field(default_factory=set)

    def joiners_until(self, retry: float) -> float:
        """Return the time until which newcomers may be behind, once all members have answered.

        A newcomer answers, fetches what it misses, and answers again: that takes ``LEVEL_TRIPS`` round trips such as
        that of its first answer, of which no more is known, or half of what members have until a step is tried again.
        """
        assert self.complete is not None
        trip = max((first - self.since for first in self.joiners_since.values()), default=0.0)
        patience = max(retry / 2, min(LEVEL_TRIPS * trip, MOST_RETRIES * retry))
        return max([self.complete, *self.joiners_since.values()]) + patience


def is_led(vote: Vote, proposal: Proposal | None, now: float) -> bool:
    """Return True if all take part in a change: a large result may be on its way to one of them.

    Args:
        vote: the answers of the member that asks.
        proposal: its own ballot; None if another one leads.
        now: time, in seconds.
    """
    if proposal is None:
        return now - vote.control <= LED_SECONDS
    return vote.fetches or proposal.complete is not None
