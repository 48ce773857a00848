"""Packing of this rank's gradients: they move from ``.grad`` into flat buffers of a pool."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pipesgd.flat_buffer import BucketedBuffer, make_dense, pack_gradients
from pipesgd.optim.loss_scale import LossScale
from pipesgd.pipeline.cut import Cut
from pipesgd.pipeline.in_flight import Outgoing
from pipesgd.reducers.base import Hooks, as_real
from pipesgd.strategy import Span


class Packing:
    """The gradient whose buckets are leaving, and a pool of the buffers that are free.

    Args:
        cut: the parameters that are trained, in buckets.
        loss_scale: scale of the gradients in ``.grad``; None if they have none.
    """

    def __init__(self, cut: Cut, loss_scale: LossScale | None):
        self._loss_scale = loss_scale
        self.hooks: dict[str, Hooks] = {}
        """Hooks that keep what gathered gradients are made of, by the exchange that needs some."""
        self.left_out: Sequence[Tensor] = ()
        """Values that the next gradient gets in addition, for each of its flat tensors; none adds nothing."""
        self._cut = cut
        self._pool: list[BucketedBuffer] = []
        self.outgoing: Outgoing | None = None
        """Gradient whose buckets are leaving, or will: it has a buffer of the pool."""
        self.buffers_allocated = 0

    def free_buffer(self) -> BucketedBuffer:
        """Take a buffer out of the pool."""
        if self._pool:
            return self._pool.pop()
        self.buffers_allocated += 1
        return BucketedBuffer(self._cut.parameters, self._cut.indices)

    def give_back(self, buffer: BucketedBuffer) -> None:
        """Return a buffer to the pool."""
        self._pool.append(buffer)

    def drop_outgoing(self) -> None:
        """Forget the gradient whose buckets are leaving, and return its buffer to the pool."""
        if self.outgoing is not None:
            self.give_back(self.outgoing.buffer)
            self.outgoing = None

    def clear(self) -> None:
        """Forget all buffers, and the gradient that one of them has."""
        self._pool.clear()
        self.outgoing = None

    def next_outgoing(self, iteration: int) -> Outgoing:
        """Return the gradient of this iteration, some of whose buckets may have left."""
        if self.outgoing is None:
            self.outgoing = Outgoing(iteration, self.free_buffer(), 1.0, [None] * len(self._cut.parameters))
        return self.outgoing

    def pack(self, outgoing: Outgoing, number: int, world_size: int) -> None:
        """Move a bucket's gradients, divided by the loss scale, from ``.grad`` into its flat buffer."""
        begin = time.perf_counter()
        indices, bucket = self._cut.indices[number], outgoing.buffer.buckets[number]
        parameters = [self._cut.parameters[index] for index in indices]
        how = self._cut.exchange[number]
        if how == "rows":
            make_dense(parameters)
        if self._loss_scale is not None:
            outgoing.scale = self._loss_scale.divide(parameters)
        if how in self.hooks:
            outgoing.parts = [self.hooks[how].look(parameter) for parameter in parameters]
        for index, gradient in zip(indices, pack_gradients(parameters, bucket), strict=True):
            outgoing.local[index] = gradient
        for flat, left_out in zip(bucket.flats, self.left_out[bucket.first :], strict=False):
            # ``mean_over_ranks`` divides float16 gradients before it sums them: these are what shares of a mean lost.
            as_real(flat).add_(left_out, alpha=world_size if flat.dtype == torch.float16 else 1)
        outgoing.packs.append(Span("pack", outgoing.iteration, begin, time.perf_counter()))
