"""Pipe-SGD inside a program that trains with DistributedDataParallel: late gradients and the prediction."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.codecs.own import codec_options
from pipesgd.comm.transport import Group
from pipesgd.ddp.hook import (
    LoopHooks,
    Places,
    before_update,
    check_all_held,
    check_dense_embeddings,
    check_model,
    check_no_scaler,
    done,
    frozen_since,
    gradients_of,
    step_without_gradient,
)
from pipesgd.ddp.local_steps import AttachedLocalSteps
from pipesgd.ddp.proof import Proof
from pipesgd.errors import UserInputError, warn
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.membership.secret import job_secret
from pipesgd.optim import hyperparameters
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.optimizer_copy import without_effect
from pipesgd.optim.step import check_unchanged, set_aside_gradients
from pipesgd.pipeline.cut import Cut
from pipesgd.pipeline.exchanges import Exchanges
from pipesgd.pipeline.on_pipeline import OnPipeline
from pipesgd.pipeline.pipeline import Pipeline
from pipesgd.pipeline.true_weights_hooks import unwrapped
from pipesgd.planning import accuracy
from pipesgd.ranks import Ranks, current
from pipesgd.reducers.make import check_momentum
from pipesgd.rules import IN_DDP, check_rules, options_of_sections
from pipesgd.sections import Updates, Windows, Wire
from pipesgd.strategy import Span, StepReport

ROUNDING = 0.01
"""Share of a value by which the loop's clipping and scaling may differ from ours, in any precision."""


def attach(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    width: int = 2,
    codec: str | CodecOptions | OwnCodec = "int8",
    windows: Windows | None = None,
    wire: Wire | None = None,
    updates: Updates | None = None,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    init_sync: bool = True,
    ranks: Ranks | None = None,
    process_group: Group | None = None,
) -> Attached:
    """Let the training loop of ``ddp_model`` and ``optimizer`` be Pipe-SGD of width K; the loop stays as it is.

    Examples:
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
        ddp_model: a model in DistributedDataParallel without a communication hook but that of a closed pipeline.
        optimizer: the optimizer of all of its parameters that require a gradient.
        width: iterations in flight, K; 1 is synchronous.
        codec: encoding of gradients: a name, an object such as ``Int4(64)``, or an ``OwnCodec``.
        windows: windows of local steps, which each rank trains by itself between exchanges (``pipesgd.Windows``). By
            default every gradient is exchanged. For local steps, ``ddp_model`` must be made without ``SyncBatchNorm``,
            without ``find_unused_parameters`` and, if it has buffers, with ``broadcast_buffers=False``: torch would
            communicate in every iteration.
        wire: how gradients travel, as in ``pipesgd.Pipelined``, without ``buckets`` and ``reduce``. The timeout is by
            default that of the process group: half an hour with gloo, unless the group was made with another one.
        updates: as in ``pipesgd.Pipelined``, without ``guard``. ``clip_norm`` and ``clip_value`` say how the loop clips
            gradients, so that predictions and ``close`` clip them alike; with local steps they are left out, since
            both are about the rank's own movement. ``on_nonfinite`` "stop" raises ``NonFiniteGradientError`` from
            ``backward``, and "skip" leaves the update out; with a ``scaler``, the loop's own GradScaler leaves it out.
        scaler: the loop's GradScaler, if it has one: gradients arrive late, and must be at the scale of the present.
        seed: seed of random numbers, as in ``pipesgd.Pipelined``.
        init_sync: whether all ranks get rank 0's parameters, buffers and optimizer state, as in ``pipesgd.Pipelined``.
        ranks: the ranks to work with, as in ``pipesgd.Pipelined``.
        process_group: the group whose ranks train the model; by default that of ``ddp_model``.

    Raises:
        UserInputError: the model has a communication hook, the optimizer does not hold all of its parameters, or a
            value is out of range.
        CommunicationError: a rank could not be reached.
    """
    wire, updates = wire or Wire(), updates or Updates()
    common: dict[str, Any] = {
        "width": width,
        "codec": codec,
        "wire": wire,
        "updates": updates,
        "scaler": scaler,
        "seed": seed,
        "init_sync": init_sync,
        "ranks": ranks,
        "process_group": process_group,
    }
    if windows is None:
        return AttachedPipeline(ddp_model, optimizer, **common)
    return AttachedLocalSteps(ddp_model, optimizer, windows, **common)


def with_clipping(updates: Updates | None, windows: Windows | None, clipping: dict[str, Any]) -> Updates | None:
    """Return ``updates`` of ``attach`` for a loop whose ``clipping`` is known; local steps need not know it."""
    return updates if windows is not None else dataclasses.replace(updates or Updates(), **clipping)


class AttachedPipeline(OnPipeline):
    """Pipe-SGD inside a DistributedDataParallel program. ``attach`` makes one.

    An iteration of the loop is taken apart like this:

    1. ``backward``: torch hands over its buckets, which are packed into a flat buffer. With the last bucket, the buffer
       goes to the communication thread, and the mean that is due, that of iteration t-K+1, is waited for. It becomes
       ``.grad``, where the loop clips or unscales it.
    2. ``optimizer.step``: before it, the parameters get the true weights, and the optimizer the options (learning rate,
       ...) with which the gradient was computed. While the pipeline fills, no gradient is due and nothing is updated.
       After it, whatever else is due where a synchronous start begins is applied, and the parameters get the predicted
       weights.
    3. A step that GradScaler leaves out changes nothing but the predicted weights.

    ``state_dict``, ``load_state_dict``, ``flush``, ``true_weights`` and ``close`` are those of ``Pipelined``; all but
    ``true_weights`` belong between ``optimizer.step`` and the next ``backward``.
    """

    report = StepReport()
    """Report of the last iteration."""
    _loop_hooks: LoopHooks | None = None

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        width: int,
        codec: str | CodecOptions | OwnCodec,
        wire: Wire,
        updates: Updates,
        scaler: torch.amp.GradScaler | None,
        seed: int,
        init_sync: bool,
        ranks: Ranks | None,
        process_group: Group | None,
    ):
        check_rules(options_of_sections(wire, updates), IN_DDP)
        check_model(ddp_model)
        check_dense_embeddings(ddp_model)
        check_all_held(ddp_model, optimizer)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
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
        self._mean: FlatBuffer | None = None
        """The mean that the backward pass has put into ``.grad``."""
        self._clip = Clipping(norm=updates.clip_norm, value=updates.clip_value)
        """Clipping that the loop has announced."""
        self._looks_for_changes = True
        """True until an update has looked whether the loop changes the mean otherwise than it has announced."""
        self._looks_at_rates = True
        """True until the loop has set learning rates between a backward pass and the step."""
        self._stepping_itself = False
        self._started = False
        self._optimizer = optimizer
        self._codec_options = codec_options(codec)
        cut = Cut.of(ddp_model, optimizer, str(wire.buckets), Exchanges(ddp_model, wire.reduce))
        super().__init__(
            Pipeline(
                ddp_model,
                optimizer,
                cut,
                width=width,
                codec=self._codec_options,
                wire=wire,
                updates=updates if self._scaler is None else dataclasses.replace(updates, on_nonfinite="skip"),
                seed=seed,
                init_sync=init_sync,
                ranks=ranks
                or current(wire.timeout, process_group or ddp_model.process_group, job_secret(wire.secret_file)),
            )
        )
        self.pipeline.update.own_steps.remove()  # the loop takes them
        self._parameters = cut.parameters
        self._places = Places(cut.parameters)
        self._loop_hooks = LoopHooks(self, ddp_model, optimizer)
        self._loop_hooks.before_forward_of(ddp_model, self.before_forward)
        synchronous = updates.synchronous_start if width > 1 else 0
        start = " after a synchronous start" if synchronous else ""
        if synchronous == "auto":
            start = ", synchronous while the learning rate rises"
        # DDP knows no limit of the rate, which exchanges of this run would show.
        trained = [one for one in ddp_model.parameters() if one.requires_grad and wire.rate_limit is None]
        self._proof = Proof(
            f"width {width}{start}",
            self.pipeline.flight,
            self._codec_options,
            self.tally,
            trained,
            functools.partial(
                accuracy.line,
                ddp_model,
                codec=self._codec_options,
                updates=updates,
                optimizer=type(optimizer).__name__,
            ),
            width,
        )

    def step(self) -> StepReport:
        """Refuse: the loop's ``optimizer.step`` is the step."""
        raise UserInputError("an attached pipeline must be left to the loop: call optimizer.step() instead of step()")

    def flush(self) -> StepReport:
        """Wait for and apply all gradients in flight; see ``OnPipeline.flush``.

        Raises its errors, and ``ReplicasDivergedError`` if the ranks end with different weights.
        """
        self._settle("flush")
        self._stepping_itself = True
        try:
            report = super().flush()
        finally:
            self._stepping_itself = False
        if report.applied:
            self.check_replicas()
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients in flight and the codec's state; see ``OnPipeline.state_dict``."""
        self._settle("state_dict")
        return super().state_dict()

    def load_checked(self, state: dict[str, Any]) -> None:
        """Drop the iteration that was interrupted, if any, and continue from ``state``."""
        self._due = None
        self._copies.clear()
        options = [dict(group) for group in self._optimizer.param_groups]
        self._update.close()  # that of a step that was interrupted, which puts back the options from before it
        for group, present in zip(self._optimizer.param_groups, options, strict=True):
            group.update(present)
        super().load_checked(state)

    def close(self) -> None:
        """Apply the gradients in flight and end the communication. The model trains again if it is attached again."""
        if self._loop_hooks is not None:
            self._loop_hooks.remove()
        error: BaseException | None = None
        try:
            if self.pipeline.flight.in_flight and not self.pipeline.failed:
                self._settle("close")
        except BaseException as failure:
            error = failure
            raise
        finally:
            self.pipeline.close(error)
        if not self.pipeline.error:
            self._proof.end(self.iteration)

    # ---- 1. backward

    def take_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take over a bucket of gradients; with the last, replace those of all buckets by the ones that are due."""
        try:
            self.pipeline.check_usable()
            self.pipeline.check_gradients(new=True)
            self._buckets.append((bucket.parameters(), gradients_of(bucket)))
            if bucket.is_last():
                buckets, self._buckets = self._buckets, []
                self._exchange(buckets)
        except BaseException as error:
            self.pipeline.note(error)
            raise
        return done(bucket.buffer())

    def _exchange(self, buckets: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
        self._check_left_out("backward")  # the forward pass was in evaluation mode, as with frozen statistics
        pipeline, flight, update = self.pipeline, self.pipeline.flight, self.pipeline.update
        check_unchanged(self._optimizer, pipeline.cut.identities, "an attached pipeline")
        check_momentum(self._codec_options, self._optimizer)
        iteration = flight.ranks.iteration = pipeline.iteration
        begin = time.perf_counter()
        gradients = {self._places[id(p)]: g for bucket in buckets for p, g in zip(*bucket, strict=True)}
        with pipeline.whole(f"taking over the gradients of iteration {iteration}"):
            outgoing = flight.next_outgoing(iteration)
            buffer = outgoing.buffer
            buffer.fill_from([gradients[place] for place in range(len(self._parameters))])
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            if scale != 1.0:
                torch._foreach_div_(buffer.flats, scale)
            # In a copy where they are kept, since torch's buckets will hold the mean.
            outgoing.local = [*(self._copy_of(buffer, iteration) if update.keeps_own else buffer).views]
            departed = pipeline.depart(outgoing, [0])
        pack = Span("pack", iteration, begin, time.perf_counter())
        flight.ranks.enter("all-reduce", waiting=True)
        wire_bytes = flight.wire_bytes(departed, [0])
        width = pipeline.width_now
        self._due = StepReport(wire_bytes=wire_bytes, spans=(pack,), width=width)
        mean = None
        if len(flight.in_flight) >= width:
            gradient, report = flight.next_mean()
            with pipeline.whole(f"the update of iteration {gradient.iteration}"):
                if report.applied:
                    update.learn(gradient.buffer.views, pipeline.guesses_of(gradient, report))
                self._hyperparameters = gradient.known.hyperparameters
                mean = gradient.buffer if report.applied or self._scaler is not None else None
                flight.land()
            self._due = dataclasses.replace(report, wire_bytes=wire_bytes, spans=(pack, *report.spans), width=width)
            pipeline.check_finite(report)
        flight.ranks.enter("compute")
        self._mean = mean
        self._give(gradients, mean, scale)

    def _copy_of(self, buffer: FlatBuffer, iteration: int) -> FlatBuffer:
        """Return a copy of this rank's gradients, in memory that is free again once they are no longer in flight."""
        in_flight = {gradient.iteration for gradient in self.pipeline.flight.in_flight}
        for landed in self._copies.keys() - in_flight:
            self._free_copies.append(self._copies.pop(landed))
        self._copies[iteration] = self._free_copies.pop() if self._free_copies else FlatBuffer(buffer.views)
        self._copies[iteration].fill_from(buffer.views)
        return self._copies[iteration]

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

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Prepare the update that the loop's optimizer is about to do."""
        if self._stepping_itself:
            return None
        return before_update(self._begin_update, args, kwargs)

    def _begin_update(self) -> None:
        self.pipeline.check_usable()
        if self._due is None:
            raise frozen_since(self._ddp_model, self._parameters) or step_without_gradient()
        if not self._started:
            self._started = True
            if self._scaler is None:
                check_no_scaler(sys._getframe())
        self.pipeline.half_done = f"the update of iteration {self.iteration - 1}"
        self.pipeline.weights.restore()
        self._take_options()
        if self._due.applied:
            self._warn_of_changes()
            self._update.enter_context(hyperparameters.set_to(self._optimizer, self._hyperparameters))
        else:  # nothing is due
            self._update.enter_context(without_effect(self._optimizer))

    def _take_options(self) -> None:
        """Let the gradient of this iteration be applied with the options that the loop steps with.

        The loop may have set them since its backward pass.
        """
        now, in_flight = hyperparameters.current(self._optimizer), self.pipeline.flight.in_flight
        if in_flight and in_flight[-1].iteration == self.iteration - 1:
            newest = in_flight[-1]
            self._warn_of_late_rates(newest.known.hyperparameters, now)
            in_flight[-1] = dataclasses.replace(newest, known=dataclasses.replace(newest.known, hyperparameters=now))
        else:
            self._warn_of_late_rates(self._hyperparameters, now)
            self._hyperparameters = now

    def _warn_of_late_rates(
        self, before: hyperparameters.Hyperparameters, now: hyperparameters.Hyperparameters
    ) -> None:
        """Warn once if the loop sets learning rates where a synchronous start does not see them in time."""
        if not (self._looks_at_rates and self.pipeline.update.width.follows_rates):
            return
        if [group.get("lr") for group in before] != [group.get("lr") for group in now]:
            self._looks_at_rates = False
            warn(
                "learning rates must be set before backward() for a synchronous start that follows them; got others "
                "before optimizer.step(): set them earlier, or give the number of its iterations by "
                "attach(..., updates=Updates(synchronous_start=N))"
            )

    def _warn_of_changes(self) -> None:
        """Warn once if the loop has changed the mean in ``.grad`` in a way that it has not announced."""
        if self._mean is None or not self._looks_for_changes or self.pipeline.update.width.most == 1:
            return
        if getattr(self._optimizer, "grad_scale", None) is not None:
            return  # a fused optimizer: the scaler leaves the division to it
        self._looks_for_changes = False
        # The mean is in a buffer of the pool, which the next backward pass overwrites.
        expected = self._mean.views
        if clips := self._clip != Clipping():
            expected = [mean.clone() for mean in expected]
            self._clip(expected)
        near = ROUNDING if clips or self._scaler is not None else 0.0
        pairs = zip(self._parameters, expected, strict=True)
        if any(p.grad is not None and not _close(p.grad, mean, near) for p, mean in pairs):
            warn(
                "gradients must not be changed between backward() and optimizer.step(), since predictions and close() "
                "use them as they arrived: announce clipping by attach(..., updates=Updates(clip_norm=...)) or "
                "clip_value=, with the loop's bounds, and move any other change into the loss or into a hook of the "
                "parameter"
            )

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End the update that the loop's optimizer has done."""
        if self._stepping_itself:
            return
        assert self._due is not None
        self._update.close()
        applied = self._due.applied
        self.report, self._due = self._due, None  # before the next line: no interruption may let it be applied twice
        self.pipeline.half_done = None
        self._predict()
        update = self.pipeline.update
        if applied and update.width.most > 1:  # a flush, and the copy of the optimizer that predicts, reuse memory
            update.check_copies([p.grad for p in self._parameters if p.grad is not None])

    def _finish_iteration(self) -> None:
        assert self._due is not None
        self.report, self._due = self._due, None
        self._predict()

    def _predict(self) -> None:
        begin, weights = time.perf_counter(), self.pipeline.weights
        try:
            weights.restore()
            with set_aside_gradients(self._optimizer):
                self._catch_up()
                self.pipeline.predict()
        except BaseException:
            weights.notices.end()  # an interruption may have left the weights half exchanged
            weights.restore()
            raise
        predict = Span("predict", self.iteration - 1, begin, time.perf_counter())
        self.report = dataclasses.replace(self.report, spans=(*self.report.spans, predict))
        self.tally.take(self.report)

    def _catch_up(self) -> None:
        """Apply what else is due: the loop steps with one gradient an iteration, but where the width falls, two are."""
        self._stepping_itself = True
        try:
            while len(self.pipeline.flight.in_flight) >= self.pipeline.width_now:
                self.report = self.report.followed_by(self.pipeline.apply_oldest())
        finally:
            self._stepping_itself = False

    # ---- 3. a step that is left out

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        """End an iteration whose update the loop has left out."""
        if self._due is None or not (unwrapped(module).training and torch.is_grad_enabled()):
            return
        self._check_left_out("forward")
        self._finish_iteration()

    def _check_left_out(self, following: str) -> None:
        """Refuse to leave out an update unless it is that of this iteration's own gradient, or is not finite.

        Else the mean of an earlier iteration would be lost, and the gradient in its place, which the loop has dropped
        or adds to another one, be applied later.
        """
        if self._due is not None and self.pipeline.flight.in_flight and not self._due.skipped:
            raise UserInputError(
                "backward() must be followed by step() of the optimizer that was given to attach, or run in "
                "ddp_model.no_sync(), with its forward pass, if its gradients are accumulated or dropped; got another "
                f"{following} pass without a step"
            )

    def _settle(self, call: str) -> None:
        if self._due is None:
            return
        pipeline = self.pipeline
        # A signal's handler may call this in a backward pass, while a mean is still waited for.
        waits = len(pipeline.flight.in_flight) >= pipeline.width_now
        if self._due.applied or waits:
            raise UserInputError(f"{call} must not be called between backward() and optimizer.step()")
        self._finish_iteration()


def _close(gradient: Tensor, expected: Tensor, near: float) -> bool:
    """Return True if every value of ``gradient`` is within a share ``near`` of the one expected, or next to zero."""
    least = torch.finfo(gradient.dtype).tiny if near else 0.0
    return torch.allclose(gradient, expected.to(gradient.dtype), rtol=near, atol=least)


Attached = AttachedPipeline | AttachedLocalSteps
"""Types of what ``attach`` returns."""
