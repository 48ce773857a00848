"""Evaluation: loss and accuracy of the weights that all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from pipesgd.data import CROSS_ENTROPY, Loss, evaluation_batches
from pipesgd.data.samples import Batch, BatchedDataset, on_tensors, outputs_of, tensors_of
from pipesgd.pipeline_config import Buffers
from pipesgd.ranks import Ranks
from pipesgd.strategy import Strategy

LARGEST_BATCH = 512
"""Most samples that are evaluated at once."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Accuracy and loss on data that the weights were not trained on."""

    accuracy: float | None
    """Share of the labels that were predicted rightly; None if the loss does not say what that means."""
    loss: float
    """Mean loss of a prediction if the loss says which are right (with cross-entropy, of a label, in nats), else of a
    sample. Not finite if the weights are not."""


def evaluate(
    model: nn.Module,
    strategy: Strategy,
    dataset: BatchedDataset,
    ranks: Ranks,
    device: torch.device,
    *,
    batch_size: int = LARGEST_BATCH,
    loss: Loss = CROSS_ENTROPY,
    sharded: bool = False,
    loader_workers: int = 0,
    buffers: Buffers = "average",
) -> Evaluation:
    """Evaluate the true weights on ``dataset``, a part on each rank, after combining ``buffers``. Collective.

    A batch has at most ``batch_size`` samples, that of training, for which there is memory, and ``LARGEST_BATCH``. With
    ``sharded``, the samples of every rank are its own part.
    """
    strategy.combine_buffers(buffers)
    with strategy.true_weights():
        batches = evaluation_batches(
            dataset,
            batch_size=min(batch_size, LARGEST_BATCH),
            rank=0 if sharded else ranks.rank,
            world_size=1 if sharded else ranks.world_size,
            loader_workers=loader_workers,
        )
        own = sums(model, batches, device, loss)
    parts = ranks.all_gather_object("evaluation", own)
    return mean(parts)


Sums = tuple[int, int, float, int]
"""Number of labels predicted rightly, number of labels that were compared, sum of all losses, and their number."""


@torch.no_grad()
def sums(model: nn.Module, batches: Iterable[Batch], device: torch.device, loss: Loss = CROSS_ENTROPY) -> Sums:
    """Evaluate the weights that ``model`` holds on ``batches``; it is in training mode afterwards."""
    correct, compared, total, count = 0, 0, 0.0, 0
    is_correct = getattr(loss, "correct", None)
    model.eval()
    for batch in batches:
        inputs, targets = on_tensors(lambda tensor: tensor.to(device), batch)
        outputs = outputs_of(model, inputs)
        weight = len(tensors_of(batch)[0])
        if is_correct is not None:
            found = is_correct(outputs, targets)
            correct += int(found.sum())
            compared += (weight := found.numel())  # labels that do not count, such as padding, may be left out
        if weight > 0:
            total += loss(outputs, targets).item() * weight
            count += weight
    model.train()
    return correct, compared, total, count


def mean(parts: Iterable[Sums]) -> Evaluation:
    """Return the evaluation of a data set from those of its parts."""
    correct, compared, total, count = (sum(values) for values in zip(*parts, strict=True))
    return Evaluation(accuracy=correct / compared if compared else None, loss=total / count if count else math.nan)
