"""Loss and accuracy, on the weights that all ranks agree on."""

from __future__ import annotations

import torch
from torch import nn

from pipesgd.launch import Ranks
from pipesgd.strategies.base import Strategy
from pipesgd.workloads import evaluation_batches
from pipesgd.workloads.samples import BatchedDataset

BATCH_SIZE = 512


@torch.no_grad()
def test_accuracy(
    model: nn.Module,
    strategy: Strategy,
    dataset: BatchedDataset,
    ranks: Ranks,
    device: torch.device,
    loader_workers: int,
) -> float:
    """Share of ``dataset`` that the true weights classify rightly. Every rank takes its part; collective."""
    strategy.average_buffers()
    correct = 0
    model.eval()
    with strategy.true_weights():
        batches = evaluation_batches(
            dataset,
            batch_size=BATCH_SIZE,
            rank=ranks.rank,
            world_size=ranks.world_size,
            loader_workers=loader_workers,
        )
        for inputs, labels in batches:
            correct += int((model(inputs.to(device)).argmax(dim=1) == labels.to(device)).sum())
    model.train()
    corrects: list[int] = ranks.exchange("test accuracy", correct)
    return sum(corrects) / len(dataset)
