"""Local steps inside a program that trains with DistributedDataParallel."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
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
    before_update,
    check_all_held,
    check_model,
    check_no_scaler,
    done,
    step_without_gradient,
)
from pipesgd.ddp.proof import Proof
from pipesgd.errors import NonFiniteGradientError, UserInputError
from pipesgd.flat_buffer import are_finite
from pipesgd.membership.secret import job_secret
from pipesgd.optim.optimizer_copy import without_effect
from pipesgd.optim.step import set_aside_gradients
from pipesgd.pipeline.local_steps import LocalSteps
from pipesgd.pipeline.on_pipeline import OnPipeline
from pipesgd.ranks import Ranks, current
from pipesgd.sections import Updates, Windows, Wire
from pipesgd.strategy import StepReport


class AttachedLocalSteps(OnPipeline):
    """Local steps inside a DistributedDataParallel program. ``attach(..., windows=Windows(local_steps=H))`` makes one.

    An iteration of the loop is taken apart like this:

    1. ``backward``: torch hands over its buckets, and gets them back as they are. So ``.grad`` is this rank's own
       gradient, which the loop clips or unscales. torch sends nothing else, since DDP options that let it are refused.
    2. ``optimizer.step`` is the loop's, on this rank's own weights. With every H-th one, the window is exchanged.
    3. A step that GradScaler leaves out counts, too, as skipped: then the iteration ends with the loop's
       ``scaler.update``, so that no rank is a window behind in what the loop does next.

    ``state_dict``, ``load_state_dict``, ``flush``, ``true_weights`` and ``close`` are those of ``LocalSteps``; all but
    ``true_weights`` belong between ``optimizer.step`` and the next ``backward``.
    """

    report = StepReport()
    """Report of the last iteration."""
    _loop_hooks: LoopHooks | None = None

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        windows: Windows,
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
        for name, value in (("clip_norm", updates.clip_norm), ("clip_value", updates.clip_value)):
            if value is not None:
                raise UserInputError(f"{name} must be left out, since the loop clips its gradients itself; got {value}")
        check_model(ddp_model)
        _check_sends_nothing(ddp_model)
        check_all_held(ddp_model, optimizer)
        self._scaled = scaler is not None and scaler.is_enabled()
        self._skips = updates.on_nonfinite == "skip" or self._scaled
        self._computed = False
        """True from the end of a backward pass to that of its iteration."""
        self._skipped = False
        """True if the present step of the optimizer has no finite gradient."""
        self._started = False
        self._update = contextlib.ExitStack()
        """Contexts that the end of a step of the optimizer closes."""
        self._optimizer = optimizer
        self._steps = LocalSteps(
            ddp_model,
            optimizer,
            windows,
            width=width,
            codec=codec,
            wire=wire,
            updates=dataclasses.replace(updates, on_nonfinite="skip" if self._skips else "stop"),
            seed=seed,
            init_sync=init_sync,
            ranks=ranks
            or current(wire.timeout, process_group or ddp_model.process_group, job_secret(wire.secret_file)),
        )
        super().__init__(self._steps.pipeline)
        self.tally = self._steps.tally
        self.owns_optimizer = True
        self._steps.own_steps.remove()  # the loop takes them
        self._loop_hooks = LoopHooks(self, ddp_model, optimizer)
        if scaler is not None and self._scaled:
            self._loop_hooks.before_update_of(scaler, self.before_scaler_update)
        how = f"width {width}, {windows.local_steps} local steps an exchange"
        self._proof = Proof(how, self.pipeline.flight, codec_options(codec), self.tally, ())

    def step(self) -> StepReport:
        """Refuse: the loop's ``optimizer.step`` is the step."""
        raise UserInputError("attached local steps must be left to the loop: call optimizer.step() instead of step()")

    def flush(self) -> StepReport:
        """Exchange the window so far and apply all movements in flight; see ``LocalSteps.flush``.

        Raises its errors, and ``ReplicasDivergedError`` if the ranks end with different weights.
        """
        self._settle("flush")
        report = self._steps.flush()
        if report.applied:
            self.check_replicas()
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both optimizers and of the window; see ``LocalSteps.state_dict``."""
        self._settle("state_dict")
        return self._steps.state_dict()

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise what ``load_state_dict`` raises before it changes anything: see ``LocalSteps``."""
        self._steps.check_state(state)

    def of_members(self, alike: dict[str, Any], taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state with which this rank takes over from other ranks; see ``LocalSteps``."""
        return self._steps.of_members(alike, taken)

    def load_checked(self, state: dict[str, Any]) -> None:
        """Drop the iteration that was interrupted, if any, and continue from ``state``."""
        self._computed = False
        self._update.close()  # that of a step that was interrupted, which puts back the gradients from before it
        self._steps.load_checked(state)

    def close(self) -> None:
        """Exchange the window so far and end the communication. The model trains again if it is attached again."""
        if self._loop_hooks is not None:
            self._loop_hooks.remove()
        try:
            if not (self.closed or self.pipeline.failed):
                self._settle("close")
        except UserInputError as error:
            self.pipeline.error = error
            raise
        finally:
            self._steps.close()
        if not self.pipeline.error:
            self._proof.end(self.iteration)

    def take_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Leave a bucket of gradients as it is; refuse it once nothing exchanges what it moves."""
        self.pipeline.check_usable()
        self.pipeline.check_gradients(new=True)
        self._computed |= bucket.is_last()
        return done(bucket.buffer())

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Prepare the update that the loop's optimizer is about to do."""
        return before_update(self._begin_update, args, kwargs)

    def _begin_update(self) -> None:
        pipeline = self.pipeline
        with pipeline.noting():
            pipeline.check_usable()
            if not self._computed:
                raise step_without_gradient()
            if not (self._scaled or self._started):
                check_no_scaler(sys._getframe())
            self._started = True
            self._steps.prepare()
            finite = are_finite(p.grad for p in pipeline.cut.parameters if p.grad is not None)
            if not (finite or self._skips):
                raise NonFiniteGradientError(self.iteration, own=True)
            pipeline.half_done = f"the local step of iteration {self.iteration}"
            self._steps.window.work()
            self._skipped = not finite
            if self._skipped:
                self._update.enter_context(without_effect(self._optimizer))

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End the update that the loop's optimizer has done."""
        self._update.close()
        self._finish_iteration(skipped=self._skipped)

    def _finish_iteration(self, *, skipped: bool) -> None:
        pipeline, window, ranks = self.pipeline, self._steps.window, self.pipeline.flight.ranks
        culprit = ranks.number(ranks.rank)
        own = StepReport(skipped=(self.iteration,), nonfinite_ranks=(culprit,)) if skipped else StepReport()
        with pipeline.noting(), set_aside_gradients(self._optimizer):
            # From the local step to its end, so that no interruption lets it be done twice.
            with pipeline.whole(pipeline.half_done or f"the end of iteration {self.iteration}"):
                pipeline.flight.thread.check()
                window.work()
                window.worked()
                pipeline.iteration += 1
                self._computed = False
            self.report = self._steps.finish(own)

    def before_scaler_update(self) -> None:
        """End an iteration whose step the loop's GradScaler has left out."""
        if self._computed:
            self.pipeline.check_usable()
            self._finish_iteration(skipped=True)

    def _settle(self, call: str) -> None:
        if self._computed:
            raise UserInputError(f"{call} must not be called between backward() and optimizer.step()")


def _check_sends_nothing(ddp_model: DistributedDataParallel) -> None:
    """Refuse a DistributedDataParallel whose ranks wait for each other in every iteration.

    Raises:
        UserInputError: it has a SyncBatchNorm, broadcasts buffers before forward passes, or asks which parameters other
            ranks have used.
    """
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in ddp_model.modules()):
        raise UserInputError(
            "ddp_model must be made without SyncBatchNorm for local steps: its statistics would be sent in every "
            "forward pass"
        )
    if ddp_model.broadcast_buffers and ddp_model.modules_buffers:
        raise UserInputError(
            "ddp_model must be made with broadcast_buffers=False for local steps: its buffers would be sent in every "
            "forward pass"
        )
    if ddp_model.find_unused_parameters:
        raise UserInputError(
            "ddp_model must be made without find_unused_parameters=True for local steps: the parameters used would be "
            "sent in every backward pass"
        )
