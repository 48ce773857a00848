"""Backend "pipesgd" of torch.distributed: a program's large sums of floats are compressed, the rest goes through gloo.

Importing this module registers the backend::

    import pipesgd.backend
    torch.distributed.init_process_group("pipesgd", pg_options=pipesgd.backend.BackendOptions(codec="int8"))

The options may also be environment variables (``PIPESGD_CODEC=int8``), so that no other line of a program changes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipesgd.checks import LONGEST_TIMEOUT, check_at_least, check_one_of
from pipesgd.codecs.base import OwnCodec, mixed
from pipesgd.codecs.options import DENSE_CODECS, CodecOptions
from pipesgd.codecs.own import codec_options
from pipesgd.comm.all_reduce import ScheduledAllReduce, no_op
from pipesgd.comm.native import check_ddp_on_gloo
from pipesgd.comm.own_all_reduce import agreed_schedule
from pipesgd.comm.pinned import PinnedTransport
from pipesgd.comm.thread import CommunicationThread
from pipesgd.comm.transport import Links, TorchLinks
from pipesgd.errors import CommunicationError, DeadlineExceeded, OutOfStepError, UserInputError
from pipesgd.flat_buffer import are_finite, take_mean, take_shares
from pipesgd.functions import OWN, kind
from pipesgd.membership.heartbeat import Standing
from pipesgd.membership.sealed import part, sealed
from pipesgd.membership.secret import Secret, job_secret
from pipesgd.pipeline.sameness import check_same_settings, plain
from pipesgd.process import say
from pipesgd.ranks import Ranks
from pipesgd.reducers.make import compiled_codec
from pipesgd.sections import TRANSPORTS, all_reduce_name, check_segment_bytes, default_transport
from timing_model.schedules import SCHEDULES, SEGMENT_BYTES, Algorithm

NAME = "pipesgd"
DEVICES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the tensors whose sums are compressed. Nobody who takes float64 wants it rounded."""
VARIABLES = ("codec", "all_reduce", "least_bytes", "segment_bytes", "transport")
"""Fields of ``BackendOptions`` that are read from environment variables: ``PIPESGD_CODEC`` and so on."""

GLOO_KEPT_SECONDS = 0.2
"""Seconds for which gloo's group outlives ours. DDP frees it with the interpreter's lock held, and torch would wait
for gloo's threads, which take that lock to let go of the last tensors: programs would hang, as with torch's gloo."""
LEAST_BYTES = 8
"""Smallest ``least_bytes``, so that a single value is never a large sum: DDP's ``join`` gives the handle of such a sum
to C++ code and drops it, and that code waits forever once the part of the handle in Python is gone."""
HANDED_ON = {
    name: name
    for name in (
        "allgather",
        "all_gather_single",
        "all_gather_single_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce_coalesced",
        "all_to_all_single",
        "alltoall",
        "alltoall_base",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "scatter",
        "send",
        "recv",
        "recv_anysource",
    )
} | {"recvAnysource": "recv_anysource", "start_coalescing": "_start_coalescing", "end_coalescing": "_end_coalescing"}
"""Methods that a Python class of a process group can replace, in one version of torch or another, by the names that
torch looks for in the class, and the names of the methods in torch. All must be replaced: for a Python class, torch
calls its own with the interpreter's lock held. They then wait for a lock of gloo's, whose threads take the
interpreter's while they hold it, so that a program would hang now and then. (Python code calls recv_anysource, and asks
its handle for the source, which the one that C++ code wraps around it does not know.)"""


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options of a process group of this backend, the same on all its ranks.

    Raises:
        UserInputError: a value is not allowed.
    """

    codec: str | CodecOptions | OwnCodec = "fp32"
    """Encoding of large sums on the wire, by name, with its options, or as an object; one that encodes every value by
    itself or by blocks (not topk, nor powersgd, which need to know the parameters)."""
    all_reduce: str | Algorithm = "ring"
    """Algorithm of large sums: ring, halving-doubling, recursive-doubling, all-to-all, or a function of the user's own,
    which can be named as module:function."""
    least_bytes: int = 1 << 20
    """Size in bytes of the smallest tensor whose sum counts as large, at least 8."""
    segment_bytes: int = SEGMENT_BYTES
    """Size in bytes of the largest message."""
    transport: str | None = None
    """Transport of large sums: gloo, tcp or tls, which needs the secret that ``PIPESGD_SECRET_FILE`` names, with a
    certificate; by default tcp for tensors of CPUs on Linux, else gloo."""

    def __post_init__(self) -> None:
        check_one_of("codec", kind(self.codec_options.codec), (*DENSE_CODECS, OWN))
        check_one_of("all-reduce", kind(self.all_reduce_name), (*SCHEDULES, OWN))
        check_at_least("least-bytes", self.least_bytes, LEAST_BYTES)
        check_at_least("segment-bytes", self.segment_bytes, 1)
        check_segment_bytes(self.segment_bytes)
        if self.transport is not None:
            check_one_of("transport", self.transport, TRANSPORTS)

    def transport_on(self, device: str) -> str:
        """Return the transport of large sums of tensors on a ``device``, "cpu" or "cuda"."""
        return self.transport or default_transport(self.all_reduce, device=device)

    @cached_property
    def codec_options(self) -> CodecOptions:
        """Return the options of the codec."""
        return codec_options(self.codec)

    @property
    def all_reduce_name(self) -> str:
        """Return the name of the algorithm."""
        return all_reduce_name(self.all_reduce)

    @classmethod
    def from_environment(cls) -> BackendOptions:
        """Return the options in ``PIPESGD_CODEC``, ``PIPESGD_ALL_REDUCE``, ``PIPESGD_LEAST_BYTES``,
        ``PIPESGD_SEGMENT_BYTES`` and ``PIPESGD_TRANSPORT``; the default of each that is not set.

        Raises:
            UserInputError: a value is not allowed.
        """
        given: dict[str, Any] = {}
        for name in VARIABLES:
            variable = f"PIPESGD_{name.upper()}"
            if (text := os.environ.get(variable)) is not None:
                given[name] = _whole_number(variable, text) if name.endswith("_bytes") else text
        return cls(**given)


class PipesgdGroup(dist.ProcessGroup):
    """Process group whose large sums run on a thread and connections of their own, and all else on gloo's.

    An ``all_reduce`` with SUM or AVG of a float32, float16 or bfloat16 tensor of ``least_bytes`` is a large sum. It is
    computed by the options' all-reduce, in float32 if there is a codec, and leaves the same bytes on every rank. torch
    sends every other operation to the gloo group that is registered here, as it would without this backend. As with
    gloo, operations that have not been waited for run in any order: a tensor must not be touched before. Large sums
    alone run in the order of their calls.

    Args:
        store: the store of this group alone.
        rank: rank of this process in the group.
        world_size: number of ranks in the group.
        timeout: time that a rank waits for another one, in any one message of a large sum or operation of gloo.
        options: the options, or None for those in the environment.
        numbers: numbers of the group's ranks in the default group, by which messages name them; empty if it is that.

    Raises:
        UserInputError: an option is not allowed on some rank, or differs between ranks.
        CommunicationError: not every rank could be reached.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        options: Any = None,
        numbers: Sequence[int] = (),
    ):
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # torch's stubs know its other constructor alone
        secret = job_secret()
        ranks_over = partial(_ranks, rank, world_size, timeout, numbers, secret)
        store = sealed(store, secret)
        ranks = ranks_over(part(store, "options"))
        self._options = ranks.raise_together("options of the backend", partial(_checked, options, secret))
        ranks.addresses()  # which others must be able to reach, else gloo's words would be the first
        check_same_settings(ranks, plain(self._options) | {"transport": self._options.transport_on("cpu")}, {})
        gloo = dist.ProcessGroupGloo(part(store, "gloo"), rank, world_size, timeout)
        gloo._set_sequence_number_for_group()
        self._gloo = gloo
        self._of_gloo = dist.ProcessGroup(store, rank, world_size)
        for group in (self, self._of_gloo):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            for device in DEVICES:
                group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._new_sums = partial(_LargeSums, store, ranks_over, self._options)
        self._sums: dict[str, _LargeSums] = {}
        self._lock = threading.Lock()  # a backward pass may call from a thread of its own

    def getBackendName(self) -> str:  # noqa: N802 (torch calls it by this name)
        return NAME

    def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Begin to sum tensors over the ranks, as ``torch.distributed.all_reduce`` asks for it.

        Raises:
            UserInputError: a sum of CUDA tensors is left to gloo, and torch is older than 2.11.
        """
        match args:
            case ([tensor], dist.AllreduceOptions(reduceOp=operation)) if self._is_large(tensor, operation):
                return self._sums_on(tensor.device.type).begin(tensor, operation)
            case ([tensor], _):  # maybe a small bucket of DDP, whose calls look like any other's
                check_ddp_on_gloo(tensor.device.type)
        return self._of_gloo.allreduce(*args, **kwargs)

    def shutdown(self) -> None:
        """End the threads and connections; ``destroy_process_group`` calls this."""
        for sums in self._sums.values():
            sums.close()
        if not sys.is_finalizing():  # then Python starts no threads: 3.12 says so earlier, and 3.11 waits for ever
            with contextlib.suppress(RuntimeError):
                threading.Timer(GLOO_KEPT_SECONDS, lambda gloo: None, [self._gloo]).start()  # no daemon: Python waits
        super().shutdown()

    def _is_large(self, tensor: Tensor, operation: Any) -> bool:
        return (
            tensor.dtype in DTYPES
            and tensor.layout == torch.strided
            and tensor.nbytes >= self._options.least_bytes
            and tensor.device.type in DEVICES
            and any(operation == large for large in (dist.ReduceOp.SUM, dist.ReduceOp.AVG))  # "in" asks these
        )

    def _sums_on(self, device: str) -> _LargeSums:
        with self._lock:
            if device not in self._sums:
                self._sums[device] = self._new_sums(device)
            return self._sums[device]


def _by_gloo(name: str) -> Callable[..., Any]:
    """Return the method of this name that hands the call to gloo."""

    def call(group: PipesgdGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(group._of_gloo, name)(*args, **kwargs)

    return call


for _name, _of_torch in HANDED_ON.items():
    if hasattr(dist.ProcessGroup, _of_torch):
        setattr(PipesgdGroup, _name, _by_gloo(_of_torch))


class _LargeSums:
    """Large sums of tensors on one kind of device, one after the other, on a thread and connections of their own.

    The ranks connect in the first sum, since a small group may never have one. Each sum has a tag made of its number
    and of what is summed: ranks whose calls differ add up nothing. Over gloo they wait for each other until the
    deadline. After a sum that has failed there are no others.
    """

    def __init__(
        self, store: dist.Store, ranks_over: Callable[[dist.Store], Ranks], options: BackendOptions, device: str
    ):
        self._ranks = ranks_over(part(store, f"sums on {device}"))
        self._options = options
        self._device = device
        self._kind = options.transport_on(device)
        self._links: Links | None = None
        self._number = 0
        self._residuals = _Residuals()
        self._thread = CommunicationThread(torch.device(device))

    def begin(self, tensor: Tensor, operation: Any) -> dist.Work:
        """Begin to replace ``tensor`` by its sum over the ranks, or by the mean."""
        done = self._thread.submit(partial(self._sum, tensor.data, bool(operation == dist.ReduceOp.AVG)))
        return _LargeSum(done, tensor, self._ranks.number(self._ranks.rank))

    def close(self) -> None:
        """End the thread, and the connections once nobody needs them any more."""
        self._thread.close(lambda: None if self._links is None else self._links.close())

    def _sum(self, tensor: Tensor, mean: bool) -> None:
        if self._links is None:
            self._links = self._connect()
            self._say(tensor)
        try:
            self._sum_connected(tensor, mean)
        except BaseException as failure:
            if self._kind != "gloo":  # whose waits nothing ends
                self._links.close()  # the other ranks hear of it
            if isinstance(failure, OutOfStepError):
                rank, peer = map(self._ranks.number, (failure.rank, failure.peer))
                reason = "its large sums are of other tensors, or in another order"
                raise CommunicationError(rank=rank, peer=peer, operation="large sum", reason=reason) from failure
            if isinstance(failure, CommunicationError):
                failure.name_ranks(self._ranks.number)
            raise

    def _sum_connected(self, tensor: Tensor, mean: bool) -> None:
        exact = self._options.codec_options.codec == "fp32"
        flat = tensor.reshape(-1) if exact else tensor.reshape(-1).float()
        values = flat.contiguous()  # the tensor's own memory, if it can be
        self._number += 1
        key = mixed(self._number, DTYPES.index(tensor.dtype), values.numel(), mean)
        self._transport.tag = key >> 1  # gloo's tags have 31 bits
        residual = self._residuals.of(tensor) if self._options.codec_options.gives_back else None
        if mean:
            take_shares([values], self._ranks.world_size)
        finish = partial(take_mean, world_size=self._ranks.world_size) if mean else no_op
        self._all_reduce(values, residual, key, finish)
        if residual is not None and not are_finite([values]):  # a GradScaler leaves out such a gradient
            residual.zero_()
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values.view_as(tensor))

    def _connect(self) -> Links:
        options, ranks = self._options, self._ranks
        codec = compiled_codec(options.codec_options, ranks, self._device)
        schedule = agreed_schedule(options.all_reduce, ranks)
        links: Links
        if self._kind == "gloo":
            links = TorchLinks(ranks, ranks.timeout, 1, backend="gloo", on_host=True)
        else:
            from pipesgd.comm.tcp import TcpLinks, wrap_of

            links = TcpLinks(ranks, ranks.timeout, wrap_of(self._kind, ranks))
        self._transport = links.messages(lambda: None, lambda nbytes: None)
        self._all_reduce = ScheduledAllReduce(
            PinnedTransport(self._transport) if self._device == "cuda" else self._transport,
            schedule,
            codec,
            segment_bytes=options.segment_bytes,
        )
        return links

    def _say(self, tensor: Tensor) -> None:
        if self._ranks.rank == 0:
            options = self._options
            say(
                f"{NAME}: summing {tensor.nbytes:,} bytes of {str(tensor.dtype).removeprefix('torch.')} with codec "
                f"{options.codec_options.describe()} by {options.all_reduce_name}, and so all such sums of at least "
                f"{options.least_bytes:,} bytes on {self._ranks.world_size} ranks"
            )


class _LargeSum(dist.Work):
    """Handle of a large sum in progress; torch calls its methods."""

    def __init__(self, done: Future[None], tensor: Tensor, rank: int):
        super().__init__()
        self._done = done
        self._tensor = tensor
        self._rank = rank

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the sum is there; raise its error, or ``DeadlineExceeded`` after ``timeout`` if not 0."""
        seconds = timeout.total_seconds()
        try:
            self._done.result(seconds or None)
        except TimeoutError:
            if self._done.done():
                raise
            raise DeadlineExceeded(
                rank=self._rank, peer=None, operation="large sum", reason=f"it was not there within {seconds:g} s"
            ) from None
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        return self._done.exception() if self._done.done() else None

    def result(self) -> list[Tensor]:
        self.wait()
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the tensor, in a list; its error is a ``RuntimeError`` with the text of the sum's."""
        devices: Any = [self._tensor.device] if self._tensor.is_cuda else None
        ended: torch.futures.Future[None] = torch.futures.Future(devices=devices)
        self._done.add_done_callback(lambda done: ended.set_result(None))
        return ended.then(lambda ended: self.result())  # an error set directly would be a value to torch's C++ code


class _Residuals:
    """Residuals of error feedback for memory that is summed repeatedly, such as the buckets of DDP.

    A tensor has no name by which to find the residual of its last sum. But it is the same quantity again if it has the
    same place, size and dtype in a storage that has existed ever since: a gradient bucket, a parameter. The residual
    begins with the second sum and ends with the storage, so tensors that are made for one sum neither get the residual
    of another one, nor pay for one. Which sums have residuals need not be the same on all ranks.
    """

    def __init__(self) -> None:
        self._residuals: dict[tuple[Any, ...], Tensor | None] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the residual of this memory, float32 (numel,); None if it has not been summed before."""
        for key in [key for key in self._residuals if key[0].expired()]:
            del self._residuals[key]
        key = (StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.numel(), tensor.dtype)
        if key not in self._residuals:
            self._residuals[key] = None
        elif self._residuals[key] is None:
            self._residuals[key] = torch.zeros(tensor.numel(), dtype=torch.float32, device=tensor.device)
        return self._residuals[key]


def _ranks(
    rank: int, world_size: int, timeout: timedelta, numbers: Sequence[int], secret: Secret | None, store: dist.Store
) -> Ranks:
    standing = Standing(min(timeout.total_seconds(), LONGEST_TIMEOUT))
    numbers = tuple(numbers or range(world_size))
    return Ranks(rank=rank, world_size=world_size, store=store, standing=standing, numbers=numbers, secret=secret)


def _checked(options: Any, secret: Secret | None) -> BackendOptions:
    """Return the options of a group that was given ``pg_options=options``."""
    if options is None:
        options = BackendOptions.from_environment()
    if not isinstance(options, BackendOptions):
        raise UserInputError(f"pg_options must be pipesgd.backend.BackendOptions; got {options!r}")
    if options.transport == "tls":
        from pipesgd.comm.tls import tls

        tls(secret)
    return options


def _whole_number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserInputError(f"{variable} must be a whole number of bytes; got {text!r}") from None


def _make(of_torch: Any, pg_options: Any) -> PipesgdGroup:
    """Return the group that ``init_process_group`` or ``new_group`` asks for, with torch's description of it."""
    own = of_torch.store, of_torch.group_rank, of_torch.group_size, of_torch.timeout
    return PipesgdGroup(*own, pg_options, of_torch.global_ranks_in_group)


dist.Backend.register_backend(NAME, _make, extended_api=True, devices=list(DEVICES))
