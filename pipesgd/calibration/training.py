"""Short laps of training on all ranks, as the calibration takes them.

Timed alone, the model would be too fast: a processor that waited is slower for a while, one that sends and receives
while it computes is slower all the time, and ranks that share cores take turns. So the model is trained with its
all-reduces, in many short laps spread over the calibration, since the machine's speed drifts, too.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import nn

from pipesgd.calibration.options import TYPICAL_CODEC, UNCOMPRESSED
from pipesgd.config import TrainConfig
from pipesgd.data import ShardedBatches
from pipesgd.optim.build import build_optimizer
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.ranks import Ranks
from pipesgd.run.forward_backward import forward_backward
from pipesgd.sections import PredictionKind, Updates, Wire
from pipesgd.strategy import Span

SYNCHRONOUS, LATE = 1, 2
"""Widths that are trained. Any width above 1 adds to 2 only a prediction for each further gradient in flight."""
UNTIMED = 2
"""Iterations at the start of a lap, after those that fill the pipeline, that do not count: idle connections start
slowly, and the caches still hold earlier data."""
LEAST_ITERATIONS, MOST_ITERATIONS = 4, 100
"""Fewest iterations that count in a lap, and most iterations that a lap is planned with."""
LEAST_LAPS = 2
"""Fewest laps, whatever they take."""
SURELY_WAIT = 1.25
"""Multiple of the computation's time: if an all-reduce is estimated to take longer, ranks wait for it."""
FORWARD, BACKWARD, UPDATE, WAIT, COMMUNICATION, CPU, DATA, LOADING, LOCAL_UPDATE = range(9)
"""Indices of an iteration's seconds. The first four add up to the iteration; then come the all-reduce that ended in it,
the time for which this thread had a core in the passes, the part of the first in which the rank waited for its batch,
the time in which a process loaded that batch, and the part of the update that a local step has, too."""

Laps = list[list[list[float]]]
"""One rank's times: laps, iterations, seconds."""


class TrainingMode(NamedTuple):
    """One way of training a model to time it."""

    width: int
    all_reduce: str
    codec: str


Make = Callable[[int, nn.Module, torch.optim.Optimizer, torch.amp.GradScaler], Pipelined]
"""Function that makes a pipeline for a copy of the model."""


def least_iterations(modes: Iterable[TrainingMode]) -> int:
    """Return the fewest iterations of a training in these ways."""
    return LEAST_LAPS * sum(_least_of_lap(way.width) for way in modes)


def _least_of_lap(width: int) -> int:
    return _untimed(width) + LEAST_ITERATIONS


def _untimed(width: int) -> int:
    return width - 1 + UNTIMED


class Training:
    """A model that all ranks train in several ways. All ranks create it, and call it, together.

    As a context manager it ends the communication at the end of the block; after an error, it waits for no other rank.

    Args:
        config: configuration of the training.
        model: model on a CPU, of which each way trains a copy.
        batches: batches of this rank.
        prediction: how the weights are predicted from gradients in flight.
        modes: the ways to train.
        ranks: ranks that take part.
        make: function that makes the pipeline of a way, by its number, for a copy of the model, an optimizer and a
            scaler; by default pipelines have no options but those of ``modes`` and the prediction.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        batches: ShardedBatches,
        prediction: PredictionKind,
        modes: Sequence[TrainingMode],
        ranks: Ranks,
        make: Make | None = None,
    ):
        self._config = config
        self._batches = batches
        self._ranks = ranks
        self._scalers = [
            torch.amp.GradScaler(
                "cpu", init_scale=config.optimization.loss_scale, enabled=config.optimization.precision == "fp16"
            )
            for _ in modes
        ]
        self._strategies: list[Pipelined] = []
        # gloo has the sums that are timed, too; but their values are no secret, as gradients are.
        transport = "tls" if config.transport == "tls" else "gloo"
        for number, (way, scaler) in enumerate(zip(modes, self._scalers, strict=True)):
            own = copy.deepcopy(model).train()
            optimizer = build_optimizer(config.optimization, own)
            if make is not None:
                self._strategies.append(make(number, own, optimizer, scaler))
                continue
            self._strategies.append(
                Pipelined(
                    own,
                    optimizer,
                    width=way.width,
                    codec=way.codec,
                    wire=Wire(all_reduce=way.all_reduce, transport=transport),
                    updates=Updates(prediction=prediction),
                    scaler=scaler,
                    ranks=ranks,
                )
            )
        self._completed: dict[int, float] = {}
        """Time at which each parameter of the first way's model last had its gradient, by its number."""
        self._released: list[list[float]] = []
        """Shares of the backward pass after which those gradients were complete, of every timed iteration."""
        trained = [one for one in self._strategies[0].module.parameters() if one.requires_grad]
        for number, parameter in enumerate(trained):
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))
        self._gradients = len(trained)
        """Number of those parameters."""
        self._paces = [0.0] * len(self._strategies)
        """Seconds of an iteration in each way, as of the last lap."""
        self._due = 0.0
        """Seconds that may be trained and were not yet."""
        self.laps: list[Laps] = [[] for _ in self._strategies]
        """Timed laps of each way."""

    def pace(self) -> float:
        """Return about how long forward and backward passes take, in s, on the slowest rank. Collective."""
        *_, times = self._train(0, UNTIMED)
        paces: list[float] = self._ranks.all_gather_object("time of the passes", sum(times[: BACKWARD + 1]))
        return max(paces)

    def lap(self, seconds: float) -> bool:
        """Train in each way, for about this many seconds together, and keep the times; return True.

        If that is too short for the fewest iterations, the seconds are added to those of the next lap, once there are
        ``LEAST_LAPS`` laps; then return False.
        """
        self._ranks.all_gather_object("computation", None)  # all begin together
        self._due += seconds
        share = self._due / len(self._strategies)
        asked = [min(share / pace, MOST_ITERATIONS) if pace else 0.0 for pace in self._paces]
        agreed = np.min(self._ranks.all_gather_object("iterations of a lap", asked), axis=0)
        least = [_least_of_lap(strategy.width) for strategy in self._strategies]
        if len(self.laps[0]) >= LEAST_LAPS and any(agreed < least):
            return False
        self._due = 0.0
        for number, strategy in enumerate(self._strategies):
            begin = time.perf_counter()
            times = self._train(number, max(least[number], int(agreed[number])))
            self._paces[number] = (time.perf_counter() - begin) / len(times)
            self.laps[number].append(times[_untimed(strategy.width) :])
        return True

    def released(self) -> list[float]:
        """Return the share of the backward pass, of the last micro-batch, after which each parameter has its gradient:
        medians of the timed iterations of the first way, in the order of the model's parameters that are trained."""
        shares: list[float] = np.median(self._released, axis=0).tolist()
        return shares

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the pipeline was closed after an error")  # nobody misses this training
            for strategy in self._strategies:
                strategy.__exit__(kind, error, trace)

    def _note(self, number: int, parameter: nn.Parameter) -> None:
        self._completed[number] = time.perf_counter()

    def _shares(self, backward: Span) -> list[float]:
        """Return the share of the ``backward`` pass after which each gradient was complete; 1 for one that has none."""
        begin, seconds = backward.start, max(backward.seconds, sys.float_info.min)
        ends = (self._completed.get(number, backward.end) for number in range(self._gradients))
        return [min(1.0, max(0.0, (end - begin) / seconds)) for end in ends]

    def _train(self, way: int, iterations: int) -> list[list[float]]:
        strategy, scaler = self._strategies[way], self._scalers[way]
        times = []
        with contextlib.closing(self._batches.from_iteration(strategy.iteration)) as samples:
            for number in range(iterations):
                self._completed.clear()
                cpu, begin = time.thread_time(), time.perf_counter()
                _, spans = forward_backward(strategy, samples, self._config, scaler, number)
                computed, cpu = time.perf_counter(), time.thread_time() - cpu
                report = strategy.step()
                wait = report.seconds("wait")
                update = time.perf_counter() - computed - wait
                backward = sum(span.seconds for span in spans if span.what == "backward")
                forward = computed - begin - backward
                data = sum(span.seconds for span in spans if span.what == "data")
                communication = report.seconds("communication")
                # A local step hands nothing over. It looks for NaN in place of packing: both read a cold gradient.
                local_update = report.seconds("update") + report.seconds("pack")
                if way == 0 and number >= _untimed(strategy.width):
                    self._released.append(self._shares(spans[-1]))
                passes = [forward, backward, update, wait, communication, cpu, data]
                times.append([*passes, samples.last.seconds, local_update])
        strategy.flush()
        return times


def training_modes(all_reduces: Sequence[str], codecs: Sequence[str]) -> list[TrainingMode]:
    """Return the ways to train: synchronous with the first all-reduce, late with each, and late with the first one and
    a codec, if any is measured: next to that the computation is the limit more often.

    >>> [tuple(way) for way in training_modes(["ring", "native"], ["bf16", "int8"])]
    [(1, 'ring', 'fp32'), (2, 'ring', 'fp32'), (2, 'native', 'fp32'), (2, 'ring', 'int8')]
    """
    compressed = [TYPICAL_CODEC] if TYPICAL_CODEC in codecs else codecs[:1]
    return [
        TrainingMode(SYNCHRONOUS, all_reduces[0], UNCOMPRESSED),
        *(TrainingMode(LATE, name, UNCOMPRESSED) for name in all_reduces),
        *(TrainingMode(LATE, all_reduces[0], name) for name in compressed),
    ]


def brief_training_modes(
    all_reduce: str, bits: Mapping[str, float], t_comm: float, t_compute: float
) -> list[TrainingMode]:
    """Return ways to train where collectives take too long for ``training_modes``: synchronous and late with the codec
    that has the fewest bits, and late with that of the fewest bits for which ranks wait, if that is another one.

    Args:
        all_reduce: name of the all-reduce.
        bits: bits of a value with each codec, fp32 among them.
        t_comm: approximate time of an uncompressed all-reduce, in s.
        t_compute: approximate time of the computation, in s.

    >>> bits = {"fp32": 32.0, "bf16": 16.0, "int4": 4.0}
    >>> [tuple(way) for way in brief_training_modes("ring", bits, t_comm=0.2, t_compute=0.05)]
    [(1, 'ring', 'int4'), (2, 'ring', 'int4'), (2, 'ring', 'bf16')]
    >>> [tuple(way) for way in brief_training_modes("ring", bits, t_comm=0.2, t_compute=0.01)]
    [(1, 'ring', 'int4'), (2, 'ring', 'int4')]
    """
    fewest = min(bits, key=lambda name: bits[name])
    waited = [name for name in bits if t_comm * bits[name] / bits[UNCOMPRESSED] >= SURELY_WAIT * t_compute]
    late = {fewest: None, min(waited, key=lambda name: bits[name], default=fewest): None}
    return [TrainingMode(SYNCHRONOUS, all_reduce, fewest), *(TrainingMode(LATE, all_reduce, name) for name in late)]
