"""Messages between members, and the actions that a state machine asks of whoever drives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipesgd.membership.generation import Ballot, Record

# ---- Messages, which travel over control connections, in order between two members


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat to one member."""

    record: Record
    """Generation of the sender, from which a member that is behind learns."""
    count: int
    """Number of the sender's heartbeats before this one."""
    echo: int | None
    """Count of the newest heartbeat that the sender has from the receiver."""
    kept: float
    """Seconds between the arrival of that heartbeat and this message."""
    newest: int
    """Newest unit whose result the sender holds."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Request to the first living member to propose the next generation."""

    record: Record


@dataclass(frozen=True, slots=True)
class Prepare:
    """Question of a proposer: what do you hold? Whoever answers is frozen."""

    record: Record
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Promise:
    """Answer to ``Prepare``, and again whenever the sender was levelled: it acts in this generation no more."""

    generation: int
    ballot: Ballot
    accepted: Record | None
    """Newest value that the sender has accepted, in the ballot ``accepted_in``."""
    accepted_in: Ballot
    newest: int
    begun: int
    """Number of iterations that the sender has begun since iteration 0."""
    levelled: Ballot
    """Newest ballot in which the sender was levelled: values accepted in older ones are void."""
    leaves: bool
    """True if the sender is to be left out."""
    settled: int
    """Number of iterations whose gradients the unit ``newest`` completes, as far as the sender knows."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer to a ballot that is below one that the sender has promised."""

    generation: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Level:
    """Request to a member that is behind to fetch the results up to ``base`` from ``holder``."""

    generation: int
    ballot: Ballot
    base: int
    holder: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Request for the results of the units from ``first`` to ``last``."""

    generation: int
    ballot: Ballot
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Results:
    """Results of units, each as its holder has it: the encoded sum and what belongs to it."""

    generation: int
    ballot: Ballot
    results: Mapping[int, object]
    settled: int
    """Number of iterations whose gradients the last of them completes."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Request to accept ``value`` as the next generation."""

    generation: int
    ballot: Ballot
    value: Record


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer to ``Accept``."""

    generation: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Decided:
    """Message that this generation was decided."""

    record: Record


@dataclass(frozen=True, slots=True)
class Join:
    """Request of a newcomer to be fed; said again, it starts over."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of training after ``unit``, which all members hold."""

    unit: int
    state: object


@dataclass(frozen=True, slots=True)
class Log:
    """Result of ``unit``, which all members hold."""

    unit: int
    result: object


@dataclass(frozen=True, slots=True)
class Ready:
    """Report of a newcomer to its donor: it holds all units up to ``newest``."""

    newest: int


@dataclass(frozen=True, slots=True)
class BeginAgain:
    """Message of a donor that can no longer feed the newcomer."""


Message = (
    Beat
    | Suspect
    | Prepare
    | Promise
    | Refuse
    | Level
    | Fetch
    | Results
    | Accept
    | Accepted
    | Decided
    | Join
    | Snapshot
    | Log
    | Ready
    | BeginAgain
)

# ---- Actions, which are carried out in their order


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to the member or newcomer ``to``."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class Stop:
    """Freeze: end the sum under way, sum nothing more in this generation, begin no iteration; then call ``stopped``."""


@dataclass(frozen=True, slots=True)
class Supply:
    """Send ``Results`` of the units from ``first`` to ``last`` to ``to``, if all of them are still there."""

    to: int
    generation: int
    ballot: Ballot
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Take:
    """Hold ``result`` as that of ``unit``: the residual becomes that of this unit, the own gradient of it may go."""

    unit: int
    result: object


@dataclass(frozen=True, slots=True)
class Enter:
    """Enter this generation: connect its ring, drop frames of older ones, sum from its base + 1 on."""

    record: Record


@dataclass(frozen=True, slots=True)
class Leave:
    """End: the others continue without this process, which may come back as a newcomer under another id."""

    why: str
    unfit_for: Record | None = None
    """Generation that names this process, which does not hold exactly its base; None if none does."""


@dataclass(frozen=True, slots=True)
class FeedSnapshot:
    """Send ``Snapshot`` of the state after ``unit`` to ``to``."""

    to: int
    unit: int


@dataclass(frozen=True, slots=True)
class FeedLog:
    """Send ``Log`` of ``unit`` to ``to``."""

    to: int
    unit: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start from ``state``, that of training after ``unit``."""

    unit: int
    state: object


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the state of training: a newcomer looks for another donor."""


Action = Send | Stop | Supply | Take | Enter | Leave | FeedSnapshot | FeedLog | Start | Forget
