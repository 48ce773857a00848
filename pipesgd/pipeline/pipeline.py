"""A flight and its update: gradients depart, means that arrive are applied, and both halves flush, resume and end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesgd.checks import check_as_loaded
from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.codecs.own import codec_options
from pipesgd.comm.headers import STEP, SYNCHRONOUS_STEP
from pipesgd.comm.transport import Group, Mesh
from pipesgd.errors import NonFiniteGradientError, OutOfStepError, RunError, UserInputError, warn, warn_of_line
from pipesgd.flat_buffer import check_layouts, memory_layout
from pipesgd.guests import guest
from pipesgd.optim.loss_scale import LossScale
from pipesgd.optim.step import check_not_schedule_free, drop_gradients, set_aside_gradients
from pipesgd.pipeline.cut import Cut
from pipesgd.pipeline.exchanges import words_of
from pipesgd.pipeline.flight import Flight
from pipesgd.pipeline.in_flight import InFlight, Outgoing
from pipesgd.pipeline.islands import island_of
from pipesgd.pipeline.optimizer_state import share_rank_0s_state
from pipesgd.pipeline.prediction import SwappedWeights, Unapplied
from pipesgd.pipeline.sameness import check_compute_alike, check_same_training, plain, settings_of
from pipesgd.pipeline.true_weights_hooks import TrueWeightsHooks, warn_of_outsiders, warn_of_write
from pipesgd.pipeline.update import Guessed, Update, clipping_of
from pipesgd.pipeline.width import make_width
from pipesgd.pipeline_config import Buffers
from pipesgd.ranks import Ranks, given_ranks
from pipesgd.reducers.make import check_reducer
from pipesgd.replicas import check_same_weights, combine_buffers, share_rank_0s_values
from pipesgd.rules import CODEC, check_rules, options_of_sections
from pipesgd.sections import Updates, Wire, check_width
from pipesgd.strategy import Span, StepReport


class Pipeline:
    """The wire half and the weight half of Pipe-SGD together, for all that puts gradients into it.

    A user packs gradients of this rank into ``flight.next_outgoing``, lets buckets ``leave`` and the last ones
    ``depart``, and lets the gradients that are due be applied by ``advance``. All that concerns both halves is here:
    errors and interruptions, flush, state and end.

    An interruption (Ctrl-C, a signal) may come at any line. What is done within ``whole`` must not be taken up halfway:
    if it is interrupted, every call is refused until a state is loaded. Elsewhere nothing is lost: a gradient is either
    in ``.grad`` or in flight, and a wait or a flush that was interrupted may be repeated.

    The arguments are those of ``Pipelined``, besides:

    Args:
        cut: the parameters that ``optimizer`` trains, in buckets, each with its exchange.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        cut: Cut,
        *,
        width: int,
        codec: str | CodecOptions | OwnCodec,
        wire: Wire,
        updates: Updates,
        scaler: torch.amp.GradScaler | None = None,
        seed: int,
        init_sync: bool,
        ranks: Ranks | None = None,
        process_group: Group | None = None,
        mesh: Mesh | None = None,
    ):
        check_width(width)
        if width > 1:
            check_not_schedule_free(optimizer)
        options = codec_options(codec)
        check_rules(options_of_sections(wire, all_reduce_name=wire.all_reduce_name, **options.facts()), CODEC)
        self.model = model
        self.optimizer = optimizer
        self.cut = cut
        gathered = cut.exchanges.gathered
        self.island = island_of(
            mesh,
            model,
            cut.parameters,
            optimizer,
            refused={
                f"codec {options.codec}": options.codec in ("topk", "powersgd"),
                f"reduce {words_of(wire.reduce)}": bool(gathered),
                "ranks or process_group": ranks is not None or process_group is not None,
            },
        )
        enabled = scaler is not None and scaler.is_enabled()
        self.update = Update(
            optimizer,
            cut.parameters,
            make_width(width, updates.synchronous_start, guard=updates.guard),
            updates,
            loss_scale=LossScale(scaler, cut.parameters) if enabled else None,
            whole=self.island,
            written=functools.partial(warn_of_write, model),
        )
        check_reducer(options, optimizer, cut.parameters, seed)
        self.iteration = 0
        """Number of iterations so far."""
        self.width_now = width
        """Width at which the newest gradient is applied."""
        self.error: BaseException | None = None
        """Error that the last step or flush raised, after which the gradients in flight are not waited for."""
        self.closed = False
        self._codec = options
        self.half_done: str | None = None
        """Name of the operation that is being done, or was interrupted halfway, if any."""
        self._ending = False
        """True once the end has begun, in which nobody waits for other ranks any more."""
        self._together = False
        """True once all ranks have come to the end."""
        self._hooks: TrueWeightsHooks | None = None
        device = cut.parameters[0].device
        compared = {
            "width": width,
            **plain(updates),
            **settings_of(wire, device.type),
            "scaler": plain(scaler.state_dict() if scaler is not None else {}),
            "buckets": cut.into,
            "reduce": plain(cut.exchanges.reduce),
            "seed": seed,
            "init_sync": init_sync,
            "device": device.type,
            "mesh": plain(() if self.island is None else self.island.shape),
            **plain(options.settings()),
        }
        between = self.island.between if self.island else process_group
        own = given_ranks(ranks, between, wire)
        if self.island is not None:
            self.island.join(own)
        all_ranks = [own, *([] if self.island is None else self.island.members)]
        check_same_training(all_ranks, compared, cut)
        check_compute_alike(all_ranks, optimizer, clipping_of(updates), gathered, options)
        kind: type[Flight[Unapplied]] = guest("elastic flight") if own.is_elastic else Flight
        self.flight = kind(
            own,
            cut.layout,
            options,
            wire,
            seed=seed,
            members=self.island,
            skips=self.update.skips,
            looks=not self.update.keeps_own,
            agrees=self.update.width.wants_norms,
            unclosed=_say_unclosed,
        )
        try:
            self._begin(init_sync=init_sync)
        except BaseException as error:
            self.close(error)
            raise

    def _begin(self, *, init_sync: bool) -> None:
        """Connect, make the replicas the same, and take over the optimizer. Collective."""
        model, parameters, flight = self.model, self.cut.parameters, self.flight
        if self.update.loss_scale is not None:
            self.update.loss_scale.take()
        flight.connect()
        if init_sync:
            if self.island is not None:
                self.island.share(model, parameters)
            sum_over_ranks = flight.sum_in("Pipelined", 0)
            share_rank_0s_values(model, parameters, flight.ranks.rank, sum_over_ranks)
            share_rank_0s_state(self.optimizer, flight.ranks, sum_over_ranks)
        if self.update.predicts:
            self._hooks = TrueWeightsHooks(model, self.weights)
            warn_of_outsiders(model, parameters)
        drop_gradients(self.optimizer)
        self.update.own_steps.refuse_others()

    @property
    def weights(self) -> SwappedWeights:
        """True and predicted weights, one of which the parameters hold."""
        return self.update.weights

    @property
    def all_ranks(self) -> list[Ranks]:
        """The ranks that exchange gradients and, with islands, the members of this rank's island."""
        return [self.flight.ranks, *([] if self.island is None else self.island.members)]

    @property
    def failed(self) -> bool:
        """True if ``close`` would drop the gradients in flight, because of an error or an interruption."""
        return self.error is not None or self.half_done is not None or self.flight.thread.failed

    # ---- Errors and interruptions

    def check_usable(self) -> None:
        """Raise what keeps this rank from another step: its end, another rank's failure, or what is done by half."""
        self.flight.thread.check()
        if self.half_done is not None:
            raise RunError(
                f"{self.half_done} was interrupted halfway, so this rank's weights are no other rank's: "
                "load a state_dict, or continue from a checkpoint"
            )

    def check_gradients(self, *, new: bool = False) -> None:
        """Refuse gradients that were computed in evaluation mode; see ``TrueWeightsHooks.check_gradients``."""
        if self._hooks is not None and self.weights.hidden:
            self._hooks.check_gradients(new=new)

    def check_none_leaves(self, call: str) -> None:
        """Refuse ``call`` while some buckets of a gradient have left and others have not."""
        if self.flight.left:
            raise UserInputError(
                f"{call} must not be called between backward() and step() with buckets; got it while those of "
                f"iteration {self.iteration} leave"
            )

    @contextlib.contextmanager
    def whole(self, what: str) -> Iterator[None]:
        """Make the pipeline unusable if the context, which does ``what``, is interrupted halfway."""
        self.half_done = what
        try:
            yield
        except (UserInputError, NonFiniteGradientError):  # refused before anything was changed
            self.half_done = None
            raise
        self.half_done = None

    def note(self, error: BaseException) -> None:
        """Note an error, after which the parameters hold the true weights."""
        self.weights.notices.end()  # an interruption may have left the weights half exchanged
        self.weights.restore()
        self.error = error

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error of what the context does, or that there was none."""
        try:
            yield
        except BaseException as error:
            self.error = error
            raise
        self.error = None

    def fail(self, error: BaseException) -> None:
        """End every wait at once with ``error``, such as a failure of another rank. Thread-safe."""
        self.flight.fail(error)

    # ---- A step

    def depart(self, outgoing: Outgoing, numbers: Sequence[int]) -> InFlight[Unapplied]:
        """Let the buckets of these ``numbers`` leave, the last ones of a gradient, all of which are packed.

        This belongs into ``whole``.
        """
        unapplied = self.update.keep(outgoing.local, outgoing.scale)
        own = [one for one in outgoing.local if one is not None] if self.update.keeps_own else None
        outgoing.local = []
        compare = functools.partial(self.update.compare, outgoing.buffer.views, unapplied)
        self.width_now = self.update.width.of(outgoing.iteration, self.optimizer.param_groups)
        call = STEP if self.width_now == self.update.width.most else SYNCHRONOUS_STEP
        gradient = self.flight.depart(outgoing, numbers, unapplied, compare, own, call=call)
        self.iteration = outgoing.iteration + 1
        return gradient

    def advance(self, gradient: InFlight[Unapplied], numbers: Sequence[int], packs: Sequence[Span]) -> StepReport:
        """Apply the gradients that are due after the departure of ``gradient``, and predict with those in flight.

        ``numbers`` are those of its buckets that are summed, and ``packs`` the times in which they were packed.
        """
        ranks = self.flight.ranks
        ranks.enter("all-reduce", waiting=True)
        report = self.apply_until(self.width_now - 1)
        ranks.enter("compute")
        wire_bytes = report.wire_bytes + self.flight.wire_bytes(gradient, numbers)
        return dataclasses.replace(report, spans=(*packs, *report.spans), wire_bytes=wire_bytes, width=self.width_now)

    def apply_until(self, remaining: int) -> StepReport:
        """Apply the oldest gradients until only ``remaining`` are in flight, and predict with those."""
        report: StepReport | None = None
        try:
            self.weights.restore()
            while len(self.flight.in_flight) > remaining:
                newest = self.apply_oldest()
                report = newest if report is None else report.followed_by(newest)
            begin = time.perf_counter()
            self.predict()
        except BaseException as error:
            self.note(error)
            raise
        self.error = None
        report = report or StepReport()
        if not self.weights.are_predicted:
            return report
        predict = Span("predict", self.iteration, begin, time.perf_counter())
        return dataclasses.replace(report, spans=(*report.spans, predict))

    def apply_oldest(self) -> StepReport:
        """Wait for the oldest gradient in flight, and apply it or leave it out. An interrupted wait changes nothing."""
        gradient, report = self.flight.next_mean()
        begin = time.perf_counter()
        fell_back = False
        with self.whole(f"the update of iteration {gradient.iteration}"):
            self.update.observe_scale(bool(report.applied), gradient.known)
            if report.applied:
                guesses = self.guesses_of(gradient, report)
                norm, views = report.gradient_norm, gradient.buffer.views
                fell_back = self.update.apply(views, guesses, norm=norm, iteration=self.iteration)
            self.flight.land()
        self.check_finite(report)
        if report.applied:
            self.update.check_copies(gradient.buffer.flats)
        update = Span("update", gradient.iteration, begin, time.perf_counter())
        return dataclasses.replace(report, spans=(*report.spans, update), fell_back=fell_back)

    def guesses_of(self, gradient: InFlight[Unapplied], report: StepReport) -> list[Guessed]:
        """Return this rank's guess of the mean of ``gradient``, which has arrived."""
        return [Guessed(gradient.known, report.comparison, self.update.agreement)]

    def check_finite(self, report: StepReport) -> None:
        """Raise ``NonFiniteGradientError`` for a mean that was left out, unless such means are to be skipped."""
        if not report.skipped:
            return
        if not self.update.skips:
            raise NonFiniteGradientError(report.skipped[0], report.nonfinite_ranks, self.flight.ranks.world_size)
        self.update.width.note_skip()

    def predict(self) -> None:
        """Let the parameters hold the weights expected once all gradients in flight are applied."""
        self.update.predict([gradient.known for gradient in self.flight.in_flight])

    # ---- Between steps

    def flush(self) -> StepReport:
        """Wait for and apply all gradients in flight; see ``Pipelined.flush``."""
        self.check_usable()
        self.check_none_leaves("flush")
        self.flight.begin_flush(self.iteration)
        loss_scale = self.update.loss_scale
        scale = 1.0 if loss_scale is None else loss_scale.scale
        with set_aside_gradients(self.optimizer):
            report = self.apply_until(0)
        if loss_scale is not None:
            loss_scale.rescale(self.cut.parameters, scale)
        self.flight.end_flush()
        return report

    def combine_buffers(self, how: Buffers = "average") -> None:
        """Set floating-point buffers to their "average" or to "rank-0"'s values, or leave them "own". Collective."""
        self.check_usable()
        self.check_none_leaves("combine_buffers")
        ranks, sum_over_ranks = self.flight.ranks, self.flight.sum_in("combine_buffers", self.iteration)
        # An evaluation may be in inference mode, whose tensors the thread that sums could not change.
        with torch.inference_mode(False), torch.no_grad():
            ranks.whole(lambda: combine_buffers(self.model, how, ranks, sum_over_ranks))
            if self.island is not None:
                self.island.combine_buffers(self.model, how)

    def average(self, tensors: Sequence[Tensor]) -> tuple[int, bool]:
        """Give all ranks the means of ``tensors``; see ``Flight.average``."""
        return self.flight.average(tensors, self.iteration)

    def regroup(self, ranks: Ranks | None = None, left_out: Sequence[Tensor] | None = None) -> None:
        """Continue with other ranks, or on new connections to the same ones; see ``Pipelined.regroup``."""
        self.check_usable()
        self.check_none_leaves("regroup")
        with self.whole("a change of ranks"):
            self.flight.regroup(ranks or self.flight.ranks, self.iteration, left_out)

    def check_replicas(self) -> None:
        """Raise ``ReplicasDivergedError`` if the ranks hold different weights. Collective."""
        check_same_weights(self.model, self.cut.parameters, self.flight.ranks)

    # ---- State

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the averaged gradients in flight, after waiting for them, and of the state of the codec."""
        self.check_usable()
        self.check_none_leaves("state_dict")
        flight = self.flight.state_dict()
        known = [gradient.known.state_dict() for gradient in self.flight.in_flight]
        in_flight = [one | of_one for one, of_one in zip(flight["in_flight"], known, strict=True)]
        strides = [memory_layout(parameter) for parameter in self.cut.parameters]
        return {
            "iteration": self.iteration,
            "rank": self.flight.ranks.rank,
            **self._exchange(),
            "strides": strides,
            **flight,
            "in_flight": in_flight,
            **self.update.state_dict(),
        }

    def of_members(self, alike: Mapping[str, Any], taken: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state with which this rank takes over from other ranks; see ``OnPipeline.of_members``."""
        ranks = self.flight.ranks
        return {
            **alike,
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "in_flight": [gradient | {"kept": []} for gradient in alike["in_flight"]],  # applied before any prediction
            "agreement": alike["agreement"] if taken else alike["agreement"] | {"missed": []},
            **self.flight.of_members(alike, taken),
        }

    def _exchange(self) -> dict[str, Any]:
        """Return what must be as in a state that is loaded."""
        return {
            "world_size": self.flight.ranks.world_size,
            "codec": self._codec.describe(),
            "reduce": self.cut.exchanges.reduce,
            "buckets": self.cut.into,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise what loading ``state`` raises before it changes anything: see ``Pipelined.load_state_dict``."""
        self.flight.thread.check()
        if self.half_done is None:
            self.check_none_leaves("load_state_dict")
        check_as_loaded(state, self._exchange())
        check_layouts(state["strides"], self.cut.parameters)
        self.update.check_state(state)
        self.flight.check_state(state)

    def load_checked(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state`` that ``check_state`` has accepted; see ``Pipelined.load_state_dict``."""
        self.flight.wait_until_summed()
        half_done, self.half_done = self.half_done, "the loading of a state"
        if half_done is not None:  # gradients may have been taken over in part
            for parameter in self.cut.parameters:
                parameter.grad = None
        self.error = None
        self.iteration = state["iteration"]
        self.update.load_state_dict(state)
        device = self.flight.device
        self.flight.load_state_dict(state, [Unapplied.of_state(one, device) for one in state["in_flight"]])
        self.predict()
        self.half_done = None

    # ---- The end

    def close(self, error: BaseException | None = None) -> None:
        """Apply the gradients in flight, and end the communication thread and its connections; see ``Pipelined.close``.

        After an ``error``, or one before, it waits for no other rank.
        """
        if self.closed:
            return
        self.error = self.error or error
        failure: BaseException | None = None
        try:
            if not (self.failed or self._ending):
                self.check_none_leaves("close")
                if self.flight.in_flight:
                    self.flush()
                # Another rank may come much later, and a process that exits while gloo waits for it is aborted.
                failure = self.flight.meet("close", self.iteration, self.flight.wait_for_all).exception()
                self._together = failure is None
                if self._together:  # all ranks are here
                    self.check_replicas()
        finally:
            self._ending = True
            self._end()
        if isinstance(failure, OutOfStepError):  # all gradients are applied, so nobody misses a rank that is lost now
            raise failure

    def _end(self) -> None:
        """End all that runs; again, if that was interrupted."""
        self.weights.restore()
        if in_flight := self.flight.in_flight:
            iterations = ", ".join(str(gradient.iteration) for gradient in in_flight)
            in_flight.clear()
            warn_of_line(
                f"the pipeline was closed after an error: gradients in flight are dropped (iterations {iterations}), "
                "and the model holds the weights without them"
            )
        if self._hooks is not None:
            self._hooks.remove()
        self.update.own_steps.remove()
        if self.update.loss_scale is not None:
            self.update.loss_scale.leave()
        self.flight.drop()
        self.flight.close(together=self._together)
        self.closed = True


def _say_unclosed() -> None:
    warn(
        "a pipeline was not closed, so the gradients in flight are not applied: call close() at the end of the "
        "training, or use the pipeline in a with statement"
    )
