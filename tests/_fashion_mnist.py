"""The Fashion-MNIST files that tests read: the whole data set where it is installed, else the part in tests/data."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import torch
from torch import Tensor, nn

from pipesgd.data import DataSplits, ShardedBatches, build_model, load_dataset
from pipesgd.data.datasets import DEBIAN_FASHION_MNIST

PART = Path(__file__).resolve().parent / "data" / "fashion-mnist"
FASHION_MNIST = DEBIAN_FASHION_MNIST if DEBIAN_FASHION_MNIST.is_dir() else PART


@functools.cache
def _fashion_mnist() -> DataSplits:
    return load_dataset("fashion-mnist", PART, image_size=28)


def fashion_mnist_batches(
    rank: int, world_size: int, iterations: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    data = _fashion_mnist()
    shards = ShardedBatches(data.train, batch_size=32, rank=rank, world_size=world_size, seed=1)
    first = itertools.islice(shards.from_iteration(0), iterations)
    return [(images.to(dtype), labels) for images, labels in first]


def paper_mlp(dtype: torch.dtype) -> nn.Module:
    """Build the paper's MLP, in float32 with tanh: at a ReLU's kink, rounding decides the gradient of a whole unit."""
    torch.manual_seed(5)
    model = build_model("mlp", sample_shape=(1, 28, 28), num_classes=10).to(dtype)
    if dtype != torch.float32:
        return model
    return nn.Sequential(*(nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in model))


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
