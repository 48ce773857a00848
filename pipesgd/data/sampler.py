"""Batches of each rank for a DataLoader, which resume an epoch with any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Sampler

from pipesgd.checks import check_at_least
from pipesgd.data.loading import epoch_order
from pipesgd.errors import UserInputError
from pipesgd.membership.record import Record


class SliceSampler(Sampler[list[int]]):
    """Batches of one rank, the ``batch_sampler`` of a DataLoader, in the order of ``pipesgd.train``.

    Each epoch is another permutation of the samples, the same on all ranks. In each iteration the ranks take the next
    batches of it, in the order of their numbers. A loop over the DataLoader is an epoch; the iteration that an epoch
    ends in may take its last batches from the next one. Samples left over at the end of an epoch, fewer than a batch
    for each rank, are dropped.

    A training that is resumed by another number of ranks sees each other sample once in each epoch, also in that which
    was interrupted.

    Args:
        samples: number of samples in the data set.
        batch_size: samples in a batch of one rank.
        rank: this rank.
        world_size: number of ranks.
        seed: seed of the permutations, the same on all ranks.

    Raises:
        UserInputError: there are fewer samples than one batch for each rank.

    >>> sampler = SliceSampler(8, 2, rank=1, world_size=2)
    >>> first, second = sampler
    >>> one, = SliceSampler(8, 8, rank=0, world_size=1)
    >>> (first, second) == (one[2:4], one[6:])
    True
    """

    def __init__(self, samples: int, batch_size: int, *, rank: int, world_size: int, seed: int = 0):
        check_at_least("batch_size", batch_size, 1)
        check_at_least("world_size", world_size, 1)
        if not 0 <= rank < world_size:
            raise UserInputError(f"rank must be at least 0 and below world_size, {world_size}; got {rank}")
        per_epoch = samples // (world_size * batch_size)
        if not per_epoch:
            raise UserInputError(
                f"batch_size must be at most {samples // world_size}: {world_size} ranks share {samples} samples; "
                f"got {batch_size}"
            )
        self._samples, self._batch_size = samples, batch_size
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._record = Record.begun(per_epoch * world_size, world_size)
        self._next = 0

    def __len__(self) -> int:
        """Return the number of batches that the next loop has: those of an epoch, or of its rest."""
        return self._end() - self._next

    def __iter__(self) -> Iterator[list[int]]:
        begin, self._next = self._next, self._end()
        present, order = -1, torch.empty(0)
        for iteration in range(begin, self._next):
            epoch, number = self._record.slice_of(iteration, self._rank)
            if epoch != present:
                present, order = epoch, epoch_order(self._samples, self._seed, epoch)
            yield order[number * self._batch_size :][: self._batch_size].tolist()

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next loop is about."""
        return self._record.epoch(self._next)

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """Return the state after this many iterations of training, which a DataLoader's workers may be ahead of."""
        return {"iteration": iteration, "length": self._record.length, **self._record.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict`` of any rank, of any number of ranks, with the same data and batch size."""
        self._next = state["iteration"]
        record = replace(self._record.continued(state), length=state["length"])
        self._record = record.changed(self._next, self._world_size)

    def _end(self) -> int:
        """Return the iteration that the epoch of the next one ends before."""
        return self._record.iterations((self.epoch + 1) * self._record.length)
