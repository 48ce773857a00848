"""The ranks of a job: what they tell each other outside of training, and how a process joins them.

``Ranks`` communicate through the key-value store that torchrun's agent (or rank 0) holds: to agree on something before
any of them acts on it, and, when the run fails, to find out which ranks are missing. Gradients never pass through the
store. The functions below it start them. They and ``pipesgd.process`` alone read the variables that torchrun sets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import reprlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
import torch.distributed as dist

from pipesgd.checks import LONGEST_TIMEOUT
from pipesgd.config import differing_options
from pipesgd.errors import (
    CommunicationError,
    DeadlineExceeded,
    DisagreementError,
    PeerFailed,
    RunError,
    UserInputError,
    named,
)
from pipesgd.membership.address import Address, own_address, unreachable
from pipesgd.membership.heartbeat import LONGEST_PHASE, Beat, Patience, Standing
from pipesgd.membership.listening import hold_back_silent_connections
from pipesgd.membership.lookups import suspecting_lookups
from pipesgd.membership.sealed import forged, part, sealed
from pipesgd.membership.secret import Secret, job_secret
from pipesgd.membership.session import open_session
from pipesgd.membership.store import BoundedStore, MalformedValue, decode, host_store, poll, present, same_kind
from pipesgd.membership.watcher import ENDED_SECONDS, FAILURE, Watcher, ended_text, report_ended, report_key, root_cause
from pipesgd.process import (
    LAUNCHER_VARIABLES,
    QUIET,
    agent_holds_store,
    launched,
    local_rank,
    local_world_size,
    say,
)
from pipesgd.sections import DEFAULT_TIMEOUT, Wire

T = TypeVar("T")

HOW_TO_START = "torchrun --nproc-per-node 4 -m pipesgd.train ..."

LOOK_SECONDS = 1.0
"""Seconds between two checks, in an exchange, of what the missing ranks are doing."""

SPEECH_SECONDS = 5.0
"""Seconds that a rank that exits waits for the others to say why they do."""

REPORT_GRACE_SECONDS = 3.0
"""Seconds that a failing rank waits for the others' reports, which may first wait for those of others yet."""


@dataclass(eq=False)
class Ranks:
    """The ranks of this job, or those of a process group of it, and the store that they share.

    ``all_gather_object`` and ``raise_together`` must be called by all ranks in the same order.
    """

    is_elastic: ClassVar[bool] = False
    """True if some of these ranks may be lost while the others continue."""
    rank: int
    """Number of this rank, from 0."""
    world_size: int
    """Number of ranks."""
    store: dist.Store
    local_rank: int = 0
    """Number of this rank among those on this node."""
    local_world_size: int = 1
    """Ranks on this node."""
    restart_count: int = 0
    """Number of times that torchrun has restarted this job (``--max-restarts``). It does not count a restart because a
    machine has joined, nor, on one machine, those that another machine has asked for."""
    processes: int = 0
    """Number of this process among all that have joined by the store of the job, from 1."""
    by_torchrun: bool = True
    standing: Standing = field(default_factory=Standing)
    before_gather: Callable[[str], None] | None = field(default=None, init=False, repr=False)
    """Function called before an ``all_gather_object`` that is not ``close_by``, with its name; it waits for ranks that
    may legitimately be far behind."""
    secret: Secret | None = None
    """Secret of the job, which seals what passes through ``store``; None if it has none."""
    job_store: dist.Store | None = None
    """Store that all attempts of the job share, whereas ``store`` is the part of this attempt."""
    job_size: int = 0
    """Number of all ranks of the job, of which these may be only the ``first``; by default ``world_size``."""
    numbers: tuple[int, ...] = ()
    """Numbers of these ranks in torch's default process group, if they are those of another group, of which each is
    counted from 0; empty if they are those of the default group."""
    still: Callable[[], None] | None = None
    """Function that raises an error once what these ranks do together is over, called in long waits; None if nothing
    ends it but their failure."""
    _gathers: int = field(default=0, init=False)
    _process_groups: int = field(default=0, init=False)
    _own_keys: list[str] = field(default_factory=list, init=False)
    _addresses: list[str] = field(default_factory=list, init=False, repr=False)
    _first: dict[int, Ranks] = field(default_factory=dict, init=False, repr=False)
    _calls: BoundedStore = field(init=False, repr=False)
    _all_attempts: BoundedStore = field(init=False, repr=False)
    _job: Ranks = field(init=False, repr=False)
    _watcher: Watcher | None = field(default=None, init=False, repr=False)
    _reports: BoundedStore | None = field(default=None, init=False, repr=False)
    """Client of the store for reports while there is a watcher, whose own client must not be given up with them."""
    _listeners: list[Callable[[RunError], None]] = field(default_factory=list, init=False, repr=False)
    _failure: RunError | None = field(default=None, init=False, repr=False)
    _goodbyes: list[Callable[[str, int | None], None]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.job_size = self.job_size or self.world_size
        self._first[self.world_size] = self
        self._calls = BoundedStore(self.store, lambda: self.timeout)
        self._all_attempts = BoundedStore(self.job_store or self.store, lambda: self.timeout)
        self._job = self

    @property
    def timeout(self) -> float:
        """Seconds that this rank waits for another rank."""
        return self.standing.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.standing.timeout = seconds

    @property
    def iteration(self) -> int | None:
        """Iteration that this rank is in; None before training."""
        return self.standing.iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self.standing.iteration = iteration

    def number(self, rank: int) -> int:
        """Return the number of ``rank`` in torch's default process group, which messages name it by."""
        return self.numbers[rank] if self.numbers else rank

    def group_store(self) -> dist.Store:
        """Return the part of the store for the next process group of these ranks, with keys of its own. Collective."""
        self._process_groups += 1
        return part(self.store, f"process group of {self.world_size}/{self._process_groups}")

    def enter(self, phase: str, *, waiting: bool = False) -> None:
        """Set what this rank does from now on, and whether it waits for others meanwhile; heartbeats report it."""
        self.standing.enter(phase, time.monotonic(), waiting=waiting)

    def first(self, number: int) -> Ranks:
        """Return the first ``number`` of these ranks, which can exchange values among themselves without the others."""
        if number not in self._first:  # the same object every time, since it counts its exchanges
            self._first[number] = dataclasses.replace(self, world_size=number)
            self._first[number]._job = self._job
        return self._first[number]

    def whole(self, do: Callable[[], T]) -> T:
        """Return ``do()``, a computation in which each rank has its share: ranks that may be lost do it again then."""
        return do()

    def watch(self, on_failure: Callable[[RunError], None], *, even_alone: bool = False) -> Callable[[], None]:
        """Call ``on_failure``, in a thread of its own, when another rank of the job is lost or has failed.

        From the first call on, this rank gives heartbeats until every function that was returned has been called.
        A single rank has nobody to watch, and does nothing unless ``even_alone``: then the thread sees to its farewell.

        Returns:
            A function that ends the watch.

        Raises:
            CommunicationError: the store is gone, or hangs.
        """
        job = self._job
        if job.world_size == 1 and not even_alone:
            return lambda: None
        if job._failure is not None:
            on_failure(job._failure)
        job._listeners.append(on_failure)
        if job._watcher is None:
            if job.standing.has_left:  # when an earlier watcher was closed
                job.enter("start")
            try:
                store = job._calls.clone(lambda: job.standing.longest_silence)
                job._reports = job._calls.clone(lambda: REPORT_GRACE_SECONDS)
            except dist.DistError as failure:
                raise lost(failure, job.number(job.rank), None, "connection to the store", self.timeout) from failure
            job._watcher = Watcher(
                store,
                job.rank,
                job.world_size,
                job.standing,
                on_failure=job._tell_listeners,
                on_stall=say,
                number=job.number,
                beats_directly=job.secret is not None,
            )

        def stop() -> None:
            if on_failure in job._listeners:
                job._listeners.remove(on_failure)
            if not job._listeners and job._watcher is not None:
                job._watcher.close()
                job._watcher = job._reports = None

        return stop

    def _tell_listeners(self, error: RunError) -> None:
        self._failure = error
        for listener in list(self._listeners):
            listener(error)

    def stand_down(self) -> None:
        """Neither watch other ranks any more, nor tell or ask them anything: others do so from now on."""
        self._listeners.clear()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = self._reports = None
        self._calls = self._all_attempts = BoundedStore(dist.HashStore(), lambda: self.timeout)
        self.world_size = self.job_size = 0  # nobody is to be heard

    def silent(self) -> dict[int, float]:
        """Return the seconds since the last heartbeat of each rank known to be silent, without any input or output."""
        return {} if self._job._watcher is None else self._job._watcher.silent()

    def ended(self, within: float = 0.0) -> list[int]:
        """Return the ranks whose processes are known to have ended without a word; wait for one for some seconds."""
        return [] if self._job._watcher is None else self._job._watcher.ended(within)

    def say_goodbye(self, why: str = "", peer: int | None = None) -> None:
        """Tell the other ranks that the end of this process, which may come now, is no loss.

        Or ``why`` it fails, and which ``peer`` it has lost, if that is the reason.
        """
        for goodbye in list(self._job._goodbyes):
            goodbye(why, peer)
        if self._job._watcher is not None:
            self._job._watcher.neighbours.say_goodbye()

    def at_goodbye(self, goodbye: Callable[[str, int | None], None]) -> Callable[[], None]:
        """Let ``say_goodbye`` call this with its values, too, until the function that is returned is called."""
        goodbyes = self._job._goodbyes
        goodbyes.append(goodbye)
        return lambda: goodbyes.remove(goodbye)

    def all_gather_object(self, what: str, value: Any, *, within: float = 0.0, close_by: bool = False) -> list[Any]:
        """Return every rank's ``value`` (anything JSON can write), in rank order. Collective.

        Args:
            what: name of the value, for messages.
            value: this rank's value.
            within: seconds to wait, if that is longer than ``timeout``.
            close_by: true if all ranks have just met elsewhere, so that none is iterations behind; ``before_gather``
                is not called then.

        Raises:
            DeadlineExceeded: some ranks did not come to this call, and showed no sign of progress, within
                ``timeout`` seconds, or ``within`` seconds if that is longer.
            CommunicationError: a rank has failed meanwhile, or ``watch`` has found that one is lost.
        """
        if self.before_gather is not None and not close_by:
            self.before_gather(what)
        self._gathers += 1
        begin = time.monotonic()
        key = f"exchange of {self.world_size}/{self._gathers}/{what}/{{}}"
        phase = self.standing.enter(f"exchange of {what}", time.monotonic(), waiting=True)
        try:
            self._calls.set(key.format(self.rank), json.dumps(value))
            seconds = max(self.timeout, within)
            missing = self._missing(key, seconds, until_a_failure=True)
            if missing:  # the wait was longer if one of them made progress for a while
                waited = time.monotonic() - begin
                seconds = seconds if waited < 2 * seconds else round(waited)
                self._raise_missing(missing, f"exchange of {what}", seconds, key)
            answers = self._calls.get([key.format(rank) for rank in range(self.world_size)])
            # A rank in this exchange has read the previous one, so that one's key can go: the store stays small.
            self._own_keys.append(key.format(self.rank))
            if len(self._own_keys) > 2:
                self._calls.delete(self._own_keys.pop(0))
        except dist.DistError as failure:
            raise self._store_lost(failure, f"exchange of {what} through the store") from failure
        self.standing.resume(phase)
        return [self._decoded(answer, rank, what, key.format(rank), value) for rank, answer in enumerate(answers)]

    def _decoded(self, answer: bytes, rank: int, what: str, key: str, own: Any) -> Any:
        """Return the value of rank ``rank``, which must be of the same kind as this rank's ``own``."""
        try:
            value = decode(answer)
            if not same_kind(value, own):
                raise MalformedValue(f"it must be of the same kind as this rank's own; got {reprlib.repr(value)}")
        except MalformedValue as problem:
            raise CommunicationError(
                rank=self.number(self.rank),
                peer=self.number(rank),
                operation=f"exchange of {what}",
                reason=f"the store's value of {key!r} cannot be read: {problem}",
                iteration=self.iteration,
            ) from problem
        return value

    def _raise_missing(self, missing: list[int], operation: str, seconds: float, key: str) -> NoReturn:
        reports = self._calls.run(lambda store: present(store, [report_key(rank) for rank in range(self.job_size)]))
        cause = root_cause({rank: reports.get(report_key(rank), b"") for rank in range(self.job_size)})
        beats = self._beats(missing)
        silent = self.silent()
        alive = [f"rank {self.number(rank)} is alive: {b.place()}" for rank, b in beats.items() if rank not in silent]
        numbers = [self.number(rank) for rank in missing]
        text = f"no message within {seconds:g} s from {named(numbers)}" + "".join(f"; {one}" for one in alive)
        if wrong := forged(self.store, [key.format(rank) for rank in missing]):
            text += f"; the store's value of {wrong[0]!r} is forged: somebody else overwrites it"
        if cause is not None and cause.accused not in (None, self._job.rank) and self._job._watcher is not None:
            poll(lambda: self._job._failure is not None, REPORT_GRACE_SECONDS)  # it waits for the accused
            if getattr(self._job._failure, "peer", None) is not None:
                cause = None
        if cause is None and self._job._failure is not None:
            raise self._job._failure
        raise (PeerFailed if cause else DeadlineExceeded)(
            rank=self.number(self.rank),
            peer=self.number(cause.rank if cause else missing[0]),
            operation=operation,
            reason=cause.text if cause else text,
            iteration=self.iteration,
        )

    def _store_lost(self, failure: dist.DistError, operation: str) -> CommunicationError:
        """Return the error to raise for a store that is lost, perhaps together with the process of a rank."""
        number = self.number(self.rank)
        if ended := self.ended(within=ENDED_SECONDS):
            peer = self.number(ended[0])
            reason, iteration = ended_text(peer), self.iteration
            return PeerFailed(rank=number, peer=peer, operation=operation, reason=reason, iteration=iteration)
        return lost(failure, number, None, operation, self.timeout)

    def _beats(self, ranks: list[int]) -> dict[int, Beat]:
        """Return the newest heartbeat of each of ``ranks`` that has given one."""
        found = self._calls.run(lambda store: present(store, [f"beat/{rank}" for rank in ranks]))
        beats = {rank: Beat.decode(found.get(f"beat/{rank}", b"")) for rank in ranks}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def raise_together(self, what: str, attempt: Callable[[], T]) -> T:
        """Return this rank's ``attempt()``; if it raises ``UserInputError`` on any rank, all ranks raise that error.

        The error is then ``known_to_all``, so one rank's report of it is enough.
        """
        failure: UserInputError | None = None
        try:
            result = attempt()
        except UserInputError as error:
            failure = error
        said = self.all_gather_object(what, None if failure is None else str(failure))
        errors = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if not errors:
            return result
        rank, text = errors[0]
        agreed = text if said.count(text) == self.world_size else f"rank {self.number(rank)}: {text}"
        raise UserInputError.on_all_ranks(agreed) from failure

    def mark_job(self, name: str) -> None:
        """Record ``name`` for later attempts of this job: torchrun keeps the store when it restarts the ranks.

        Raises:
            CommunicationError: the store is gone, or hangs.
        """
        try:
            self._all_attempts.set(_mark(name), "")
        except dist.DistError as failure:
            raise self._store_lost(failure, "note in the store") from failure

    def job_has(self, name: str) -> bool:
        """Return True if this attempt of the job or an earlier one has marked it with ``name``.

        Raises:
            CommunicationError: the store is gone, or hangs.
        """
        try:
            return self._all_attempts.check([_mark(name)])
        except dist.DistError as failure:
            raise self._store_lost(failure, "look into the store") from failure

    def wait_until_all_have_spoken(self) -> None:
        """Return once all ranks have called this or ``need_not_speak``, or after some seconds.

        torchrun ends all ranks as soon as one exits, so no rank may exit before the others have said why they do.
        """
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody is left to wait for
            self._calls.set(f"spoken/{self.rank}", "")
            self._missing("spoken/{}", SPEECH_SECONDS)

    def need_not_speak(self) -> None:
        """Record that this rank ends normally, so that no other rank waits for it to say why.

        A parameter server on a rank of its own ends normally when its workers are stopped.
        """
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody is left to wait
            self._calls.set(f"spoken/{self.rank}", "")

    def addresses(self) -> list[str]:
        """Return the address at which each rank makes itself reachable, with its interface if known. Collective.

        Raises:
            UserInputError: a rank has an address that the others cannot reach, or was told an interface that it lacks.
        """
        if not self._addresses:
            own = self.raise_together("network address", own_address)
            found = [Address(*one) for one in self.all_gather_object("network address", own)]
            if (wrong := unreachable(found, self.number)) is not None:
                raise UserInputError.on_all_ranks(wrong)
            self._addresses = [one.shown for one in found]
        return self._addresses

    def start_process_group(self, device: str, timeout: float) -> None:
        """Start torch's default process group with this deadline for every operation. No such group may exist.

        Groups may follow each other, since each has its own keys in the store. With the device "cuda" every rank of a
        machine needs a GPU of its own, which is made its current one; with "cpu" the group is gloo's, which takes
        tensors on GPUs as well.

        Raises:
            UserInputError: as ``addresses``.
            CommunicationError: not every rank could be reached.
        """
        self.timeout = timeout
        self.addresses()
        if device == "cuda":
            torch.cuda.set_device(self.local_rank)
        try:
            dist.init_process_group(
                backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=self.group_store(),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=timeout),
            )
        except RuntimeError as failure:
            raise lost(failure, self.rank, None, "connection to all ranks", timeout) from failure

    def report(self, error: str, peer: int | None = None, reason: str = "") -> None:
        """Tell the other ranks why this one has failed, and which ``peer`` it has lost, if that is the reason.

        An empty ``error`` says that the peer's failure has ended this one. ``reason`` is that of the peer, without what
        this rank did. If the peer's process has ended, that is reported first, so that nobody takes this rank for the
        cause.
        """
        calls = self._job._reports or self._calls
        calls.hurry(REPORT_GRACE_SECONDS)  # if the store hangs, this rank's own line must not wait for it
        try:
            if error and peer is not None:
                for ended in self.ended(within=ENDED_SECONDS):
                    calls.run(functools.partial(report_ended, rank=ended, number=self.number(ended)))
            calls.set(report_key(self.rank), json.dumps([error, peer]))
            if error:
                calls.set(FAILURE, "")
        finally:  # the store may be gone
            self.say_goodbye(reason or error, peer)

    def report_and_wait(self, error: str, peer: int | None = None, reason: str = "") -> list[int]:
        """Report an error as ``report`` does, wait a moment for other ranks' reports, and return those that sent none.

        Nobody waits for the report of a rank whose process has ended.

        Raises:
            RuntimeError: the store is gone, or hangs.
        """
        calls = self._job._reports or self._calls
        self.report(error, peer, reason)
        keys = [report_key(rank) for rank in range(self.world_size)]
        if poll(lambda: calls.check(keys), REPORT_GRACE_SECONDS):
            return self.ended()
        return sorted({*self.ended(), *(rank for rank, key in enumerate(keys) if not calls.check([key]))})

    def leave(self) -> None:
        """Destroy torch's process groups in this process."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _knows_a_failure(self) -> bool:
        """Return True if a rank has reported a failure, or this job's watcher has found that one is lost."""
        return self._job._failure is not None or self._calls.check([FAILURE])

    def _missing(self, key: str, timeout: float, *, until_a_failure: bool = False) -> list[int]:
        """Wait until every rank's ``key`` is in the store or ``timeout`` has passed; return the ranks that are missing.

        With ``until_a_failure``, a missing rank that makes progress is waited for longer (``Patience``), and a failure
        of any rank ends the wait.
        """
        keys = [key.format(rank) for rank in range(self.world_size)]
        check = self._calls.check
        longest = max(timeout, LONGEST_PHASE * self.timeout)
        patience = Patience(timeout=timeout, longest=longest, now=time.monotonic())
        while True:
            until = min(LOOK_SECONDS, max(0.0, patience.end - time.monotonic()))
            if poll(lambda: check(keys) or (until_a_failure and self._knows_a_failure()), until) and check(keys):
                return []
            missing = [rank for rank, one in enumerate(keys) if not check([one])]
            if until_a_failure:
                patience.observe(self._beats(missing), time.monotonic())
                if forged(self.store, [f"beat/{rank}" for rank in missing]):
                    patience.extend(time.monotonic())  # they may well make progress
            if time.monotonic() >= patience.end or (until_a_failure and self._knows_a_failure()):
                return missing


def check_same_options(ranks: Ranks, options: dict[str, Any], *, free: frozenset[str]) -> None:
    """Raise ``DisagreementError`` if ``options``, except those in ``free``, differ between the ranks. Collective."""
    everybody = [others or {} for others in ranks.all_gather_object("configuration", options)]
    for rank, others in enumerate(everybody):
        for name in differing_options(everybody[0], others, free=free):
            raise DisagreementError(
                f"--{name} must be the same on all ranks; got {everybody[0].get(name)!r} on rank 0, "
                f"{others.get(name)!r} on rank {rank}"
            )


def check_same(ranks: Ranks, what: str, value: str) -> None:
    """Raise ``DisagreementError`` if ``value`` differs between the ranks. Collective."""
    everybody = ranks.all_gather_object(what, value)
    for rank, other in enumerate(everybody):
        if other != everybody[0]:
            raise DisagreementError(
                f"{what} must be the same on all ranks; got {everybody[0]} on rank {ranks.number(0)}, {other} on rank "
                f"{ranks.number(rank)}"
            )


def lost(failure: RuntimeError, rank: int, peer: int | None, operation: str, timeout: float) -> CommunicationError:
    """Return the error to raise for torch's ``failure``: torch has one type for all failures."""
    if "timed out" in str(failure).lower():
        reason = f"no answer within {timeout:g} s"
        return DeadlineExceeded(rank=rank, peer=peer, operation=operation, reason=reason)
    # gloo's message ends in advice; its first sentence says what happened, after the place in its source.
    reason = str(failure).split("] ", 1)[-1].split(". ")[0]
    return CommunicationError(rank=rank, peer=peer, operation=operation, reason=reason)


def join(secret: Secret | None = None) -> Ranks:
    """Return the ranks that torchrun started this process with; without torchrun, a single rank.

    With a ``secret``, by default that of the environment, what they tell each other through the store is sealed.

    Raises:
        UserInputError: torchrun's variables are set in part only, or to what they cannot be; or the ranks do not have
            the same secret.
        CommunicationError: the store of the job cannot be reached.
    """
    if not any(name in os.environ for name in LAUNCHER_VARIABLES):
        return alone()
    place = _given(launched)
    secret = secret or job_secret()
    try:
        with suspecting_lookups(place.host):
            own = None
            if agent_holds_store():
                hold_back_silent_connections(place.port)
            elif place.rank == 0:
                own = host_store(place.host, place.port)
            store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=DEFAULT_TIMEOUT))))
            del own  # the process has one server at the port, which the store of the rendezvous keeps
            store = sealed(store, secret)
            processes = BoundedStore(store, lambda: DEFAULT_TIMEOUT).run(lambda store: store.add("processes", 1))
        session = open_session(store, rank, world_size, DEFAULT_TIMEOUT)
    except dist.DistError as failure:
        raise lost(failure, place.rank, None, "connection to the other ranks", DEFAULT_TIMEOUT) from failure
    return Ranks(
        rank=rank,
        world_size=world_size,
        store=session,
        secret=secret,
        job_store=store,
        local_rank=_given(local_rank),
        local_world_size=_given(local_world_size),
        restart_count=place.restarts,
        processes=processes,
    )


def _given(read: Callable[[], T]) -> T:
    """Return what ``read`` finds in the launcher's variables.

    Raises:
        UserInputError: it finds one that cannot be.
    """
    try:
        return read()
    except ValueError as problem:
        raise UserInputError(f"{problem} (start with: {HOW_TO_START})") from None


def alone(number: int | None = None) -> Ranks:
    """Return this process as the only rank, whatever other ranks there are; ``number`` is its own among those."""
    numbers = () if number is None else (number,)
    return Ranks(rank=0, world_size=1, store=dist.HashStore(), by_torchrun=False, numbers=numbers)


def current(
    timeout: float | None, process_group: dist.ProcessGroup | None = None, secret: Secret | None = None
) -> Ranks:
    """Return the ranks of ``process_group``, by default torch's default group, which is started if there is none yet.

    All ranks of the group call this together. Those of other groups of the job may do so at the same time, or not.
    With None, ranks wait for each other as long as in the group's own operations. That is half an hour in gloo, since
    one of them may evaluate or save alone, but a rank without a heartbeat is lost as early as by default.
    With a ``secret``, by default that of the environment, what they tell each other through the store is sealed.

    Raises:
        UserInputError: ``process_group`` is no group of torch.distributed, or one without this rank; or the ranks do
            not have the same secret.
        CommunicationError: not every rank could be reached.
    """
    if process_group is not None:
        _check_group(process_group)
    elif not dist.is_initialized():
        ranks = join(secret)
        if ranks.world_size == 1 and not os.environ.get(QUIET):
            say("pipesgd: 1 rank, which exchanges nothing: torchrun --nproc-per-node 4 program.py starts several")
        # Ranks that share a GPU use gloo for it, too: nccl refuses them.
        enough = torch.cuda.device_count() >= ranks.local_world_size
        own_gpus = all(ranks.all_gather_object("whether there are GPUs", enough))
        ranks.start_process_group("cuda" if own_gpus else "cpu", DEFAULT_TIMEOUT if timeout is None else timeout)
        return ranks
    everybody = dist.distributed_c10d._get_default_group()
    group = process_group or everybody
    standing = Standing(_timeout_of(group), silence=DEFAULT_TIMEOUT) if timeout is None else Standing(timeout)
    # torch offers no public access to the store of a group that somebody else has started.
    secret = secret or job_secret()
    store = sealed(dist.distributed_c10d._get_process_group_store(group), secret)
    numbers = dist.get_process_group_ranks(group)
    rank, session = _session(store, numbers, standing.timeout)
    started = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    # Else torchrun's variables are not those of the default group.
    by_torchrun = started == [str(dist.get_rank()), str(dist.get_world_size())]
    first = dist.get_rank() - _given(local_rank)
    close_by = [number for number in numbers if first <= number < first + _given(local_world_size)]
    return Ranks(
        rank=rank,
        world_size=len(numbers),
        store=session,
        secret=secret,
        job_store=store,
        standing=standing,
        local_rank=close_by.index(dist.get_rank()) if by_torchrun else 0,
        local_world_size=len(close_by) if by_torchrun else 1,
        numbers=() if group is everybody else tuple(numbers),
    )


def given_ranks(ranks: Ranks | None, process_group: dist.ProcessGroup | None, wire: Wire) -> Ranks:
    """Return the ``ranks`` to work with, or those of ``process_group``, as ``current`` does.

    Raises:
        UserInputError: both are given, or this rank is not in the group.
    """
    if ranks is not None and process_group is not None:
        raise UserInputError("process_group must be left out where ranks= gives the ranks; got both")
    timeout = DEFAULT_TIMEOUT if wire.timeout is None else wire.timeout
    return ranks or current(timeout, process_group, job_secret(wire.secret_file))


def among(numbers: Sequence[int], standing: Standing, secret: Secret | None = None) -> Ranks:
    """Return the ranks of torch's default group that have these ``numbers``, of which this rank's is one.

    All of them call this together, and no other rank does. They need no process group of torch.distributed.

    Args:
        numbers: numbers of the ranks in the default group, in the order in which the ranks are counted from now on.
        standing: what this rank is doing, as it is known already to other ranks.
        secret: the secret of the job; None if it has none.

    Raises:
        CommunicationError: not every rank could be reached.
    """
    store = dist.distributed_c10d._get_process_group_store(dist.distributed_c10d._get_default_group())
    store = part(sealed(store, secret), f"among {','.join(map(str, numbers))}")
    rank, session = _session(store, numbers, standing.timeout)
    return Ranks(
        rank=rank,
        world_size=len(numbers),
        store=session,
        secret=secret,
        job_store=store,
        standing=standing,
        numbers=tuple(numbers),
    )


def _session(store: dist.Store, numbers: Sequence[int], timeout: float) -> tuple[int, dist.Store]:
    """Return this rank's place among the ranks with these ``numbers``, and their new part of ``store``. Collective."""
    own = dist.get_rank()
    rank = list(numbers).index(own)
    try:
        return rank, open_session(store, rank, len(numbers), timeout, numbers.__getitem__)
    except dist.DistError as failure:
        raise lost(failure, own, None, "connection to the other ranks", timeout) from failure


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Return the seconds that operations of ``group`` wait for a rank."""
    # torch offers no public access to it.
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return min(timeout.total_seconds(), LONGEST_TIMEOUT)


def _check_group(group: Any) -> None:
    """Refuse what ``process_group`` cannot be.

    Raises:
        UserInputError: it is no group of torch.distributed that still exists, or one without this rank.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UserInputError(f"process_group must have this rank in it; got one without rank {dist.get_rank()}")
    if not isinstance(group, dist.ProcessGroup):
        raise UserInputError(f"process_group must be a group of torch.distributed; got {type(group).__name__}")
    if group not in dist.distributed_c10d._world.pg_map:
        raise UserInputError("process_group must be a group of torch.distributed that exists; got a destroyed one")


def _mark(name: str) -> str:
    """Return the key of a mark in the store, whose keys are UTF-8: a path in ``name`` may hold other bytes."""
    return f"mark/{name!a}"
