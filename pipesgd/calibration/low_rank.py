"""Sizes of a model's factors of low rank, and the time of the products that make them, on a rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipesgd.comm.all_reduce import Finish, no_op
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.reducers.low_rank import LowRank
from pipesgd.reducers.powersgd import PowerSgdReducer
from timing_model.measured import Estimate, LowRankProfile
from timing_model.params import FLOAT_BYTES

ROUNDS = 7
"""Number of sums that are timed, after one that is not."""


class _Alone:
    """An all-reduce that changes nothing, and keeps how many values each of its calls had."""

    def __init__(self) -> None:
        self.numels: list[int] = []

    def __call__(self, flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = no_op) -> None:
        self.numels.append(flat.numel())

    def wire_bytes(self, flat: Tensor) -> int:
        return FLOAT_BYTES * flat.numel()


def measure(parameters: Sequence[Tensor], world_size: int) -> tuple[list[int], list[float]]:
    """Return the sizes of the two all-reduces of a gradient's factors, in values, and CPU seconds of sums without them.

    Factors have the rank of training by default. The lists are empty if no parameter is factored.
    """
    rule = LowRank()
    if not any(map(rule.matrices, parameters)):
        return [], []
    alone, buffer = _Alone(), FlatBuffer(parameters)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(flat.numel(), generator=generator).to(flat.dtype) for flat in buffer.flats]
    reducer = PowerSgdReducer(alone, world_size=max(2, world_size), rule=rule)
    seconds = []
    for number in range(1 + ROUNDS):
        for flat, random in zip(buffer.flats, values, strict=True):
            flat.copy_(random)
        begin = time.thread_time()
        reducer.sum(buffer, number)
        seconds.append(time.thread_time() - begin)
    return alone.numels[:2], seconds[1:]


def summarize(sizes: Sequence[int], every_seconds: Sequence[Sequence[float]]) -> LowRankProfile | None:
    """Return the profile, whose work is that of the slowest rank; None if no parameter is factored.

    >>> summarize([5, 3], [[1.0, 2.0, 3.0], [0.5, 0.5, 0.5]]).work.value
    2.0
    """
    if not sizes:
        return None
    slowest = max(every_seconds, key=np.median)
    low, high = np.percentile(slowest, [5, 95])
    return LowRankProfile(
        rank=LowRank.rank,
        left=sizes[0],
        right=sizes[1],
        work=Estimate(float(np.median(slowest)), float(low), float(high)),
    )
