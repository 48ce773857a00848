"""Sums over simulated ranks: the trainer's own reducers, one a rank, with an all-reduce that needs no connections.

The all-reduce is the ring, in its order, with its segments and its random numbers, so that sums have the bits that they
have on real ranks (``tests/experiments/test_simulation.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from pipesgd.codecs.base import Codec, mixed
from pipesgd.codecs.floats import Uncompressed
from pipesgd.codecs.options import CodecOptions
from pipesgd.comm.all_reduce import AllReduce, Finish, no_op, nonce_of, segments_of_chunks
from pipesgd.comm.connections import Connections
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.ranks import alone
from pipesgd.reducers.base import GradientCodec, Reducer
from pipesgd.reducers.make import dense_reducer
from pipesgd.reducers.powersgd import PowerSgd
from timing_model.schedules import SEGMENT_BYTES


def is_summed(codec: CodecOptions) -> bool:
    """Return True if sums over simulated ranks follow ``codec``: the others use more than an all-reduce."""
    return not isinstance(codec, GradientCodec) or isinstance(codec, PowerSgd)


class SimulatedSums:
    """Sums of buffers of gradients, one a rank, as the reducers of real ranks make them on a ring.

    Args:
        codec: encoding of gradients, for which ``is_summed``.
        world_size: number of ranks.
        seed: seed of the codec's random numbers.
    """

    def __init__(self, codec: CodecOptions, world_size: int, *, seed: int):
        assert is_summed(codec)
        self._turns = _Turns(world_size)
        # A dense sum ends with its all-reduce, which so need not bring the sum to all ranks.
        self._in_phases = isinstance(codec, GradientCodec)
        self._reducers: list[Reducer] = []
        given: list[_Given] = []
        for rank in range(world_size):
            connections = _Connections(rank, world_size, given, self._turns.pass_on if self._in_phases else None)
            if isinstance(codec, GradientCodec):
                self._reducers.append(codec.reducer(connections, codec.make(), seed=seed))
            else:
                self._reducers.append(dense_reducer(codec, codec.make(), connections, seed=seed))

    def sum(self, buffers: Sequence[FlatBuffer], iteration: int) -> None:
        """Replace the values in the last of ``buffers`` by the sum; the others hold nothing of use afterwards."""

        def sum_of(rank: int) -> None:
            self._reducers[rank].sum(buffers[rank], iteration)

        if self._in_phases:
            self._turns.run(sum_of)
        else:
            for rank in range(len(buffers)):
                sum_of(rank)


_Given = tuple[Tensor, Tensor | None]
"""Values of a rank to be summed, and its residual."""


class _Connections(Connections):
    """Connections of one simulated rank, whose all-reduces are the sums of what the ranks call them with, in turn.

    Args:
        rank: this rank.
        world_size: number of ranks.
        given: what the ranks have given of the sum that is made, shared by them.
        pass_on: function of a rank that lets the next one run until it is this one's turn again; None if the ranks need
            no sum, but the last one does.
    """

    def __init__(self, rank: int, world_size: int, given: list[_Given], pass_on: Callable[[int], None] | None):
        self.ranks = replace(alone(), rank=rank, world_size=world_size)
        self._given = given
        self._pass_on = pass_on

    def all_reduce(self, codec: Codec | None = None) -> AllReduce:
        """Return the ring's all-reduce with this codec on the wire; exact without one."""
        ring = Ring(codec or Uncompressed(), self.ranks.world_size)

        def take_part(flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = no_op) -> None:
            self._given.append((flat, residual))
            if len(self._given) == self.ranks.world_size:
                flats, residuals = zip(*self._given, strict=True)
                self._given.clear()
                ring.sum(flats, residuals, key)
                if self._pass_on is not None:
                    for other in flats[:-1]:
                        other.copy_(flat)
            if self._pass_on is not None:
                self._pass_on(self.ranks.rank)
            finish(flat)

        return cast(AllReduce, take_part)  # nobody asks simulated ranks for their bytes


class _Turns:
    """Threads of the ranks, of which one runs at a time, so that they meet in every all-reduce of a sum."""

    def __init__(self, world_size: int):
        self._world_size = world_size

    def run(self, function: Callable[[int], None]) -> None:
        """Call ``function`` for each rank in a thread of its own; return when all have returned, or raise an error."""
        self._errors: list[BaseException] = []
        self._turns = [threading.Semaphore(0) for _ in range(self._world_size)]

        def of_rank(rank: int) -> None:
            try:
                self._wait(rank)
                function(rank)
            except BaseException as error:  # noqa: BLE001 (raised again below)
                self._errors.append(error)
            finally:
                self._turns[(rank + 1) % self._world_size].release()

        threads = [
            threading.Thread(target=of_rank, args=(rank,), name=f"simulated rank {rank}", daemon=True)
            for rank in range(self._world_size)
        ]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def pass_on(self, rank: int) -> None:
        """Let the next rank run; return when it is the turn of ``rank`` again."""
        self._turns[(rank + 1) % self._world_size].release()
        self._wait(rank)

    def _wait(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self._errors:
            raise self._errors[0]


@dataclass(frozen=True, slots=True)
class _Segment:
    values: slice
    nbytes: int
    hops: list[tuple[int, int]]
    """Each rank that adds its values, in the order of the ring, and the nonce of its random numbers."""


class Ring:
    """The ring's sums of all ranks' values: chunk r begins on rank r, and the last rank to add encodes for all."""

    def __init__(self, codec: Codec, world_size: int):
        self._codec = codec
        self._world_size = world_size
        self._segments: dict[int, list[_Segment]] = {}  # by number of values
        self._wires = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def sum(self, flats: Sequence[Tensor], residuals: Sequence[Tensor | None], key: int = 0) -> None:
        """Replace the last of ``flats``, one a rank, by the sum that all ranks would hold; the others are overwritten.

        ``residuals`` and ``key`` are as in ``AllReduce``.
        """
        numel = flats[0].numel()
        if numel not in self._segments:
            self._segments[numel] = self._segments_like(flats[0])
        for segment in self._segments[numel]:
            parts = [flats[rank][segment.values] for rank, _ in segment.hops]
            total = flats[-1][segment.values]
            if self._codec.in_place or self._world_size == 1:
                for part in parts[1:]:
                    parts[0].add_(part)
                total.copy_(parts[0])
                continue
            here, there = (wire[: segment.nbytes] for wire in self._wires)
            for (rank, nonce), part in zip(segment.hops, parts, strict=True):
                residual = residuals[rank]
                own = None if residual is None else residual[segment.values]
                if part is parts[0]:
                    self._codec.encode(part, own, there, mixed(key, nonce))
                else:
                    self._codec.decode_add_encode(here, part, own, there, mixed(key, nonce))
                here, there = there, here
            self._codec.decode(here, total)

    def _segments_like(self, flat: Tensor) -> list[_Segment]:
        codec, p = self._codec, self._world_size

        def wire_bytes(numel: int) -> int:
            return numel * flat.element_size() if codec.in_place else codec.wire_bytes(numel)

        chunks = segments_of_chunks(flat.numel(), p, codec.block, wire_bytes, SEGMENT_BYTES)
        segments = [
            _Segment(
                slice(start, stop),
                wire_bytes(stop - start),
                [(rank, nonce_of(rank, start)) for rank in ((number + hop) % p for hop in range(p))],
            )
            for number, parts in enumerate(chunks)
            for start, stop in parts
        ]
        most = 0 if codec.in_place else max((segment.nbytes for segment in segments), default=0)
        if most > self._wires[0].numel():
            self._wires = [torch.empty(most, dtype=torch.uint8) for _ in range(2)]
        return segments
