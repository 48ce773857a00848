"""torch's own DistributedDataParallel, with the same deadlines, errors and measurements as the other strategies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pipesgd.checks import check_one_of, check_timeout
from pipesgd.comm.connections import make_all_reduce
from pipesgd.comm.native import check_ddp_on_gloo, ring_wire_bytes
from pipesgd.comm.thread import CommunicationThread
from pipesgd.comm.transport import communication_group
from pipesgd.errors import CommunicationError, DeadlineExceeded, UserInputError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.step import SynchronousUpdate
from pipesgd.pipeline_config import DDP_HOOKS, Buffers
from pipesgd.ranks import Ranks, lost
from pipesgd.replicas import combine_buffers, sum_buffer
from pipesgd.sections import DEFAULT_TIMEOUT
from pipesgd.strategy import Span, StepReport, Strategy

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

OPERATION = "all-reduce by DistributedDataParallel"
"""Name of the operation in errors."""


class Ddp(Strategy):
    """Synchronous SGD in which torch all-reduces buckets of gradients during the backward pass.

    torch runs the hook named by ``hook`` for every bucket; our hook only wraps it, to learn when it began and
    ended. ``step`` raises any failure, or a bucket's delay of more than ``timeout`` seconds after the last bucket was
    handed over, before anything is applied. torch itself would wait for ever.

    torch cuts its buckets once more after the first iteration, in the order in which gradients got ready in it, and
    where a value is in its bucket decides in which order the ranks' values are added. So the state has that order, and
    a resumed run begins with the buckets of the uninterrupted one.

    Args:
        model: the module whose parameters ``optimizer`` updates.
        optimizer: any ``torch.optim.Optimizer``.
        hook: "none", or torch's communication hook "fp16" or "bf16".
        clip: clipping of the averaged gradients.
        scaler: loss scaler for float16 (``pipesgd.optim.loss_scale``).
        on_nonfinite: "stop" raises ``NonFiniteGradientError``, "skip" leaves the update out.
        timeout: seconds that a rank waits for the others' part of a bucket.
        ranks: the ranks to work with; torch's process group must exist.

    Raises:
        UserInputError: a value out of range, or a hook that torch refuses on this machine.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        ranks: Ranks,
        hook: str = "none",
        clip: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: str = "stop",
        timeout: float = DEFAULT_TIMEOUT,
    ):
        check_timeout(timeout)
        check_hook(hook)
        self.iteration = 0
        self.replicated = True
        self._model = model
        self._update = SynchronousUpdate(optimizer, clip=clip, scaler=scaler, on_nonfinite=on_nonfinite, averaged=True)
        self._ranks = ranks
        self._timeout = timeout
        self._all_reduce = make_all_reduce("native", ranks, timeout=timeout)
        group = communication_group(ranks, timeout, backend=None)
        device = self._update.parameters[0].device
        backend = group if ranks.numbers else group._get_backend(device)
        if backend.name() == "gloo":
            check_ddp_on_gloo(device.type)
        self._element_size = {"fp16": 2, "bf16": 2}.get(hook)
        try:
            module = _Module(model, process_group=group)  # gives all ranks rank 0's values
        except RuntimeError as failure:
            raise lost(failure, ranks.rank, None, "start of DistributedDataParallel", timeout) from failure
        module.name_failure = self._name_failure
        self._buckets = _Buckets(ranks, timeout, self._wire_bytes)
        module.register_comm_hook(group, self._buckets.around(_hook_named(hook)))
        self.module: nn.Module = module
        self._ddp = module
        self._ready_order: list[int] | None = None  # None before the first iteration
        self._thread = CommunicationThread(device)
        self._buckets.watch_by(self._thread)

    def step(self) -> StepReport:
        """Apply the gradients, which torch has averaged during the backward pass.

        Raises:
            CommunicationError: a rank was lost, or silent for longer than the timeout, or torch's hook failed.
            NonFiniteGradientError: an averaged gradient holds a NaN or an infinity.
        """
        self._update.check_parameters("ddp")
        iteration = self.iteration
        spans, wire_bytes = self._buckets.take(iteration)
        if self._ready_order is None:
            self._ready_order = self._ddp.ready_order()
        self.iteration += 1
        report = self._update.apply(iteration)
        return dataclasses.replace(report, spans=(*spans, *report.spans), wire_bytes=wire_bytes)

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Let torch add gradients up and send nothing while the context is open."""
        return self._ddp.no_sync()

    def combine_buffers(self, how: Buffers) -> None:
        """Set floating-point buffers to their average over ranks or to rank 0's values, or leave them. Collective."""
        combine_buffers(self._model, how, self._ranks, self._sum_over_ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration, the loss scale, and the order in which torch has sorted gradients into its buckets."""
        return {
            "iteration": self.iteration,
            "loss_scale": self._update.loss_scale.state_dict(),
            "ready_order": self._ready_order,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, before the first iteration: torch sorts gradients into its buckets only once.

        Raises:
            ValueError: the state is one of a model with other parameters.
        """
        order = state["ready_order"]
        if self._ready_order is None and order is not None:
            with self._buckets.staying():
                self._ddp.rehearse(order)
            self._ready_order = order
        self.iteration = state["iteration"]
        self._update.loss_scale.load_state_dict(state["loss_scale"])

    def close(self) -> None:
        """End the thread that watches the deadline."""
        self._buckets.end_watch()
        self._thread.close()

    def _name_failure(self, failure: RuntimeError) -> CommunicationError:
        named = lost(failure, self._ranks.rank, None, "forward pass of DistributedDataParallel", self._timeout)
        named.iteration = self.iteration
        return named

    def _sum_over_ranks(self, buffer: FlatBuffer) -> None:
        sum_buffer(buffer, self._all_reduce)

    def _wire_bytes(self, bucket: GradBucket) -> int:
        """Return the bytes that this rank sends for this bucket if its all-reduce is a ring."""
        buffer = bucket.buffer()
        element_size = self._element_size or buffer.element_size()
        return ring_wire_bytes(self._ranks.rank, self._ranks.world_size, buffer.numel(), element_size)


class _Module(DistributedDataParallel):
    """torch's module, which also communicates in forward passes: buffers, and in the second one its bucket layout."""

    name_failure: Callable[[RuntimeError], CommunicationError]

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as failure:
            raise self.name_failure(failure) from failure

    def ready_order(self) -> list[int] | None:
        """Return the parameters' numbers in the order in which they last got gradients; None if they never got any."""
        nanoseconds = self.reducer.get_backward_stats()
        return sorted(range(len(nanoseconds)), key=nanoseconds.__getitem__) if all(nanoseconds) else None

    def rehearse(self, order: list[int]) -> None:
        """Have torch observe that gradients get ready in ``order``, by which the next forward pass cuts the buckets.

        Only a backward pass can tell torch so, but it may be one without the model: no hook of a parameter runs, and
        the zeros that the parameters get as gradients are dropped.
        """
        parameters, are_sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if sorted(order) != list(range(len(parameters))):
            raise ValueError(f"ready_order must be an order of {len(parameters)} parameters; got {len(order)} numbers")
        for parameter, is_sparse in zip(parameters, are_sparse, strict=True):
            if is_sparse:  # torch makes up only dense gradients
                parameter.grad = torch.zeros_like(parameter, layout=torch.sparse_coo)

        def all_ready(gradient: Tensor) -> None:
            for number in order:
                self.reducer._autograd_hook(number)  # type: ignore[attr-defined]

        seed = torch.zeros((), requires_grad=True)
        seed.register_hook(all_ready)
        self.reducer.prepare_for_backward([])
        seed.backward()
        self.zero_grad()


class _Buckets:
    """The buckets of one iteration in flight, with the times when they began and ended, and any failure.

    torch gets futures of ours, which resolve to the hook's result, or, after a failure or the deadline, to the local
    gradient. So the backward pass returns, and ``take`` raises the failure.
    """

    def __init__(self, ranks: Ranks, timeout: float, wire_bytes_of: Callable[[GradBucket], int]):
        self._ranks = ranks
        self._timeout = timeout
        self._wire_bytes_of = wire_bytes_of
        self._changed = threading.Condition()
        self._pending: dict[int, tuple[torch.futures.Future[Tensor], Tensor]] = {}
        self._failure: BaseException | None = None
        self._watching = True
        self._staying = False
        self._handed_over = 0.0
        self._periods: list[list[float]] = []  # begin and end of times in which buckets were in flight
        self._wire_bytes = 0

    def around(self, hook: Hook) -> Hook:
        """Return ``hook``, observed. It keeps its name, by which torch decides whether to accept it."""

        @functools.wraps(hook)
        def observed(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            index, buffer = bucket.index(), bucket.buffer()
            # With its device, the future has torch's streams wait for the hook's; without one, for nothing on a GPU.
            result: torch.futures.Future[Tensor] = torch.futures.Future(
                devices=[buffer.device] if buffer.is_cuda else None
            )
            if self._staying:
                result.set_result(buffer)
                return result
            with self._changed:
                self._handed_over = time.perf_counter()
                if not self._pending:
                    self._periods.append([self._handed_over, self._handed_over])
                self._pending[index] = (result, buffer)
                failed = self._failure is not None
                self._changed.notify_all()
            if failed:  # the ranks no longer agree on the messages to send
                self._finish(index, None)
                return result
            try:
                future = hook(state, bucket)
                self._wire_bytes += self._wire_bytes_of(bucket)
                future.then(functools.partial(self._arrived, index))
            except BaseException as failure:  # noqa: BLE001 (raised by take)
                self._fail(failure)
            return result

        return observed

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """Send no bucket while the context is open: each keeps this rank's values."""
        self._staying = True
        try:
            yield
        finally:
            self._staying = False

    def watch_by(self, thread: CommunicationThread) -> None:
        """Have ``thread`` end the wait for buckets that do not arrive within the deadline."""
        thread.submit(self._watch)

    def end_watch(self) -> None:
        with self._changed:
            self._watching = False
            self._changed.notify_all()

    def take(self, iteration: int) -> tuple[list[Span], int]:
        """Return the spans "communication" and "wait" of the last backward pass, and the bytes sent in it.

        Between two spans of communication, no bucket was in flight.
        """
        with self._changed:
            if self._failure is not None:
                self._raise(self._failure, iteration)
            spans = [Span("communication", iteration, begin, end) for begin, end in self._periods]
            # Once the last bucket is handed over, nothing is left to compute: the rest of the backward pass is waiting.
            arrived = self._periods[-1][1] if self._periods else self._handed_over
            spans.append(Span("wait", iteration, self._handed_over, arrived))
            sent = self._wire_bytes
            self._handed_over, self._periods, self._wire_bytes = 0.0, [], 0
        return spans, sent

    def _arrived(self, index: int, future: torch.futures.Future[Tensor]) -> None:
        try:
            value = future.value()
        except BaseException as failure:  # noqa: BLE001 (raised by take)
            self._fail(failure)
        else:
            self._finish(index, value)

    def _finish(self, index: int, value: Tensor | None) -> None:
        with self._changed:
            pending = self._pending.pop(index, None)
            if pending is not None and self._periods:  # else a backward pass has ended without it
                self._periods[-1][1] = time.perf_counter()
            self._changed.notify_all()
        if pending is not None:
            result, buffer = pending
            result.set_result(buffer if value is None else value)

    def _fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or failure
            indices = list(self._pending)
        for index in indices:
            self._finish(index, None)

    def _watch(self) -> None:
        while self._watching:
            with self._changed:
                left = self._handed_over + self._timeout - time.perf_counter() if self._pending else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
            reason = f"no answer within {self._timeout:g} s"
            self._fail(DeadlineExceeded(rank=self._ranks.rank, peer=None, operation=OPERATION, reason=reason))

    def _raise(self, failure: BaseException, iteration: int) -> NoReturn:
        if not isinstance(failure, CommunicationError) and isinstance(failure, RuntimeError):
            failure = lost(failure, self._ranks.rank, None, OPERATION, self._timeout)
        if isinstance(failure, CommunicationError):
            failure.iteration = iteration
        raise failure


def check_hook(name: str) -> None:
    """Ask torch whether it accepts the communication hook ``name`` on this machine.

    Raises:
        UserInputError: torch does not accept it, or there is none of this name.
    """
    check_one_of("ddp-hook", name, DDP_HOOKS)

    def refuse(kind: type[Exception], text: str) -> NoReturn:
        raise UserInputError(f"ddp-hook must be one that torch accepts here; got {name}: {text}")

    # DistributedDataParallel makes this check when the hook is registered, which is too late for an input error.
    nobody: Any = types.SimpleNamespace(_log_and_throw=refuse)
    DistributedDataParallel._check_comm_hook(nobody, _hook_named(name))


def _hook_named(name: str) -> Hook:
    hooks: dict[str, Hook] = {
        "none": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    return hooks[name]
