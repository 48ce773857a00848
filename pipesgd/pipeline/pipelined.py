"""Pipe-SGD: the all-reduce of one iteration runs while the next ones compute."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.codecs.own import codec_options
from pipesgd.comm.connections import Connections
from pipesgd.comm.transport import Group, Mesh
from pipesgd.errors import NonFiniteGradientError, OutOfStepError, RunError, UserInputError, warn
from pipesgd.flat_buffer import (
    FlatBuffer,
    all_finite,
    are_finite,
    check_dense,
    check_layouts,
    check_shapes,
    check_sizes,
    give_gradients,
    memory_layout,
    on_device,
    sizes_of_flats,
    take_mean,
    take_shares,
)
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.loss_scale import LossScale
from pipesgd.optim.step import (
    OwnSteps,
    check_copies_gradients,
    check_not_schedule_free,
    check_unchanged,
    drop_gradients,
    set_aside_gradients,
    trainable_identities,
)
from pipesgd.pipeline.buckets import BackwardHooks
from pipesgd.pipeline.cut import Cut
from pipesgd.pipeline.delayed_update import DelayedUpdate, Guessed
from pipesgd.pipeline.exchanges import WHOLE as WHOLE_GRADIENTS
from pipesgd.pipeline.exchanges import Exchanges, words_of
from pipesgd.pipeline.in_flight import InFlight, Outgoing
from pipesgd.pipeline.islands import island_of
from pipesgd.pipeline.optimizer_state import share_rank_0s_state
from pipesgd.pipeline.packing import Packing
from pipesgd.pipeline.prediction import Agreement, SwappedWeights
from pipesgd.pipeline.sameness import check_compute_alike, check_same_training, plain
from pipesgd.pipeline.summing import Summing
from pipesgd.pipeline.true_weights_hooks import TrueWeightsHooks, warn_of_outsiders, warn_of_write
from pipesgd.pipeline_config import Buffers
from pipesgd.ranks import Ranks, given_ranks
from pipesgd.reducers.base import as_real
from pipesgd.reducers.make import check_eligible, check_momentum, check_reducer, gathering
from pipesgd.replicas import (
    SumOverRanks,
    check_same_weights,
    combine_buffers,
    nonfinite_ranks,
    share_rank_0s_values,
)
from pipesgd.rules import CODEC, PARTS, REDUCE, check_rules, options_of_sections
from pipesgd.sections import DEFAULT_TIMEOUT, Updates, Wire, check_width
from pipesgd.strategy import Span, StepReport, Strategy
from timing_model.buckets import WHOLE

T = TypeVar("T")


class Pipelined(Strategy):
    """Pipe-SGD of width K (Li et al., NeurIPS 2018): staleness is exactly K-1, on every rank, always.

    ``w[t+1] = w[t] - Opt(mean over ranks of g[t-K+1])``, with no update for a negative index. Width 1 is
    decentralized synchronous SGD. Each ``step`` of iteration t is

    1. pack: the gradients move from ``.grad`` into a flat buffer of a pool of K;
    2. hand over: the communication thread sums the buffer over the ranks and takes the mean. With ``buckets``, both
       happen bucket by bucket, as soon as the backward pass has completed a bucket's gradients
       (``pipesgd.pipeline.buckets``), and ``step`` does the rest;
    3. wait: until the oldest of K gradients in flight, that of iteration t-K+1, has arrived;
    4. apply: the optimizer steps with the mean, of which no copy is made, at the learning rate that
       was set when the gradient was computed. The buffer returns to the pool;
    5. predict: for the next forward pass, the parameters get the weights that are expected once all gradients
       in flight are applied (``pipesgd.pipeline.prediction``).

    Between steps the parameters therefore hold predicted weights. Hooks put the true ones in while the model is
    evaluated, saved or loaded (``pipesgd.pipeline.true_weights_hooks``); average and change weights in
    ``true_weights()``, or after ``flush()``.

    A mean that is not finite is so on every rank, since all hold the same bytes: all stop or skip it
    in the same iteration. The optimizer, its state and a learning-rate scheduler remain the caller's, but until the
    pipeline is closed, steps of the optimizer in the loop are refused.
    The constructor gives all ranks rank 0's parameters, buffers and optimizer state (``init_sync``). It, ``step``,
    ``flush``, ``combine_buffers`` and ``close`` are collective: all ranks make these calls in the same order, and fail
    if they do not.

    As a context manager it is closed at the end of the block; see ``close``.

    Args:
        model: the module whose parameters ``optimizer`` updates, on one device. It must not be in
            DistributedDataParallel, which exchanges gradients, too; for that there is ``pipesgd.ddp``.
        optimizer: any ``torch.optim.Optimizer``.
        width: iterations in flight, K.
        codec: encoding of gradients: a name, ``CodecOptions`` such as ``Int4(block=64)``, or a
            ``pipesgd.codecs.base.OwnCodec``. The ``momentum_correction`` of ``TopK`` replaces the optimizer's momentum,
            which must be 0 then.
        wire: how gradients travel (``pipesgd.Wire``). ``all_reduce`` may be a function of a rank and the number of
            ranks that returns the rank's ``timing_model.schedules.Schedule``. With ``buckets``, every backward pass
            outside of ``accumulating`` must be followed by a ``step``; topk and powersgd are refused.

            ``reduce`` is the exchange of gradients: of all parameters for which it is made, or a mapping from the names
            of parameters to the exchange of each. "matrix" sums gradients whole. "rows" gathers, of embeddings'
            gradients, the rows that are not zero (``pipesgd.systems.exchanges.rows``). "factors" gathers, for linear
            layers' weights, the inputs and the output gradients of the batch, and multiplies those of all ranks
            (``pipesgd.systems.exchanges.factors``). Such a weight may be used nowhere else, and nothing but a backward
            pass may change its ``.grad``. Both are exact and uncompressed, and all other gradients are summed whole.
            Embeddings that are exchanged by rows may be sparse. Topk, powersgd, all-reduce native and GPUs are refused,
            except with "matrix". ``pipesgd.systems.exchanges.fewest_bytes`` says what sends fewer bytes.
        updates: how gradients are applied, and those in flight predicted (``pipesgd.Updates``). ``prediction`` may be a
            class of predictions (``pipesgd.pipeline.prediction``). At width 1 there is nothing to predict or to guard.
        scaler: loss scaler for float16, of this pipeline alone; neither its ``step`` nor its ``update`` may be called
            (``pipesgd.optim.loss_scale``). An update whose gradients are not finite is left out then.
        seed: seed of the random numbers of stochastic rounding, and of those that powersgd begins with.
        init_sync: whether all ranks get rank 0's parameters, buffers and optimizer state; without it they must have the
            same parameters and the same state already, and buffers stay each rank's own.
        ranks: the ranks to work with; by default those of ``process_group``.
        process_group: the group of torch.distributed whose ranks train this model together; the job's other ranks may
            train another one at the same time. By default torch's default group, which is started from torchrun's
            variables if there is none yet. Messages name ranks by their numbers in the default group.
        mesh: a device mesh of torch.distributed whose first dimension is the one between islands; the parameters are
            DTensors, split over the other dimensions. Each rank exchanges its shards with the ranks that have the same
            place in other islands (``pipesgd.pipeline.islands``). topk, powersgd, every ``reduce`` but "matrix",
            ``ranks``, ``process_group`` and optimizers that need whole matrices are refused.

    Raises:
        UserInputError: a value out of range, an optimizer without a parameter to train, or a ``process_group`` without
            this rank.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), width=2) as pipeline:
        ...     model(torch.ones(4, 2)).sum().backward()
        ...     pipeline.step().applied, pipeline.flush().applied
        ((), (0,))
    """

    _in_turns = False
    """True if a step sums one bucket alone, in turns, as fragments of local steps are: no other parameter may have a
    gradient then."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        width: int = 2,
        codec: str | CodecOptions | OwnCodec = "fp32",
        wire: Wire | None = None,
        updates: Updates | None = None,
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
        init_sync: bool = True,
        ranks: Ranks | None = None,
        process_group: Group | None = None,
        mesh: Mesh | None = None,
    ):
        wire, updates = wire or Wire(), updates or Updates()
        check_width(width)
        if width > 1:
            check_not_schedule_free(optimizer)
        name = wire.all_reduce_name
        options = codec_options(codec)
        given = options_of_sections(wire, fragments=1, all_reduce_name=name, **options.facts())
        check_rules(given, CODEC, PARTS)
        self.module = model
        """Model that is trained."""
        self._optimizer = optimizer
        exchanges = Exchanges(model, wire.reduce)
        self._cut: Cut = Cut.of(model, optimizer, str(wire.buckets), exchanges)
        device = self._parameters[0].device
        given.reduce, given.device = words_of(wire.reduce) if exchanges.gathered else WHOLE_GRADIENTS, device.type
        check_rules(given, REDUCE)
        self._island = island_of(
            mesh,
            model,
            self._parameters,
            optimizer,
            refused={
                f"codec {options.codec}": options.codec in ("topk", "powersgd"),
                f"reduce {words_of(wire.reduce)}": bool(exchanges.gathered),
                "ranks or process_group": ranks is not None or process_group is not None,
            },
        )
        if isinstance(wire.reduce, str):
            check_eligible(wire.reduce, model, self._parameters)
        self._codec_options = options
        self._turn = 0
        """Number of the bucket that the next step sums, with ``in_turns``."""
        clip = Clipping(norm=updates.clip_norm, value=updates.clip_value)
        whole_clip = clip if self._island is None else dataclasses.replace(clip, total_norm=self._island.total_norm)
        self._updates = DelayedUpdate(
            optimizer,
            self._parameters,
            width=width,
            warmup_iterations=updates.warmup_iterations,
            prediction=updates.prediction,
            guard=updates.guard,
            clip=None if updates.clip_norm is None and updates.clip_value is None else whole_clip,
            island=self._island,
            written=functools.partial(warn_of_write, model),
        )
        check_reducer(options, optimizer, self._parameters, seed)
        self.iteration = 0
        """Number of iterations so far."""
        self.replicated = True
        self._agreement = Agreement()
        self._loss_scale: LossScale | None = None
        if scaler is not None and scaler.is_enabled():
            self._loss_scale = LossScale(scaler, self._parameters)
        self._packing = Packing(self._cut, self._loss_scale)
        self._skip_nonfinite = updates.on_nonfinite == "skip" or self._loss_scale is not None
        self._in_flight: collections.deque[InFlight] = collections.deque()
        self._error: BaseException | None = None
        """Error that the last ``step`` or ``flush`` raised."""
        self._half_done: str | None = None
        """Name of the operation that was interrupted halfway, if any."""
        self._meeting: Future[None] | None = None
        """Meeting of the ranks for a flush that has begun and not ended."""
        self._closed = False
        self._hooks: TrueWeightsHooks | None = None
        self._own_steps = OwnSteps(optimizer)
        self._copies_gradients = False
        """True once an update has shown that the optimizer keeps no gradient of which it has made no copy."""
        self._leaving: BackwardHooks | None = None
        """Hooks that let buckets leave during the backward pass; None if none do."""
        self._checks: list[Callable[[], None]] = []
        """Checks before each step that options ask for."""
        if options.own_momentum:
            self._checks.append(functools.partial(check_momentum, options, optimizer))
        if self._island is not None:
            self._checks.append(functools.partial(self._island.check_alike, self._parameters))
        self._settings = {
            "width": width,
            **plain(updates),
            **plain(wire),
            "timeout": None,  # may differ
            "scaler": plain(scaler.state_dict() if scaler is not None else {}),
            "buckets": self._cut.into,
            "reduce": plain(exchanges.reduce),
            "in_turns": self._in_turns,
            "seed": seed,
            "init_sync": init_sync,
            "device": device.type,
            "mesh": plain(() if self._island is None else self._island.shape),
            **{"codec" if name == "codec" else f"codec's {name}": value for name, value in plain(options).items()},
        }
        between = self._island.between if self._island else process_group
        self._ranks = given_ranks(ranks, between, DEFAULT_TIMEOUT if wire.timeout is None else wire.timeout)
        if self._island is not None:
            self._island.join(self._ranks)
        check_same_training(self.all_ranks, self._settings, self._cut)
        check_compute_alike(self.all_ranks, optimizer, clip, exchanges.gathered, options.codec)
        self._summing = Summing(self._ranks, self._island, device)
        self._if_never_closed = functools.partial(_end_unclosed, self._summing)
        try:
            self._summing.watch()
            connected = Connections(
                wire.all_reduce,
                self._ranks,
                timeout=self._ranks.timeout if wire.timeout is None else wire.timeout,
                segment_bytes=wire.segment_bytes,
                connections=wire.connections,
                rate_limit=wire.rate,
                device=device.type,
                buckets=len(self._cut.indices),
            )
            if self._loss_scale is not None:
                self._loss_scale.take()
            self._summing.start(
                connected,
                options,
                gathered=exchanges.gathered,
                seed=seed,
                skips=self._skip_nonfinite,
            )
            if init_sync:
                if self._island is not None:
                    self._island.share(model, self._parameters)
                share_rank_0s_values(model, self._parameters, self._ranks.rank, self._sum_in("Pipelined"))
                share_rank_0s_state(optimizer, self._ranks, self._sum_in("Pipelined"))
            if self._updates.predicts:
                self._hooks = TrueWeightsHooks(model, self._updates)
                warn_of_outsiders(model, self._parameters)
            for kind in exchanges.gathered:
                weights = [one for one in self._parameters if exchanges.of(one) == kind]
                if (hooks := gathering(kind).hooks(model, weights, self._loss_scale)) is not None:
                    self._packing.hooks[kind] = hooks
            if not self._in_turns and wire.cut != WHOLE:
                self._leaving = BackwardHooks(self.buckets, self._leave)
            drop_gradients(optimizer)
            self._own_steps.refuse_others()
            atexit.register(self._if_never_closed)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    @property
    def buffers_allocated(self) -> int:
        """Number of gradient buffers made so far for the parameters that are trained now: at most ``width``."""
        return self._packing.buffers_allocated

    @property
    def _parameters(self) -> list[Tensor]:
        """Parameters that are trained."""
        return self._cut.parameters

    @property
    def width(self) -> int:
        """Iterations in flight, K."""
        return self._updates.width

    @property
    def warmup_iterations(self) -> int:
        """First iterations that run at width 1."""
        return self._updates.warmup_iterations

    @property
    def next_summed(self) -> Sequence[int]:
        """Numbers of the parameters whose gradients the next step sums."""
        return self._cut.indices[self._turn] if self._in_turns else range(len(self._parameters))

    @property
    def buckets(self) -> list[list[Tensor]]:
        """Parameters of each bucket, in the order in which the buckets leave."""
        return self._cut.buckets

    @property
    def exchanges(self) -> dict[str, str]:
        """Exchange of each trained parameter of which ``reduce`` says one, by its name; empty with "matrix"."""
        return self._cut.exchanges.named(self._parameters)

    @property
    def closed(self) -> bool:
        """True once ``close`` was called."""
        return self._closed

    @property
    def failed(self) -> bool:
        """True if ``close`` would drop the gradients in flight, because of an error or an interruption."""
        return self._error is not None or self._half_done is not None or self._summing.thread.failed

    @property
    def weights(self) -> SwappedWeights:
        """True and predicted weights, one of which the parameters hold."""
        return self._updates.weights

    def step(self) -> StepReport:
        """Take over the gradients in ``.grad`` and apply the one that is due; see the class.

        Raises:
            CommunicationError: a rank was lost, or silent for longer than the timeout.
            OutOfStepError: another rank is in a different call or iteration.
            NonFiniteGradientError: the gradient that is due holds a NaN or an infinity. It is dropped.
            UserInputError: the pipeline was closed, parameters were frozen, unfrozen or added, gradients were added
                after their bucket had left, or were computed in evaluation mode.

        After an error, the parameters hold the true weights. No gradient is lost: after an interruption (Ctrl-C, a
        signal) all gradients that were not applied are still in flight, also in ``state_dict``.
        """
        self.check_usable()
        if self._leaving is not None:
            self._leaving.check_taken()
        self.check_gradients()
        check_unchanged(self._optimizer, self._cut.identities, "a pipeline")
        return self.exchange()

    def exchange(self) -> StepReport:
        """Do what ``step`` does, without its checks.

        It may be called within ``whole``: what that does is done once the gradients are handed over.
        """
        for dense in self._cut.dense:
            check_dense(dense)
        for check in self._checks:
            check()
        self._ranks.iteration = self.iteration
        with self.whole(f"taking over the gradients of iteration {self.iteration}"):
            # 1. Pack what has not left during the backward pass.
            outgoing = self._packing.next_outgoing(self.iteration)
            for number in range(self._left, len(self._cut.indices)):
                self._packing.pack(outgoing, number, self._ranks.world_size)
            for kept in self._packing.hooks.values():
                kept.forget()
            self._packing.left_out = ()
            # 2. Hand over.
            summed: Sequence[int] = [self._turn] if self._in_turns else range(len(self._cut.indices))
            self._hand_over(outgoing)
        # 3. to 5. Wait, apply and predict.
        self._ranks.enter("all-reduce", waiting=True)
        report = self._apply_until(self._updates.width_after(self.iteration) - 1)
        self._ranks.enter("compute")
        wire_bytes = report.wire_bytes + sum(
            self._summing.reducer.wire_bytes(outgoing.buffer.buckets[number], outgoing.iteration)
            for number in summed
            if self._cut.exchange[number] == "matrix"
        )
        return dataclasses.replace(report, spans=(*outgoing.packs, *report.spans), wire_bytes=wire_bytes)

    def flush(self) -> StepReport:
        """Wait for and apply all gradients in flight. Collective. Further steps may follow and fill the pipeline again.

        Gradients in ``.grad`` stay there for the next step, at the loss scale of those that will be added to them.

        Raises the same errors as ``step``, and ``UserInputError`` if buckets have left since then.
        """
        return self.apply_all()

    def apply_all(self) -> StepReport:
        """Do what ``flush`` does."""
        self.check_usable()
        self._check_whole("flush")
        if self._meeting is None:  # else an earlier call was interrupted
            self._meeting = self._meet("flush", lambda: None)
        scale = 1.0 if self._loss_scale is None else self._loss_scale.scale
        with set_aside_gradients(self._optimizer):
            report = self._apply_until(0)
        if self._loss_scale is not None:
            self._loss_scale.rescale(self._parameters, scale)
        self._meeting.result()
        self._meeting = None
        return report

    def add_to_next_gradient(self, left_out: Sequence[Tensor]) -> None:
        """Add what a codec has left out of the sums of other ranks, or of an earlier pipeline, to the next gradient.

        Args:
            left_out: residuals of its error feedback, one for each flat tensor of the gradient; none adds nothing.
        """
        self._packing.left_out = on_device(list(left_out), self._parameters[0].device)

    @contextlib.contextmanager
    def true_weights(self) -> Iterator[None]:
        """Make the model hold the weights that all ranks agree on while the context is open; changes then are kept.

        Evaluating the model and its ``state_dict`` do so by themselves; whatever reads or changes parameters needs it.
        """
        with self._updates.weights.held_true():
            yield

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Let backward passes add up, and no bucket leave, while the context is open. Without ``buckets`` gradients are
        sent only in ``step``, and backward passes before it add up anyway."""
        return contextlib.nullcontext() if self._leaving is None else self._leaving.held()

    def combine_buffers(self, how: Buffers = "average") -> None:
        """Set floating-point buffers to their "average" or to "rank-0"'s values, or leave them "own". Collective."""
        self.check_usable()
        self._check_whole("combine_buffers")
        combine_buffers(self.module, how, self._ranks, self._sum_in("combine_buffers"))
        if self._island is not None:
            self._island.combine_buffers(self.module, how)

    def average(self, tensors: Sequence[Tensor]) -> tuple[int, bool]:
        """Give all ranks the means of ``tensors`` over the ranks, unless a mean is not finite. Collective.

        Returns the number of bytes sent, and whether all means are finite, which all ranks find alike.
        """
        buffer = FlatBuffer(tensors)
        buffer.fill_from(tensors)
        take_shares(buffer.flats, self._ranks.world_size)
        self._sum_in("step")(buffer)
        for flat in buffer.flats:
            take_mean(flat, self._ranks.world_size)
        finite = all_finite(buffer)
        if finite:
            buffer.copy_to(tensors)
        return sum(self._summing.exact.wire_bytes(flat) for flat in buffer.flats), finite

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the averaged gradients in flight, after waiting for them, and of the state of the codec."""
        self.check_usable()
        self._check_whole("state_dict")
        if self._packing.left_out:
            raise UserInputError("state_dict must follow the step that adds what other codecs left out; got it before")
        in_flight = [gradient.state_dict() for gradient in self._in_flight]
        # Only now is the communication thread idle, and with it the reducer.
        return {
            "iteration": self.iteration,
            "world_size": self._ranks.world_size,
            "codec": self._codec_options.describe(),
            "buckets": self._cut.into,
            "strides": [memory_layout(parameter) for parameter in self._parameters],
            "reduce": self._cut.exchanges.reduce,
            "turn": self._turn,
            "in_flight": in_flight,
            "reducer": self._summing.reducer.state_dict(),
            **self._updates.state_dict(),
            "agreement": self._agreement.state_dict(),
            "loss_scale": None if self._loss_scale is None else self._loss_scale.state_dict(),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise what ``load_state_dict`` raises before it changes anything: see there."""
        self._summing.thread.check()
        if self._half_done is None:
            self._check_whole("load_state_dict")
        for name, own in (
            ("world_size", self._ranks.world_size),
            ("codec", self._codec_options.describe()),
            ("reduce", self._cut.exchanges.reduce),
            ("buckets", self._cut.into),
        ):
            if (before := state[name]) != own:
                raise UserInputError(f"{name} must be {before}, as in the state that is loaded; got {own}")
        check_layouts(state["strides"], self._parameters)
        check_shapes(state["agreement"]["missed"], self._parameters)
        for gradient in state["in_flight"]:
            check_sizes([as_real(flat).numel() for flat in gradient["flats"]], sizes_of_flats(self.buckets))
        self._summing.reducer.check_state(state["reducer"], self._cut.whole_buckets)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; the model must hold that moment's true weights. Gradients in flight are dropped.

        After an operation that was interrupted halfway, gradients in ``.grad`` and buckets that have left are dropped,
        too: all ranks must have been interrupted when the same buckets had left.

        Raises:
            CommunicationError: another rank has not sent a bucket or a gradient that has left on this rank.
            UserInputError: ``state`` is of a pipeline with another number of ranks, another codec, other buckets,
                another ``reduce`` or other trained parameters, or buckets have left since the last step. Nothing is
                changed.
        """
        self.check_state(state)
        self.load_checked(state)

    def load_checked(self, state: dict[str, Any]) -> None:
        """Continue from a ``state`` that ``check_state`` has accepted."""
        self._summing.thread.submit(lambda: None).result()  # until then, all that has left is summed in its buffer
        if self._half_done is not None:
            give_gradients(self._parameters, [None] * len(self._parameters))
            for kept in self._packing.hooks.values():
                kept.forget()
        self._error = self._half_done = self._meeting = None
        self._packing.left_out = ()
        self._updates.weights.adopt()
        if self._leaving is not None:
            self._leaving.begin_iteration()
        self._packing.drop_outgoing()
        while self._in_flight:
            self._packing.give_back(self._in_flight.popleft().buffer)
        self.iteration, self._turn = state["iteration"], state["turn"]
        device = self._parameters[0].device
        self._summing.reducer.load_state_dict(on_device(state["reducer"], device))
        self._updates.load_state_dict(on_device({name: state[name] for name in ("prediction", "guard")}, device))
        self._agreement.load_state_dict(on_device(state["agreement"], device))
        if self._loss_scale is not None:
            self._loss_scale.load_state_dict(state["loss_scale"])
        for entry in state["in_flight"]:
            self._in_flight.append(InFlight.of_state(entry, self._packing.free_buffer(), device))
        self._predict()

    def fail(self, error: BaseException) -> None:
        """End every wait of this pipeline at once with ``error``, such as a failure of another rank. Thread-safe."""
        self._summing.thread.fail(error)

    def close(self) -> None:
        """Apply the gradients in flight, and end the communication thread and its connections. May be called twice.

        It returns when all ranks have called it, or after ``timeout`` seconds without one of them.

        After an error it waits for no other rank: it drops the gradients in flight with a warning, and leaves the true
        weights in the model.

        Raises the same errors as ``flush``, and ``ReplicasDivergedError`` if the ranks' weights differ, those of frozen
        parameters, too; the pipeline is closed then, too.
        """
        if self._closed:
            return
        failure: BaseException | None = None
        together = False
        try:
            if not self.failed:
                self._check_whole("close")
                if self._in_flight:
                    self.apply_all()
                # Another rank may come much later, and a process that exits while gloo waits for it is aborted.
                failure = self._meet("close", self._summing.wait_for_all).exception()
                together = failure is None
                if together:  # all ranks are here
                    self.check_replicas()
        finally:
            self._closed = True
            atexit.unregister(self._if_never_closed)
            self._summing.stop_watching()
            self._drop_in_flight()
            for hooks in (self._hooks, *self._packing.hooks.values(), self._leaving, self._own_steps):
                if hooks is not None:
                    hooks.remove()
            if self._loss_scale is not None:
                self._loss_scale.leave()
            self._summing.close(together=together)
        if isinstance(failure, OutOfStepError):  # all gradients are applied, so nobody misses a rank that is lost now
            raise failure

    def check_replicas(self) -> None:
        """Raise ``ReplicasDivergedError`` if the ranks hold different weights. Collective."""
        check_same_weights(self.module, self._parameters, self._ranks)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._error = self._error or error
        self.close()

    def _drop_in_flight(self) -> None:
        self._updates.weights.restore()
        if self._in_flight:
            iterations = ", ".join(str(gradient.iteration) for gradient in self._in_flight)
            warnings.warn(
                f"the pipeline was closed after an error: gradients in flight are dropped (iterations {iterations}), "
                "and the model holds the weights without them",
                RuntimeWarning,
                stacklevel=3,
            )
        self._in_flight.clear()
        self._packing.clear()

    def check_usable(self) -> None:
        self._summing.thread.check()
        if self._half_done is not None:
            raise RunError(
                f"{self._half_done} was interrupted halfway, so this rank's weights are no other rank's: "
                "load a state_dict, or continue from a checkpoint"
            )

    def check_gradients(self, *, new: bool = False) -> None:
        """Refuse gradients that were computed in evaluation mode; see ``TrueWeightsHooks.check_gradients``."""
        if self._hooks is not None:
            self._hooks.check_gradients(new=new)

    def _check_whole(self, call: str) -> None:
        """Refuse ``call`` while some buckets of a gradient have left and others have not."""
        if self._left:
            raise UserInputError(
                f"{call} must not be called between backward() and step() with buckets; got it while those of "
                f"iteration {self.iteration} leave"
            )

    @contextlib.contextmanager
    def whole(self, what: str) -> Iterator[None]:
        """Make the pipeline unusable if the context, which does ``what``, is interrupted halfway."""
        self._half_done = what
        try:
            yield
        except (UserInputError, NonFiniteGradientError):  # refused before anything was changed
            self._half_done = None
            raise
        self._half_done = None

    @property
    def all_ranks(self) -> list[Ranks]:
        """The ranks that exchange gradients and, with islands, the members of this rank's island."""
        return [self._ranks, *([] if self._island is None else self._island.members)]

    def _meet(self, call: str, job: Callable[[], T]) -> Future[T]:
        """Have the communication thread do ``job`` after sending a header that says that this rank is at ``call``."""
        self._meeting = None  # a flush that was interrupted before this call is not resumed
        return self._summing.meet(call, self.iteration, job)

    def _leave(self) -> bool:
        """Let the next bucket leave during the backward pass, unless the next step refuses the parameters."""
        self.check_usable()
        self.check_gradients(new=True)
        # Only the first bucket asks: parameters do not change between the buckets of one backward pass.
        if not self._left and trainable_identities(self._optimizer) != self._cut.identities:
            return False
        assert self._leaving is not None
        number = self._leaving.left
        check_dense(self._cut.dense[number])
        if self._island is not None:
            self._island.check_alike(self.buckets[number])
        with self.whole(f"taking over the gradients of iteration {self.iteration}"):
            outgoing = self._packing.next_outgoing(self.iteration)
            self._packing.pack(outgoing, number, self._ranks.world_size)
            self._meet("step", self._mean_of(outgoing, number))
            self._leaving.left += 1
        return True

    def _hand_over(self, outgoing: Outgoing) -> None:
        """Let the communication thread sum the buckets that have not left, all of which are packed."""
        unapplied = self._updates.hand_over(outgoing.local)
        own = [gradient for gradient in outgoing.local if gradient is not None]
        own_is_finite = functools.partial(are_finite, own) if self._keeps_own else lambda: all(outgoing.own_finite)
        if self._skip_nonfinite and unapplied.kept and not self._is_so(are_finite(own)):
            unapplied = dataclasses.replace(unapplied, kept=[])  # it will cause no update
            own_is_finite = functools.partial(bool, False)
        outgoing.local = []
        *early, last = [self._turn] if self._in_turns else range(self._left, len(self._cut.indices))
        self._turn = (last + 1) % len(self._cut.indices)
        for number in early:
            self._meet("step", self._mean_of(outgoing, number))
        take_last_mean = functools.partial(
            self._summing.take_last_mean,
            outgoing,
            last,
            self._cut.exchange[last],
            functools.partial(self._updates.compare, outgoing.buffer.views, unapplied),
            looks=not self._keeps_own,
            agreed_norm=self._updates.wants_norms,
        )
        reduction = self._meet("step", take_last_mean)
        self._packing.outgoing = None  # before it is in flight: no interruption may leave the buffer in two places
        self._in_flight.append(
            InFlight(outgoing.iteration, outgoing.buffer, unapplied, outgoing.scale, own_is_finite, reduction)
        )
        if self._leaving is not None:
            self._leaving.begin_iteration()
        self.iteration += 1

    @property
    def _left(self) -> int:
        """Number of buckets that have left since the last step."""
        return 0 if self._leaving is None else self._leaving.left

    def _is_so(self, flag: bool) -> bool:
        """Return True if ``flag`` is true on all ranks that hold the model together."""
        return flag if self._island is None else self._island.is_so(flag)

    @property
    def _keeps_own(self) -> bool:
        """True if this rank's own gradients are kept until their mean has arrived, as they are at width 1."""
        return self._updates.keeps_gradients or self.width == 1

    def _mean_of(self, outgoing: Outgoing, number: int) -> Callable[[], None]:
        """Return a job that takes the mean of a bucket that is not the last one."""
        exchange, looks = self._cut.exchange[number], not self._keeps_own
        return functools.partial(self._summing.take_mean, outgoing, number, exchange, looks=looks)

    def _apply_until(self, remaining: int) -> StepReport:
        """Apply the oldest gradients until only ``remaining`` are in flight, and predict with those."""
        self._updates.weights.restore()
        report: StepReport | None = None
        try:
            while len(self._in_flight) > remaining:
                newest = self._apply_oldest()
                report = newest if report is None else report.followed_by(newest)
            begin = time.perf_counter()
            self._predict()
        except BaseException as error:
            self._updates.weights.restore()
            self._error = error
            raise
        self._error = None
        report = report or StepReport()
        if not self._updates.weights.are_predicted:
            return report
        predict = Span("predict", self.iteration, begin, time.perf_counter())
        return dataclasses.replace(report, spans=(*report.spans, predict))

    def _apply_oldest(self) -> StepReport:
        """Wait for the oldest gradient in flight, and apply it or leave it out. An interrupted wait changes nothing."""
        gradient, report = self._wait_for_oldest()
        begin = time.perf_counter()
        fell_back = False
        with self.whole(f"the update of iteration {gradient.iteration}"):
            if self._loss_scale is not None:
                self._loss_scale.observe(bool(report.applied), gradient.scale)
            if report.applied:
                with self._own_steps.taken():
                    fell_back = self._updates.arrived(
                        gradient.buffer.views,
                        [self._guess_of(gradient)],
                        norm=report.gradient_norm,
                        iteration=self.iteration,
                    )
            self._take_out(gradient)
        self._check_finite(report)
        if report.applied:
            self._check_copies(gradient.buffer.flats)
        update = Span("update", gradient.iteration, begin, time.perf_counter())
        return dataclasses.replace(report, spans=(*report.spans, update), fell_back=fell_back)

    def _wait_for_oldest(self) -> tuple[InFlight, StepReport]:
        """Return the oldest gradient in flight when its mean has arrived, and a report of what is to become of it."""
        gradient = self._in_flight[0]
        begin = time.perf_counter()
        reduction = gradient.reduction.result()
        wait = Span("wait", gradient.iteration, begin, time.perf_counter())
        culprits: list[int] = []
        if not reduction.finite:  # on all ranks, in the same step
            own_is_finite = self._is_so(gradient.own_is_finite())
            culprits = nonfinite_ranks(self._ranks, "gradients", own_is_finite)
        return gradient, StepReport(
            applied=(gradient.iteration,) if reduction.finite else (),
            skipped=() if reduction.finite else (gradient.iteration,),
            nonfinite_ranks=tuple(culprits),
            spans=(*reduction.spans, wait),
            wire_bytes=reduction.gathered_bytes,
            gradient_norm=reduction.norm if reduction.finite else None,
            comparison=reduction.comparison,
        )

    def _check_copies(self, gradients: Sequence[Tensor]) -> None:
        """Look once whether the optimizer, which has stepped with ``gradients``, keeps one of them itself."""
        if not self._copies_gradients:
            check_copies_gradients(self._optimizer, gradients)
            self._copies_gradients = True

    def _check_finite(self, report: StepReport) -> None:
        if report.skipped and not self._skip_nonfinite:
            raise NonFiniteGradientError(report.skipped[0], report.nonfinite_ranks, self._ranks.world_size)

    def _guess_of(self, gradient: InFlight) -> Guessed:
        return Guessed(gradient.unapplied, gradient.reduction.result().comparison, self._agreement)

    def _take_out(self, gradient: InFlight) -> None:
        """Return the buffer of the oldest gradient in flight to the pool."""
        self._in_flight.popleft()
        self._packing.give_back(gradient.buffer)

    def _predict(self) -> None:
        self._updates.predict([gradient.unapplied for gradient in self._in_flight], self._agreement)

    def _sum_in(self, call: str) -> SumOverRanks:
        """Return the function that sums a buffer over the ranks in this ``call``."""
        return lambda buffer: self._meet(call, functools.partial(self._summing.sum_exactly, buffer)).result()


def _end_unclosed(summing: Summing) -> None:
    """End the threads of a pipeline that is open when the program ends; a thread in a wait of gloo's would abort it."""
    warn(
        "a pipeline was not closed, so the gradients in flight are not applied: call close() at the end of the "
        "training, or use the pipeline in a with statement"
    )
    summing.stop_watching()
    summing.close(together=False)
