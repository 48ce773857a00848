"""The command: ``torchrun [torchrun's options] -m pipesgd.train [options]``.

Reads from top to bottom as a run happens. One path for every number of ranks.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import logging
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pipesgd import launch, output
from pipesgd.checkpoint import Checkpoints, CheckpointSchedule, save_atomically
from pipesgd.command_line import as_toml, parse
from pipesgd.computation import forward_backward, load
from pipesgd.config import FREE_BETWEEN_RANKS, TrainConfig
from pipesgd.ending import run_and_exit
from pipesgd.errors import DisagreementError
from pipesgd.evaluation import evaluate
from pipesgd.guard import SYNCHRONOUS_ITERATIONS
from pipesgd.launch import Ranks
from pipesgd.metrics import IterationMetrics, MetricsWriter, read_metrics, statistics, step_seconds
from pipesgd.optimization import build_optimizer, build_schedule
from pipesgd.planning import plan_run
from pipesgd.progress import ProgressBar, say, show_summary
from pipesgd.replanning import Watch, replan
from pipesgd.replicas import check_replicas, hashes_of_ranks
from pipesgd.state import RunState
from pipesgd.strategies.ddp import check_hook
from pipesgd.strategies.make import make_strategy, serve
from pipesgd.summary import Result, describe, summarize
from pipesgd.trace import Trace
from pipesgd.workloads import DataSplits

DEFAULT_EPOCHS = 3
FELL_BACK = (
    "warning: the gradient blew up in iteration {iteration}: staleness hurts here. "
    f"Width 1 for the next {SYNCHRONOUS_ITERATIONS} iterations (--guard); a lower --lr or --clip-norm may avoid it"
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
    data, batches, model, device = ranks.agree("data and model", lambda: load(config, workers))
    agree_on_data(data, ranks)
    per_epoch = batches.iterations_per_epoch
    total = config.optimization.iterations or (config.optimization.epochs or DEFAULT_EPOCHS) * per_epoch
    earlier, replans = output.earlier_run(config, ranks), config.planning.replan
    config, planned = plan_run(
        config, ranks, model, batches, console, samples=len(data.train), iterations=total, earlier=earlier
    )
    folder = output.take_folder(config, ranks, planned.as_json() if planned else None)

    # 3. The optimizer, and the strategy that feeds it.
    network: list[str] = ranks.exchange("network address", launch.network_address())
    ranks.start_process_group(config.run.device, config.run.timeout)
    model.to(device)
    optimizer = build_optimizer(config.optimization, model)
    schedule = build_schedule(config.optimization, optimizer, total)
    if ranks.rank >= workers.world_size:
        serve(config, model, optimizer, ranks)  # a parameter server on a rank of its own does nothing else
        return
    scaler = torch.amp.GradScaler(
        config.run.device, init_scale=config.optimization.loss_scale, enabled=config.optimization.precision == "fp16"
    )
    strategy = make_strategy(config, model, optimizer, scaler, ranks)
    with contextlib.ExitStack() as stack:
        # 4. Where an earlier run of the same command has come to.
        losses: collections.deque[float] = collections.deque(maxlen=per_epoch)
        state = RunState(model=model, optimizer=optimizer, schedule=schedule, strategy=strategy, losses=losses)
        stack.callback(lambda: state.strategy.close())  # another one, maybe (--replan)
        checkpoints = Checkpoints(folder / output.CHECKPOINTS, workers, keep=config.run.keep_checkpoints)
        if (found := checkpoints.load_newest()) is not None:
            state.restore(found.shared, found.own)
        start = strategy.iteration
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

        def save_checkpoint(done: int) -> None:
            for recorder in recorders:
                recorder.flush()
            checkpoints.save(done, *state.snapshot(time.perf_counter() - begin))

        # Pushed last, so run first: the others shall not take this rank for dead while it closes the rest.
        stack.push(functools.partial(report_failure, ranks))
        paces: list[float] = []
        watch = None if planned is None else Watch(planned, ranks, console, replans=replans)
        if replans and planned is None:
            say(console, "replan has nothing to do: nothing was predicted of this run")
        replanned: list[dict[str, Any]] = []
        samples_per_iteration = config.samples_per_rank * workers.world_size
        evaluated: dict[str, Any] = {"loader_workers": config.data.workers, "buffers": config.pipeline.buffers}
        model.train()
        last = time.perf_counter()
        begin = last - state.seconds
        for iteration in range(start, total):
            ranks.iteration = workers.iteration = iteration
            lr = float(schedule.get_last_lr()[0])
            loss, spans = forward_backward(strategy, samples, config, scaler, iteration)
            report = strategy.step()
            for _ in range(report.schedule_steps):
                schedule.step()
            losses.append(loss)
            if report.fell_back:
                say(console, FELL_BACK.format(iteration=iteration))
            seconds = step_seconds(report, time.perf_counter() - last)
            paces.append(seconds["iteration"])
            done = iteration + 1
            evaluation = None
            if done % per_epoch == 0 and done < total:
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
            if done < total and checkpoint_schedule.is_due(done, (time.perf_counter() - begin) / done):
                save_checkpoint(done)
            if watch is not None and planned is not None and watch.is_time(seconds["iteration"], done, total):
                config, planned = replan(
                    config,
                    planned,
                    state,
                    ranks,
                    batches,
                    scaler,
                    console,
                    samples=len(data.train),
                    done=done,
                    total=total,
                )
                strategy = state.strategy
                watch.go_on(planned)
                replanned.append({"iteration": done, "choices": planned.choices})
                # Who continues the run begins here: before, it had another strategy.
                save_checkpoint(done)
                output.replanned(folder, config, ranks, planned.as_json())
            last = time.perf_counter()

        # 6. Apply what is still in flight, and measure what came out.
        strategy.flush()
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
            weights_sha256=hashes[0],
            replicas_identical=len(set(hashes)) == 1,
        )

    # 7. What it leaves behind.
    if trace is not None:
        trace.write(folder / output.TRACE_FILE)
    if workers.local_rank == 0:
        save_atomically(model.state_dict(), folder / output.WEIGHTS_FILE, writer=workers.rank)
    if workers.rank == 0:
        metrics_lines = read_metrics(folder / output.METRICS_FILE)
        summary = summarize(config, ranks, network, result, metrics_lines)
        if planned is not None:
            own = [line for line in metrics_lines if line["iteration"] >= total - planned.iterations]
            measured = statistics(line["seconds"]["iteration"] for line in own)["median"]
            summary["planned"] = planned.as_json() | {"measured_seconds": measured, "replanned": replanned}
        (folder / output.SUMMARY_FILE).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        names = [output.SUMMARY_FILE, output.METRICS_FILE, output.WEIGHTS_FILE, output.TRACE_FILE]
        show_summary(console, summary, [folder / name for name in names if name != output.TRACE_FILE or trace])
        if planned is not None:
            say(console, planned.compare(summary["planned"]["measured_seconds"]))
    workers.exchange("the end", None)


def report_failure(
    ranks: Ranks, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Tell the other ranks of ``error``, if there is one."""
    if error is not None:
        with contextlib.suppress(RuntimeError):  # the store may be gone; this rank says itself what happened
            ranks.report(str(error) or repr(error))


def agree_on_configuration(words: Sequence[str], ranks: Ranks) -> TrainConfig:
    """The configuration that ``words`` ask for, once it is known that all ranks were asked the same.

    Raises:
        UserInputError: a rank's words are wrong.
        DisagreementError: the ranks' words differ.
    """
    config = ranks.agree("options", lambda: parse(words))
    launch.check_same_options(ranks, config.options(), free=FREE_BETWEEN_RANKS)
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
