"""The command: ``torchrun [torchrun's options] -m pipesgd.train [options]``.

Reads from top to bottom as a run happens. One path for every number of ranks.
"""

from __future__ import annotations

if __name__ == "__main__":  # before torch is imported, which takes seconds
    from pipesgd import process

    process.begin()

import collections
import contextlib
import functools
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pipesgd.baselines.ddp import check_hook
from pipesgd.cli import as_toml, parse
from pipesgd.config import FREE_BETWEEN_RANKS, TrainConfig
from pipesgd.data import DataSplits
from pipesgd.errors import CommunicationError, DisagreementError, PeerFailed, RunError, StoppedBySignal, named
from pipesgd.exit import reason_of, run_and_exit
from pipesgd.optim.build import build_optimizer, build_schedule
from pipesgd.pipeline.divergence_guard import SYNCHRONOUS_ITERATIONS
from pipesgd.planning.agree import plan_run
from pipesgd.planning.drift import Drift
from pipesgd.ranks import Ranks, check_same_options, network_address
from pipesgd.replicas import check_replicas, hashes_of_ranks
from pipesgd.run import output
from pipesgd.run.checkpoint import Checkpoints, CheckpointSchedule
from pipesgd.run.checkpoint_files import save_atomically
from pipesgd.run.console import ProgressBar, say, show_summary
from pipesgd.run.evaluation import evaluate
from pipesgd.run.files import write_text_atomically
from pipesgd.run.forward_backward import forward_backward, load
from pipesgd.run.metrics import IterationMetrics, MetricsWriter, read_metrics, statistics, step_seconds
from pipesgd.run.state import RunState
from pipesgd.run.summary import Result, describe, summarize
from pipesgd.run.trace import Trace
from pipesgd.strategies import make_strategy, serve

DEFAULT_EPOCHS = 3
FELL_BACK = (
    "warning: the gradient blew up in iteration {iteration}: staleness hurts here. "
    f"Width 1 for the next {SYNCHRONOUS_ITERATIONS} iterations (--guard); a lower --lr or --clip-norm may avoid it"
)
LEFT_OUT = (
    "warning: the gradient of iteration {iteration} is not finite on {ranks}: the update is left out "
    "(--on-nonfinite skip); summary.json counts them by rank"
)

DRIFTS = (
    "warning: the ranks' processors compute other bits, so replicas drift apart: all get rank 0's weights at every "
    "evaluation and checkpoint (--allow-drift)"
)


def train(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """One run, on this rank.

    Raises:
        UserInputError: before any training starts, and before anything is written or deleted.
        RunError: the run failed.
    """
    # 1. What to do: the same on all ranks.
    config = agree_on_configuration(words, ranks)
    if config.run.dry_run:
        if ranks.rank == 0:
            console.file.write(as_toml(config))
        return
    if config.run.log_messages:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("pipesgd").setLevel(logging.DEBUG)

    # 2. Data and model, from one seed on all ranks; what is left to be chosen; and the folder to write to.
    workers = ranks.agree("strategy", lambda: who_works(config, ranks))
    ranks.enter("loading of data and model")
    data, batches, model, device = ranks.agree("data and model", lambda: load(config, workers))
    agree_on_data(data, ranks)
    per_epoch = batches.iterations_per_epoch
    total = config.optimization.iterations or (config.optimization.epochs or DEFAULT_EPOCHS) * per_epoch
    earlier = output.earlier_run(config, ranks)
    config, planned = plan_run(
        config, ranks, model, batches, console, samples=len(data.train), iterations=total, earlier=earlier
    )
    lock = output.take_folder(config, ranks, planned.as_json() if planned else None)
    folder = config.run.output

    # 3. The optimizer, and the strategy that feeds it.
    network: list[str] = ranks.exchange("network address", network_address())
    ranks.start_process_group(config.run.device, config.run.timeout)
    model.to(device)
    optimizer = build_optimizer(config.optimization, model)
    schedule = build_schedule(config.optimization, optimizer, total)
    if ranks.rank >= workers.world_size:
        ranks.standing.farewell.open(members=workers.world_size, start=0, seconds=config.run.farewell_seconds)
        serve(config, model, optimizer, ranks)  # a parameter server on a rank of its own does nothing else
        return
    scaler = torch.amp.GradScaler(
        config.run.device, init_scale=config.optimization.loss_scale, enabled=config.optimization.precision == "fp16"
    )
    strategy = make_strategy(config, model, optimizer, scaler, ranks)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        # After an error: whoever resumes finds gradients in flight in the checkpoint.
        warnings.filterwarnings("ignore", "the pipeline was closed after an error")
        # 4. Where an earlier run of the same command has come to.
        losses: collections.deque[float] = collections.deque(maxlen=per_epoch)
        state = RunState(model=model, optimizer=optimizer, schedule=schedule, strategy=strategy, losses=losses)
        stack.enter_context(strategy)
        checkpoints = Checkpoints(folder / output.CHECKPOINTS, workers, keep=config.run.keep_checkpoints)
        if (found := checkpoints.load_newest(state.what_is_wrong_with)) is not None:
            workers.agree("a restored checkpoint", functools.partial(state.restore, found.shared, found.own))
        start = strategy.iteration
        ranks.standing.newest_checkpoint = checkpoints.newest
        checkpoint_schedule = CheckpointSchedule(
            workers, iterations=config.run.checkpoint_iterations, seconds=config.run.checkpoint_seconds, start=start
        )

        # 5. Train.
        trace = Trace(workers) if config.run.trace else None
        samples = stack.enter_context(contextlib.closing(batches.from_iteration(start)))
        recorders: list[MetricsWriter | ProgressBar] = []
        if workers.rank == 0:
            say(console, describe(config, ranks, model, network, total=total, start=start))
            recorders.append(stack.enter_context(MetricsWriter(folder, start=start)))
            recorders.append(stack.enter_context(ProgressBar(console, total=total, start=start)))

        if strategy.drifts:
            say(console, DRIFTS)

        def save_checkpoint(done: int) -> bool:
            strategy.share_weights()
            ranks.enter("checkpoint")
            for recorder in recorders:
                recorder.flush()
            written = checkpoints.save(done, *state.snapshot(time.perf_counter() - begin))
            ranks.standing.newest_checkpoint = checkpoints.newest
            return written

        # Pushed last, so run first: the others shall not take this rank for dead while it closes the rest.
        stack.push(functools.partial(report_failure, ranks))
        paces: list[float] = []
        blamed: set[int] = set()
        computing: list[float] = []
        drift = None if planned is None or ranks.rank else Drift(planned)
        samples_per_iteration = config.samples_per_rank * workers.world_size
        evaluated: dict[str, Any] = {"loader_workers": config.data.workers, "buffers": config.pipeline.buffers}
        model.train()
        last = time.perf_counter()
        begin = last - state.seconds
        farewell = ranks.standing.farewell
        farewell.open(members=workers.world_size, start=start, seconds=config.run.farewell_seconds)
        for iteration in range(start, total):
            if farewell.is_due(iteration):
                raise say_farewell(ranks, iteration, save_checkpoint)
            ranks.iteration = iteration
            lr = float(schedule.get_last_lr()[0])
            ranks.enter("compute")
            loss, spans = forward_backward(strategy, samples, config, scaler, iteration)
            ranks.enter("all-reduce", waiting=True)
            report = strategy.step()
            for _ in range(report.schedule_steps):
                schedule.step()
            losses.append(loss)
            if (new := set(report.nonfinite_ranks) - blamed) and not scaler.is_enabled():
                blamed |= new
                say(console, LEFT_OUT.format(iteration=report.skipped[0], ranks=named(sorted(new))))
            if report.fell_back:
                say(console, FELL_BACK.format(iteration=iteration))
            seconds = step_seconds(report, time.perf_counter() - last)
            paces.append(seconds["iteration"])
            computing.append(seconds["compute"])
            done = iteration + 1
            evaluation = None
            if done % per_epoch == 0 and done < total:
                ranks.enter("evaluation")
                strategy.share_weights()
                evaluation = evaluate(model, strategy, data.test, workers, device, **evaluated)
            metrics = IterationMetrics(
                iteration=iteration,
                epoch=iteration // per_epoch,
                loss=loss,
                lr=lr,
                samples_per_second=samples_per_iteration / seconds["iteration"],
                seconds=seconds,
                wire_bytes=report.wire_bytes,
                skipped=len(report.skipped),
                nonfinite_ranks=report.nonfinite_ranks,
                prediction_cosine=report.comparison.cosine if report.comparison else None,
                prediction_error=report.comparison.relative_error if report.comparison else None,
                test_accuracy=evaluation.accuracy if evaluation else None,
                test_loss=evaluation.loss if evaluation else None,
            )
            for recorder in recorders:
                recorder.record(metrics)
            if trace is not None:
                trace.add([*spans, *report.spans])
            if config.run.check_replicas and done % config.run.check_replicas == 0:
                with strategy.true_weights():
                    check_replicas(hashes_of_ranks(model, workers), done)
            if checkpoint_schedule.is_due(done, (time.perf_counter() - begin) / done) or done == total:
                save_checkpoint(done)
            if drift is not None and (line := drift.saw(seconds["iteration"])):
                say(console, line)
            last = time.perf_counter()

        farewell.is_open = False

        # 6. Apply what is still in flight, and measure what came out.
        ranks.enter("last all-reduce", waiting=True)
        strategy.flush()
        strategy.share_weights()
        ranks.enter("evaluation")
        hashes = hashes_of_ranks(model, workers)
        if strategy.replicated:
            check_replicas(hashes, total)
        evaluation = evaluate(model, strategy, data.test, workers, device, **evaluated)
        result = Result(
            iterations=total,
            wall_seconds=time.perf_counter() - begin,
            train_loss=float(np.mean(workers.exchange("loss of the last epoch", float(np.mean(losses))))),
            test_accuracy=evaluation.accuracy,
            test_loss=evaluation.loss,
            iteration_seconds=workers.exchange("pace", statistics(paces)["median"]),
            compute_seconds=workers.exchange("pace of computing", statistics(computing)["median"]),
            weights_sha256=hashes[0],
            replicas_identical=len(set(hashes)) == 1,
        )

    # 7. What it leaves behind. A file that cannot be written is said at the end, when all is tried.
    trouble: list[str] = []
    if trace is not None:
        trace.write(folder / output.TRACE_FILE)
    if workers.local_rank == 0:
        with note_trouble(trouble, path := folder / output.WEIGHTS_FILE):
            save_atomically(model.state_dict(), path)
    if workers.rank == 0:
        metrics_lines = read_metrics(folder / output.METRICS_FILE)
        summary = summarize(config, ranks, network, result, metrics_lines)
        if planned is not None:
            own = [line for line in metrics_lines if line["iteration"] >= total - planned.iterations]
            measured = statistics(line["seconds"]["iteration"] for line in own)["median"]
            summary["planned"] = planned.as_json() | {"measured_seconds": measured}
        with note_trouble(trouble, path := folder / output.SUMMARY_FILE):
            write_text_atomically(path, json.dumps(summary, indent=1) + "\n")
        names = (output.SUMMARY_FILE, output.METRICS_FILE, output.WEIGHTS_FILE, output.TRACE_FILE)
        show_summary(console, summary, [folder / name for name in names if (folder / name).exists()])
        if planned is not None and summary["planned"]["measured_seconds"] is not None:
            say(console, planned.compare(summary["planned"]["measured_seconds"]))
    for rank, failures in enumerate(workers.exchange("the end", trouble)):
        if failures:
            raise RunError(
                f"rank {rank}: training is done, but {'; '.join(failures)}. The newest checkpoint is that of iteration "
                f"{checkpoints.newest or 0} of {total}: --resume ends the run once there is room"
            )
    if lock is not None:
        lock.release()


@contextlib.contextmanager
def note_trouble(trouble: list[str], path: Path) -> Iterator[None]:
    """Add to ``trouble`` why ``path`` could not be written, instead of raising it."""
    try:
        yield
    except OSError as failure:
        trouble.append(f"{path} could not be written: {failure.strerror or failure}")


def say_farewell(ranks: Ranks, iteration: int, save: Callable[[int], bool]) -> StoppedBySignal:
    """The end of a run that was told to stop, with the checkpoint that all ranks write before ``iteration``."""
    standing = ranks.standing
    written = standing.newest_checkpoint == iteration or save(iteration)
    standing.farewell.is_open = False
    return StoppedBySignal(
        standing.farewell.requested or "another rank's signal",
        iteration=iteration,
        newest=standing.newest_checkpoint,
        without=None if written else "it could not be written",
    )


def report_failure(
    ranks: Ranks, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Tell the other ranks of ``error``, if there is one."""
    if error is not None and not isinstance(error, StoppedBySignal):  # of which all ranks know
        with contextlib.suppress(RuntimeError):  # the store may be gone; this rank says itself what happened
            ranks.report(
                "" if isinstance(error, PeerFailed) else reason_of(error, ranks),
                error.peer if isinstance(error, CommunicationError) else None,
            )


def agree_on_configuration(words: Sequence[str], ranks: Ranks) -> TrainConfig:
    """The configuration that ``words`` ask for, once it is known that all ranks were asked the same.

    Raises:
        UserInputError: a rank's words are wrong.
        DisagreementError: the ranks' words differ.
    """

    def own() -> TrainConfig:
        config = parse(words)
        ranks.timeout = config.run.timeout  # the first exchange already waits for this long
        ranks.standing.stall_seconds = config.run.stall_seconds
        return config

    config = ranks.agree("options", own)
    check_same_options(ranks, config.options(), free=FREE_BETWEEN_RANKS)
    return config


def who_works(config: TrainConfig, ranks: Ranks) -> Ranks:
    """The ranks that compute gradients: all, or all but the parameter servers that have ranks of their own.

    Raises:
        UserInputError: the strategy cannot run on these ranks or with this torch.
    """
    check_hook(config.pipeline.ddp_hook)
    return ranks.first(config.pipeline.workers(ranks.world_size))


def agree_on_data(data: DataSplits, ranks: Ranks) -> None:
    """Check that every rank has found data of the same size, or the same text: folders may be on different machines.

    Raises:
        DisagreementError: they have not.
    """
    found = (
        f"{len(data.train)} training samples and {len(data.test)} test samples of {data.num_classes} classes, "
        f"{'x'.join(map(str, data.sample_shape))}"
    )
    if data.content:
        found += f", {data.content}"
    everybody = ranks.exchange("size of the data", found)
    for rank, other in enumerate(everybody):
        if other != everybody[0]:
            raise DisagreementError(
                f"data must be the same on all ranks; got {everybody[0]} on rank 0, {other} on rank {rank}"
            )


if __name__ == "__main__":
    run_and_exit(train, sys.argv[1:])
