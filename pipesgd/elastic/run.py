"""A run whose members may be lost: those who remain take over the samples, and the first of them the records."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipesgd.data.loading import Batches
from pipesgd.elastic.ranks import ElasticRanks
from pipesgd.errors import LeftBehind, NotEnoughMembers, StoppedBySignal, UserInputError, named, warn
from pipesgd.membership.generation import Record, Span, first_record
from pipesgd.membership.record import Slices
from pipesgd.optim.build import follow
from pipesgd.process import say
from pipesgd.run.evaluation import Evaluation
from pipesgd.run.folder_lock import FolderInUseError
from pipesgd.run.metrics import IterationMetrics, MetricsWriter
from pipesgd.run.summary import Result
from pipesgd.training import DEFAULT_EPOCHS, Job, Run

LOCK_SECONDS = 1.0
"""Seconds between two tries of the first rank to get the folder's lock."""


class ElasticRun(Run):
    """A run on a member; see ``Run``."""

    def __init__(self, job: Job):
        ranks = job.ranks
        assert isinstance(ranks, ElasticRanks)
        self._ranks = ranks
        self._span: Span | None = None
        """Span of the samples that this member takes."""
        self._first = 0
        """First member of that span."""
        self._lock_failed = False
        self._lock_due = 0.0
        """Time at which the first rank tries again to get the folder's lock, which another one of the job may have."""
        self._said = 0
        """Number of generations that have been told of."""
        self._all_end = False
        """True if all members end here: the end of one that is faster is no loss."""
        super().__init__(job)

    def train(self) -> None:
        ranks = self._ranks
        ranks.members.leaving.signal = lambda: ranks.standing.farewell.requested
        span = self.job.batches.record.next_span(self.start, ranks.world_size)
        first = first_record(range(ranks.world_size), self.start, span.given_back, span.given)
        ranks.units.start(first)
        self._span = first.spans[0]
        super().train()

    def _ends_before(self, iteration: int) -> bool:
        members = self._ranks.members
        if members.leaving.is_due:  # the next first rank counts what is on the disk
            for recorder in self._recorders:
                recorder.flush()
        record = self._ranks.begin(iteration)
        span = record.span(iteration)
        self._say_changes()
        if members.stop_at is not None and iteration >= members.stop_at:
            self._all_end = True
            return True
        if len(span.members) < members.least:
            written = self.save_checkpoint(iteration)
            self._all_end = True
            raise NotEnoughMembers(
                f"{len(span.members)} of the ranks are left, fewer than --elastic {members.least}; "
                + (f"--resume continues after iteration {iteration}" if written else "no checkpoint could be written")
            )
        if span != self._span:
            self._take_samples(span, iteration)
        elif self._ranks.rank == 0 and not self.job.lock.is_held and time.monotonic() >= self._lock_due:
            self._hold_folder()  # the first rank before may have ended later
        return False

    def _take_samples(self, span: Span, iteration: int) -> None:
        """Take the samples of ``span`` from ``iteration`` on, as a member of those who remain."""
        ranks, batches = self._ranks, self.job.batches
        before, self._first = self._first, span.members[0]
        self._follow(span)
        self._hold_folder()
        self._samples.close()
        self._samples = batches.from_iteration(iteration, self.job.device)
        self.losses = self.state.losses = collections.deque(self.losses, maxlen=batches.iterations_per_epoch)
        optimization = self.job.config.optimization
        if optimization.iterations is None:  # epochs end with their samples, and the schedule with them
            end = (optimization.epochs or DEFAULT_EPOCHS) * batches.record.length
            self.job = replace(self.job, iterations=batches.record.iterations(end))
            self._next_rate = functools.partial(follow, self.state.schedule, batches.record)
        if ranks.rank == 0 and self._attempts is None:  # the first member was another one
            self._begin_records(iteration)
        if before != self._first:  # which may have read the measurements of days: here, the others wait
            ranks.all_gather_object("begin of records", None, close_by=True)

    def _hold_folder(self) -> None:
        """Do what the first rank, of all and of a machine, does for the others: the one before may be lost.

        That one may end a little later, and has the lock until then.
        """
        self._lock_due = time.monotonic() + LOCK_SECONDS
        if self._ranks.local_rank == 0:
            try:
                self.job.lock.take()
            except FolderInUseError:
                raise
            except UserInputError as problem:  # its disk may have failed since, which costs no member
                if not self._lock_failed:
                    warn(f"rank {self._ranks.members.me} continues without the lock of its folder: {problem}")
                self._lock_failed = True
        if self._ranks.rank == 0 and self._attempts is None:
            self.job.console.quiet = False

    def _say_changes(self) -> None:
        """Tell of the members that were lost since this was called last, on the first one that is not lost since."""
        members = self._ranks.members
        while self._said + 1 < len(members.history):
            self._said += 1
            record, _ = members.history[self._said]
            if next((one for one in record.members if one in members.record.members), None) == members.me:
                config = self.job.config
                taken_over = members.leaving.taken_over if config.compression.chosen().gives_back else None
                say(sentence(record, config.samples_per_rank, taken_over))

    def _follow(self, span: Span) -> None:
        """Count iterations and samples from here on as those of the members of ``span``."""
        self._span = span
        self._ranks.see_members(span.members)
        self.job.batches.follow(Slices(span.first, len(span.members), span.fresh, span.given_back), self._ranks.rank)

    def _iterate(self, iteration: int, samples: Batches) -> IterationMetrics:
        self._ranks.is_in_step = True
        try:
            found = super()._iterate(iteration, samples)
        finally:
            self._ranks.is_in_step = False
        self._ranks.check_majority()
        return found

    def _evaluate(self) -> Evaluation:
        return self._ranks.whole(super()._evaluate)

    def save_checkpoint(self, done: int) -> bool:
        """Write a checkpoint of those who remain; again if one of them was lost meanwhile, with its part of it."""
        ranks = self._ranks
        ranks.all_gather_object("members", None)
        while True:
            before = ranks.record
            self._hold_folder()
            written = super().save_checkpoint(done)
            if ranks.record.members == before.members:
                self._say_changes()
                return written

    def _snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        done = self.strategy.iteration
        if (span := self._ranks.record.span(done)) != self._span:  # nobody has begun the next iteration
            self._take_samples(span, done)
            self._ranks.see_members(self._ranks.record.members)  # more may be lost since the span began
        return super()._snapshot()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        is_alone = self._ranks.members.why_alone is not None
        if is_alone or isinstance(error, LeftBehind):  # the records are the others' now, who may share the disk
            self.job.lock.release()
            self._ranks.standing.last_words = None
            for recorder in self._recorders:
                if isinstance(recorder, MetricsWriter):
                    recorder.drop()
        try:
            if is_alone and isinstance(error, NotEnoughMembers):
                self._keep_alone()
        finally:
            super().__exit__(kind, error, trace)
        if self._all_end and isinstance(error, StoppedBySignal | NotEnoughMembers):
            self._ranks.close(in_order=True)

    def _keep_alone(self) -> None:
        """Write what this member has, which has waited in vain for a majority: no checkpoint that counts."""
        ranks, done = self._ranks, self.strategy.iteration
        me = ranks.members.me
        try:
            ranks.all_gather_object("members", None)  # all sums are done, and what the codec has left out is here
            self._follow(ranks.members.span_alone(done))
            place = self.checkpoints.save_alone(done, *super()._snapshot(), me)
        except Exception as problem:  # noqa: BLE001 (this process ends for another reason, which it says)
            say(f"rank {me}: what it has after iteration {done} could not be written: {problem!r}")
            return
        say(
            f"rank {me}: what it has after iteration {done} is in {place}, and does not count, since others may have "
            f"continued. If none has, put it in place of iteration-{done}: --resume continues on any number of ranks"
        )

    def finish(self) -> Result:
        self._ranks.members.stop_listening()
        return super().finish()

    def leave_behind(self, result: Result) -> None:
        ranks = self._ranks
        ranks.all_gather_object("members", None)
        while True:
            before = ranks.record
            self._hold_folder()
            if ranks.rank == 0 and self._attempts is None:  # since the others were lost at the end
                with MetricsWriter(self.job.folder, start=self.job.iterations) as writer:
                    writer.record_last(result.iterations, result.test_accuracy, result.test_loss)
                    self._history = writer.history
                    self._attempts = self._begin_attempt(self.job.iterations, run_again=0)
            super().leave_behind(result)
            if ranks.record.members == before.members:  # else what one of them was to write may be missing
                break
        self._say_changes()
        ranks.close(in_order=True)

    def _summary_of_members(self, result: Result) -> dict[str, Any]:
        history = self._ranks.members.history
        return {
            "ranks": result.numbers,
            "generations": [in_summary(record) | {"time": when} for record, when in history],
        }


def in_summary(record: Record) -> dict[str, Any]:
    """Return what summary.json says of a generation, but for the time at which it began."""
    return {
        "number": record.number,
        "members": list(record.members),
        "first_iteration": record.first,
        "iterations_done": record.settled,
        "lost": [{"rank": one.member, "why": one.why, "slices_given_back": list(one.slices)} for one in record.lost],
    }


def sentence(record: Record, samples: int, taken_over: Mapping[int, int] | None) -> str:
    """Return the line that tells of the change to ``record``.

    Args:
        samples: number of samples of a slice.
        taken_over: members that have what the codec of others had left out, by these; None if it leaves nothing out.
    """
    slices = sum(len(one.slices) for one in record.lost)
    again = record.first - record.settled
    what = "; ".join(f"rank {one.member} is lost: {one.why}" for one in record.lost) or "connections were made again"
    text = f"{what}. Generation {record.number}: {named(list(record.members))}"
    if again > 0:
        first = record.settled
        which = f"Iteration {first} is" if again == 1 else f"Iterations {first} to {record.first - 1} are"
        text += f". {which} summed again"
    if slices:
        given = (
            f"1 slice ({samples} samples) is" if slices == 1 else f"{slices} slices ({slices * samples} samples) are"
        )
        text += f"; {given} given out again"
    if taken_over is None:
        return text
    places: dict[str, list[int]] = {}
    for one in record.lost:
        by = taken_over.get(one.member)
        places.setdefault(f"with rank {by}" if by in record.members else "lost", []).append(one.member)
    for place, those in places.items():
        text += f"; what the codec of {named(those)} had left out is {place}"
    return text
