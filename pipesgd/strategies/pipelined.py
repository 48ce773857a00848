"""Pipe-SGD: the all-reduce of one iteration runs while the next ones compute."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesgd import launch
from pipesgd.agreement import Agreement, Comparison
from pipesgd.checks import check_above_zero, check_one_of
from pipesgd.clipping import Clipping
from pipesgd.codecs.options import CodecOptions
from pipesgd.collectives.make import Connections
from pipesgd.collectives.worker import CommunicationThread
from pipesgd.config import (
    ALL_REDUCES,
    DEFAULT_SEGMENT_BYTES,
    DEFAULT_TIMEOUT,
    ON_NONFINITE,
    check_connections,
    check_width,
)
from pipesgd.errors import CommunicationError, NonFiniteGradientError
from pipesgd.exchanges.make import make_exchange
from pipesgd.gradients import FlatBuffer, all_finite, are_finite, pack_gradients, take_mean
from pipesgd.hyperparameters import Hyperparameters
from pipesgd.loss_scale import LossScale
from pipesgd.prediction import Unapplied
from pipesgd.strategies.base import Span, StepReport
from pipesgd.strategies.late_updates import LateUpdates
from pipesgd.strategies.replication import (
    combine_buffers,
    share_rank_0s_values,
    sum_buffer,
    trainable_parameters,
)


@dataclass(frozen=True)
class _Reduction:
    """What the communication thread says of a mean."""

    finite: bool
    span: Span
    """When it was computed."""
    comparison: Comparison | None = None
    norm: float | None = None
    """The same on all ranks; None without a guard."""


@dataclass(frozen=True)
class _InFlight:
    """A gradient on its way: handed over in ``iteration``, to be applied with these options of the optimizer."""

    iteration: int
    buffer: FlatBuffer
    kept: Sequence[Tensor]
    """By the prediction."""
    hyperparameters: Hyperparameters
    scale: float
    """That its loss was multiplied by."""
    reduction: Future[_Reduction]


class Pipelined:
    """Pipe-SGD of width K (Li et al., NeurIPS 2018): staleness is exactly K-1, on every rank, always.

    ``w[t+1] = w[t] - Opt(mean over ranks of g[t-K+1])``, with no update for a negative index. Width 1 is
    decentralized synchronous SGD. Each ``step`` of iteration t is

    1. pack: the gradients move from ``.grad`` into a flat buffer of a pool of K;
    2. hand over: the communication thread sums the buffer over the ranks and takes the mean;
    3. wait: until the oldest of K gradients in flight, that of iteration t-K+1, has arrived;
    4. apply: it becomes ``.grad``, without a copy, and the optimizer steps, at the learning rate that
       was set when the gradient was computed. The buffer goes back to the pool;
    5. predict: the parameters get the weights that they are expected to have when all that is in flight is
       applied, for the next forward pass (``pipesgd.prediction``).

    Between steps the parameters hold predicted weights, therefore: evaluate, save, average and change weights in
    ``true_weights()``, or after ``flush()``.

    A gradient that is not finite is so on every rank, since all hold the same bytes: all stop or skip it
    in the same iteration. The optimizer, its state and a learning-rate scheduler stay the caller's.
    The constructor gives all ranks rank 0's parameters and buffers.

    Args:
        model: the module whose parameters ``optimizer`` updates, on one device.
        optimizer: any ``torch.optim.Optimizer``.
        width: iterations in flight, K.
        warmup_iterations: first iterations that run at width 1.
        prediction: what stands for the gradients in flight: "eager", or another of ``pipesgd.prediction``.
        guard: whether to fall back to width 1 for a while, on all ranks, when gradients blow up (``pipesgd.guard``).
        clip_norm: largest norm of the averaged gradient, to which it is scaled down when it is applied.
        clip_value: largest magnitude of a single value in it; applied before ``clip_norm``.
        scaler: of the losses, with float16; neither its ``step`` nor its ``update`` is to be called
            (``pipesgd.loss_scale``). An update whose gradients are not finite is left out then.
        codec: what travels: a name, or ``CodecOptions`` for more than its defaults. A ``momentum_correction`` takes
            the place of the optimizer's momentum, which must be 0 then.
        all_reduce: the algorithm, by its name on the command line; "native" is torch's own.
        on_nonfinite: "stop" raises ``NonFiniteGradientError``, "skip" leaves the update out.
        timeout: seconds that a rank waits for another one in any one message (ring) or all-reduce (native).
        segment_bytes: largest message; native cuts as torch does.
        streams: connections to each rank, on which messages take turns.
        seed: of the random numbers of stochastic rounding, and of those that powersgd begins with.
        ranks: the ranks to work with; by default those of torch's process group, which is started from
            torchrun's variables where there is none yet.

    Raises:
        UserInputError: a value out of range, or an optimizer without a parameter to train.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> pipeline = Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), width=2)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> pipeline.step().applied, pipeline.flush().applied
        ((), (0,))
        >>> pipeline.close()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        width: int = 2,
        warmup_iterations: int = 0,
        prediction: str = "eager",
        guard: bool = False,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        codec: str | CodecOptions = "fp32",
        all_reduce: str = "ring",
        on_nonfinite: str = "stop",
        timeout: float = DEFAULT_TIMEOUT,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        streams: int = 1,
        seed: int = 0,
        ranks: launch.Ranks | None = None,
    ):
        check_width(width, warmup_iterations)
        check_one_of("all_reduce", all_reduce, ALL_REDUCES)
        check_connections(all_reduce, segment_bytes, streams)
        options = CodecOptions(codec=codec) if isinstance(codec, str) else codec
        options.check_all_reduce(all_reduce)
        check_one_of("on_nonfinite", on_nonfinite, ON_NONFINITE)
        check_above_zero("timeout", timeout)
        self._parameters = trainable_parameters(optimizer)
        self._updates = LateUpdates(
            optimizer,
            self._parameters,
            width=width,
            warmup_iterations=warmup_iterations,
            prediction=prediction,
            guard=guard,
            clip=Clipping(norm=clip_norm, value=clip_value),
        )
        self._prediction, self._guard = self._updates.prediction, self._updates.guard
        device = self._parameters[0].device
        self.iteration = 0
        self.module = model
        self.replicated = True
        self._agreement = Agreement()
        self._loss_scale = LossScale(scaler, self._parameters)
        self._skip_nonfinite = on_nonfinite == "skip" or self._loss_scale.skips
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._pool: list[FlatBuffer] = []
        self.buffers_allocated = 0
        """Gradient copies made so far: at most ``width``."""
        self._ranks = ranks or launch.current(timeout)
        self._thread = CommunicationThread(device)
        connections = Connections(
            all_reduce,
            self._ranks,
            timeout=timeout,
            segment_bytes=segment_bytes,
            streams=streams,
            device=device.type,
        )
        self._exact = connections.all_reduce()
        self._exchange = make_exchange(options, connections, device=device.type, seed=seed)
        share_rank_0s_values(model, self._parameters, self._ranks.rank, self._sum_over_ranks)

    @property
    def width(self) -> int:
        """Iterations in flight, K."""
        return self._updates.width

    @property
    def warmup_iterations(self) -> int:
        """First iterations that run at width 1."""
        return self._updates.warmup_iterations

    def step(self) -> StepReport:
        """Take over the gradients in ``.grad`` and apply the one that is due: see the class.

        Raises:
            CommunicationError: a rank was lost, or silent for longer than the timeout.
            NonFiniteGradientError: the gradient that is due holds a NaN or an infinity.
        """
        begin = time.perf_counter()
        buffer = self._take_buffer()
        # 1. Pack.
        scale = self._loss_scale.divide(self._parameters)
        local = pack_gradients(self._parameters, buffer)
        pack = Span("pack", self.iteration, begin, time.perf_counter())
        # 2. Hand over.
        self._in_flight.append(self._hand_over(buffer, local, scale))
        self.iteration += 1
        # 3. to 5. Wait, apply and predict.
        report = self._apply_until(self._updates.width_after(self.iteration) - 1)
        wire_bytes = self._exchange.wire_bytes(buffer, pack.iteration)
        return dataclasses.replace(report, spans=(pack, *report.spans), wire_bytes=wire_bytes)

    def flush(self) -> StepReport:
        """Wait for and apply all gradients in flight. Further steps may follow: the pipeline fills again."""
        return self._apply_until(0)

    @contextlib.contextmanager
    def true_weights(self) -> Iterator[None]:
        """While it is open, the model holds the weights that all ranks agree on; what changes them then is kept."""
        predicted = self._prediction.holds_predicted
        self._prediction.restore()
        try:
            yield
        finally:
            # Unless a ``flush`` or a ``step`` in between has left other weights.
            if predicted and self._in_flight and not self._prediction.holds_predicted:
                self._prediction.return_to_predicted()

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Nothing leaves before ``step``: backward passes before it add up, as ever."""
        return contextlib.nullcontext()

    def combine_buffers(self, how: str = "average") -> None:
        """Give floating-point buffers their "average" over ranks or "rank-0"'s values, or leave "own". Collective."""
        combine_buffers(self.module, how, self._ranks.rank, self._ranks.world_size, self._sum_over_ranks)

    def state_dict(self) -> dict[str, Any]:
        """The gradients in flight, averaged, and what the codec owes: waits for them, applies none, and copies them."""
        in_flight = [
            {
                "iteration": gradient.iteration,
                "hyperparameters": list(gradient.hyperparameters),
                "finite": gradient.reduction.result().finite,
                "norm": gradient.reduction.result().norm,
                "comparison": list(gradient.reduction.result().comparison or ()),
                "flats": [flat.clone() for flat in gradient.buffer.flats],
                "scale": gradient.scale,
                "kept": [tensor.clone() for tensor in gradient.kept],
            }
            for gradient in self._in_flight
        ]
        # Only now the communication thread rests, and the exchange with it.
        return {
            "iteration": self.iteration,
            "in_flight": in_flight,
            "exchange": self._exchange.state_dict(),
            "prediction": self._prediction.state_dict(),
            "agreement": self._agreement.state_dict(),
            "loss_scale": self._loss_scale.state_dict(),
            "guard": None if self._guard is None else self._guard.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, of when the model's weights were the true ones; what is in flight is dropped."""
        self._prediction.adopt()
        while self._in_flight:
            dropped = self._in_flight.popleft()
            dropped.reduction.result()
            self._pool.append(dropped.buffer)
        self.iteration = state["iteration"]
        self._exchange.load_state_dict(state["exchange"])
        self._prediction.load_state_dict(state["prediction"])
        self._agreement.load_state_dict(state["agreement"])
        self._loss_scale.load_state_dict(state["loss_scale"])
        if self._guard is not None and state["guard"] is not None:
            self._guard.load_state_dict(state["guard"])
        for entry in state["in_flight"]:
            buffer = self._take_buffer()
            for flat, saved in zip(buffer.flats, entry["flats"], strict=True):
                flat.copy_(saved)
            now = time.perf_counter()
            span = Span("communication", entry["iteration"], now, now)
            arrived: Future[_Reduction] = Future()
            comparison = Comparison(*entry["comparison"]) if entry["comparison"] else None
            arrived.set_result(_Reduction(entry["finite"], span, comparison, entry["norm"]))
            options = entry["hyperparameters"]
            self._in_flight.append(
                _InFlight(entry["iteration"], buffer, entry["kept"], options, entry["scale"], arrived)
            )
        self._predict()

    def close(self) -> None:
        """End the communication thread, after what it is doing."""
        self._thread.close()

    def _take_buffer(self) -> FlatBuffer:
        if self._pool:
            return self._pool.pop()
        self.buffers_allocated += 1
        return FlatBuffer(self._parameters)

    def _hand_over(self, buffer: FlatBuffer, local: Sequence[Tensor | None], scale: float) -> _InFlight:
        iteration = self.iteration
        kept = self._prediction.keep(local)
        if self._skip_nonfinite and kept and not all_finite(buffer):
            kept = []  # no update will come of it

        def reduce() -> _Reduction:
            start = time.perf_counter()
            finite = True

            def finish(part: Tensor) -> None:
                nonlocal finite
                take_mean(part, self._ranks.world_size)
                finite = finite and are_finite([part])

            try:
                self._exchange.sum(buffer, iteration, finish)
                norm = None if self._guard is None else self._agreed_norm(buffer)
            except CommunicationError as failure:
                failure.iteration = iteration
                raise
            comparison = self._prediction.compare(buffer.views, kept)
            return _Reduction(finite, Span("communication", iteration, start, time.perf_counter()), comparison, norm)

        options = self._updates.hand_over()
        return _InFlight(iteration, buffer, kept, options, scale, self._thread.submit(reduce))

    def _apply_until(self, remaining: int) -> StepReport:
        """Apply the oldest gradients until only ``remaining`` are in flight, and predict from these."""
        applied: list[int] = []
        skipped: list[int] = []
        spans: list[Span] = []
        comparison = None
        fell_back = False
        self._prediction.restore()
        while len(self._in_flight) > remaining:
            gradient = self._in_flight.popleft()
            begin = time.perf_counter()
            reduction = gradient.reduction.result()
            arrived = time.perf_counter()
            comparison = reduction.comparison
            self._loss_scale.saw(reduction.finite, gradient.scale)
            if self._guard is not None and reduction.norm is not None:
                fell_back |= self._guard.saw(reduction.norm, self.iteration)
            if reduction.finite:
                self._prediction.learn(gradient.buffer.views, gradient.kept, comparison, self._agreement)
                self._updates.apply(gradient.buffer.views, gradient.kept, gradient.hyperparameters)
                applied.append(gradient.iteration)
            elif self._skip_nonfinite:
                skipped.append(gradient.iteration)
            else:
                raise NonFiniteGradientError(gradient.iteration)
            self._pool.append(gradient.buffer)
            spans += [
                reduction.span,
                Span("wait", gradient.iteration, begin, arrived),
                Span("update", gradient.iteration, arrived, time.perf_counter()),
            ]
        begin = time.perf_counter()
        self._predict()
        if self._prediction.holds_predicted:
            spans.append(Span("predict", self.iteration, begin, time.perf_counter()))
        return StepReport(
            applied=tuple(applied),
            skipped=tuple(skipped),
            spans=tuple(spans),
            comparison=comparison,
            fell_back=fell_back,
        )

    def _agreed_norm(self, buffer: FlatBuffer) -> float:
        """The mean's norm, to the last bit the same on all ranks, whatever processors they have. Collective."""
        norms = [torch.linalg.vector_norm(flat, dtype=torch.float64) for flat in buffer.flats]
        total = torch.stack(norms).square().sum().reshape(1)
        self._exact(total)
        return math.sqrt(total.item() / self._ranks.world_size)

    def _predict(self) -> None:
        in_flight = [Unapplied(gradient.kept, gradient.hyperparameters) for gradient in self._in_flight]
        self._prediction.predict(in_flight, self._agreement)

    def _sum_over_ranks(self, buffer: FlatBuffer) -> None:
        self._thread.submit(lambda: sum_buffer(buffer, self._exact)).result()
