"""Loss and accuracy, on the weights that all ranks agree on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipesgd.launch import Ranks
from pipesgd.strategies.base import Strategy
from pipesgd.workloads import evaluation_batches
from pipesgd.workloads.samples import BatchedDataset

BATCH_SIZE = 512


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the weights are worth on data that they were not trained on."""

    accuracy: float
    """Share of the labels that got the largest logit."""
    loss: float
    """Mean cross-entropy of a label, in nats; not finite where the weights are not."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    strategy: Strategy,
    dataset: BatchedDataset,
    ranks: Ranks,
    device: torch.device,
    loader_workers: int,
) -> Evaluation:
    """How the true weights do on ``dataset``. Every rank takes its part; collective."""
    strategy.average_buffers()
    correct, loss, count = 0, 0.0, 0
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
            logits, targets = model(inputs.to(device)).flatten(0, -2), labels.to(device).flatten()
            correct += int((logits.argmax(dim=1) == targets).sum())
            loss += cross_entropy(logits, targets, reduction="sum").item()
            count += len(targets)
    model.train()
    parts = ranks.exchange("evaluation", (correct, loss, count))
    correct, loss, count = (sum(values) for values in zip(*parts, strict=True))
    return Evaluation(accuracy=correct / count, loss=loss / count)
