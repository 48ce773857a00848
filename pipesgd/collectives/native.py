"""torch's own all-reduce: gloo's ring on CPU tensors, nccl on CUDA tensors."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipesgd.collectives.schedule import ring_wire_bytes
from pipesgd.launch import lost


class NativeAllReduce:
    """Sums a flat tensor over the ranks of ``group``, in place, by ``torch.distributed.all_reduce``."""

    def __init__(self, group: dist.ProcessGroup, timeout: float):
        self._group = group
        self._timeout = timeout

    def __call__(self, flat: Tensor) -> None:
        try:
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            work.wait(timedelta(seconds=self._timeout))
            if flat.is_cuda:  # nccl's wait only makes the stream wait: here the sum must be there
                torch.cuda.current_stream().synchronize()
        except RuntimeError as failure:
            raise lost(failure, self._group.rank(), None, "native all-reduce", self._timeout) from failure

    def wire_bytes(self, flat: Tensor) -> int:
        """What a ring sends. torch does not count; gloo's real ring rounds chunks up a little."""
        return ring_wire_bytes(self._group.rank(), self._group.size(), flat.numel(), flat.element_size())
