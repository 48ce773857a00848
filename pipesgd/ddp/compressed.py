"""Gradients of a DistributedDataParallel program with a codec on the wire, summed in their own iteration."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipesgd.checks import check_as_loaded, check_at_least, check_one_of
from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import BUCKET_CODECS, CodecOptions
from pipesgd.codecs.own import codec_options
from pipesgd.comm.transport import Group
from pipesgd.ddp.hook import (
    BucketHook,
    Places,
    check_dense_embeddings,
    check_model,
    done,
    gradients_of,
    register_comm_hook,
)
from pipesgd.ddp.proof import Proof
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import BucketedBuffer, FlatBuffer, check_layouts, memory_layout, on_device, real_numel
from pipesgd.functions import OWN, kind
from pipesgd.membership.secret import job_secret
from pipesgd.pipeline.flight import Flight
from pipesgd.pipeline.in_flight import WHOLE, Layout, Outgoing
from pipesgd.pipeline.on_pipeline import taken_over
from pipesgd.pipeline.sameness import check_same_products, check_same_settings, plain, settings_of
from pipesgd.planning import accuracy
from pipesgd.ranks import current
from pipesgd.reducers.base import OfParameters, added_by_place, added_up, as_real
from pipesgd.rules import CODEC, check_rules, options_of_sections
from pipesgd.sections import Wire, differing
from pipesgd.strategy import Span, StepReport, Tally, Totals


def compress(
    ddp_model: DistributedDataParallel,
    codec: str | CodecOptions | OwnCodec = "int8",
    *,
    wire: Wire | None = None,
    seed: int = 0,
    process_group: Group | None = None,
) -> CompressedBuckets:
    """Compress the gradients of ``ddp_model`` on the wire; the loop stays as it is, and synchronous.

    torch's buckets are summed during the backward pass, one after the other. Error feedback and factors of low rank,
    where the codec has them, belong to the parameters: they stay when torch splits its buckets again, as it does after
    a first iteration.

    Args:
        ddp_model: a model in DistributedDataParallel without a communication hook.
        codec: encoding of gradients: a name, an object such as ``Int4(64)``, or an ``OwnCodec``; all but topk.
        wire: how gradients travel, as in ``pipesgd.Pipelined``, without ``rate_limit``, ``buckets`` and ``reduce``. The
            timeout is by default that of operations of ``process_group``: half an hour with gloo, unless the group was
            made with another one.
        seed: seed of the random numbers of stochastic rounding.
        process_group: the group whose ranks sum their gradients; by default that of ``ddp_model``.

    Raises:
        UserInputError: the model has a communication hook, or a value is out of range.
        CommunicationError: a rank could not be reached.
    """
    return CompressedBuckets(
        ddp_model,
        codec_options(codec),
        wire=wire or Wire(),
        seed=seed,
        process_group=process_group,
    )


class CompressedBuckets:
    """Sums of torch's buckets with a codec on the wire, during the backward pass. ``compress`` makes one.

    It is the wire half of a pipeline alone: torch's buckets leave as they come, and their means are waited for at the
    end of the backward pass. As a context manager it is closed at the end of the block.
    """

    report = StepReport()
    """Report of the last backward pass: its communication, how long the end of it waited, and the bytes sent."""

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        options: CodecOptions,
        *,
        wire: Wire,
        seed: int,
        process_group: Group | None,
    ):
        check_model(ddp_model)
        check_dense_embeddings(ddp_model)
        check_one_of("codec", kind(options.codec), (*BUCKET_CODECS, OWN))
        check_rules(options_of_sections(all_reduce_name=wire.all_reduce_name, **options.facts()), CODEC)
        read = ("all_reduce", "segment_bytes", "connections", "transport", "secret_file", "timeout")
        for name, value in differing(wire, but=read).items():
            raise UserInputError(f"{name} must be left out of compress, which sums torch's buckets; got {value!r}")
        check_at_least("seed", seed, 0)
        self.iteration = 0
        self._parameters = [parameter for parameter in ddp_model.parameters() if parameter.requires_grad]
        self._places = Places(self._parameters)
        self._carried: dict[int, Tensor] = {}
        """Values, by places of their parameters, that a single rank adds to its next gradient, since it sends nothing
        and would never add what others left out."""
        self._waiting: dict[int, list[Tensor]] = {}
        """State of parameters, by their places, whose bucket has not been seen yet."""
        ranks = current(wire.timeout, process_group or ddp_model.process_group, job_secret(wire.secret_file))
        check_same_settings(
            ranks, {**settings_of(wire, self._parameters[0].device.type), "seed": seed, **plain(options.settings())}, {}
        )
        if options.multiplies:
            check_same_products(ranks, self._parameters[0].device, f"with codec {options.codec}")
        self._codec = options.describe()
        self._proof: Proof | None = None
        self.flight: Flight[None] = Flight(
            ranks,
            self._layout(range(len(self._parameters))),
            options,
            wire,
            seed=seed,
            skips=options.remembers,
            unclosed=functools.partial(_end_unclosed, weakref.ref(self)),
        )
        self._of_buckets: BucketHook | None = None
        try:
            self.flight.connect()
            self.tally = Tally(self.flight.uncompressed_bytes())
            """Reports of all backward passes, which ``totals`` adds up."""
            self._of_buckets = register_comm_hook(ddp_model, self.take_bucket)
            trained = self._parameters
            known = functools.partial(accuracy.line, ddp_model, codec=options)
            self._proof = Proof("compress", self.flight, options, self.tally, trained, known, hides=False)
        except BaseException:
            self._end()
            raise

    def take_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to replace a bucket's gradients by their mean; with the last bucket, wait for all of them."""
        flight, number = self.flight, bucket.index()
        flight.thread.check()
        flight.ranks.iteration = self.iteration
        if number == 0:
            flight.outgoing, flight.left = Outgoing(self.iteration, _Buckets(), []), 0
        outgoing = flight.outgoing
        assert outgoing is not None
        outgoing.buffer.buckets.append(_Bucket(bucket))
        places = [self._places[id(parameter)] for parameter in bucket.parameters()]
        self._lay_out(number, places)
        if self._carried:
            self._add_carried(bucket.buffer(), places)
        if bucket.is_last():
            self._finish(outgoing, number)
        else:
            flight.leave(outgoing, number)
        return done(bucket.buffer())

    def totals(self) -> Totals:
        """Return the totals of all iterations so far: times, hidden share and bytes."""
        return self.tally.totals()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of iterations and this rank's state of the codec, needed to continue after a restart.

        torch splits its buckets again after the first iteration of a resumed run: sums may differ in their last bits.
        """
        kept = self._waiting | self._in_use()
        return {
            "iteration": self.iteration,
            "rank": self.flight.ranks.rank,
            **self._exchange(),
            "strides": [memory_layout(parameter) for parameter in self._parameters],
            "kept": [kept.get(place, []) for place in range(len(self._parameters))],
            "carried": {place: value.clone() for place, value in self._carried.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of this rank, with the same model.

        Raises:
            UserInputError: the number of ranks or the codec was another one, or parameters were in another memory
                order.
        """
        check_as_loaded(state, self._exchange())
        check_layouts(state["strides"], self._parameters)
        self.flight.wait_until_summed()
        self.iteration = state["iteration"]
        self._forget_from(0)
        self._waiting = dict(enumerate(on_device(state["kept"], self.flight.device)))
        self._carried = on_device(dict(state["carried"]), self.flight.device)

    def _exchange(self) -> dict[str, Any]:
        """Return what must be as in a state that is loaded."""
        return {"world_size": self.flight.ranks.world_size, "codec": self._codec}

    def load_members(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the ``states`` of another number of ranks, with the same model.

        What the codec has left out of the gradients of former ranks is added as with ``Pipelined.load_members``.

        Args:
            states: the ``state_dict`` of all former ranks, or at least of those that this rank takes over.

        Raises:
            UserInputError: states are missing, or are of several moments; or parameters were in another memory order.
        """
        ranks = self.flight.ranks
        alike, taken = taken_over(states, ranks.rank, ranks.world_size)
        kept: list[list[Tensor]] = []
        for place, of_alike in enumerate(alike["kept"]):  # the residual, and what all ranks hold alike
            residuals = added_up([state["kept"][place][:1] for state in taken])
            kept.append([*(residuals or [torch.zeros_like(one) for one in of_alike[:1]]), *of_alike[1:]])
        left_out = [state["carried"] for state in taken]
        if ranks.world_size == 1:
            left_out.append({place: own[0] for place, own in enumerate(kept) if own})
            kept = [[] for _ in kept]
        carried = added_by_place(left_out)
        now = {"rank": ranks.rank, "world_size": ranks.world_size, "kept": kept, "carried": carried}
        self.load_state_dict(alike | now)

    def close(self) -> None:
        """End the communication, when all ranks have called it. The model may then be attached, or compressed again."""
        flight = self.flight
        try:
            if not flight.thread.failed:
                with contextlib.suppress(UserInputError):  # closed before
                    flight.meet("close", self.iteration, flight.wait_for_all).result()
                    self._end_proof()
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def _end_proof(self) -> None:
        if self._proof is not None:
            self._proof.end(self.iteration)

    def _end(self) -> None:
        if self._of_buckets is not None:
            self._of_buckets.release(self.take_bucket)
        self.flight.drop()
        self.flight.close(together=False)

    def _add_carried(self, flat: Tensor, places: Sequence[int]) -> None:
        """Add what is carried to the gradients of the parameters at these ``places``, side by side in ``flat``."""
        parts = as_real(flat).split([real_numel(self._parameters[place]) for place in places])
        for place, part in zip(places, parts, strict=True):
            if (value := self._carried.pop(place, None)) is not None:
                part.add_(value)

    def _finish(self, outgoing: Outgoing, last: int) -> None:
        flight, ranks = self.flight, self.flight.ranks
        begin = time.perf_counter()
        gradient = flight.depart(outgoing, [last], None, lambda: None, None)
        ranks.enter("all-reduce", waiting=True)
        arrived = gradient.reduction.result()
        flight.in_flight.clear()
        ranks.enter("compute")
        wait = Span("wait", self.iteration, begin, time.perf_counter())
        self.report = StepReport(
            applied=(self.iteration,),
            spans=(*arrived.spans, wait),
            wire_bytes=flight.wire_bytes(gradient, range(last + 1)),
            gradient_norm=arrived.norm if arrived.finite else None,
        )
        self.tally.take(self.report)
        self.iteration += 1

    # ---- State of the codec, which belongs to the parameters

    def _layout(self, *buckets: Sequence[int]) -> Layout:
        return Layout(self._parameters, buckets, [WHOLE] * len(buckets))

    def _lay_out(self, number: int, places: Sequence[int]) -> None:
        """Let bucket ``number`` be of the parameters at these ``places``, with the state that these have."""
        flight, known = self.flight, self.flight.layout.buckets
        if number < len(known) and list(known[number]) == places:
            return
        if number < len(known):  # torch has split its buckets again
            flight.wait_until_summed()
            self._waiting |= self._in_use()
            self._forget_from(number)
        flight.layout = self._layout(*known[:number], places)
        waiting = [self._waiting.pop(place, []) for place in places]
        if any(waiting):
            flight.wait_until_summed()
            assert flight.outgoing is not None
            flight.reducer.state(flight.outgoing.buffer.buckets[number])  # makes room
            for own, kept in zip(self._state_of(number), waiting, strict=True):
                for tensor, value in zip(own, kept, strict=False):  # a parameter may have none
                    tensor.copy_(value)

    def _state_of(self, number: int) -> list[list[Tensor]]:
        """Return the state of each parameter of bucket ``number``."""
        parameters = [self._parameters[place] for place in self.flight.layout.buckets[number]]
        return self._reducer.state_of(number, parameters)

    @property
    def _reducer(self) -> OfParameters:
        return cast(OfParameters, self.flight.reducer)

    def _in_use(self) -> dict[int, list[Tensor]]:
        """Return copies of the state of all buckets, by the places of their parameters."""
        self.flight.wait_until_summed()
        return {
            place: [tensor.clone() for tensor in own]
            for number, places in enumerate(self.flight.layout.buckets)
            for place, own in zip(places, self._state_of(number), strict=True)
            if own
        }

    def _forget_from(self, number: int) -> None:
        """Forget the state of this bucket and the later ones, and what it is of."""
        known = self.flight.layout.buckets
        self._reducer.forget_from(number)
        self.flight.layout = self._layout(*known[:number])
        self._waiting = {
            place: one for place, one in self._waiting.items() if place not in set().union(*known[:number])
        }


def _end_unclosed(compressed: Callable[[], CompressedBuckets | None]) -> None:
    """Say what the exchanges have cost, if the program ends without ``close``."""
    found = compressed()
    if found is not None and not found.flight.thread.failed:
        found._end_proof()


class _Buckets(BucketedBuffer):
    """The buckets that torch has handed over in a backward pass."""

    def __init__(self) -> None:
        super().__init__([], [])


class _Bucket(FlatBuffer):
    """Gradients of a bucket of torch, in its own memory."""

    def __init__(self, bucket: GradBucket):
        self.first = bucket.index()
        self.flats = [bucket.buffer()]
        self.views = gradients_of(bucket)
