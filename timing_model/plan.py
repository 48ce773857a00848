"""Search for the best way to run a job, over strategy, width, codec, all-reduce, segment size and islands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from timing_model.choices import TIE, Choice, Space, simplicity
from timing_model.costs import costs_of, iteration_time
from timing_model.job import Job
from timing_model.search import Search
from timing_model.support import support_of
from timing_model.units import format_bytes, format_bytes_up

EQUAL = 0.001
"""Relative distance within which two times are the same to a reader."""
SERVERS = "ps-sync"
"""Strategy that is always shown, however slow it is."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Result of a search."""

    best: Choice
    """Simplest of the fastest configurations; one without late gradients, if it is at most ``LATE_TIE`` slower."""
    ranking: tuple[Choice, ...]
    """All configurations, each with its best segment size. The fastest come first, and within a tie the simplest."""
    ddp: Choice | None
    """torch's DDP without a hook, searched or not; None if its time is not known, or it does not fit."""
    uncompressed: Choice | None
    """Best configuration without a codec; None if none was searched."""
    considered: int
    """Number of configurations, all segment sizes included."""
    too_large: Mapping[int, float]
    """Least memory of a rank, in bytes, with islands of a number of members of which none fits, by that number."""

    @property
    def kinds(self) -> tuple[Choice, ...]:
        """Best configuration of each strategy, width, codec and islands in the ranking."""
        first: dict[tuple[str, int, str, int], Choice] = {}
        for one in self.ranking:
            first.setdefault((one.job.strategy, one.job.width, one.job.codec, one.job.islands.members), one)
        return tuple(first.values())

    @property
    def meshes(self) -> dict[int, Choice]:
        """Best configuration with islands of each number of members, by that number."""
        first: dict[int, Choice] = {}
        for one in self.ranking:
            first.setdefault(one.job.islands.members, one)
        return dict(sorted(first.items()))

    @property
    def fastest(self) -> float:
        """Smallest score in the ranking."""
        return min(one.score for one in self.ranking)

    @property
    def tied(self) -> tuple[Choice, ...]:
        """Choices of ``kinds`` that are as fast as ``best``, up to a tie, and more complex."""
        score, tie = self.best.score, 1 + TIE
        most = max(score, self.fastest * tie)  # others that are slower may be simpler
        return tuple(one for one in self.kinds if one is not self.best and score <= one.score * tie <= most * tie)

    @property
    def late(self) -> Choice | None:
        """Fastest configuration with late gradients; None if none was searched."""
        return _fastest([one for one in self.ranking if one.job.width > 1])

    @property
    def synchronous(self) -> Choice | None:
        """Fastest configuration without: of width 1, ddp, or parameter servers; None if none was searched."""
        return _fastest([one for one in self.ranking if one.job.width == 1])

    def shown(self, top: int) -> tuple[Choice, ...]:
        """Return the simplest choice of each tie, at most ``top``, the fastest first, and those that people compare
        with: the best one, the best synchronous one, the best without a codec, ddp, a parameter server, and the best of
        all islands."""
        servers = next((one for one in self.ranking if one.job.strategy == SERVERS), None)
        others = (self.best, self.synchronous, self.uncompressed, self.ddp, servers, *self.meshes.values())
        references = [one for one in others if one is not None]
        simplest: dict[float, Choice] = {}
        for one in self.kinds:
            simplest.setdefault(_ties(one.score, self.fastest), one)
        shown = {id(one): one for one in [*references, *list(simplest.values())[:top]]}
        return tuple(sorted(shown.values(), key=lambda one: _place(one, self.fastest)))


def plan(
    base: Job,
    space: Space | None = None,
    *,
    accuracy_cost: Mapping[str, float] | None = None,
    extrapolate: bool = False,
) -> Plan:
    """Search for the best way to run the job of ``base``, whose own strategy, width, codec and so on do not count.

    An iteration never takes less if its collective takes more, so one segment size is the best for every width.

    Args:
        base: the job.
        space: configurations to search; by default ``Space.of`` the job.
        accuracy_cost: share of additional iterations to the same accuracy, by name: ``width``, for each unit above 1,
            or a codec's name.
        extrapolate: also search outside of what was measured.

    Raises:
        ValueError: nothing is left to search.
    """
    space = space or Space.of(base)
    search = Search(base, space, accuracy_cost or {}, extrapolate)
    for job in search.whole():
        search.add(job, *iteration_time(job, costs_of(job)))
    search.pairs()
    best = search.best
    if best is None:
        base.check_messages()
        if search.too_large:
            needed, given = min(search.too_large.values()), base.islands.memory or 0.0
            raise ValueError(
                f"memory must be at least {format_bytes_up(needed)}, the least of all that was searched, activations "
                f"left out; got {format_bytes(given)}"
            )
        reasons = support_of(base).reasons or ("no all-reduce for any of the codecs",)
        raise ValueError(f"extrapolate must be asked for, or more be searched, as nothing is left; got {reasons[0]}")
    fitting = {one.job.islands.members for one in search.choices}
    fastest = min(one.score for one in search.choices)
    ranking = sorted(search.choices, key=lambda one: _place(one, fastest))
    return Plan(
        best=best,
        ranking=tuple(ranking),
        ddp=search.ddp(),
        uncompressed=search.uncompressed.chosen,
        considered=search.considered,
        too_large={members: nbytes for members, nbytes in sorted(search.too_large.items()) if members not in fitting},
    )


def _fastest(ranking: Sequence[Choice]) -> Choice | None:
    """Return the simplest of those that differ from the fastest by less than a reader would see."""
    fastest = min((one.score for one in ranking), default=0.0)
    equal = [one for one in ranking if one.score <= fastest * (1 + EQUAL)]
    return min(equal, key=lambda one: simplicity(one.job), default=None)


def _place(one: Choice, fastest: float) -> tuple[float, tuple[float, ...]]:
    """Return a sort key: the fastest come first, and within a tie the simplest."""
    return _ties(one.score, fastest), simplicity(one.job)


def _ties(score: float, fastest: float) -> float:
    """Return the number of ties by which ``score`` is slower than ``fastest``: 0 up to one tie."""
    if score <= fastest:
        return 0
    return math.inf if fastest == 0 else max(0, math.ceil(math.log(score / fastest, 1 + TIE) - 1e-9) - 1)
