"""The ranks of an elastic run: those of a generation, on the communication thread, and as the main thread sees them."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import torch

from pipesgd.comm.tcp import wrap_of
from pipesgd.elastic.members import Interrupted, Members
from pipesgd.elastic.units import Units, gathered
from pipesgd.elastic.values import SharedValues
from pipesgd.errors import NotEnoughMembers, RunError, UserInputError, warn
from pipesgd.membership.generation import Lost, Record, first_record
from pipesgd.membership.heartbeat import Standing
from pipesgd.membership.peers import SILENT_SECONDS
from pipesgd.process import under_torchrun
from pipesgd.ranks import Ranks

T = TypeVar("T")

DEFAULT_WAIT_SECONDS = 60.0


class MembersChanged(RunError):  # noqa: N818 (what happened)
    """Members were lost while something was computed for which each has its share; it must be computed again."""


@dataclass(eq=False)
class GenerationRanks(Ranks):
    """The ranks of one generation, whose exchanges, on the communication thread, end when it does."""

    def watch(self, on_failure: Callable[[RunError], None], *, even_alone: bool = False) -> Callable[[], None]:
        return lambda: None  # members watch each other


@dataclass
class _Unseen(Standing):
    """Standing of the communication thread, which stays as it is: what this process does, the main thread's shows."""

    def enter(self, phase: str, now: float, *, waiting: bool = False) -> tuple[str, bool, float]:
        return self.phase

    def resume(self, phase: tuple[str, bool, float]) -> None:
        pass


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
    """Ranks that take part no more from this iteration on, and why, alike on all others."""


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
    transport: str = "tcp"
    """Transport of the members' own connections, which gradients take, too."""
    joined: Ranks = field(init=False, repr=False)
    """Ranks that this process has joined, whose numbers messages about its end bear."""
    units: Units = field(init=False, repr=False)
    members: Members = field(init=False, repr=False)
    record: Record = field(init=False, repr=False)
    is_in_step: bool = field(default=False, init=False, repr=False)
    is_alone: bool = field(default=False, init=False, repr=False)
    """True once the program was told that no majority came back."""
    _in_whole: bool = field(default=False, init=False, repr=False)
    _next: int | None = field(default=None, init=False, repr=False)
    """Iteration after the one that was yielded last; None where ``iterations`` is not used."""

    is_elastic: ClassVar[bool] = True

    def see(self, record: Record) -> None:
        """Let this object be about the members of ``record``.

        Raises:
            MembersChanged: they have changed within a computation that must be ``whole``.
            NotEnoughMembers: no majority came back.
        """
        self.check_majority()
        before, self.record = self.record, record
        self.see_members(record.members)
        if self._in_whole and record.members != before.members:
            raise MembersChanged(f"rank {self.members.me}: members were lost meanwhile")

    def check_majority(self) -> None:
        """Raise ``NotEnoughMembers``, once, if no majority came back; not in a step, which is not left halfway.

        From there on this process is the only rank, and can save what it has.
        """
        if self.members.why_alone is not None and not (self.is_alone or self.is_in_step):
            raise self._alone(self.members.why_alone)

    def _alone(self, why: str) -> NotEnoughMembers:
        self.is_alone = True
        self.see_members((self.members.me,))
        return NotEnoughMembers(why)

    def whole(self, do: Callable[[], T]) -> T:
        if self._in_whole:
            return do()
        self.all_gather_object("members", None)  # from here on, all see the same changes in the same places
        self._in_whole = True
        try:
            while True:
                with contextlib.suppress(MembersChanged):
                    return do()
        finally:
            self._in_whole = False

    def see_members(self, members: tuple[int, ...]) -> None:
        """Let the numbers of ranks be those among ``members``, ids in the order of the ring."""
        me = self.members.me
        own = [one for one in members if self.machines[one] == self.machines[me]]
        self.rank, self.world_size, self.numbers = members.index(me), len(members), members
        self.local_rank, self.local_world_size = own.index(me), len(own)
        self.job_size = self.world_size
        self._addresses = [self.places[one] for one in members]
        self.joined.rank, self.joined.numbers = self.rank, members

    def iterations(self, number: int, state: Mapping[str, Any] | None = None) -> Iterator[Share]:
        """Yield this rank's share of each iteration, in a loop of the user's own; losses are survived from now on.

        It waits while the others agree who continues. A step of the optimizer belongs to each iteration.

        Args:
            number: number of iterations.
            state: what ``state_dict`` has returned in the run that this one continues, on any number of ranks.

        Raises:
            LeftBehind: the others continue without this rank.
            NotEnoughMembers: fewer than ``least`` ranks remain, or no majority was in reach for ``wait`` seconds. The
                pipeline can still be flushed, and what this rank has then be saved, apart from what the others save.
            UserInputError: ``state`` is none of ``state_dict``.
        """
        before: Mapping[str, Any] = {"iteration": 0, "given_back": [], "fresh": 0} if state is None else state
        try:
            start, given_back, fresh = (before[key] for key in ("iteration", "given_back", "fresh"))
        except (KeyError, TypeError) as problem:
            raise UserInputError(f"state must be what state_dict() returns; got {state!r}") from problem
        self._next = start
        self.units.start(first_record(range(self.world_size), start, tuple(given_back), fresh))
        members, told = self.members, 1
        for iteration in range(start, number):
            record = self.begin(iteration)
            span = record.span(iteration)
            self.see_members(span.members)
            if len(span.members) < members.least:
                raise NotEnoughMembers(f"{len(span.members)} ranks are left, fewer than {members.least}")
            # A member that is behind knows of a change earlier, but all are told of it in the same iteration.
            new = [one for one, _ in members.history[told:] if one.first <= iteration]
            told += len(new)
            part = span.slice_of(iteration, members.me)
            assert part is not None, "this rank is a member"
            self._next, self.iteration = iteration + 1, iteration
            yield Share(iteration, part, self.rank, self.world_size, tuple(one for each in new for one in each.lost))
        members.stop_listening()

    def iteration_of_loop(self, otherwise: int) -> int:
        """Return the iteration that was yielded last; ``otherwise`` where ``iterations`` is not used."""
        return otherwise if self._next is None else self._next - 1

    def state_dict(self) -> dict[str, Any]:
        """Return, for JSON, which samples the iterations so far have taken, to continue in another run.

        It is called in an iteration, after ``pipeline.flush()``: the gradients of a rank that is lost before are given
        out again.
        """
        done = self._next or 0
        span = self.members.span_alone(done) if self.is_alone else self.members.record.span(done)
        given_back, fresh = span.rest(done)
        return {"iteration": done, "given_back": list(given_back), "fresh": fresh}

    def begin(self, iteration: int) -> Record:
        """Begin ``iteration``; return the generation that it belongs to. It waits while a change is under way."""
        self.enter("change of members", waiting=True)
        try:
            if self.members.leaving.is_due and self.members.stop_at is None:
                self._leave()
            record = self.members.begin(iteration)
        except Interrupted:
            raise self.members.failure or RunError(f"rank {self.members.me}: its membership has ended") from None
        finally:
            self.enter("compute")
        if self.members.why_alone is not None:
            raise self._alone(self.members.why_alone)
        return record

    def _leave(self) -> None:
        """Hand over what the codec has left out, and wait to be left out: nothing is summed meanwhile."""
        sums, thread = self.members.leaving.sums, self.units.thread
        left_out = [] if sums is None else thread.submit(sums.left_out).result()
        if self.members.why_alone is None and self.members.leave(left_out) and sums is not None:
            thread.submit(sums.forget_left_out).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close(in_order=kind is None)

    def first(self, number: int) -> Ranks:
        assert number == self.world_size, "all ranks of an elastic run train"
        return self

    def all_gather_object(self, what: str, value: Any, *, within: float = 0.0, close_by: bool = False) -> list[Any]:
        phase = self.standing.enter(f"exchange of {what}", time.monotonic(), waiting=True)
        try:
            found, record = self.units.call(gathered(what, value, within=within, close_by=close_by))
        finally:
            self.standing.resume(phase)
        self.see(record)
        return found

    def addresses(self) -> list[str]:
        return self._addresses

    def report(self, error: str, peer: int | None = None, reason: str = "") -> None:
        """Do nothing: the others continue without this rank."""

    def close(self, *, in_order: bool) -> None:
        """End the membership of this process."""
        self.units.close()
        self.members.close(in_order=in_order)


def elastic(
    ranks: Ranks,
    device: torch.device,
    *,
    transport: str,
    least: int,
    wait: float | None = None,
    silence: float | None = None,
) -> ElasticRanks:
    """Return the members that ``ranks`` become, of which some may be lost from the start of training on. Collective.

    Args:
        ranks: all ranks of the job.
        device: device of the tensors of sums.
        transport: "tcp" or "tls".
        least: least number of members that train.
        wait: seconds for which a member without a majority waits for the others, by default 60.
        silence: seconds without a sign of life after which a member is lost, by default 3, the same on all ranks.
    """
    wrap = wrap_of(transport, ranks)
    machines = ranks.all_gather_object("machines of members", ranks.rank - ranks.local_rank)
    places = ranks.addresses()
    members = Members(
        ranks,
        wrap,
        least=least,
        wait=DEFAULT_WAIT_SECONDS if wait is None else wait,
        silence=SILENT_SECONDS if silence is None else silence,
    )
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
        transport=transport,
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
        standing=_Unseen(own.timeout),
        secret=own.secret,
        by_torchrun=False,
        numbers=record.members,
        still=members.check,
    )
    found._addresses = [own.places[member] for member in record.members]
    return found
