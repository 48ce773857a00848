"""Parts of gradients that a run will gather: their bytes and the work with them, which the timing model asks for."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from pipesgd.baselines.local import Local
from pipesgd.comm.all_reduce import Finish, no_op
from pipesgd.config import TrainConfig
from pipesgd.data import ShardedBatches
from pipesgd.flat_buffer import FlatBuffer, make_dense, pack_gradients
from pipesgd.optim.loss_scale import LossScale
from pipesgd.pipeline.exchanges import Exchanges, Reduce
from pipesgd.ranks import Ranks
from pipesgd.reducers.base import Hooks
from pipesgd.reducers.make import GATHERING, gathering
from pipesgd.run.forward_backward import forward_backward
from timing_model.params import Parts

ROUNDS = 5
"""Number of sums whose median time counts, after one that does not."""


class FirstGradients:
    """Gradients of a run's first batch on this rank, computed on a copy of the model.

    Args:
        config: configuration of the training.
        model: model on a CPU; it stays as it is.
        batches: batches of this rank.
        reduce: exchange of gradients.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, batches: ShardedBatches, reduce: Reduce):
        model = copy.deepcopy(model)
        self.parameters: list[Tensor] = [one for one in model.parameters() if one.requires_grad]
        optimization = config.optimization
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=optimization.loss_scale, enabled=optimization.precision == "fp16"
        )
        self._loss_scale = LossScale(scaler, self.parameters)
        self.exchanges = Exchanges(model, reduce)
        self._hooks: dict[str, Hooks] = {}
        for kind in self.exchanges.gathered:
            weights = [one for one in self.parameters if self.exchanges.of(one) == kind]
            if (hooks := gathering(kind).hooks(model, weights, self._loss_scale)) is not None:
                self._hooks[kind] = hooks
        never_steps = Local(model, torch.optim.SGD(self.parameters, lr=0.0))
        with closing(batches.from_iteration(0)) as samples:
            forward_backward(never_steps, samples, config, scaler, 0)
        self.pieces = [self._pieces(one) for one in self.parameters]
        """Number of rows, or of rows of factors, of each parameter's gradient; 0 where it is exchanged whole."""

    def _pieces(self, parameter: Tensor) -> int:
        kind, gradient = self.exchanges.of(parameter), parameter.grad
        if gradient is None or kind == "matrix":
            return 0
        return gathering(kind).pieces(gradient, self._kept(kind, parameter))

    def _kept(self, kind: str, parameter: Tensor) -> Any:
        return self._hooks[kind].look(parameter) if kind in self._hooks else None

    def seconds(self, kind: str, numbers: list[int], ranks: Ranks) -> tuple[float, int]:
        """Return the time of a sum of these parameters' gradients without a network, and how often it gathers.

        Every rank takes its own parts for those of all: the bytes and the work are those of a run.
        """
        parameters = [self.parameters[number] for number in numbers]
        make_dense(parameters)
        self._loss_scale.divide(parameters)
        parts = [self._kept(kind, one) for one in parameters]
        gradients, buffer = FlatBuffer(parameters), FlatBuffer(parameters)
        pack_gradients(parameters, gradients)
        gather = _Own(ranks.rank, ranks.world_size)
        reducer = gathering(kind)(gather, rank=ranks.rank, world_size=ranks.world_size)
        times = []
        for _ in range(1 + ROUNDS):
            buffer.fill_from(gradients.views)
            gather.calls = 0
            reducer.parts = parts
            begin = time.perf_counter()
            reducer.sum(buffer, 0)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:]), gather.calls


class _Own:
    """An all-gather that gives this rank's part in place of those of all ranks, and counts its calls."""

    def __init__(self, rank: int, world_size: int):
        self._rank, self._world_size = rank, world_size
        self.calls = 0

    def __call__(self, flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = no_op) -> None:
        parts = flat.view(self._world_size, flat.numel() // self._world_size)
        parts.copy_(parts[self._rank].clone())
        self.calls += 1

    def wire_bytes(self, flat: Tensor) -> int:
        return flat.nbytes // self._world_size * (self._world_size - 1)


def parts_of_run(
    config: TrainConfig, ranks: Ranks, model: nn.Module, batches: ShardedBatches, reduce: Reduce
) -> tuple[Parts, ...]:
    """Return what the ranks will gather in place of whole gradients with this ``reduce``; the same on all ranks.

    All ranks call this together. They count in the gradients of the first batch. Then all time their sums at once,
    since ranks may share cores as they will in training. The state of random numbers is kept.

    Raises:
        UserInputError: the gradients cannot be exchanged like this, or the batch not be computed.
        CommunicationError: a rank was lost.
    """
    if reduce == "matrix":
        return ()
    with torch.random.fork_rng(devices=[]):
        own = ranks.raise_together(
            "gradients of the first batch", functools.partial(FirstGradients, config, model, batches, reduce)
        )
    of_ranks = ranks.all_gather_object("sizes of gradients", own.pieces)
    most = {
        number: max(counts)
        for number, counts in enumerate(zip(*of_ranks, strict=True))
        if own.exchanges.of(own.parameters[number]) != "matrix"
    }
    return tuple(
        _parts(own, kind, of_kind, ranks)
        for kind in GATHERING
        if (of_kind := {at: count for at, count in most.items() if own.exchanges.of(own.parameters[at]) == kind})
    )


def _parts(own: FirstGradients, kind: str, most: Mapping[int, int], ranks: Ranks) -> Parts:
    """Return the parts of the gradients with these numbers of pieces on the rank with the most. Collective."""
    timed = ranks.raise_together("sums of gradients", functools.partial(own.seconds, kind, list(most), ranks))
    seconds, messages = zip(*ranks.all_gather_object("seconds of the sums", timed), strict=True)
    nbytes = sum(gathering(kind).part_bytes(count, own.parameters[number]) for number, count in most.items())
    return Parts(tensors=tuple(most), nbytes=float(nbytes), messages=max(messages), work=max(seconds))
