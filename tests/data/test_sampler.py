"""A sampler for programs with DistributedDataParallel, whose epochs other ranks complete."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pipesgd.data import ShardedBatches
from pipesgd.data.sampler import SliceSampler
from pipesgd.data.samples import Batch, BatchedDataset
from pipesgd.errors import UserInputError

SAMPLES = 53
PER_EPOCH = SAMPLES // 6 * 2
"""Batches of three samples in an epoch that two ranks begin."""


def samplers(world_size: int, state: dict[str, object] | None = None) -> list[SliceSampler]:
    made = [SliceSampler(SAMPLES, 3, rank=rank, world_size=world_size, seed=7) for rank in range(world_size)]
    for one in made:
        if state is not None:
            one.load_state_dict(state)
    return made


def test_epochs_that_other_ranks_continue_are_completed_with_each_sample_once() -> None:
    batches: list[list[int]] = []
    state, iteration = None, 0
    for world_size, iterations in [(2, 5), (3, 2), (1, 3), (4, 20)]:
        of_ranks = samplers(world_size, state)
        assert {one.epoch for one in of_ranks} == {len(batches) // PER_EPOCH}
        done = 0
        while done < iterations:
            lengths = {len(one) for one in of_ranks}
            loops = [list(one) for one in of_ranks]
            assert {len(loop) for loop in loops} == lengths
            taken = min(len(loops[0]), iterations - done)
            batches += [loop[number] for number in range(taken) for loop in loops]
            done += taken
        iteration += done
        state = of_ranks[-1].state_dict(iteration)
    assert len(batches) == 2 * 5 + 3 * 2 + 1 * 3 + 4 * 20
    for epoch in range(len(batches) // PER_EPOCH):
        seen = list(itertools.chain(*batches[epoch * PER_EPOCH : (epoch + 1) * PER_EPOCH]))
        assert len(set(seen)) == len(seen) == PER_EPOCH * 3


class Numbers(BatchedDataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, indices: torch.Tensor) -> Batch:
        return indices, indices


def test_batches_are_those_of_the_command() -> None:
    for rank, sampler in enumerate(samplers(2)):
        command = ShardedBatches(Numbers(), batch_size=3, rank=rank, world_size=2, seed=7).from_iteration(0)
        loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=sampler)
        for _ in range(2):
            for [batch] in loader:
                assert torch.equal(batch, next(command)[0])


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"^batch_size must be at most 26: 2 ranks share 53 samples; got 27$"):
        SliceSampler(SAMPLES, 27, rank=0, world_size=2)
    with pytest.raises(UserInputError, match=r"^rank must be at least 0 and below world_size, 2; got 2$"):
        SliceSampler(SAMPLES, 3, rank=2, world_size=2)
