"""The ranks of an elastic run: those of a generation, on the communication thread, and as the main thread sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from pipesgd.comm.tcp import wrap_of
from pipesgd.elastic.members import Interrupted, Members
from pipesgd.elastic.units import Units, gathered
from pipesgd.elastic.values import SharedValues
from pipesgd.errors import NotEnoughMembers, RunError, warn
from pipesgd.membership.generation import Lost, Record, first_record
from pipesgd.process import under_torchrun
from pipesgd.ranks import Ranks

DEFAULT_WAIT_SECONDS = 60.0


class MembersChanged(RunError):  # noqa: N818 (what happened)
    """Members were lost while something was computed for which each has its share; it must be computed again."""


@dataclass(eq=False)
class GenerationRanks(Ranks):
    """The ranks of one generation, whose exchanges, on the communication thread, end when it does."""

    def watch(self, on_failure: Callable[[RunError], None], *, even_alone: bool = False) -> Callable[[], None]:
        return lambda: None  # members watch each other


@dataclass(frozen=True)
class Share:
    """Share of one rank in an iteration."""

    iteration: int
    slice: int
    """Number of its slice of the samples: in all iterations together, each number from 0 on is given out once."""
    rank: int
    """Number of the rank among those that take part, from 0."""
    world_size: int
    """Number of ranks that take part."""
    lost: tuple[Lost, ...]
    """Ranks that were lost since the iteration before, and why."""


@dataclass(eq=False)
class ElasticRanks(GenerationRanks):
    """The members of an elastic run as the main thread sees them: each exchange of values is a unit of its own.

    ``rank`` and ``world_size`` are those of the generation ``record``. It changes in the same places of the program on
    all members: when a unit's result is read, and where an iteration begins.
    """

    machines: tuple[int, ...] = ()
    """A number for each member's machine, by the member's id."""
    places: tuple[str, ...] = ()
    """Address of each member, by the member's id."""
    joined: Ranks = field(init=False, repr=False)
    """Ranks that this process has joined, whose numbers messages about its end bear."""
    units: Units = field(init=False, repr=False)
    members: Members = field(init=False, repr=False)
    record: Record = field(init=False, repr=False)

    is_elastic: ClassVar[bool] = True

    def see(self, record: Record) -> None:
        """Let this object be about the members of ``record``."""
        self.see_members(record.members)
        self.record = record

    def see_members(self, members: tuple[int, ...]) -> None:
        """Let the numbers of ranks be those among ``members``, ids in the order of the ring."""
        me = self.members.me
        own = [one for one in members if self.machines[one] == self.machines[me]]
        self.rank, self.world_size, self.numbers = members.index(me), len(members), members
        self.local_rank, self.local_world_size = own.index(me), len(own)
        self.job_size = self.world_size
        self._addresses = [self.places[one] for one in members]
        self.joined.rank, self.joined.numbers = self.rank, members

    def iterations(self, number: int, start: int = 0) -> Iterator[Share]:
        """Yield this rank's share of each iteration, in a loop of the user's own; losses are survived from now on.

        It waits while the others agree who continues. A step of the optimizer belongs to each iteration.

        Args:
            number: number of iterations.
            start: first of them, as in a run that is resumed.

        Raises:
            LeftBehind: the others continue without this rank.
            NotEnoughMembers: fewer than ``least`` ranks remain, or no majority was in reach for ``wait`` seconds.
        """
        self.units.start(first_record(range(self.world_size), start, fresh=start * self.world_size))
        members, told = self.members, 1
        for iteration in range(start, number):
            record = self.begin(iteration)
            span = record.span(iteration)
            self.see_members(span.members)
            if len(span.members) < members.least:
                raise NotEnoughMembers(f"{len(span.members)} ranks are left, fewer than {members.least}")
            new = [one for one, _ in members.history[told:]]
            told += len(new)
            part = span.slice_of(iteration, members.me)
            assert part is not None, "this rank is a member"
            yield Share(iteration, part, self.rank, self.world_size, tuple(one for each in new for one in each.lost))
        members.stop_listening()

    def begin(self, iteration: int) -> Record:
        """Begin ``iteration``; return the generation that it belongs to. It waits while a change is under way."""
        try:
            return self.members.begin(iteration)
        except Interrupted:
            self.units.thread.check()  # it says why
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close(in_order=kind is None)

    def check_same_since(self, before: Record) -> None:
        """Raise ``MembersChanged`` if ``before`` was another generation."""
        if self.record.members != before.members:
            raise MembersChanged(f"rank {self.members.me}: members were lost meanwhile")

    def first(self, number: int) -> Ranks:
        assert number == self.world_size, "all ranks of an elastic run train"
        return self

    def all_gather_object(self, what: str, value: Any, *, within: float = 0.0, close_by: bool = False) -> list[Any]:
        found, record = self.units.call(gathered(what, value, within=within, close_by=close_by))
        self.see(record)
        return found

    def addresses(self) -> list[str]:
        return self._addresses

    def report(self, error: str, peer: int | None = None) -> None:
        """Do nothing: the others continue without this rank."""

    def close(self, *, in_order: bool) -> None:
        """End the membership of this process."""
        self.units.close()
        self.members.close(in_order=in_order)


def elastic(ranks: Ranks, device: torch.device, *, transport: str, least: int, wait: float | None) -> ElasticRanks:
    """Return the members that ``ranks`` become, of which some may be lost from the start of training on. Collective.

    Args:
        ranks: all ranks of the job.
        device: device of the tensors of sums.
        transport: "tcp" or "tls".
        least: least number of members that train.
        wait: seconds for which a member without a majority waits for the others, by default 60.
    """
    wrap = wrap_of(transport, ranks)
    machines = ranks.all_gather_object("machines of members", ranks.rank - ranks.local_rank)
    places = ranks.addresses()
    members = Members(ranks, wrap, least=least, wait=DEFAULT_WAIT_SECONDS if wait is None else wait)
    members.wait_for_connections(ranks.timeout)
    found = ElasticRanks(
        rank=ranks.rank,
        world_size=ranks.world_size,
        store=ranks.store,
        restart_count=ranks.restart_count,
        processes=ranks.processes,
        by_torchrun=ranks.by_torchrun,
        standing=ranks.standing,
        secret=ranks.secret,
        job_store=ranks.job_store,
        machines=tuple(machines),
        places=tuple(places),
    )
    found.joined, found.members, found.record = ranks, members, first_record(range(ranks.world_size))
    found.units = Units(members, functools.partial(_of_generation, found), device)
    found.see(found.record)
    ranks.all_gather_object("members", None)
    if ranks.rank == 0 and under_torchrun():
        warn(
            "torchrun ends all ranks of a machine when one of them is lost, also those that could continue: "
            "python -m pipesgd.launch --elastic does not"
        )
    ranks.stand_down()
    return found


def _of_generation(own: ElasticRanks, record: Record) -> Ranks:
    """Return the ranks of a generation."""
    members = own.members
    found = GenerationRanks(
        rank=record.members.index(members.me),
        world_size=len(record.members),
        store=SharedValues(members, record.number),
        standing=own.standing,
        secret=own.secret,
        by_torchrun=False,
        numbers=record.members,
        still=members.check,
    )
    found._addresses = [own.places[member] for member in record.members]
    return found
