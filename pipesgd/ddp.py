"""The method inside a program that trains with torch's DistributedDataParallel.

``attach`` brings all of Pipe-SGD: late gradients, their compression, and the prediction. ``compress`` is for programs
that refuse staleness: each bucket is summed in its own iteration, with a codec on the wire.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipesgd.checks import check_at_least, check_one_of, check_timeout
from pipesgd.codecs.base import mixed
from pipesgd.codecs.options import DENSE_CODECS, CodecOptions
from pipesgd.comm.connections import Connections
from pipesgd.comm.thread import CommunicationThread
from pipesgd.config import DEFAULT_TIMEOUT, ON_NONFINITE, check_messages
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.optim import hyperparameters
from pipesgd.optim.step import check_unchanged, set_aside_gradients, trainable_parameters
from pipesgd.pipeline.pipelined import InFlight, Pipelined
from pipesgd.pipeline.sameness import check_same_settings, plain
from pipesgd.pipeline.true_weights_hooks import unwrapped
from pipesgd.ranks import current
from pipesgd.reducers.base import mean_over_ranks
from pipesgd.reducers.dense import DenseReducer
from pipesgd.reducers.make import compiled_codec, dense_reducer
from pipesgd.strategy import Span, StepReport
from timing_model.schedules import ALL_REDUCES, SEGMENT_BYTES


def attach(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    width: int = 2,
    codec: str | CodecOptions = "fp32",
    scaler: torch.amp.GradScaler | None = None,
    on_nonfinite: str = "stop",
    **options: Any,
) -> AttachedPipeline:
    """Let the training loop of ``ddp_model`` and ``optimizer`` be Pipe-SGD of width K; the loop stays as it is.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp_model = DistributedDataParallel(nn.Linear(2, 1))
        >>> optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
        >>> pipeline = attach(ddp_model, optimizer, width=2, codec="int8")
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     ddp_model(torch.ones(4, 2)).sum().backward()
        ...     optimizer.step()
        >>> pipeline.close()  # applies the last gradient
        >>> dist.destroy_process_group()

    Args:
        ddp_model: a model in DistributedDataParallel without a communication hook.
        optimizer: the optimizer of all of its parameters that require a gradient.
        width: iterations in flight, K; 1 is synchronous.
        codec: encoding of gradients, by name or as ``CodecOptions``.
        scaler: the loop's GradScaler, if it has one: gradients arrive late, and must be at the scale of the present.
        on_nonfinite: "stop" raises ``NonFiniteGradientError`` from ``backward``, "skip" leaves the update out. With a
            ``scaler``, the loop's own GradScaler leaves it out.
        options: further arguments of ``pipesgd.Pipelined``, except ``guard``. ``clip_norm`` and ``clip_value`` say how
            the loop clips gradients, so that predictions and ``close`` clip them in the same way.

    Raises:
        UserInputError: the model has a communication hook, the optimizer does not hold all of its parameters, or a
            value is out of range.
        CommunicationError: a rank could not be reached.
    """
    return AttachedPipeline(
        ddp_model, optimizer, width=width, codec=codec, loop_scaler=scaler, on_nonfinite=on_nonfinite, **options
    )


def compress(
    ddp_model: DistributedDataParallel,
    codec: str | CodecOptions = "int8",
    *,
    all_reduce: str = "ring",
    timeout: float = DEFAULT_TIMEOUT,
    segment_bytes: int = SEGMENT_BYTES,
    connections: int = 1,
    seed: int = 0,
) -> CompressedBuckets:
    """Compress the gradients of ``ddp_model`` on the wire; the loop stays as it is, and synchronous.

    torch's buckets are summed during the backward pass, one after the other. Error feedback, where the codec has it,
    belongs to the parameters: it stays when torch splits its buckets again, as it does after a first iteration.

    Args:
        ddp_model: a model in DistributedDataParallel without a communication hook.
        codec: encoding of gradients, by name or as ``CodecOptions``: all but topk and powersgd.
        all_reduce: the algorithm, by its name on the command line.
        timeout: seconds that a rank waits for another one in any one message.
        segment_bytes: largest message in bytes.
        connections: connections to each rank, used in turn.
        seed: seed of the random numbers of stochastic rounding.

    Raises:
        UserInputError: the model has a communication hook, or a value is out of range.
        CommunicationError: a rank could not be reached.
    """
    return CompressedBuckets(
        ddp_model,
        CodecOptions.of(codec),
        all_reduce=all_reduce,
        timeout=timeout,
        segment_bytes=segment_bytes,
        connections=connections,
        seed=seed,
    )


class AttachedPipeline(Pipelined):
    """Pipe-SGD inside a DistributedDataParallel program. ``attach`` makes one.

    An iteration of the loop is taken apart like this:

    1. ``backward``: torch hands over its buckets, which are packed into a flat buffer. With the last bucket, the buffer
       goes to the communication thread, and the mean that is due, that of iteration t-K+1, is waited for. It becomes
       ``.grad``, where the loop clips or unscales it.
    2. ``optimizer.step``: before it, the parameters get the true weights, and the optimizer the options (learning rate,
       ...) with which the gradient was computed. While the pipeline fills, no gradient is due and nothing is updated.
       After it, the parameters get the predicted weights.
    3. A step that GradScaler leaves out changes nothing but the predicted weights.

    ``state_dict``, ``load_state_dict``, ``flush``, ``true_weights`` and ``close`` are those of ``Pipelined``; all but
    ``true_weights`` belong between ``optimizer.step`` and the next ``backward``.
    """

    report = StepReport()
    """Report of the last iteration."""

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        loop_scaler: torch.amp.GradScaler | None,
        on_nonfinite: str,
        **options: Any,
    ):
        for name in ("guard", "scaler"):
            if options.get(name):
                raise UserInputError(f"{name} must be left out: a loop with DistributedDataParallel has its own steps")
        check_one_of("on_nonfinite", on_nonfinite, ON_NONFINITE)
        check_model(ddp_model)
        check_all_held(ddp_model, optimizer)
        self._scaler = loop_scaler if loop_scaler is not None and loop_scaler.is_enabled() else None
        self._ddp_model = ddp_model
        self._due: StepReport | None = None
        """Report of the last backward pass, until the optimizer has stepped."""
        self._hyperparameters: hyperparameters.Hyperparameters = []
        self._buckets: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        """Parameters and gradients of the buckets of the present backward pass."""
        self._copies: dict[int, FlatBuffer] = {}
        """Copies of this rank's gradients in flight, by iteration."""
        self._free_copies: list[FlatBuffer] = []
        self._update = contextlib.ExitStack()
        """Contexts that the end of a step of the optimizer closes."""
        self._stepping_itself = False
        self._started = False
        super().__init__(
            ddp_model, optimizer, on_nonfinite="skip" if self._scaler is not None else on_nonfinite, **options
        )
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            ddp_model.register_forward_pre_hook(self._before_forward),
        ]
        try:
            ddp_model.register_comm_hook(self.take_bucket, _hook)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def step(self) -> StepReport:
        """Refuse: the loop's ``optimizer.step`` is the step."""
        raise UserInputError("an attached pipeline must be left to the loop: call optimizer.step() instead of step()")

    def flush(self) -> StepReport:
        """Wait for and apply all gradients in flight; see ``Pipelined.flush``."""
        self._settle("flush")
        self._stepping_itself = True
        try:
            return super().flush()
        finally:
            self._stepping_itself = False

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients in flight and the codec's state; see ``Pipelined.state_dict``."""
        self._settle("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; see ``Pipelined.load_state_dict``."""
        self._due = None
        self._copies.clear()
        super().load_state_dict(state)

    def close(self) -> None:
        """Apply the gradients in flight and end the communication. The model can be trained by DDP no more."""
        for handle in getattr(self, "_handles", ()):
            handle.remove()
        super().close()

    def _take_out(self, gradient: InFlight) -> None:
        super()._take_out(gradient)
        if (copied := self._copies.pop(gradient.iteration, None)) is not None:
            self._free_copies.append(copied)

    # ---- 1. backward

    def take_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take over a bucket of gradients; with the last, replace those of all buckets by the ones that are due."""
        try:
            self._check_usable()
            self._buckets.append((bucket.parameters(), bucket.gradients()))
            if bucket.is_last():
                buckets, self._buckets = self._buckets, []
                self._exchange(buckets)
        except BaseException as error:
            self._updates.weights.restore()
            self._error = error
            raise
        return _done(bucket.buffer())  # torch reads it after the last bucket's hook

    def _exchange(self, buckets: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
        check_unchanged(self._optimizer, self._identities, "an attached pipeline")
        iteration = self.iteration
        self._ranks.iteration = iteration
        begin = time.perf_counter()
        gradients = {self._places[id(p)]: g for bucket in buckets for p, g in zip(*bucket, strict=True)}
        with self._whole(f"taking over the gradients of iteration {iteration}"):
            buffer = self._free_buffer()
            buffer.fill_from([gradients[place] for place in range(len(self._parameters))])
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            if scale != 1.0:
                torch._foreach_div_(buffer.flats, scale)
            local = buffer.views
            if self._updates.keeps_gradients or self.width == 1:  # in a copy, since torch's buckets will hold the mean
                self._copies[iteration] = self._free_copies.pop() if self._free_copies else FlatBuffer(buffer.views)
                self._copies[iteration].fill_from(buffer.views)
                local = self._copies[iteration].views
            self._hand_over(buffer, local, 1.0)
        pack = Span("pack", iteration, begin, time.perf_counter())
        self._ranks.enter("all-reduce", waiting=True)
        wire_bytes = self._reducer.wire_bytes(buffer, iteration)
        self._due = StepReport(wire_bytes=wire_bytes, spans=(pack,))
        mean = None
        if len(self._in_flight) >= self._updates.width_after(self.iteration):
            gradient, report = self._wait_for_oldest()
            with self._whole(f"the update of iteration {gradient.iteration}"):
                if report.applied:
                    self._updates.learn(gradient.buffer.views, [self._guess_of(gradient)])
                self._hyperparameters = gradient.unapplied.hyperparameters
                mean = gradient.buffer if report.applied or self._scaler is not None else None
                self._take_out(gradient)
            self._due = dataclasses.replace(report, wire_bytes=wire_bytes, spans=(pack, *report.spans))
            self._check_finite(report)
        self._ranks.enter("compute")
        self._give(gradients, mean, scale)

    def _give(self, gradients: dict[int, Tensor], mean: FlatBuffer | None, scale: float) -> None:
        """Let torch's buckets hold ``mean`` at the loss scale of the present, or zeros."""
        views = list(gradients.values())
        if mean is None:
            torch._foreach_zero_(views)
            return
        torch._foreach_copy_(views, [mean.views[place] for place in gradients])
        if scale != 1.0:
            torch._foreach_mul_(views, scale)
        if self._ddp_model.find_unused_parameters:
            # torch leaves parameters alone that no rank has used in this iteration; the mean is of an earlier one.
            for place, view in gradients.items():
                self._parameters[place].grad = view if self._ddp_model.gradient_as_bucket_view else view.clone()

    # ---- 2. optimizer.step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._stepping_itself:
            return None
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            self._begin_update()
            return None

        def compute_first() -> Any:
            with torch.enable_grad():
                result = closure()
            self._begin_update()
            return result

        return (args[0], compute_first), {name: value for name, value in kwargs.items() if name != "closure"}

    def _begin_update(self) -> None:
        self._check_usable()
        if self._due is None:
            raise UserInputError("optimizer.step() must follow a backward pass; got a step without a new gradient")
        if not self._started:
            self._started = True
            if self._scaler is None and is_called_by_grad_scaler(sys._getframe()):
                raise UserInputError(
                    "scaler must be the loop's GradScaler, whose steps reach this optimizer: attach(..., scaler=scaler)"
                )
        self._half_done = f"the update of iteration {self.iteration - 1}"
        self._updates.weights.restore()
        if self._due.applied:
            self._update.enter_context(hyperparameters.set_to(self._optimizer, self._hyperparameters))
        else:  # nothing is due: torch's optimizers leave parameters without a gradient alone
            self._update.enter_context(set_aside_gradients(self._optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping_itself:
            return
        self._update.close()
        self._half_done = None
        self._finish_iteration()

    def _finish_iteration(self) -> None:
        assert self._due is not None
        self.report, self._due = self._due, None
        begin = time.perf_counter()
        self._updates.weights.restore()
        with set_aside_gradients(self._optimizer):
            self._predict()
        predict = Span("predict", self.iteration - 1, begin, time.perf_counter())
        self.report = dataclasses.replace(self.report, spans=(*self.report.spans, predict))

    # ---- 3. a step that is left out

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._due is None or not (unwrapped(module).training and torch.is_grad_enabled()):
            return
        if self._due.applied and any(p.grad is not None and bool(p.grad.any()) for p in self._parameters):
            raise UserInputError(
                "gradients must be accumulated in ddp_model.no_sync(), up to the last backward pass of an update; got "
                "another forward pass without optimizer.step() or zero_grad()"
            )
        self._finish_iteration()

    def _settle(self, call: str) -> None:
        if self._due is None:
            return
        if self._due.applied:
            raise UserInputError(f"{call} must not be called between backward() and optimizer.step()")
        self._finish_iteration()


class CompressedBuckets:
    """Sums of torch's buckets with a codec on the wire, during the backward pass. ``compress`` makes one.

    As a context manager it is closed at the end of the block.
    """

    report = StepReport()
    """Report of the last backward pass: its communication, how long the end of it waited, and the bytes sent."""

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        options: CodecOptions,
        *,
        all_reduce: str,
        timeout: float,
        segment_bytes: int,
        connections: int,
        seed: int,
    ):
        check_model(ddp_model)
        check_one_of("codec", options.codec, DENSE_CODECS)
        check_one_of("all_reduce", all_reduce, ALL_REDUCES)
        check_messages(all_reduce, segment_bytes, connections)
        options.check_all_reduce(all_reduce)
        check_timeout(timeout)
        check_at_least("seed", seed, 0)
        self.iteration = 0
        self._options = options
        self._parameters = [parameter for parameter in ddp_model.parameters() if parameter.requires_grad]
        self._seed = seed
        self._ranks = current(timeout)
        settings = {"all_reduce": all_reduce, "segment_bytes": segment_bytes, "connections": connections, "seed": seed}
        check_same_settings(self._ranks, settings | plain(options), {})
        device = self._parameters[0].device
        self._connections = Connections(
            all_reduce,
            self._ranks,
            timeout=timeout,
            segment_bytes=segment_bytes,
            connections=connections,
            device=device.type,
        )
        self._thread = CommunicationThread(device)
        self._stop_watching = self._ranks.watch(self._thread.fail)
        self._reducers: dict[int, tuple[list[int], DenseReducer]] = {}
        """Parameters of each bucket, by their ids, and its reducer."""
        self._residuals: dict[int, Tensor] = {}
        """Residuals of parameters, by their ids, that wait for a reducer."""
        self._sums: list[concurrent.futures.Future[Span]] = []
        self._wire_bytes = 0
        try:
            self._codec = compiled_codec(options, self._ranks, device.type)
            ddp_model.register_comm_hook(self.take_bucket, _hook)
        except BaseException:
            self._end()
            raise

    def take_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to replace a bucket's gradients by their mean; with the last bucket, wait for all of them."""
        self._thread.check()
        iteration, buffer = self.iteration, _Bucket(bucket)
        self._ranks.iteration = iteration
        reducer = self._reducer_of(bucket)
        self._wire_bytes += reducer.wire_bytes(buffer, iteration)

        def reduce() -> Span:
            begin = time.perf_counter()
            mean_over_ranks(reducer, buffer, iteration, self._ranks.world_size)
            return Span("communication", iteration, begin, time.perf_counter())

        self._sums.append(self._thread.submit(functools.partial(self._connections.run, "step", iteration, reduce)))
        if bucket.is_last():
            self._finish()
        return _done(bucket.buffer())  # torch reads it after the last bucket's hook

    def state_dict(self) -> dict[str, Any]:
        """Return the number of iterations and this rank's residuals, needed to continue after a restart.

        torch splits its buckets again after the first iteration of a resumed run: sums may differ in their last bits.
        """
        residuals = self._residuals | self._residuals_in_use()
        return {"iteration": self.iteration, "residuals": [residuals.get(id(p)) for p in self._parameters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of this rank, with the same model."""
        self.iteration = state["iteration"]
        self._reducers.clear()
        loaded = zip(self._parameters, state["residuals"], strict=True)
        self._residuals = {id(p): residual.to(p.device) for p, residual in loaded if residual is not None}

    def close(self) -> None:
        """End the communication, when all ranks have called it. The model can be trained by DDP no more."""
        try:
            if not self._thread.failed:
                with contextlib.suppress(UserInputError):  # closed before
                    self._thread.submit(self._connections.wait_for_all).result()
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def _end(self) -> None:
        self._stop_watching()
        self._thread.close(at_the_end=self._connections.close)

    def _finish(self) -> None:
        begin = time.perf_counter()
        sums, self._sums = self._sums, []
        self._ranks.enter("all-reduce", waiting=True)
        spans = [one.result() for one in sums]
        self._ranks.enter("compute")
        wait = Span("wait", self.iteration, begin, time.perf_counter())
        self.report = StepReport(applied=(self.iteration,), spans=(*spans, wait), wire_bytes=self._wire_bytes)
        self._wire_bytes = 0
        self.iteration += 1

    def _reducer_of(self, bucket: GradBucket) -> DenseReducer:
        index, parameters = bucket.index(), bucket.parameters()
        known, reducer = self._reducers.get(index, (None, None))
        if reducer is not None and known == [id(parameter) for parameter in parameters]:
            return reducer
        if reducer is not None:  # torch has split its buckets again
            self._residuals = self._residuals_in_use()
            self._reducers.clear()
        reducer = dense_reducer(self._options, self._codec, self._connections, seed=mixed(self._seed, index))
        waiting = [self._residuals.pop(id(parameter), None) for parameter in parameters]
        if any(residual is not None for residual in waiting):
            zeros = [torch.zeros(parameter.numel(), device=parameter.device) for parameter in parameters]
            own = [zero if residual is None else residual for zero, residual in zip(zeros, waiting, strict=True)]
            reducer.load_state_dict({"residuals": [torch.cat(own)]})
        self._reducers[index] = [id(parameter) for parameter in parameters], reducer
        return reducer

    def _residuals_in_use(self) -> dict[int, Tensor]:
        """Return copies of the residuals of all parameters that have one, by the parameters' ids."""
        concurrent.futures.wait(self._sums)
        found: dict[int, Tensor] = {}
        sizes = {id(parameter): parameter.numel() for parameter in self._parameters}
        for identities, reducer in self._reducers.values():
            for flat in reducer.state_dict()["residuals"]:
                parts = flat.split([sizes[identity] for identity in identities])
                found |= dict(zip(identities, parts, strict=True))
        return found


class _Bucket(FlatBuffer):
    """Gradients of a bucket of torch, in its own memory."""

    def __init__(self, bucket: GradBucket):
        self.flats = [bucket.buffer()]
        self.views = bucket.gradients()


def check_model(ddp_model: DistributedDataParallel) -> None:
    """Refuse what is not a DistributedDataParallel whose gradients can be taken over.

    Raises:
        UserInputError: it is another module, has a communication hook already, or reduces in mixed precision.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise UserInputError(f"ddp_model must be a DistributedDataParallel; got {type(ddp_model).__name__}")
    if ddp_model._comm_hooks:
        hook = ddp_model._comm_hooks[0][0]
        raise UserInputError(f"ddp_model must have no communication hook; got one with {hook.__qualname__}")
    if ddp_model.mixed_precision is not None:
        raise UserInputError("ddp_model must be made without mixed_precision=; use torch.autocast in the loop")


def check_all_held(ddp_model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that does not hold all parameters whose gradients torch reduces.

    Raises:
        UserInputError: it lacks some, or holds others.
    """
    held = {id(parameter) for parameter in trainable_parameters(optimizer)}
    trained = {
        id(parameter): name
        for name, parameter in ddp_model._get_data_parallel_params(ddp_model.module, named_params=True)
        if parameter.requires_grad
    }
    if missing := [name for key, name in trained.items() if key not in held]:
        raise UserInputError(
            "optimizer must hold all parameters of ddp_model that require a gradient; "
            f"got one without {missing[0]} ({len(missing)} of {len(trained)} are missing)"
        )
    if others := len(held - trained.keys()):
        raise UserInputError(f"optimizer must hold parameters of ddp_model alone; got {others} others")


def _hook(take: Callable[[GradBucket], Future[Tensor]], bucket: GradBucket) -> Future[Tensor]:
    return take(bucket)


def _done(buffer: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future(devices=[] if buffer.device.type == "cpu" else [buffer.device])
    future.set_result(buffer)
    return future


# torch compares a hook's annotations with these types, and those above are strings.
_hook.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}


def is_called_by_grad_scaler(frame: FrameType | None) -> bool:
    """Return True if an enabled GradScaler's method is among the callers of ``frame``, which nothing else tells."""
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            return caller.is_enabled()
        frame = frame.f_back
    return False
