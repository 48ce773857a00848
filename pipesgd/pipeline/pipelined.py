"""Pipe-SGD: the all-reduce of one iteration runs while the next ones compute."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.codecs.own import codec_options
from pipesgd.comm.transport import Group, Mesh
from pipesgd.flat_buffer import check_dense, make_dense, pack_gradients
from pipesgd.optim.step import check_unchanged, trainable_identities
from pipesgd.pipeline.buckets import BackwardHooks
from pipesgd.pipeline.cut import Cut
from pipesgd.pipeline.exchanges import Exchanges, words_of
from pipesgd.pipeline.in_flight import WHOLE as WHOLE_GRADIENTS
from pipesgd.pipeline.in_flight import Outgoing
from pipesgd.pipeline.on_pipeline import OnPipeline
from pipesgd.pipeline.pipeline import Pipeline
from pipesgd.ranks import Ranks
from pipesgd.reducers.base import Hooks
from pipesgd.reducers.make import check_eligible, check_momentum, gathering
from pipesgd.rules import PARTS, REDUCE, check_rules, options_of_sections
from pipesgd.sections import Updates, Wire
from pipesgd.strategy import FOLDED, Span, StepReport
from timing_model.buckets import WHOLE


class Pipelined(OnPipeline):
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
            outside of ``accumulating`` must be followed by a ``step``; topk is refused.

            ``reduce`` is the exchange of gradients: of all parameters for which it is made, or a mapping from the names
            of parameters to the exchange of each. "matrix" sums gradients whole. "rows" gathers, of embeddings'
            gradients, the rows that are not zero (``pipesgd.systems.exchanges.rows``). "factors" gathers, for linear
            layers' weights, the inputs and the output gradients of the batch, and multiplies those of all ranks
            (``pipesgd.systems.exchanges.factors``). Such a weight may be used nowhere else, and nothing but a backward
            pass may change its ``.grad``. Both are exact and uncompressed, and all other gradients are summed whole.
            Embeddings that are exchanged by rows may be sparse. Topk, all-reduce native and GPUs are refused,
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
        wire, updates, options = wire or Wire(), updates or Updates(), codec_options(codec)
        given = options_of_sections(wire, fragments=1, all_reduce_name=wire.all_reduce_name, **options.facts())
        check_rules(given, PARTS)
        exchanges = Exchanges(model, wire.reduce)
        cut = Cut.of(model, optimizer, str(wire.buckets), exchanges)
        given.reduce = words_of(wire.reduce) if exchanges.gathered else WHOLE_GRADIENTS
        given.device = cut.parameters[0].device.type
        check_rules(given, REDUCE)
        if isinstance(wire.reduce, str) and mesh is None:  # else refused by the pipeline
            check_eligible(wire.reduce, model, cut.parameters)
        super().__init__(
            Pipeline(
                model,
                optimizer,
                cut,
                width=width,
                codec=options,
                wire=wire,
                updates=updates,
                scaler=scaler,
                seed=seed,
                init_sync=init_sync,
                ranks=ranks,
                process_group=process_group,
                mesh=mesh,
            )
        )
        self._optimizer = optimizer
        self._cut = cut
        self._of_exchanges: dict[str, Hooks] = {}
        """Hooks that keep what gathered gradients are made of, by the exchange that needs some."""
        self._leaving: BackwardHooks | None = None
        """Hooks that let buckets leave during the backward pass; None if none do."""
        self._checks: list[Callable[[], None]] = []
        """Checks before each step that options ask for."""
        if options.own_momentum:
            self._checks.append(functools.partial(check_momentum, options, optimizer))
        if self.pipeline.island is not None:
            self._checks.append(functools.partial(self.pipeline.island.check_alike, cut.parameters))
        try:
            for kind in exchanges.gathered:
                weights = [one for one in cut.parameters if exchanges.of(one) == kind]
                hooks = gathering(kind).hooks(model, weights, self.pipeline.update.loss_scale)
                if hooks is not None:
                    self._of_exchanges[kind] = hooks
            if wire.cut != WHOLE:
                self._leaving = BackwardHooks(cut.buckets, self._leave, lambda: self.pipeline.flight.left)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    @property
    def buffers_allocated(self) -> int:
        """Number of gradient buffers made so far: at most ``width``."""
        return self.pipeline.flight.buffers_allocated

    @property
    def width(self) -> int:
        """Iterations in flight, K."""
        return self.pipeline.update.width.most

    @property
    def buckets(self) -> list[list[Tensor]]:
        """Parameters of each bucket, in the order in which the buckets leave."""
        return self._cut.buckets

    @property
    def exchanges(self) -> dict[str, str]:
        """Exchange of each trained parameter of which ``reduce`` says one, by its name; empty with "matrix"."""
        return self._cut.exchanges.named(self._cut.parameters)

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
        pipeline, flight = self.pipeline, self.pipeline.flight
        pipeline.check_usable()
        if self._leaving is not None:
            self._leaving.check_taken()
        pipeline.check_gradients()
        check_unchanged(self._optimizer, self._cut.identities, "a pipeline")
        for dense in self._cut.dense:
            check_dense(dense)
        for check in self._checks:
            check()
        flight.ranks.iteration = pipeline.iteration
        with pipeline.whole(f"taking over the gradients of iteration {pipeline.iteration}"):
            # 1. Pack what has not left during the backward pass.
            outgoing, numbers = flight.next_outgoing(pipeline.iteration), range(len(self._cut.indices))
            for number in numbers[flight.left :]:
                self._pack(outgoing, number)
            for kept in self._of_exchanges.values():
                kept.forget()
            # 2. Hand over.
            gradient = pipeline.depart(outgoing, numbers[flight.left :])
            if self._leaving is not None:
                self._leaving.begin_iteration()
        # 3. to 5. Wait, apply and predict.
        report = pipeline.advance(gradient, numbers, outgoing.packs)
        self.tally.reports.append(report)
        if len(self.tally.reports) == FOLDED:
            self.tally.fold()
        return report

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Let backward passes add up, and no bucket leave, while the context is open. Without ``buckets`` gradients are
        sent only in ``step``, and backward passes before it add up anyway."""
        return contextlib.nullcontext() if self._leaving is None else self._leaving.held()

    def regroup(self, ranks: Ranks | None = None, left_out: Sequence[Tensor] | None = None) -> None:
        """Continue with other ranks, or on new connections to the same ones. Collective.

        All sums that have begun end before, and gradients in flight stay there. What the codec has left out of sums is
        added to the next gradient, as a mean over the ranks that it is of, so that it is lost to nobody.

        Args:
            ranks: the ranks from now on, which must hold the same weights; by default they stay the same.
            left_out: the mean of what the codec of other ranks, or of an earlier pipeline, has left out, one for each
                flat tensor of the gradient; by default it is that of this pipeline's ranks.
        """
        self.pipeline.regroup(ranks, left_out)

    def load_checked(self, state: dict[str, Any]) -> None:
        """Continue from a ``state`` that ``check_state`` has accepted."""
        halfway = self.pipeline.half_done is not None
        super().load_checked(state)
        if halfway:
            for kept in self._of_exchanges.values():
                kept.forget()
        if self._leaving is not None:
            self._leaving.begin_iteration()

    def close(self) -> None:
        """Apply the gradients in flight and end; see ``OnPipeline.close``."""
        try:
            super().close()
        finally:
            for hooks in (*self._of_exchanges.values(), self._leaving):
                if hooks is not None:
                    hooks.remove()

    def _leave(self) -> bool:
        """Let the next bucket leave during the backward pass, unless the next step refuses the parameters."""
        pipeline, flight = self.pipeline, self.pipeline.flight
        pipeline.check_usable()
        pipeline.check_gradients(new=True)
        number = flight.left
        # Only the first bucket asks: parameters do not change between the buckets of one backward pass.
        if not number and trainable_identities(self._optimizer) != self._cut.identities:
            return False
        check_dense(self._cut.dense[number])
        if pipeline.island is not None:
            pipeline.island.check_alike(self.buckets[number])
        with pipeline.whole(f"taking over the gradients of iteration {pipeline.iteration}"):
            outgoing = flight.next_outgoing(pipeline.iteration)
            self._pack(outgoing, number)
            flight.leave(outgoing, number)
        return True

    def _pack(self, outgoing: Outgoing, number: int) -> None:
        """Move a bucket's gradients, divided by the loss scale, from ``.grad`` into its flat buffer."""
        begin = time.perf_counter()
        parameters, how = self._cut.buckets[number], self._cut.exchange[number]
        loss_scale = self.pipeline.update.loss_scale
        if how == "rows":
            make_dense(parameters)
        if loss_scale is not None:
            outgoing.scale = loss_scale.divide(parameters)
        if how in self._of_exchanges:
            outgoing.parts = [self._of_exchanges[how].look(parameter) for parameter in parameters]
        gradients = pack_gradients(parameters, outgoing.buffer.buckets[number])
        for index, gradient in zip(self._cut.indices[number], gradients, strict=True):
            outgoing.local[index] = gradient
        outgoing.packs.append(Span("pack", outgoing.iteration, begin, time.perf_counter()))
