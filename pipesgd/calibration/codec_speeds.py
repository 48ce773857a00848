"""CPU cost of codecs and of sums on a rank, for messages from memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from pipesgd.calibration.robust_fit import Floats, median_of
from pipesgd.calibration.sweep import finish_part
from pipesgd.codecs.base import Codec
from pipesgd.codecs.options import codec_named
from pipesgd.comm.all_reduce import Finish, no_op
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.guests import guest
from timing_model.measured import Estimate
from timing_model.schedules import SEGMENT_BYTES

OPERATIONS = ("encode", "decode", "add", "hop")
TOPK = "topk"
SMALL_NUMEL = 1 << 10
"""Values in a call, few enough for its fixed cost to show."""
MEMORY_NUMEL = 8 << 20
"""Values in one pass over memory, segment by segment: a segment has left the caches since the pass before."""
TOPK_NUMEL = 2 << 20
ADDED = 33
"""Parts of topk that are added up in a measurement: the cost of adding one is lost in the noise of the selection."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
SMALL_CALLS = 30
"""Calls that are timed together for small messages."""
FINISHED_FOR = 2
"""Number of ranks in the mean that is timed; any number costs the same."""

Times = dict[str, dict[str, list[float]]]
"""Times by place and operation: seconds per call for "small", seconds per value for "memory"."""


@dataclass(frozen=True, kw_only=True)
class CodecSpeed:
    """Cost of one codec, over all ranks."""

    bits: float
    call: Estimate
    memory: dict[str, Estimate]
    """Seconds per value, by operation."""
    gathered: bool = False
    """True if every rank gets all parts and adds them once all have arrived, as with topk."""


def measure(names: Sequence[str], seconds: float, advance: Callable[[float], None]) -> dict[str, Times]:
    """Measure these codecs and fp32's sums, in CPU seconds of this thread: waits for a shared core do not count.

    Codecs have the default options of training. Decoding is timed with what training does to every sum in the same
    pass, the mean and the check that it is finite; for fp32, "decode" is only that.
    """
    kinds = {name: codec_named(name) for name in ("fp32", *names) if name != TOPK}
    topk = _TopK() if TOPK in names else None
    values = torch.full((MEMORY_NUMEL,), 1e-3, dtype=torch.float32)
    residual = torch.zeros(MEMORY_NUMEL, dtype=torch.float32)
    begin = time.perf_counter()
    found: dict[str, Times] = {name: {} for name in kinds}
    for number in range(MOST_ROUNDS):
        for index, (name, options) in enumerate(kinds.items()):
            codec = options.make()
            _round(found[name], codec, values, residual if options.gives_back else None, first=number == 0)
            if number < LEAST_ROUNDS:
                advance((number + (index + 1) / len(kinds)) / LEAST_ROUNDS * 0.9)
        if topk is not None:
            found.setdefault(TOPK, {})["memory"] = topk.timed()
        if number + 1 >= LEAST_ROUNDS and time.perf_counter() - begin > seconds:
            break
    return found


def summarize(name: str, everybody: Sequence[Times]) -> CodecSpeed:
    """Summarize the cost of one codec from all ranks' times."""
    if name == TOPK:
        return _summarize_topk(everybody)

    def pooled(place: str, operation: str) -> Floats:
        return np.concatenate([times[place][operation] for times in everybody])

    memory, calls = {}, []
    for operation in OPERATIONS:
        small, rate = pooled("small", operation), pooled("memory", operation)
        memory[operation] = median_of(rate)
        calls.append(median_of(np.maximum(small - SMALL_NUMEL * memory[operation].value, 0.0)))
    return CodecSpeed(
        bits=bits_of(name),
        call=Estimate(*(float(one) for one in np.median([astuple(one) for one in calls], axis=0))),
        memory=memory,
    )


def bits_of(name: str) -> float:
    """Return the bits of a value on the wire, scales included, with this dense codec."""
    return 8 * codec_named(name).make().wire_bytes(MEMORY_NUMEL) / MEMORY_NUMEL


def sum_seconds(everybody: Sequence[Mapping[str, Times]], world_size: int) -> Estimate:
    """Return the seconds that summing a byte of float32 costs in an all-reduce of ``world_size`` ranks.

    A rank adds (p-1)/p of the bytes and finishes all of them.
    """
    memory = [np.array(times["fp32"]["memory"]["add"]) for times in everybody]
    finish = [np.array(times["fp32"]["memory"]["decode"]) for times in everybody]
    share = (world_size - 1) / world_size
    return median_of((np.concatenate(memory) + np.concatenate(finish) / share) / 4)


def _round(found: Times, codec: Codec, values: Tensor, residual: Tensor | None, *, first: bool) -> None:
    """Time every operation once in every place."""
    values_per_byte = SMALL_NUMEL / codec.wire_bytes(SMALL_NUMEL)
    segment = min(int(SEGMENT_BYTES * values_per_byte) // codec.block * codec.block, MEMORY_NUMEL)
    starts = range(0, MEMORY_NUMEL - segment + 1, segment)
    wire, received = (torch.zeros(codec.wire_bytes(segment), dtype=torch.uint8) for _ in range(2))
    if not codec.in_place:
        codec.encode(values[:segment].clone(), None, received, 1)

    def call(operation: str, start: int, numel: int) -> None:
        part, nbytes = values[start : start + numel], codec.wire_bytes(numel)
        own = None if residual is None else residual[start : start + numel]
        if operation == "encode":
            codec.encode(part, own, wire[:nbytes], 2)
        elif operation == "decode":
            codec.decode(received[:nbytes], part)
            finish_part(FINISHED_FOR, part)
        elif operation == "add":
            codec.decode_add(received[:nbytes], part)
        else:
            codec.decode_add_encode(received[:nbytes], part, own, wire[:nbytes], 2)

    places = {
        "small": ([0] * SMALL_CALLS, SMALL_NUMEL, SMALL_CALLS),
        "memory": (list(starts), segment, len(starts) * segment),
    }
    for operation in OPERATIONS:
        for place, (offsets, numel, divisor) in places.items():
            in_memory = place == "memory"
            (values if in_memory else values[:numel]).fill_(1e-3)
            if first or not in_memory:  # compiles it, and brings small messages into the cache
                call(operation, 0, numel)
            begin = time.thread_time()
            for start in offsets:
                call(operation, start, numel)
            taken = (time.thread_time() - begin) / divisor
            found.setdefault(place, {}).setdefault(operation, []).append(taken)


class _TopK:
    """Cost of selecting the largest values, and of adding what one rank selected, in s per value of the gradient.

    A reduction with one rank selects and adds once; one with many gets the same part from each, and adds each.
    """

    def __init__(self) -> None:
        self._gradient = torch.randn(TOPK_NUMEL, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        self._buffer = FlatBuffer([self._gradient])
        self._reducers = [guest(TOPK)().sums(_Repeat(parts), rank=0, world_size=parts) for parts in (1, ADDED)]
        self._times: dict[str, list[float]] = {"encode": [], "add": []}
        self._seconds()  # allocates residuals and memory

    def timed(self) -> dict[str, list[float]]:
        """Time both once more and return all times so far."""
        one, many = self._seconds()
        add = max(many - one, 0.0) / (ADDED - 1)
        self._times["add"].append(add / TOPK_NUMEL)
        self._times["encode"].append(max(one - add, 0.0) / TOPK_NUMEL)
        return self._times

    def _seconds(self) -> list[float]:
        taken = []
        for reducer in self._reducers:
            self._buffer.fill_from([self._gradient])
            begin = time.thread_time()
            reducer.sum(self._buffer, 0)
            taken.append(time.thread_time() - begin)
        return taken


@dataclass(frozen=True)
class _Repeat:
    """Stand-in for an all-gather in which every rank has selected the same values as this one."""

    parts: int

    def __call__(self, flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = no_op) -> None:
        own, *others = flat.chunk(self.parts)
        for other in others:
            other.copy_(own)

    def wire_bytes(self, flat: Tensor) -> int:
        return 0


def _summarize_topk(everybody: Sequence[Times]) -> CodecSpeed:
    nothing = Estimate.exact(0.0)
    memory = dict.fromkeys(OPERATIONS, nothing)  # a part is neither decoded nor encoded again for a hop
    for operation in ("encode", "add"):
        memory[operation] = median_of(np.concatenate([times["memory"][operation] for times in everybody]))
    return CodecSpeed(bits=guest(TOPK)().bits, call=nothing, memory=memory, gathered=True)
