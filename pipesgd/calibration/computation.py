"""What the computation of a model takes: alone, and while a collective runs beside it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from pipesgd import launch
from pipesgd.calibration.fit import Floats, Range, mean_range, median_range
from pipesgd.collectives.base import AllReduce
from pipesgd.collectives.worker import CommunicationThread
from pipesgd.computation import forward_backward
from pipesgd.config import TrainConfig
from pipesgd.launch import Ranks
from pipesgd.optimization import build_optimizer
from pipesgd.strategies.base import Strategy
from pipesgd.strategies.local import Local
from pipesgd.strategies.pipelined import Pipelined
from pipesgd.workloads import ShardedBatches

LATE_WIDTH = 2
"""Of a late update: every width above 1 does the same, and a prediction for each gradient more in flight."""
WARM_UP, LEAST_ITERATIONS, MOST_ITERATIONS = 1, 3, 400
CONTENTION_BLOCKS = 3
"""Of computation alone and beside a collective, each, in turns."""
MOST_BESIDE_BYTES = 16 << 20
"""Of the collective that runs beside it: a longer one does the same for longer."""
SLOW_RANK, STRETCHES = 1.1, 4
"""Of the median rank: who takes longer in every one of so many stretches of time is always slow."""
INTERRUPTED = 3.0
"""Of the median: an iteration that takes longer was interrupted by something else on its core, and is left out."""
PARTS = ("forward", "backward", "update", "late_update")
CPU = "cpu"
"""Seconds of this thread in a synchronous iteration: while others have its core, no time passes."""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """What the ranks' iterations took, in s."""

    parts: dict[str, Range]
    """Of ``PARTS``: means over the iterations of the median rank."""
    cv: float
    """Standard deviation over mean of one rank's forward, backward and update; of the median rank."""
    slow_ranks: dict[int, float]
    """Of the ranks that are always slow: median iteration over the median rank's."""
    contention: Range


class Workload:
    """A model to be trained, and its batches."""

    def __init__(self, config: TrainConfig, model: nn.Module, batches: ShardedBatches, prediction: str):
        self.config = config
        self.model = model
        self._batches = batches
        self._prediction = prediction
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=config.optimization.loss_scale, enabled=config.optimization.precision == "fp16"
        )

    @property
    def gradient_bytes(self) -> int:
        return sum(4 * one.numel() for one in self.model.parameters() if one.requires_grad)

    def alone(self, seconds: float, advance: Callable[[float], None]) -> dict[str, list[float]]:
        """Of this rank, times of ``PARTS`` and ``CPU``, one an iteration, of ``Pipelined`` with one rank: nobody waits.

        Starts and ends a torch process group of this rank alone; there must be none yet.
        """
        solo = launch.alone()
        solo.start_process_group("cpu", self.config.run.timeout)
        times: dict[str, list[float]] = {name: [] for name in (*PARTS, CPU)}
        try:
            for width, update in ((1, "update"), (LATE_WIDTH, "late_update")):
                optimizer = self._optimizer()
                strategy = Pipelined(
                    self.model, optimizer, width=width, prediction=self._prediction, scaler=self._scaler, ranks=solo
                )
                with contextlib.closing(strategy):
                    for spans in self._iterations(strategy, seconds / 2):
                        times[update].append(spans["update"])
                        if width == 1:
                            times["forward"].append(spans["forward"])
                            times["backward"].append(spans["backward"])
                            times[CPU].append(spans[CPU])
                    strategy.flush()
                advance(width / LATE_WIDTH)
        finally:
            solo.leave()
        return times

    def contended(
        self, ranks: Ranks, ring: AllReduce, seconds: float, advance: Callable[[float], None]
    ) -> tuple[list[float], list[float]]:
        """Of this rank, times of iterations alone, and of those with a collective beside them. Collective."""
        thread = CommunicationThread(torch.device("cpu"))
        flat = torch.zeros(min(self.gradient_bytes, MOST_BESIDE_BYTES) // 4)
        times: tuple[list[float], list[float]] = ([], [])
        strategy = Local(self.model, self._optimizer(), scaler=self._scaler)
        with contextlib.closing(thread):
            for block in range(2 * CONTENTION_BLOCKS):
                beside = block % 2
                ranks.exchange("computation", None)  # all begin together
                computed = threading.Event()
                reducing = thread.submit(partial(_reduce_until, ring, flat, computed)) if beside else None
                for spans in self._iterations(strategy, seconds / 2 / CONTENTION_BLOCKS):
                    times[beside].append(sum(spans.values()) - spans[CPU])
                computed.set()
                if reducing is not None:
                    reducing.result()
                advance((block + 1) / (2 * CONTENTION_BLOCKS))
        return times

    def _optimizer(self) -> Optimizer:
        return build_optimizer(self.config.optimization, self.model)

    def _iterations(self, strategy: Strategy, seconds: float) -> Iterator[dict[str, float]]:
        """The times of iterations after the first ones, for so many seconds; what it waited is in none of them."""
        self.model.train()
        end, done = time.perf_counter() + seconds, 0
        with contextlib.closing(self._batches.from_iteration(strategy.iteration)) as samples:
            while done < WARM_UP + MOST_ITERATIONS:
                if done >= WARM_UP + LEAST_ITERATIONS and time.perf_counter() > end:
                    break
                cpu, begin = time.thread_time(), time.perf_counter()
                _, spans = forward_backward(strategy, samples, self.config, self._scaler, done)
                computed = time.perf_counter()
                report = strategy.step()
                update = time.perf_counter() - computed - report.seconds("wait")
                backward = sum(span.seconds for span in spans if span.what == "backward")
                done += 1
                if done > WARM_UP:
                    times = {"forward": computed - begin - backward, "backward": backward, "update": update}
                    yield times | {CPU: time.thread_time() - cpu}


def _reduce_until(ring: AllReduce, flat: Tensor, computed: threading.Event) -> None:
    """All-reduce, again and again, until all ranks have computed what they had to: they tell each other in the sum."""
    while True:
        flat[-1] = 0.0 if computed.is_set() else 1.0
        ring(flat)
        if flat[-1] == 0:
            return


def summarize(
    alone: Sequence[dict[str, list[float]]],
    contended: Sequence[tuple[list[float], list[float]]],
    *,
    shared_cores: bool = False,
) -> Computation:
    """From every rank's times; ``contended`` is empty where there is one rank, and nothing to run beside it.

    With ``shared_cores`` ranks are compared by their CPU time: which of them waits for a core longest is chance.
    """
    totals = [_totals(times) for times in alone]
    medians = [float(np.median(total)) for total in totals]
    middle = sorted(range(len(alone)), key=lambda rank: medians[rank])[(len(alone) - 1) // 2]
    kept = [_uninterrupted(total) for total in totals]
    return Computation(
        parts={name: mean_range(_uninterrupted(np.array(alone[middle][name]))) for name in PARTS},
        cv=float(np.median([np.std(total) / np.mean(total) for total in kept])),
        slow_ranks=_slow_ranks([np.array(times[CPU]) for times in alone] if shared_cores else totals),
        contention=_contention(contended),
    )


def _totals(times: dict[str, list[float]]) -> Floats:
    total: Floats = np.array(times["forward"]) + np.array(times["backward"]) + np.array(times["update"])
    return total


def _uninterrupted(times: Floats) -> Floats:
    return times[times <= INTERRUPTED * np.median(times)]


def _slow_ranks(totals: Sequence[Floats]) -> dict[int, float]:
    """The factors of those that are slow in every stretch of their iterations."""
    parts = [[float(np.median(one)) for one in np.array_split(total, STRETCHES) if len(one)] for total in totals]
    stretches = min(map(len, parts))
    medians = np.array([one[:stretches] for one in parts])  # (ranks, stretches)
    factors = medians / np.median(medians, axis=0)
    return {rank: float(np.median(own)) for rank, own in enumerate(factors) if np.all(own > SLOW_RANK)}


def _contention(contended: Sequence[tuple[Any, Any]]) -> Range:
    """By what share computation beside a collective is slower: of the median rank, at least 0."""
    if not contended:
        return Range(0.0, 0.0, 0.0)
    found = []
    for free, beside in contended:
        one, other = median_range(np.array(free)), median_range(np.array(beside))
        shares = other.value / one.value, other.low / one.high, other.high / one.low
        found.append([max(share - 1, 0.0) for share in shares])
    return Range(*(float(one) for one in np.median(found, axis=0)))
