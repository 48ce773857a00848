"""All-reduces by the names of the command line."""

from __future__ import annotations

from collections.abc import Callable

from pipesgd.codecs.base import Codec
from pipesgd.codecs.floats import Uncompressed
from pipesgd.collectives.all_to_all import all_to_all
from pipesgd.collectives.base import AllReduce
from pipesgd.collectives.halving_doubling import halving_doubling
from pipesgd.collectives.hierarchical import hierarchical
from pipesgd.collectives.native import NativeAllReduce
from pipesgd.collectives.pinned import PinnedTransport
from pipesgd.collectives.recursive_doubling import recursive_doubling
from pipesgd.collectives.ring import gather_ring, ring
from pipesgd.collectives.schedule import Schedule
from pipesgd.collectives.scheduled import ScheduledAllReduce
from pipesgd.collectives.transport import TorchTransport, Transport, communication_group
from pipesgd.config import DEFAULT_SEGMENT_BYTES
from pipesgd.launch import Ranks

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "ring": ring,
    "halving-doubling": halving_doubling,
    "recursive-doubling": recursive_doubling,
    "all-to-all": all_to_all,
}
"""Of a rank and the number of ranks."""


class Connections:
    """Connections to all ranks for one thread, and the collectives that run over them, one after the other.

    All ranks of the job make one together.

    Args:
        all_reduce: the algorithm.
        ranks: who takes part.
        timeout: seconds that a rank waits for another one, in any one message or native all-reduce.
        segment_bytes: largest message.
        streams: connections to each rank; segments take turns.
        device: where the tensors are, "cpu" or "cuda". Messages go over gloo; native is nccl on a GPU.

    Raises:
        UserInputError: the ranks are not spread over nodes as the algorithm needs it.
        CommunicationError: not every rank could be reached.
    """

    def __init__(
        self,
        all_reduce: str,
        ranks: Ranks,
        *,
        timeout: float,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        streams: int = 1,
        device: str = "cpu",
    ):
        self._name = all_reduce
        self.ranks = ranks
        self._timeout = timeout
        self._segment_bytes = segment_bytes
        ranks_per_node = ranks.per_node() if all_reduce == "hierarchical" else 0
        backend = None if all_reduce == "native" else "gloo"
        self._groups = [communication_group(ranks, timeout, backend) for _ in range(streams)]
        if all_reduce == "native":
            return
        transport = TorchTransport(self._groups, timeout)
        self.transport: Transport = PinnedTransport(transport) if device == "cuda" else transport
        if all_reduce == "hierarchical":
            self._schedule = hierarchical(ranks.rank, ranks.world_size, ranks_per_node)
        else:
            self._schedule = SCHEDULES[all_reduce](ranks.rank, ranks.world_size)

    def all_reduce(self, codec: Codec | None = None) -> AllReduce:
        """The all-reduce with this codec on the wire; exact without one."""
        codec = codec or Uncompressed()
        if self._name == "native":
            return NativeAllReduce(self._groups[0], self._timeout, codec.name)
        return self._scheduled(self._schedule, codec)

    def all_gather(self) -> AllReduce:
        """Gives every rank the chunks of all: of a flat tensor of p equal parts, the own part goes in."""
        return self._scheduled(gather_ring(self.ranks.rank, self.ranks.world_size), Uncompressed())

    def _scheduled(self, schedule: Schedule, codec: Codec) -> AllReduce:
        return ScheduledAllReduce(self.transport, schedule, codec, segment_bytes=self._segment_bytes)


def make_all_reduce(
    name: str, ranks: Ranks, *, timeout: float, segment_bytes: int = DEFAULT_SEGMENT_BYTES
) -> AllReduce:
    """The exact all-reduce of this name over ``ranks``, on connections of its own. All ranks of the job call this."""
    return Connections(name, ranks, timeout=timeout, segment_bytes=segment_bytes).all_reduce()
