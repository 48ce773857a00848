"""A run on a rank that computes gradients: resumed, trained, finished, and its results written."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import math
import shlex
import time
import warnings
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from pipesgd.config import TrainConfig
from pipesgd.data import DataSplits, ShardedBatches, find_loss
from pipesgd.data.loading import Batches
from pipesgd.errors import RunError, StoppedBySignal, named, warn
from pipesgd.optim.build import build_schedule, follow
from pipesgd.pipeline.exchanges import Reduce
from pipesgd.pipeline.width import SYNCHRONOUS_ITERATIONS
from pipesgd.process import say as say_on_stderr
from pipesgd.ranks import Ranks
from pipesgd.replicas import check_replicas, hashes_of_ranks
from pipesgd.run import output
from pipesgd.run.checkpoint import Checkpoints, CheckpointSchedule
from pipesgd.run.checkpoint_files import Checkpoint, save_atomically
from pipesgd.run.console import ProgressBar, say, show_summary
from pipesgd.run.evaluation import Evaluation, evaluate
from pipesgd.run.files import note_trouble, write_text_atomically
from pipesgd.run.folder_lock import FolderLock
from pipesgd.run.forward_backward import forward_backward
from pipesgd.run.loading_time import ExposedLoading, LoadingTimes, hint
from pipesgd.run.metrics import History, IterationMetrics, MetricsWriter, statistics, step_seconds
from pipesgd.run.state import RunState
from pipesgd.run.summary import (
    Result,
    describe,
    measured_before,
    sum_of_finite,
    summarize,
    versions,
)
from pipesgd.strategies import make_strategy
from pipesgd.strategy import StepReport, Strategy

if TYPE_CHECKING:
    from pipesgd.planning.drift import Drift
    from pipesgd.planning.planned import Planned
    from pipesgd.run.attempts import Attempts
    from pipesgd.run.recorder import OwnRecorder
    from pipesgd.run.trace import Trace

DEFAULT_EPOCHS = 3
FELL_BACK = (
    "warning: the gradient blew up in iteration {iteration}: staleness hurts here. "
    f"Width 1 for the next {SYNCHRONOUS_ITERATIONS} iterations (--guard); a lower --lr or --clip-norm may avoid it"
)
LEFT_OUT = (
    "warning: the gradient of iteration {iteration} is not finite{where}: the update is skipped ({why}); summary.json "
    "counts them"
)
OVERFLOWS = ", although every rank's own is, so their sum overflows (lower --lr, or use --codec bf16)"
LEAST_LOSS_SCALE = 1.0
"""Loss scale below which skipped updates are reported: above, the scale is taken to be what made gradients overflow."""

OTHER_RANKS = (
    "the checkpoint is of {before} ranks, and {now} continue: gradients in flight are applied, and the ranks take the "
    "samples that are next"
)
OTHER_DATA = (
    "warning: the data{whose} are not those of the checkpoint, {then}; got {now}{where}: the run continues with them "
    "up to iteration {total}, as it began, and is not what it would have been without the interruption"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that is settled before training begins: the model, its data, the ranks, the number of iterations."""

    config: TrainConfig
    """Configuration as the user gave it, with the timing model's choices filled in."""
    ranks: Ranks
    workers: Ranks
    """Ranks that compute gradients."""
    console: Console
    data: DataSplits
    batches: ShardedBatches
    model: nn.Module
    device: torch.device
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    iterations: int
    reduce: Reduce
    """Exchange of gradients, of each parameter with ``--reduce auto``."""
    planned: Planned | None
    """Prediction of the timing model; None if it was not asked."""
    recorders: list[OwnRecorder]
    """Recorders of the user's own, on rank 0."""
    lock: FolderLock

    @property
    def folder(self) -> Path:
        return self.config.run.output

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        say(self.console, line)


class Run:
    """A run on a rank that computes gradients: ``resume``, ``train``, ``finish``, and afterwards ``leave_behind``.

    As a context manager it closes the strategy and the files, and reports an error to the other ranks.
    """

    def __init__(self, job: Job):
        config = job.config
        self.job = job
        self.start = 0
        """Iteration that this attempt begins with."""
        self.scaler = torch.amp.GradScaler(
            config.run.device,
            init_scale=config.optimization.loss_scale,
            enabled=config.optimization.precision == "fp16",
        )
        self.losses: collections.deque[float] = collections.deque(maxlen=job.batches.iterations_per_epoch)
        self.state = RunState(
            model=job.model,
            optimizer=job.optimizer,
            schedule=job.schedule,
            strategy=make_strategy(config, job.model, job.optimizer, self.scaler, job.ranks, job.reduce),
            losses=self.losses,
            rate_ranks=job.workers.world_size,
        )
        self.checkpoints = Checkpoints(job.folder / output.CHECKPOINTS, job.workers, keep=config.run.keep_checkpoints)
        self.trace = self._trace()
        self._recorders: list[MetricsWriter | ProgressBar | OwnRecorder] = []
        self._attempts: Attempts | None = None
        """Writer of the beginning and the end of this attempt, on rank 0 once training begins."""
        self._history = History()
        """Numbers of all iterations on rank 0, with those before this attempt; empty on the other ranks."""
        self._paces = array("d")
        self._computing = array("d")
        self._loading = LoadingTimes(workers=config.data.workers)
        self._blamed: set[int | None] = set()
        """Ranks whose gradients were not finite and that have been named in a warning; None if there was one about no
        rank."""
        self._stack = contextlib.ExitStack()
        self._next_rate: Callable[[int], object] = lambda done: self.job.schedule.step()
        """Function that lets the schedule take its step, given the number of iterations done."""
        self._begin = self._last = time.perf_counter()
        """Time when the run would have begun without interruptions, and time when the last iteration ended."""

    @property
    def strategy(self) -> Strategy:
        """Strategy that trains now."""
        return self.state.strategy

    def __enter__(self) -> Self:
        self._stack.enter_context(warnings.catch_warnings())
        # Not needed after an error: a resumed run finds the gradients in flight in the checkpoint.
        warnings.filterwarnings("ignore", "the pipeline was closed after an error")
        self._stack.push(self.strategy)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def resume(self) -> None:
        """Continue from the newest checkpoint that is whole on all ranks, if there is one.

        Raises:
            UserInputError: ranks have checkpoints, but none in common, or results without any. Nothing was deleted.
        """
        workers = self.job.workers
        found = self.checkpoints.load_newest(self.state.what_is_wrong_with)
        if found is None:
            workers.raise_together("results of an earlier run", lambda: output.check_no_results(self.job.folder))
        else:
            total = self._continue_record(found)
            now = self.job.data.describe(own=True)
            both = workers.all_gather_object("data of the checkpoint", [found.own["data"], now])
            if changed := [rank for rank, (then, now) in enumerate(both) if then != now]:
                then, now = both[changed[0]]
                own = (f" of {named(changed)}", f" on rank {changed[0]}")
                whose, where = own if self.job.data.sharded else ("", "")
                self.job.say(OTHER_DATA.format(whose=whose, then=then, now=now, where=where, total=total))
            before, state = found.world_size, found.own
            assert before is not None, "it was read"
            others = None if before == workers.world_size else found.others
            if workers.rank >= before:
                state = state | self.state.of_new_rank(found.iteration)
            workers.raise_together(
                "a restored checkpoint", functools.partial(self.state.restore, found.shared, state, others)
            )
            if others is not None:
                self.job.say(OTHER_RANKS.format(before=before, now=workers.world_size))
            if self.job.config.optimization.lr_scaling == "linear":
                self.state.scale_rates_to(workers.world_size)
        self.start = self.strategy.iteration
        self.job.ranks.standing.newest_checkpoint = self.checkpoints.newest

    def _continue_record(self, found: Checkpoint) -> int:
        """Continue the samples, the schedule and the last losses of a checkpoint; return the number of iterations.

        Epochs end with their samples, and so does a run of epochs with its schedule: where the number of ranks has
        changed, iterations are counted as those of the first ranks.
        """
        job, optimization = self.job, self.job.config.optimization
        batches, total = job.batches, found.shared["iterations"]
        batches.continue_record(found.shared["record"], found.iteration)
        record, of_schedule = batches.record, total
        by_samples = len(record.spans) > 1 and optimization.iterations is None
        if by_samples:
            end = (optimization.epochs or DEFAULT_EPOCHS) * record.length
            total, of_schedule = record.iterations(end), end // record.spans[0].ranks
        if total != job.iterations or of_schedule != job.iterations:  # of other data, or of other ranks
            ranks = job.workers.world_size
            self.state.schedule = build_schedule(optimization.for_ranks(ranks), job.optimizer, of_schedule)
            self.job = replace(job, iterations=total, schedule=self.state.schedule)
        if by_samples:
            self._next_rate = functools.partial(follow, self.state.schedule, record)
        self.losses = self.state.losses = collections.deque(maxlen=batches.iterations_per_epoch)
        return int(total)

    def train(self) -> None:
        """Run all remaining iterations.

        Raises:
            StoppedBySignal: a signal asked any rank to stop; a checkpoint was written if that was possible.
            RunError: the run failed.
        """
        job, config, ranks = self.job, self.job.config, self.job.ranks
        checkpoint_schedule = CheckpointSchedule(
            job.workers,
            iterations=config.run.checkpoint_iterations,
            seconds=config.run.checkpoint_seconds,
            start=self.start,
        )
        self._samples = job.batches.from_iteration(self.start, job.device)
        self._stack.callback(lambda: self._samples.close())
        if job.workers.rank == 0:
            job.say(describe(config, ranks, job.model, total=job.iterations, start=self.start))
            ranks.enter("reading of earlier metrics")
            self._begin_records(self.start)
        drift = self._drift()
        # Rank 0 may have read the metrics of days: here, the others wait as long as it makes progress.
        job.workers.all_gather_object("start of training", None, close_by=True)
        job.model.train()
        self._last = time.perf_counter()
        self._begin = self._last - self.state.seconds
        farewell = ranks.standing.farewell
        farewell.open(members=job.workers.world_size, start=self.start, seconds=config.run.farewell_seconds)
        done = self.start
        while done < self.job.iterations:
            if self._ends_before(done):
                raise say_farewell(ranks, done, self.save_checkpoint)
            metrics = self._iterate(done, self._samples)
            done += 1
            for recorder in self._recorders:
                recorder.record(metrics)
            if config.run.check_replicas and done % config.run.check_replicas == 0:
                with self.strategy.true_weights():
                    check_replicas(hashes_of_ranks(job.model, job.workers), done, job.workers)
            if checkpoint_schedule.is_due(done, time.perf_counter() - self._last) or done == self.job.iterations:
                self.save_checkpoint(done)
            unlike = metrics.width < config.pipeline.width or done <= (config.compression.dense_start or 0)
            if drift and (line := drift.observe(metrics.seconds["iteration"], unlike=unlike)):
                job.say(line)
            self._last = time.perf_counter()
        farewell.is_open = False

    def _ends_before(self, iteration: int) -> bool:
        """Return True if the run stops before ``iteration``, as a signal has asked any rank to."""
        return self.job.ranks.standing.farewell.is_due(iteration)

    def _begin_records(self, start: int) -> None:
        """Let this rank, which is the first one, record iterations from ``start`` on."""
        job = self.job
        writer = self._stack.enter_context(MetricsWriter(job.folder, start=start))
        self._history = writer.history
        self._attempts = self._begin_attempt(start, run_again=writer.dropped)
        self._recorders.append(writer)
        bar = ProgressBar(job.console, total=job.iterations, start=start)
        self._recorders.append(self._stack.enter_context(bar))
        self._recorders += [self._stack.enter_context(contextlib.closing(one)) for one in job.recorders]

    def _trace(self) -> Trace | None:
        """Return the trace of this rank's spans, if it is asked for."""
        if not self.job.config.run.trace:
            return None
        from pipesgd.run.trace import Trace

        return Trace(self.job.workers)

    def _begin_attempt(self, start: int, *, run_again: int) -> Attempts:
        """Write that this rank begins to record an attempt with iteration ``start``, for the report of the run."""
        from pipesgd.run.attempts import Attempts

        attempts = Attempts(self.job.folder / output.ATTEMPTS_FILE, self.job.ranks.standing)
        attempts.begin(start=start, world_size=self.job.ranks.world_size, run_again=run_again, versions=versions())
        return attempts

    def _drift(self) -> Drift | None:
        """Return what compares the iterations of this attempt with the plan, on rank 0 of a run that has one."""
        if self.job.planned is None or self.job.workers.rank > 0:
            return None
        from pipesgd.planning.drift import Drift

        return Drift(self.job.planned)

    def _iterate(self, iteration: int, samples: Batches) -> IterationMetrics:
        """One iteration: its gradients, what the strategy makes of them, and an evaluation where one is due."""
        job, ranks, record = self.job, self.job.ranks, self.job.batches.record
        ranks.iteration = iteration
        lr = float(job.schedule.get_last_lr()[0])
        ranks.enter("compute")
        loss, spans = forward_backward(self.strategy, samples, job.config, self.scaler, iteration)
        ranks.enter("all-reduce", waiting=True)
        step = self.strategy.step()
        for _ in range(step.schedule_steps):
            self._next_rate(iteration + 1)
        self.losses.append(loss)
        self._take_note(step, iteration)
        if self.trace is not None:
            self.trace.add(spans)
            if (worker := samples.last.worker) is not None:
                self.trace.add_loading(worker, iteration, samples.last.start, samples.last.end)
        loading = sum(span.seconds for span in spans if span.what == "data")
        seconds = step_seconds(step, time.perf_counter() - self._last, loading)
        self._paces.append(seconds["iteration"])
        self._loading.add(seconds["iteration"], loading, samples.last.seconds)
        self._computing.append(seconds["compute"])
        evaluation = None
        done, epoch, every = iteration + 1, record.epoch(iteration), job.config.run.evaluate_iterations
        due = record.epoch(done) > epoch if every is None else done % every == 0
        if due and done < job.iterations:
            ranks.enter("evaluation")
            evaluation = self._evaluate()
        return IterationMetrics(
            iteration=iteration,
            epoch=epoch,
            loss=loss,
            lr=lr,
            samples_per_second=job.config.samples_per_rank * job.workers.world_size / seconds["iteration"],
            seconds=seconds,
            wire_bytes=step.wire_bytes,
            skipped=len(step.skipped),
            nonfinite_ranks=step.nonfinite_ranks,
            width=step.width,
            fell_back=step.fell_back,
            prediction_cosine=step.comparison.cosine if step.comparison else None,
            prediction_error=step.comparison.relative_error if step.comparison else None,
            test_accuracy=evaluation.accuracy if evaluation else None,
            test_loss=evaluation.loss if evaluation else None,
        )

    def _take_note(self, report: StepReport, iteration: int) -> None:
        """Count the updates that were left out by the end of ``iteration``, and warn of what ``report`` tells."""
        self.state.nonfinite += report.nonfinite_ranks.count(self.job.ranks.number(self.job.ranks.rank))
        if report.skipped and not (self.scaler.is_enabled() and self.scaler.get_scale() >= LEAST_LOSS_SCALE):
            self._warn_of_skipped(report)
        if report.fell_back:
            self.job.say(FELL_BACK.format(iteration=iteration))
        if self.trace is not None:
            self.trace.add(report.spans)

    def _warn_of_skipped(self, report: StepReport) -> None:
        """Warn of an update that was left out: once for each rank that caused one, and once if none is known to."""
        ranks, config = self.job.ranks, self.job.config
        new: set[int | None] = {*report.nonfinite_ranks} or {None}
        new -= self._blamed
        if not new:
            return
        self._blamed |= new
        where = ""
        if culprits := sorted(rank for rank in new if rank is not None):
            where = f" on {named(culprits)}"
        elif config.pipeline.strategy == "pipelined":  # others do not know whose gradient was not finite
            where = OVERFLOWS
        why = "--on-nonfinite skip"
        if self.scaler.is_enabled():
            why = f"--precision fp16, whose loss scale has fallen to {self.scaler.get_scale():g}"
        line = LEFT_OUT.format(iteration=report.skipped[0], where=where, why=why)
        self.job.say(line)
        if ranks.number(ranks.rank) in new and ranks.rank > 0 and self.strategy.owns_optimizer:  # rank 0 does not know
            warn(line.removeprefix("warning: "))

    def _evaluate(self) -> Evaluation:
        job = self.job
        return evaluate(
            job.model,
            self.strategy,
            job.data.test,
            job.workers,
            job.device,
            batch_size=job.config.data.batch_size,
            loss=find_loss(job.config.model.loss),
            sharded=job.data.sharded,
            loader_workers=job.config.data.workers,
            buffers=job.config.pipeline.buffers,
        )

    def save_checkpoint(self, done: int) -> bool:
        """Write the checkpoint of ``done`` iterations on all ranks together; return False if one of them could not."""
        self.job.ranks.enter("checkpoint")
        for recorder in self._recorders:
            recorder.flush()
        written = self.checkpoints.save(done, self._snapshot)
        self.job.ranks.standing.newest_checkpoint = self.checkpoints.newest
        return written

    def _snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a checkpoint has in common on all ranks, and what it has of this rank."""
        shared, own = self.state.snapshot(time.perf_counter() - self._begin)
        own["data"] = self.job.data.describe(own=True)
        return shared | {"iterations": self.job.iterations, "record": self.job.batches.record.state_dict()}, own

    def finish(self) -> Result:
        """Apply the gradients that are still in flight, and evaluate the result."""
        job, workers = self.job, self.job.workers
        job.ranks.enter("last all-reduce", waiting=True)
        report = self.strategy.flush()
        self._take_note(report, job.iterations - 1)
        job.ranks.enter("evaluation")
        hashes = hashes_of_ranks(job.model, workers)
        if self.strategy.replicated:
            check_replicas(hashes, job.iterations, job.workers)
        evaluation = self._evaluate()
        for recorder in self._recorders:
            recorder.record_last(job.iterations, evaluation.accuracy, evaluation.loss)
        pace, compute = (statistics(times)["median"] for times in (self._paces, self._computing))
        loading = self._loading.summarize(job.ranks.local_world_size)
        own = [sum_of_finite(self.losses), loading, self.state.nonfinite, pace, compute]
        of_ranks = workers.all_gather_object("results", own)  # at once: a rank may be lost after it
        losses, exposed, nonfinite, paces, computes = map(list, zip(*of_ranks, strict=True))
        loss, finite, left_out = map(sum, zip(*losses, strict=True))
        return Result(
            numbers=[workers.number(rank) for rank in range(len(of_ranks))],
            iterations=job.iterations,
            wall_seconds=time.perf_counter() - self._begin,
            train_loss=loss / finite if finite else math.nan,
            train_losses_left_out=left_out,
            test_accuracy=evaluation.accuracy,
            test_loss=evaluation.loss,
            iteration_seconds=paces,
            compute_seconds=computes,
            exposed_loading=[None if one is None else ExposedLoading(*one) for one in exposed],
            skipped_at_end=len(report.skipped),
            nonfinite=nonfinite,
            weights_sha256=hashes[0],
            replicas_identical=len(set(hashes)) == 1,
        )

    def leave_behind(self, result: Result) -> None:
        """Write the weights, the summary and the trace. Files that cannot be written are reported after the others.

        Raises:
            RunError: a file could not be written.
        """
        job, folder, config, planned = self.job, self.job.folder, self.job.config, self.job.planned
        trouble: list[str] = []
        nothing_new = self.start == job.iterations  # then the trace and each rank's times stay as they were
        if self.trace is not None and not nothing_new:
            self.trace.write(folder / output.TRACE_FILE)
        for turn in (job.workers.rank > 0, job.workers.rank == 0):  # on a common disk, rank 0's files stay
            if turn and job.workers.local_rank == 0:
                with note_trouble(trouble, path := folder / output.WEIGHTS_FILE):
                    save_atomically(job.model.state_dict(), path)
            job.workers.all_gather_object("written weights", None)
        if job.workers.rank == 0:
            summary = summarize(config, job.ranks, result, self._history) | self._summary_of_members(result)
            if nothing_new:
                summary |= measured_before(folder / output.SUMMARY_FILE, job.workers.world_size)
            if planned is not None:
                own = self._history.known("iteration", start=planned.settled)
                measured = statistics(planned.windows(own.tolist()))["median"]
                summary["planned"] = planned.as_json() | {"measured_seconds": measured}
            with note_trouble(trouble, path := folder / output.SUMMARY_FILE):
                write_text_atomically(path, json.dumps(summary, indent=1) + "\n")
            if self._attempts is not None:  # else the rank that had it was lost
                self._attempts.finish()
            job.ranks.enter("report")  # of days, perhaps: the others wait as long as this takes
            self._write_report()
            files = [folder / name for name in output.RESULTS if (folder / name).exists()]
            show_summary(job.console, summary, files)
            if planned is not None and summary["planned"]["measured_seconds"] is not None:
                job.say(planned.compare(summary["planned"]["measured_seconds"]))
            from pipesgd.planning.accuracy import line_of_run

            for line in (hint(result.exposed_loading, result.numbers), line_of_run(config, job.model, job.iterations)):
                if line is not None:
                    job.say(line)
            job.say(f"next: tensorboard --logdir {shlex.quote(str(folder))} shows the curves")
        ends = job.workers.all_gather_object("the end", [str(folder), *trouble])
        for rank, (_, *failures) in enumerate(ends):
            if failures:
                raise RunError(
                    f"rank {job.workers.number(rank)}: training is done, but {'; '.join(failures)}. The newest "
                    f"checkpoint is that of iteration {self.checkpoints.newest or 0} of {job.iterations}: --resume "
                    "finishes it once there is room"
                )
        job.lock.release()
        if job.workers.rank > 0 and job.workers.local_rank == 0:  # on its machine nothing else says that all is well
            where = job.ranks.addresses()[0].partition(" ")[0]  # without its interface
            say_on_stderr(f"rank {job.workers.number(job.workers.rank)}: done; results are on {where} in {ends[0][0]}")

    def _summary_of_members(self, result: Result) -> dict[str, Any]:
        """Return what summary.json has about changes of members."""
        return {}

    def _write_report(self) -> None:
        """Write the report of the run, or warn if that is impossible: ``pipesgd report`` can write it later."""
        from pipesgd.report.page import write_report

        path = self.job.folder / output.REPORT_FILE
        try:
            write_report(self.job.folder, path, is_in_use=False)
        except OSError as failure:
            warn(f"the report could not be written ({path}: {failure.strerror or failure})")


def say_farewell(ranks: Ranks, iteration: int, save: Callable[[int], bool]) -> StoppedBySignal:
    """Return the error that ends a run stopped by a signal, after all ranks' checkpoint before ``iteration``."""
    standing = ranks.standing
    written = standing.newest_checkpoint == iteration or save(iteration)
    standing.farewell.is_open = False
    return StoppedBySignal(
        standing.farewell.requested or "another rank's signal",
        iteration=iteration,
        newest=standing.newest_checkpoint,
        without=None if written else "it could not be written",
    )
