"""Evaluation: loss and accuracy of the weights that all ranks agree on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipesgd.data import evaluation_batches
from pipesgd.data.samples import Batch, BatchedDataset
from pipesgd.ranks import Ranks
from pipesgd.strategy import Strategy

BATCH_SIZE = 512


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Accuracy and loss on data that the weights were not trained on."""

    accuracy: float
    """Share of the labels that got the largest logit."""
    loss: float
    """Mean cross-entropy per label, in nats; not finite if the weights are not."""


def evaluate(
    model: nn.Module,
    strategy: Strategy,
    dataset: BatchedDataset,
    ranks: Ranks,
    device: torch.device,
    *,
    loader_workers: int = 0,
    buffers: str = "average",
) -> Evaluation:
    """Evaluate the true weights on ``dataset``, a part on each rank, after combining ``buffers``. Collective."""
    strategy.combine_buffers(buffers)
    with strategy.true_weights():
        batches = evaluation_batches(
            dataset,
            batch_size=BATCH_SIZE,
            rank=ranks.rank,
            world_size=ranks.world_size,
            loader_workers=loader_workers,
        )
        own = sums(model, batches, device)
    parts = ranks.all_gather_object("evaluation", own)
    return mean(parts)


Sums = tuple[int, float, int]
"""Number of labels that got the largest logit, cross-entropy of all labels in nats, and number of labels."""


@torch.no_grad()
def sums(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Sums:
    """Evaluate the weights that ``model`` holds on ``batches``; it is in training mode afterwards."""
    correct, loss, count = 0, 0.0, 0
    model.eval()
    for inputs, labels in batches:
        logits, targets = by_label(model(inputs.to(device)), labels.to(device))
        correct += int((logits.argmax(dim=1) == targets).sum())
        loss += cross_entropy(logits, targets, reduction="sum").item()
        count += len(targets)
    model.train()
    return correct, loss, count


def mean(parts: Iterable[Sums]) -> Evaluation:
    """Return the evaluation of a data set from those of its parts."""
    correct, loss, count = (sum(values) for values in zip(*parts, strict=True))
    return Evaluation(accuracy=correct / count, loss=loss / count)


def by_label(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (N, classes) and labels (N,), whether there is one label per sample or one per byte of a sample."""
    return logits.flatten(0, -2), labels.flatten()
