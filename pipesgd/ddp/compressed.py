"""Gradients of a DistributedDataParallel program with a codec on the wire, summed in their own iteration."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipesgd.checks import check_at_least, check_one_of
from pipesgd.codecs.base import OwnCodec, mixed
from pipesgd.codecs.options import DENSE_CODECS, CodecOptions
from pipesgd.codecs.own import codec_options
from pipesgd.comm.connections import Connections
from pipesgd.comm.thread import CommunicationThread
from pipesgd.comm.transport import Group
from pipesgd.ddp.hook import BucketHook, check_dense_embeddings, check_model, done, gradients_of, register_comm_hook
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import FlatBuffer, all_finite, check_layouts, memory_layout, real_numel
from pipesgd.functions import OWN, kind
from pipesgd.pipeline.sameness import check_same_settings, plain
from pipesgd.ranks import current
from pipesgd.reducers.base import mean_over_ranks
from pipesgd.reducers.dense import DenseReducer
from pipesgd.reducers.make import compiled_codec, dense_reducer
from pipesgd.rules import CODEC, check_rules, options_of_sections
from pipesgd.sections import Wire, differing
from pipesgd.strategy import Span, StepReport


def compress(
    ddp_model: DistributedDataParallel,
    codec: str | CodecOptions | OwnCodec = "int8",
    *,
    wire: Wire | None = None,
    seed: int = 0,
    process_group: Group | None = None,
) -> CompressedBuckets:
    """Compress the gradients of ``ddp_model`` on the wire; the loop stays as it is, and synchronous.

    torch's buckets are summed during the backward pass, one after the other. Error feedback, where the codec has it,
    belongs to the parameters: it stays when torch splits its buckets again, as it does after a first iteration.

    Args:
        ddp_model: a model in DistributedDataParallel without a communication hook.
        codec: encoding of gradients: a name, an object such as ``Int4(64)``, or an ``OwnCodec``; all but topk and
            powersgd.
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

    As a context manager it is closed at the end of the block.
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
        check_one_of("codec", kind(options.codec), (*DENSE_CODECS, OWN))
        check_rules(options_of_sections(all_reduce_name=wire.all_reduce_name, **options.facts()), CODEC)
        for name, value in differing(wire, but=("all_reduce", "segment_bytes", "connections", "timeout")).items():
            raise UserInputError(f"{name} must be left out of compress, which sums torch's buckets; got {value!r}")
        check_at_least("seed", seed, 0)
        self.iteration = 0
        self._options = options
        self._parameters = [parameter for parameter in ddp_model.parameters() if parameter.requires_grad]
        self._seed = seed
        self._ranks = current(wire.timeout, process_group or ddp_model.process_group)
        settings = {**plain(wire), "timeout": None, "seed": seed}  # timeouts may differ
        check_same_settings(self._ranks, settings | plain(options), {})
        device = self._parameters[0].device
        self._connections = Connections(
            wire.all_reduce,
            self._ranks,
            timeout=self._ranks.timeout,
            segment_bytes=wire.segment_bytes,
            connections=wire.connections,
            device=device.type,
        )
        self._thread = CommunicationThread(device)
        self._stop_watching = self._ranks.watch(self._thread.fail)
        self._reducers: dict[int, tuple[list[int], DenseReducer]] = {}
        """Parameters of each bucket, by their ids, and its reducer."""
        self._residuals: dict[int, Tensor] = {}
        """Residuals of parameters, by their ids, that wait for a reducer."""
        self._sums: list[concurrent.futures.Future[Span]] = []
        self._finite = True
        """False once a mean of this backward pass was not finite, on all ranks alike; unknown without residuals."""
        self._wire_bytes = 0
        self._of_buckets: BucketHook | None = None
        # A thread that is in torch's code when the program ends would abort it. This must not keep the model.
        self._at_exit = functools.partial(_end_threads, self._thread, self._stop_watching, self._connections)
        try:
            self._codec = compiled_codec(options, self._ranks, device.type)
            self._of_buckets = register_comm_hook(ddp_model, self.take_bucket)
            atexit.register(self._at_exit)
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
            if self._options.gives_back:
                self._finite = self._finite and all_finite(buffer)
            return Span("communication", iteration, begin, time.perf_counter())

        self._sums.append(self._thread.submit(functools.partial(self._connections.run, "step", iteration, reduce)))
        if bucket.is_last():
            self._finish()
        return done(bucket.buffer())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of iterations and this rank's residuals, needed to continue after a restart.

        torch splits its buckets again after the first iteration of a resumed run: sums may differ in their last bits.
        """
        residuals = self._residuals | self._residuals_in_use()
        return {
            "iteration": self.iteration,
            "strides": [memory_layout(parameter) for parameter in self._parameters],
            "residuals": [residuals.get(id(p)) for p in self._parameters],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of this rank, with the same model.

        Raises:
            UserInputError: parameters were in another memory order.
        """
        check_layouts(state["strides"], self._parameters)
        self.iteration = state["iteration"]
        self._reducers.clear()
        loaded = zip(self._parameters, state["residuals"], strict=True)
        self._residuals = {id(p): residual.to(p.device) for p, residual in loaded if residual is not None}

    def close(self) -> None:
        """End the communication, when all ranks have called it. The model may then be attached, or compressed again."""
        try:
            if not self._thread.failed:
                meet = functools.partial(self._connections.run, "close", self.iteration, self._connections.wait_for_all)
                with contextlib.suppress(UserInputError):  # closed before
                    self._thread.submit(meet).result()
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
        atexit.unregister(self._at_exit)
        if self._of_buckets is not None:
            self._of_buckets.release(self.take_bucket)
        self._at_exit()

    def _finish(self) -> None:
        begin = time.perf_counter()
        sums, self._sums = self._sums, []
        self._ranks.enter("all-reduce", waiting=True)
        spans = [one.result() for one in sums]
        self._ranks.enter("compute")
        wait = Span("wait", self.iteration, begin, time.perf_counter())
        self.report = StepReport(applied=(self.iteration,), spans=(*spans, wait), wire_bytes=self._wire_bytes)
        self._wire_bytes = 0
        if not self._finite:  # a GradScaler will leave the update out, and nothing of it may come later
            for _, reducer in self._reducers.values():
                reducer.load_state_dict({"residuals": []})
            self._finite = True
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
            zeros = [torch.zeros(real_numel(p), dtype=torch.float32, device=p.device) for p in parameters]
            own = [zero if residual is None else residual for zero, residual in zip(zeros, waiting, strict=True)]
            reducer.load_state_dict({"residuals": [torch.cat(own)]})
        self._reducers[index] = [id(parameter) for parameter in parameters], reducer
        return reducer

    def _residuals_in_use(self) -> dict[int, Tensor]:
        """Return copies of the residuals of all parameters that have one, by the parameters' ids."""
        concurrent.futures.wait(self._sums)
        found: dict[int, Tensor] = {}
        sizes = {id(parameter): real_numel(parameter) for parameter in self._parameters}
        for identities, reducer in self._reducers.values():
            for flat in reducer.state_dict()["residuals"]:
                parts = flat.split([sizes[identity] for identity in identities])
                found |= dict(zip(identities, parts, strict=True))
        return found


class _Bucket(FlatBuffer):
    """Gradients of a bucket of torch, in its own memory."""

    def __init__(self, bucket: GradBucket):
        self.flats = [bucket.buffer()]
        self.views = gradients_of(bucket)


def _end_threads(thread: CommunicationThread, stop_watching: Callable[[], None], connections: Connections) -> None:
    stop_watching()
    thread.close(at_the_end=connections.close)
