"""torch's own all-reduce: gloo's ring on CPU tensors, nccl on CUDA tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipesgd.checks import check_version
from pipesgd.comm.all_reduce import Finish, no_op
from pipesgd.ranks import lost
from timing_model.schedules import ring, split

NATIVE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype in which torch adds up, by the name of the codec; None for the dtype of the tensor."""


class NativeAllReduce:
    """Sums a flat tensor over the ranks of the first of ``groups``, in place, by ``torch.distributed.all_reduce``.

    A rank outside that group may construct one, since all ranks of a job make groups together, but not call it.

    With the codec bf16 or fp16, the values are rounded to that dtype first, and so is every partial sum.
    ``before`` is called before each sum.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        rank: int,
        world_size: int,
        timeout: float,
        codec: str = "fp32",
        before: Callable[[], None] = lambda: None,
    ):
        self._groups = groups
        self._rank, self._world_size = rank, world_size
        self._timeout = timeout
        self._before = before
        self._dtype = NATIVE_DTYPES[codec]
        self._rounded: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = no_op) -> None:
        if self._dtype is None:
            self._sum(flat)
            finish(flat)
            return
        kind = (flat.numel(), flat.device)
        if kind not in self._rounded:
            self._rounded[kind] = torch.empty_like(flat, dtype=self._dtype)
        rounded = self._rounded[kind]
        rounded.copy_(flat)
        self._sum(rounded)
        flat.copy_(rounded)
        finish(flat)

    def wire_bytes(self, flat: Tensor) -> int:
        """Return the bytes that a ring sends. torch does not count; gloo's real ring rounds chunks up a little."""
        element_size = flat.element_size() if self._dtype is None else self._dtype.itemsize
        return ring_wire_bytes(self._rank, self._world_size, flat.numel(), element_size)

    def _sum(self, flat: Tensor) -> None:
        self._before()
        try:
            work = dist.all_reduce(flat, group=self._groups[0], async_op=True)
            work.wait(timedelta(seconds=self._timeout))
            if flat.is_cuda:  # nccl's wait only makes the stream wait, but the sum must be ready here
                torch.cuda.current_stream().synchronize()
        except RuntimeError as failure:
            raise lost(failure, self._rank, None, "native all-reduce", self._timeout) from failure


def ring_wire_bytes(rank: int, world_size: int, numel: int, element_size: int) -> int:
    """Return the bytes that ``rank`` sends in a ring all-reduce of ``numel`` elements: about 2(p-1)/p of theirs."""
    chunks = split(numel, world_size)
    sizes = [(stop - start) * element_size for start, stop in chunks]
    return sum(sizes[send.chunk] for send in ring(rank, world_size).sends)


@functools.cache
def check_ddp_on_gloo(device: str) -> None:
    """Refuse a torch whose DistributedDataParallel cannot sum tensors on this kind of ``device`` over gloo.

    DistributedDataParallel waits for the future of a sum. Before torch 2.11 (pytorch pull request 170812), that of gloo
    let gradients on a GPU be used before the sums had been copied back to it. ``wait`` of a sum was right.

    Raises:
        UserInputError: the device is "cuda", and torch is older than 2.11.
    """
    if device == "cuda":
        check_version("torch", "2.11", "CUDA tensors that DistributedDataParallel sums over gloo")
