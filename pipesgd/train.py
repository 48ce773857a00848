"""The command: ``torchrun [torchrun's options] -m pipesgd.train [options]``.

Reads from top to bottom as a run happens. One path for every number of ranks.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pipesgd
from pipesgd import launch, output
from pipesgd.checkpoint import Checkpoints, CheckpointSchedule, save_atomically
from pipesgd.command_line import HelpRequested, as_toml, parse
from pipesgd.config import FREE_BETWEEN_RANKS, TrainConfig, differing_options
from pipesgd.errors import DisagreementError, PipesgdError, UserInputError
from pipesgd.evaluation import test_accuracy
from pipesgd.launch import Ranks
from pipesgd.metrics import SECONDS, IterationMetrics, MetricsWriter, read_metrics, statistics, step_seconds
from pipesgd.optimization import build_optimizer, build_schedule
from pipesgd.progress import ProgressBar, show_summary
from pipesgd.replicas import check_replicas
from pipesgd.state import RunState
from pipesgd.strategies.base import Span
from pipesgd.strategies.pipelined import Pipelined
from pipesgd.trace import Trace
from pipesgd.workloads import DataSplits, ShardedBatches, build_model, load_dataset

DEFAULT_EPOCHS = 3
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143


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

    # 2. Data and model, from one seed on all ranks; and the folder to write to.
    data, batches, model, device = ranks.agree("data and model", lambda: load(config, ranks))
    folder = output.take_folder(config, ranks)
    per_epoch = batches.iterations_per_epoch
    total = config.optimization.iterations or (config.optimization.epochs or DEFAULT_EPOCHS) * per_epoch

    # 3. The optimizer, and the strategy that feeds it.
    ranks.start_process_group(config.run.device, config.run.timeout)
    model.to(device)
    optimizer = build_optimizer(config.optimization, model.parameters())
    schedule = build_schedule(config.optimization, optimizer, total)
    strategy = Pipelined(
        model,
        optimizer,
        width=config.pipeline.width,
        warmup_iterations=config.pipeline.warmup_iterations,
        all_reduce=config.pipeline.all_reduce,
        on_nonfinite=config.run.on_nonfinite,
        timeout=config.run.timeout,
        ranks=ranks,
    )

    # 4. Where an earlier run of the same command has come to.
    losses: collections.deque[float] = collections.deque(maxlen=per_epoch)
    state = RunState(model=model, optimizer=optimizer, schedule=schedule, strategy=strategy, losses=losses)
    checkpoints = Checkpoints(folder / output.CHECKPOINTS, ranks, keep=config.run.keep_checkpoints)
    if (found := checkpoints.load_newest()) is not None:
        state.restore(found.shared, found.own)
    start = strategy.iteration
    checkpoint_schedule = CheckpointSchedule(
        ranks, iterations=config.run.checkpoint_iterations, seconds=config.run.checkpoint_seconds, start=start
    )

    # 5. Train.
    trace = Trace(ranks) if config.run.trace else None
    begin = time.perf_counter() - state.seconds
    with contextlib.ExitStack() as stack:
        samples = stack.enter_context(contextlib.closing(batches.from_iteration(start)))
        recorders: list[MetricsWriter | ProgressBar] = []
        if ranks.rank == 0:
            console.print(describe(config, ranks, model, total=total, start=start), highlight=False, soft_wrap=True)
            recorders.append(stack.enter_context(MetricsWriter(folder, start=start)))
            recorders.append(stack.enter_context(ProgressBar(console, total=total, start=start)))
        model.train()
        last = time.perf_counter()
        for iteration in range(start, total):
            lr = float(schedule.get_last_lr()[0])
            loss, spans = forward_backward(model, samples, device, iteration)
            report = strategy.step()
            schedule.step()
            losses.append(loss)
            seconds = step_seconds(report, time.perf_counter() - last)
            done = iteration + 1
            accuracy = None
            if done % per_epoch == 0 and done < total:
                accuracy = test_accuracy(model, strategy, data.test, ranks, device)
            metrics = IterationMetrics(
                iteration=iteration,
                epoch=iteration // per_epoch,
                loss=loss,
                lr=lr,
                samples_per_second=config.data.batch_size * ranks.world_size / seconds["iteration"],
                seconds=seconds,
                wire_bytes=report.wire_bytes,
                skipped=len(report.skipped),
                test_accuracy=accuracy,
            )
            for recorder in recorders:
                recorder.record(metrics)
            if trace is not None:
                trace.add([*spans, *report.spans])
            if config.run.check_replicas and done % config.run.check_replicas == 0:
                check_replicas(model, ranks, done)
            if done < total and checkpoint_schedule.is_due(done, (time.perf_counter() - begin) / done):
                for recorder in recorders:
                    recorder.flush()
                checkpoints.save(done, *state.snapshot(time.perf_counter() - begin))
            last = time.perf_counter()

        # 6. Apply what is still in flight, and measure what came out.
        strategy.flush()
        wall_seconds = time.perf_counter() - begin
        accuracy = test_accuracy(model, strategy, data.test, ranks, device)
        sha256 = check_replicas(model, ranks, total)
    train_loss = float(np.mean(ranks.exchange("loss of the last epoch", float(np.mean(losses)))))
    strategy.close()

    # 7. What it leaves behind.
    written = [folder / output.SUMMARY_FILE, folder / output.METRICS_FILE, folder / output.WEIGHTS_FILE]
    if trace is not None:
        trace.write(folder / output.TRACE_FILE)
        written.append(folder / output.TRACE_FILE)
    if ranks.local_rank == 0:
        save_atomically(model.state_dict(), folder / output.WEIGHTS_FILE, writer=ranks.rank)
    if ranks.rank == 0:
        summary = summarize(config, ranks, read_metrics(folder / output.METRICS_FILE)) | {
            "iterations": total,
            "wall_seconds": wall_seconds,
            "final": {
                "train_loss": train_loss if math.isfinite(train_loss) else None,  # JSON has no NaN
                "test_accuracy": accuracy,
            },
            "replicas_identical": True,  # or check_replicas had ended the run
            "weights_sha256": sha256,
        }
        (folder / output.SUMMARY_FILE).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        show_summary(console, summary, written)
    ranks.exchange("the end", None)


def agree_on_configuration(words: Sequence[str], ranks: Ranks) -> TrainConfig:
    """The configuration that ``words`` ask for, once it is known that all ranks were asked the same.

    Raises:
        UserInputError: a rank's words are wrong.
        DisagreementError: the ranks' words differ.
    """
    config = ranks.agree("options", lambda: parse(words))
    everybody = ranks.exchange("configuration", config.options())
    for rank, options in enumerate(everybody):
        for name in differing_options(everybody[0], options, free=FREE_BETWEEN_RANKS):
            raise DisagreementError(
                f"--{name} must be the same on all ranks; got {everybody[0][name]!r} on rank 0, "
                f"{options[name]!r} on rank {rank}"
            )
    return config


def load(config: TrainConfig, ranks: Ranks) -> tuple[DataSplits, ShardedBatches, nn.Module, torch.device]:
    """The data set, this rank's batches of it, the model, and where it computes."""
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise UserInputError("device must be cpu where torch finds no GPU; got cuda")
    data = load_dataset(config.data.dataset, config.data.data_dir, image_size=config.data.image_size)
    batches = ShardedBatches(
        data.train,
        batch_size=config.data.batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=config.optimization.seed,
        loader_workers=config.data.loader_workers,
    )
    torch.manual_seed(config.optimization.seed)
    model = build_model(
        config.model.model,
        sample_shape=data.sample_shape,
        num_classes=data.num_classes,
        hidden_sizes=config.model.hidden_sizes,
    )
    torch.manual_seed(config.optimization.seed * ranks.world_size + ranks.rank)  # from here on, ranks differ
    return data, batches, model, torch.device(config.run.device)


def forward_backward(
    model: nn.Module, samples: Any, device: torch.device, iteration: int
) -> tuple[float, tuple[Span, ...]]:
    """Load one batch, and leave its gradients in ``.grad``: its loss, and when what ran."""
    begin = time.perf_counter()
    inputs, labels = (tensor.to(device, non_blocking=True) for tensor in next(samples))
    loaded = time.perf_counter()
    loss: Tensor = cross_entropy(model(inputs), labels)
    predicted = time.perf_counter()
    loss.backward()
    value = loss.item()
    spans = (
        Span("data", iteration, begin, loaded),
        Span("forward", iteration, loaded, predicted),
        Span("backward", iteration, predicted, time.perf_counter()),
    )
    return value, spans


def describe(config: TrainConfig, ranks: Ranks, model: nn.Module, *, total: int, start: int) -> str:
    """What is about to run, in a line or two."""
    size = sum(parameter.numel() for parameter in model.parameters())
    pipeline = config.pipeline
    text = (
        f"{config.model.model} ({size:,} parameters) on {config.data.dataset}, {ranks.world_size} "
        f"rank{'s' if ranks.world_size > 1 else ''} x {config.data.batch_size} samples, "
        f"{pipeline.strategy} width {pipeline.width}, {pipeline.all_reduce} all-reduce, {pipeline.codec}"
    )
    if not ranks.by_torchrun:
        text += f"\nnot started by torchrun, hence one rank; for four: {launch.HOW_TO_START}"
    if config.run.resume or ranks.restart_count:
        text += f"\ncontinuing after iteration {start} of {total}" if start else "\nno checkpoint yet: starting anew"
    return text


def summarize(config: TrainConfig, ranks: Ranks, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of summary.json that follows from the configuration and from the ``lines`` of metrics.jsonl."""
    return {
        "world_size": ranks.world_size,
        "strategy": config.pipeline.strategy,
        "width": config.pipeline.width,
        "codec": config.pipeline.codec,
        "all_reduce": config.pipeline.all_reduce,
        "prediction": "none",
        "seconds": {name: statistics(line["seconds"][name] for line in lines) for name in SECONDS},
        "wire_bytes_per_iteration": lines[-1]["wire_bytes"],
        "skipped_updates": sum(line["skipped"] for line in lines),
        "versions": {
            "pipesgd": pipesgd.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "options": config.options(),
    }


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt it is no error of the program's."""


def main() -> NoReturn:
    """Run the command and exit: 0 done, 2 the input was wrong, 1 the run failed, 130 Ctrl-C, 143 SIGTERM."""
    signal.signal(signal.SIGTERM, _raise_terminated)
    launch.die_with_parent()
    code = _run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # The other ranks may be gone: a normal exit would wait for the communication thread and for
        # torch's groups, which wait for them.
        os._exit(code)
    sys.exit(0)


def _run(words: Sequence[str]) -> int:
    console = Console()
    ranks: Ranks | None = None
    try:
        ranks = launch.join()
        train(words, ranks, console)
        ranks.leave()
    except HelpRequested as request:
        if ranks is None or ranks.rank == 0:
            print(request)
    except BaseException as failure:  # noqa: BLE001 (told apart, and said, below)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # one end is enough
        return _explain(failure, ranks)
    return 0


def _explain(failure: BaseException, ranks: Ranks | None) -> int:
    """Say in one line why this rank ends; the exit code."""
    rank = 0 if ranks is None else ranks.rank
    if isinstance(failure, UserInputError) and (ranks is None or failure.known_to_all):
        if rank == 0:
            _say(f"error: {failure}")
        if ranks is not None:
            ranks.wait_for_rank_0()
        return EXIT_BAD_INPUT
    if isinstance(failure, DisagreementError):
        _say(f"error: rank {rank}: {failure}")
        return EXIT_BAD_INPUT
    if isinstance(failure, KeyboardInterrupt):
        if rank == 0:
            _say("interrupted; --resume continues from the last checkpoint")
        return EXIT_INTERRUPTED
    if not isinstance(failure, PipesgdError | Terminated):
        raise failure
    text = str(failure)
    text = text if text.startswith("rank ") else f"rank {rank}: {text}"
    _say("error: " + (text if ranks is None else ranks.diagnose(text)))
    if isinstance(failure, Terminated):
        return EXIT_TERMINATED
    return EXIT_BAD_INPUT if isinstance(failure, UserInputError) else EXIT_FAILED


def _say(line: str) -> None:
    print(line.replace("\n", " "), file=sys.stderr, flush=True)


def _raise_terminated(number: int, frame: object) -> NoReturn:
    raise Terminated("told to stop (SIGTERM): another rank has failed, or somebody has stopped the job")


if __name__ == "__main__":
    main()
