"""All-reduces by the names of the command line."""

from __future__ import annotations

from pipesgd.collectives.base import AllReduce
from pipesgd.collectives.native import NativeAllReduce
from pipesgd.collectives.ring import RingAllReduce
from pipesgd.collectives.transport import TorchTransport, communication_group
from pipesgd.config import DEFAULT_SEGMENT_BYTES
from pipesgd.launch import Ranks


def make_all_reduce(
    name: str, ranks: Ranks, *, timeout: float, segment_bytes: int = DEFAULT_SEGMENT_BYTES
) -> AllReduce:
    """The all-reduce of this name over ``ranks``, on a process group of its own. All ranks of the job call this."""
    group = communication_group(ranks, timeout, backend="gloo" if name == "ring" else None)
    if name == "ring":
        return RingAllReduce(TorchTransport(group, timeout), segment_bytes=segment_bytes)
    return NativeAllReduce(group, timeout)
