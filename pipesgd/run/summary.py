"""Descriptions of a run: a line or two before it, and summary.json after it."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import pipesgd
from pipesgd.config import TrainConfig
from pipesgd.ranks import HOW_TO_START, Ranks
from pipesgd.run.loading_time import ExposedLoading
from pipesgd.run.metrics import SECONDS, History, statistics
from pipesgd.strategies import start_iterations


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results of a run."""

    numbers: list[int]
    """Numbers, in the job, of the ranks of which each list here tells."""
    iterations: int
    wall_seconds: float
    train_loss: float
    """Mean, over ranks and the last epoch's iterations, of the loss before each update, where that is finite."""
    train_losses_left_out: int
    """Number of these losses that are not finite, of all ranks."""
    test_accuracy: float | None
    """Accuracy of the last evaluation; None if the loss measures none."""
    test_loss: float
    iteration_seconds: list[float | None]
    """Median duration of each rank's iterations."""
    compute_seconds: list[float | None]
    """Median duration of the computation in each rank's iterations, without waiting for others."""
    exposed_loading: list[ExposedLoading | None]
    """Each rank's wait for its batches."""
    skipped_at_end: int
    """Number of updates left out after the last iteration, when those still in flight arrived."""
    nonfinite: list[int]
    """Number of updates that were left out while a rank's own gradient was not finite, of each rank."""
    weights_sha256: str
    """SHA-256 of rank 0's weights, in hexadecimal."""
    replicas_identical: bool


def network_line(addresses: Sequence[str]) -> str:
    """Tell the user at which ``addresses``, one a rank, the ranks make themselves reachable.

    >>> network_line(["10.0.0.1 (eth0)", "10.0.0.2 (eth0)"])
    'network: ranks at 10.0.0.1 (eth0), 10.0.0.2 (eth0)'
    """
    alike = len(set(addresses)) == 1
    return "network: " + (f"all ranks at {addresses[0]}" if alike else f"ranks at {', '.join(addresses)}")


def describe(config: TrainConfig, ranks: Ranks, model: nn.Module, *, total: int, start: int) -> str:
    """Describe in a line or two what is about to run."""
    size = sum(parameter.numel() for parameter in model.parameters())
    workers = config.workers(ranks.world_size)
    text = (
        f"{config.model.model} ({size:,} parameters) on {config.data.dataset}, {workers} "
        f"rank{'s' if workers > 1 else ''} x {config.samples()} samples, {config.describe()}"
        f"{config.compression.chosen().said_of(model.parameters())}"
    )
    if synchronous := start_iterations(config, total):
        text += f", the first {synchronous} of {total} iterations synchronous"
    if not ranks.by_torchrun:
        text += f"\nnot started by torchrun, so there is one rank; for four: {HOW_TO_START}"
    if config.run.resume or ranks.restart_count or start:
        text += "\n" + _where_it_resumes(start, total)
    return text


def _where_it_resumes(start: int, total: int) -> str:
    if start == 0:
        return "no checkpoint yet: starting from the beginning"
    if start == total:
        return f"all {total} iterations are done: evaluating, and writing the results again"
    return f"continuing after iteration {start} of {total}"


OF_THIS_ATTEMPT = ("iteration_seconds_of_ranks", "compute_seconds_of_ranks", "loading_share_of_ranks")
"""Fields of summary.json that each rank measures of iterations since it was started."""


def sum_of_finite(losses: Collection[float]) -> tuple[float, int, int]:
    """Return the sum of those ``losses`` that are finite, their number, and the number of the others.

    >>> sum_of_finite([1.0, math.inf, 2.0])
    (3.0, 2, 1)
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    return float(np.sum(finite)), len(finite), len(losses) - len(finite)


def measured_before(path: Path, ranks: int) -> dict[str, list[float | None]]:
    """Return the fields ``OF_THIS_ATTEMPT``, as far as the summary at ``path`` has them of this many ranks."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        found = {name: earlier[name] for name in OF_THIS_ATTEMPT}
        whole = all(
            len(values) == ranks and all(value is None or type(value) is float for value in values)
            for values in found.values()
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    return found if whole else {}


def versions() -> dict[str, str]:
    """Return the versions of the packages that train, by their names."""
    return {
        "pipesgd": pipesgd.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def summarize(config: TrainConfig, ranks: Ranks, result: Result, history: History) -> dict[str, Any]:
    """Return the content of summary.json; ``history`` is that of all iterations."""
    pipeline, windows = config.pipeline, config.windows
    pipelined = pipeline.strategy == "pipelined"
    is_late = pipelined and pipeline.width > 1 and not config.in_windows
    sent = history.known("wire_bytes")
    window = sent[-windows.local_steps * windows.fragments :]  # has one exchange of everything
    if config.wire.reduce != "matrix":  # rows differ in number; what is gathered is counted on arrival
        window = sent[pipeline.width - 1 :]
    prediction = str(config.updates.prediction)
    if config.in_windows:
        prediction = "none" if windows.outer == "elastic" else "own movement"
    return {
        "world_size": ranks.world_size,
        "network": ranks.addresses(),  # found before, so that this rank need not ask the others
        "workers": config.workers(ranks.world_size),
        "strategy": pipeline.strategy,
        "width": pipeline.width if pipelined else None,
        "codec": config.compression.codec if pipelined else None,
        "all_reduce": config.wire.all_reduce if pipelined else None,
        "prediction": prediction if pipelined and pipeline.width > 1 else "none",
        "late_iterations": int((history.known("width") > 1).sum()) if is_late else None,
        "synchronous_start": start_iterations(config, result.iterations) if pipelined else None,
        "local_steps": windows.local_steps if pipeline.strategy in ("pipelined", "easgd-async") else None,
        "iterations": result.iterations,
        "wall_seconds": result.wall_seconds,
        "seconds": {name: statistics(history.known(name)) for name in SECONDS},
        "iteration_seconds_of_ranks": result.iteration_seconds,
        "compute_seconds_of_ranks": result.compute_seconds,
        "loading_share_of_ranks": [None if one is None else one.share for one in result.exposed_loading],
        "wire_bytes_per_iteration": round(sum(map(int, window)) / len(window)) if len(window) else None,
        "skipped_updates": int(history.known("skipped").sum()) + result.skipped_at_end,
        "nonfinite_gradients_of_ranks": {
            rank: own for rank, own in zip(result.numbers, result.nonfinite, strict=True) if own
        },
        "final": {
            "train_loss": result.train_loss if math.isfinite(result.train_loss) else None,  # JSON has no NaN
            "train_losses_left_out": result.train_losses_left_out,
            "test_accuracy": result.test_accuracy,
            "test_loss": result.test_loss if math.isfinite(result.test_loss) else None,
        },
        "replicas_identical": result.replicas_identical,
        "weights_sha256": result.weights_sha256,
        "versions": versions(),
        "options": config.options(),
    }
