"""Exact simulation of ranks in one process, for results that do not depend on time.

All ranks' true weights are the same at all times, so one model and one optimizer serve them all; the ranks compute one
after the other, each on its own batch and predicted weights, with the trainer's own predictions, updates and sums.
``tests/experiments/test_simulation.py`` shows that weights and losses are those of real ranks, bit for bit.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from experiments.simulated_sums import SimulatedSums
from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.codecs.own import codec_options
from pipesgd.flat_buffer import BucketedBuffer, give_gradients, pack_gradients, take_mean
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.step import SynchronousUpdate, trainable_parameters
from pipesgd.pipeline.buckets import bucket_indices
from pipesgd.pipeline.local_steps import OwnMovement, outer_optimizer
from pipesgd.pipeline.prediction import Agreement, Unapplied
from pipesgd.pipeline.update import Guessed, Update
from pipesgd.pipeline.width import Width, make_width
from pipesgd.pipeline.window import Window
from pipesgd.sections import PredictionKind, Updates
from pipesgd.systems.windows.elastic import ElasticAveraging

T = TypeVar("T")


@dataclass(frozen=True)
class _InFlight:
    mean: BucketedBuffer
    unapplied: list[Unapplied]
    """Gradients not yet applied, by rank."""


class _Exchange:
    """Exchange of the gradients of parameters, and their updates.

    Args:
        optimizer: the optimizer that updates them.
        parameters: the parameters, all of one dtype.
        fragments: numbers of the parameters of each part of them; the parts are exchanged in turns.
        world_size: number of ranks.
        codec: encoding of gradients.
        seed: seed of the codec's random numbers.
        width: iterations in flight.
        updates: how gradients are applied and predicted.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        fragments: Sequence[Sequence[int]],
        world_size: int,
        codec: CodecOptions,
        seed: int,
        width: Width,
        updates: Updates,
    ):
        self.parameters = parameters
        self.fragments = fragments
        self.turn = 0
        """Number of the fragment that is exchanged next."""
        self._world_size = world_size
        # Shared by all ranks. Each rank's own state, how well it agrees and what it missed, is in its Agreement.
        self.update = Update(optimizer, parameters, width, updates)
        self._agreements = [Agreement() for _ in range(world_size)]
        self._in_flight: deque[_InFlight] = deque()
        self._outgoing: list[Unapplied] = []
        self._buffers = [BucketedBuffer(parameters, fragments) for _ in range(world_size)]
        assert len(self._buffers[0].flats) == len(fragments)
        self._sums = SimulatedSums(codec, world_size, seed=seed)

    def predict(self, rank: int) -> None:
        """Let the parameters hold the weights that this rank expects."""
        self.update.predict([gradient.unapplied[rank] for gradient in self._in_flight], self._agreements[rank])

    def hand_over(self, rank: int) -> None:
        """Take this rank's gradients out of ``.grad``."""
        self._outgoing.append(self.update.keep(pack_gradients(self.parameters, self._buffers[rank])))

    def sum(self, iteration: int) -> None:
        """Take the mean of what all ranks have handed over in ``iteration`` of the fragment whose turn it is."""
        self._sums.sum([buffer.buckets[self.turn] for buffer in self._buffers], iteration)
        mean = self._buffers[-1]
        take_mean(mean.flats[self.turn], self._world_size)
        self._buffers[-1] = BucketedBuffer(self.parameters, self.fragments)
        self.turn = (self.turn + 1) % len(self.fragments)
        self._in_flight.append(_InFlight(mean, self._outgoing))
        self._outgoing = []

    def apply_until(self, remaining: int, iteration: int) -> None:
        """Apply the oldest means until only ``remaining`` are in flight."""
        while len(self._in_flight) > remaining:
            gradient = self._in_flight.popleft()
            mean, norm = gradient.mean.views, None
            if self.update.width.wants_norms:  # windows have no guard, and gradients no fragments
                norm = torch.linalg.vector_norm(gradient.mean.flats[0], dtype=torch.float64).item()
            guessed = [
                Guessed(unapplied, self.update.compare(mean, unapplied), agreement)
                for unapplied, agreement in zip(gradient.unapplied, self._agreements, strict=True)
            ]
            self.update.apply(mean, guessed, norm=norm, iteration=iteration)


class SimulatedRanks:
    """Simulation in one process of ``Pipelined`` on ``world_size`` ranks with a ring.

    Args:
        model: the module whose parameters ``optimizer`` updates, all of one dtype.
        optimizer: any ``torch.optim.Optimizer``.
        world_size: number of ranks.
        width, synchronous_start, prediction, guard, clip_norm, clip_value, seed: as in ``Pipelined``.
        codec: encoding of gradients, as in ``Pipelined``, but not topk.
        fragments: parts of the parameters, about equal in size, of which an iteration exchanges one, in turns. No other
            parameter may have a gradient then.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        world_size: int,
        width: int = 2,
        synchronous_start: int | Literal["auto"] = "auto",
        prediction: PredictionKind = "eager",
        guard: bool = False,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        codec: str | CodecOptions | OwnCodec = "fp32",
        seed: int = 0,
        fragments: int = 1,
    ):
        self.iteration = 0
        self._model = model
        self._optimizer = optimizer
        self._world_size = world_size
        parameters = trainable_parameters(optimizer)
        self._gradients = _Exchange(
            optimizer,
            parameters,
            bucket_indices(model, parameters, str(fragments)),
            world_size,
            codec_options(codec),
            seed,
            make_width(width, synchronous_start, guard=guard),
            Updates(prediction=prediction, clip_norm=clip_norm, clip_value=clip_value),
        )
        self._buffers = [[buffer.clone() for buffer in model.buffers()] for _ in range(world_size)]

    def iterate(self, loss_of: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any]) -> list[float]:
        """Run one iteration on ``batches``, one a rank, and return their losses."""

        def compute(rank: int) -> float:
            loss = loss_of(self._model, batches[rank])
            loss.backward()
            return loss.item()

        return self._exchange(compute, iterations=1)

    def _exchange(self, compute: Callable[[int], T], *, iterations: int) -> list[T]:
        """Exchange what ``compute`` leaves in ``.grad`` for each rank, after this number of iterations.

        Return what it returned, by rank.
        """
        results: list[T] = []
        for rank in range(self._world_size):
            self._gradients.predict(rank)
            self._take_buffers(self._buffers[rank])
            results.append(compute(rank))
            self._keep_buffers(self._buffers[rank])
            self._gradients.hand_over(rank)
            self._gradients.update.weights.restore()
        self.iteration += iterations
        self._gradients.sum(self.iteration - 1)
        width = self._gradients.update.width.of(self.iteration - 1, self._optimizer.param_groups)
        self._gradients.apply_until(width - 1, self.iteration)
        return results

    def flush(self) -> None:
        """Apply the gradients in flight, and replace the model's floating-point buffers by their means over ranks."""
        self._gradients.apply_until(0, self.iteration)
        means = [
            torch.stack(of_ranks).sum(0) / self._world_size if of_ranks[0].is_floating_point() else of_ranks[0]
            for of_ranks in zip(*self._buffers, strict=True)
        ]
        self._take_buffers(means)

    def _take_buffers(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            buffer.copy_(value)

    def _keep_buffers(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            value.copy_(buffer)


class SimulatedLocalSteps(SimulatedRanks):
    """Simulation in one process of ``LocalSteps`` on as many ranks as there are ``optimizers``.

    Args:
        model: the module whose parameters all ``optimizers`` update, all of one dtype.
        optimizers: the own optimizer of each rank.
        outer, outer_lr, outer_momentum, moving_rate, width, clip_norm, clip_value: as in ``LocalSteps``.
        options: other arguments of ``SimulatedRanks``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        outer: str = "average",
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        moving_rate: float | None = None,
        width: int = 2,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        **options: Any,
    ):
        parameters, ranks = trainable_parameters(optimizers[0]), len(optimizers)
        elastic = ElasticAveraging(moving_rate, ranks) if outer == "elastic" else None
        lr = outer_lr if elastic is None else elastic.lr
        super().__init__(
            model,
            outer_optimizer(parameters, outer, lr, outer_momentum, width=width),
            world_size=ranks,
            width=width,
            synchronous_start=0,
            prediction=OwnMovement if elastic is None else elastic.prediction,
            **options,
        )
        clip = Clipping(norm=clip_norm, value=clip_value)
        self._inner = [
            SynchronousUpdate(optimizer, clip=clip, scaler=None, on_nonfinite="stop") for optimizer in optimizers
        ]
        window = Window if elastic is None else elastic.window
        self._windows = [window(parameters, self._gradients.update.weights) for _ in optimizers]

    def run_window(
        self,
        loss_of: Callable[[nn.Module, Any], Tensor],
        batches: Sequence[Sequence[Any]],
        before: Callable[[int, int], None] = lambda rank, iteration: None,
    ) -> list[list[float]]:
        """Run a window on ``batches``, by iteration and rank; return the losses likewise. Only the last may be shorter.

        ``before`` is called with rank and iteration before each update, to set the learning rate.
        """

        def compute(rank: int) -> list[float]:
            losses, window = [], self._windows[rank]
            window.begin()
            for iteration, of_ranks in enumerate(batches, self.iteration):
                loss = loss_of(self._model, of_ranks[rank])
                loss.backward()
                losses.append(loss.item())
                before(rank, iteration)
                window.step(functools.partial(self._inner[rank].apply, iteration))
            give_gradients(window.parameters, window.end(self._exchanged))
            return losses

        return [list(of_ranks) for of_ranks in zip(*self._exchange(compute, iterations=len(batches)), strict=True)]

    def flush(self) -> None:
        """Exchange what has moved since the turn of its fragment, and do what ``SimulatedRanks.flush`` does."""

        def compute(rank: int) -> None:
            window = self._windows[rank]
            window.begin()
            give_gradients(window.parameters, window.end(self._exchanged))

        while self._windows[0].unexchanged:
            self._exchange(compute, iterations=0)
        super().flush()

    @property
    def _exchanged(self) -> Sequence[int]:
        """Numbers of the parameters that are exchanged next."""
        return self._gradients.fragments[self._gradients.turn]
