"""Connections to all ranks, and the all-reduces that the command line names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from pipesgd.codecs.base import Codec
from pipesgd.codecs.floats import Uncompressed
from pipesgd.comm.all_reduce import MOST_PLANS, AllReduce, ScheduledAllReduce
from pipesgd.comm.headers import Headers
from pipesgd.comm.own_all_reduce import agreed_schedule, ranks_per_node
from pipesgd.comm.transport import Links, TorchLinks, Transport
from pipesgd.errors import CommunicationError, OutOfStepError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.sections import default_transport
from timing_model.schedules import SEGMENT_BYTES, Algorithm, Schedule, gather_ring

T = TypeVar("T")


class Connections:
    """Connections to all ranks for one thread, and the collectives that run over them, one after the other.

    All ranks of the job make one together.

    Args:
        all_reduce: the algorithm, by name or as a function.
        ranks: the ranks that take part.
        timeout: seconds that a rank waits for another one, in any one message or native all-reduce.
        segment_bytes: largest message in bytes.
        connections: connections to each rank, used in turn by segments.
        transport: kind of the connections, one of ``sections.TRANSPORTS``; by default that of ``default_transport``.
        rate_limit: most bytes of messages that this rank sends in a second, with ``headers``, but without those of
            packets (``pace.TokenBucket``). A message then takes at most ``pace.PACED_SECONDS``, and an all-reduce is
            ``paced``.
        device: device of the tensors, "cpu" or "cuda". Messages are sent from the host; native uses nccl on a GPU.
        buckets: number of buckets that are reduced again and again.

    Raises:
        UserInputError: the ranks are not spread over nodes as the algorithm requires, or it is no all-reduce.
        DisagreementError: an algorithm of the user's own is another one on some rank.
        CommunicationError: not every rank could be reached.
    """

    def __init__(
        self,
        all_reduce: str | Algorithm,
        ranks: Ranks,
        *,
        timeout: float,
        segment_bytes: int = SEGMENT_BYTES,
        connections: int = 1,
        transport: str | None = None,
        rate_limit: float = math.inf,
        device: str = "cpu",
        buckets: int = 1,
    ):
        if all_reduce == "native" and device == "cuda" and ranks.numbers:
            raise UserInputError(
                "all_reduce must not be native with a process_group of GPUs, for which nccl is not set up"
            )
        self._name = all_reduce
        self.ranks = ranks
        self._timeout = timeout
        self._segment_bytes = segment_bytes
        self._rate_limit = rate_limit
        pace = _at_once
        if rate_limit < math.inf:
            from pipesgd.comm.pace import TokenBucket, paced_segment_bytes

            self._segment_bytes = paced_segment_bytes(segment_bytes, rate_limit)
            pace = TokenBucket(rate_limit).take
        self._buckets = buckets
        on_each_node = ranks_per_node(ranks) if all_reduce == "hierarchical" else 1
        is_outside = ranks.rank >= ranks.world_size  # this rank is not among ``ranks``, the first ones of the job
        if all_reduce != "native" and not is_outside:  # refused before there are groups, which torch would keep
            self._schedule = agreed_schedule(all_reduce, ranks, on_each_node)
        if not is_outside:  # nor must gloo wait for an address that cannot be reached
            ranks.addresses()
        self._links: Links
        transport = transport or default_transport(all_reduce, connections, device, is_paced=rate_limit < math.inf)
        if transport == "gloo":
            backend = None if all_reduce == "native" else "gloo"
            on_host = all_reduce != "native" or device == "cpu"  # nccl cannot send tensors on the host
            self._links = torch_links = TorchLinks(ranks, timeout, connections, backend=backend, on_host=on_host)
            self._groups = torch_links.groups
        else:
            from pipesgd.comm.tcp import TcpLinks, wrap_of

            self._links = TcpLinks(ranks, timeout, wrap_of(transport, ranks))
        if is_outside:
            return
        self.control: Transport = self._links.control(pace)
        """Transport of the headers, which counts their bytes."""
        self._headers = Headers(self.control)
        if all_reduce == "native":
            return
        self._transport = self._links.messages(self._headers.check, pace)
        self.transport: Transport = self._transport
        if device == "cuda":
            from pipesgd.comm.pinned import PinnedTransport

            self.transport = PinnedTransport(self._transport)

    def begin(self, call: str, iteration: int) -> None:
        """Begin the sums of ``call`` (one of ``headers.CALLS``) in ``iteration``, which last until the next ``begin``.

        Collectives fail from now on if the previous rank around the ring has begun something else.
        """
        self._headers.begin(call, iteration)
        if self._name != "native":
            self._transport.tag = self._headers.tag

    def check(self) -> None:
        """Wait until the previous rank around the ring has begun the same.

        Raises:
            OutOfStepError: that rank has begun something else.
            CommunicationError: that rank was lost, or silent for longer than the deadline.
        """
        self._headers.check()

    def run(self, call: str, iteration: int, job: Callable[[], T]) -> T:
        """Return ``job()``, whose sums are those of ``call`` in ``iteration``. All ranks must run the same.

        Raises:
            OutOfStepError: the previous rank around the ring runs something else.
            CommunicationError: a rank was lost, or silent for longer than the deadline; it bears the iteration.
        """
        try:
            self.begin(call, iteration)
            result = job()
            self.check()
            self._links.push()
        except CommunicationError as failure:
            failure.iteration = iteration
            failure.name_ranks(self.ranks.number)
            raise
        except OutOfStepError as failure:
            failure.name_ranks(self.ranks.number)
            raise
        return result

    def wait_for_all(self) -> None:
        """Return when all ranks have called this, and no rank has a message for another one any more.

        Raises:
            CommunicationError: a rank was lost, or silent for longer than the deadline.
        """
        self.check()
        self._links.wait_for_all()

    def abort(self, error: BaseException) -> None:
        """End every wait because of ``error``, as far as the transport can; any thread may call this."""
        self._links.abort(error)

    def close(self) -> None:
        """End the connections; the collectives cannot be used any more."""
        self._links.close()

    def meanwhile(self, do: Callable[[], None]) -> None:
        """Let ``do`` be called whenever a sum is about to wait for a message, while others are on their way."""

        def both() -> None:
            do()
            self._headers.check()

        self._transport.before_waits = both

    def all_reduce(self, codec: Codec | None = None) -> AllReduce:
        """Return the all-reduce with this codec on the wire; exact without one.

        Raises:
            UserInputError: an encoded block of the codec is larger than a message may be at the rate limit.
        """
        codec = codec or Uncompressed()
        if self._name == "native":
            from pipesgd.comm.native import NativeAllReduce

            return NativeAllReduce(
                self._groups, self.ranks.rank, self.ranks.world_size, self._timeout, codec.name, self.check
            )
        return self._scheduled(self._schedule, codec)

    def bytes_sent(self, nbytes: int) -> int:
        """Return about how many bytes this rank sends in the all-reduce of ``nbytes``, uncompressed."""
        if self._name == "native":
            return round(2 * (self.ranks.world_size - 1) / self.ranks.world_size * nbytes)
        return round(len(self._schedule.sends) / self._schedule.chunks * nbytes)

    def all_gather(self) -> AllReduce:
        """Return an all-gather, which completes a flat tensor of p equal parts of which each rank has set its own."""
        return self._scheduled(gather_ring(self.ranks.rank, self.ranks.world_size), Uncompressed())

    def _scheduled(self, schedule: Schedule, codec: Codec) -> AllReduce:
        check_block(codec, self._rate_limit)
        return ScheduledAllReduce(
            self.transport,
            schedule,
            codec,
            segment_bytes=self._segment_bytes,
            most_plans=MOST_PLANS * self._buckets,
            paced=self._rate_limit < math.inf,
        )


def _at_once(nbytes: int) -> None:
    """Let a message pass."""


def check_block(codec: Codec, rate_limit: float) -> None:
    """Raise ``UserInputError`` if an encoded block of ``codec`` is larger than a message may be at the rate limit."""
    if rate_limit == math.inf:
        return
    from pipesgd.comm.pace import PACED_SECONDS

    block_bytes, most_bytes = codec.wire_bytes(codec.block), rate_limit * PACED_SECONDS
    if block_bytes > most_bytes:
        raise UserInputError(
            f"codec-block must encode to at most {most_bytes:.0f} bytes, a message's at this rate-limit; got "
            f"{codec.block} values, {block_bytes} bytes"
        )


def make_all_reduce(name: str, ranks: Ranks, *, timeout: float, segment_bytes: int = SEGMENT_BYTES) -> AllReduce:
    """Return the exact all-reduce of this name over ``ranks``, on its own connections. All ranks must call this."""
    return Connections(name, ranks, timeout=timeout, segment_bytes=segment_bytes).all_reduce()
