"""Two moons told apart: a model, a data set and a loss of your own, trained by the command.

    torchrun --nproc-per-node 2 -m pipesgd.train --dataset own_model:moons --model own_model:Classifier \
        --loss own_model:squared_hinge --hidden-sizes 32 32 --lr 0.1 --epochs 5

Run it in this folder. docs/own_model.md explains it.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Moons(Dataset[tuple[Tensor, int]]):
    """Points of the plane on two half circles, with the number of the half circle."""

    num_classes = 2

    def __init__(self, samples: int, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (samples,), generator=numbers)
        angles = math.pi * (torch.rand(samples, generator=numbers) + self.labels)
        shifts = torch.stack([self.labels.float(), 0.5 * self.labels], dim=1)
        noise = 0.1 * torch.randn(samples, 2, generator=numbers)
        self.points = torch.stack([angles.cos(), angles.sin()], dim=1) + shifts + noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.labels[index])


def moons(seed: int) -> tuple[Moons, Moons]:
    """Return the training set and the test set."""
    return Moons(2000, seed), Moons(400, seed + 1)


class Classifier(nn.Module):
    """Points (B, 2) to a score for each half circle, (B, num_classes)."""

    def __init__(self, num_classes: int, hidden_sizes: tuple[int, ...]) -> None:
        super().__init__()
        sizes = [2, *hidden_sizes]
        hidden = [nn.Sequential(nn.Linear(n, m), nn.ReLU()) for n, m in itertools.pairwise(sizes)]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], num_classes))

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.layers(points)
        return scores


def squared_hinge(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared amount by which scores miss a margin of 1."""
    signs = 2.0 * nn.functional.one_hot(labels, scores.shape[1]) - 1
    return (1 - signs * scores).clamp(min=0).square().mean()


def is_right(scores: Tensor, labels: Tensor) -> Tensor:
    """Return, for each label, whether it has the highest score: bool (B,)."""
    return scores.argmax(dim=1) == labels


squared_hinge.correct = is_right  # type: ignore[attr-defined]  # so that evaluations measure the accuracy, too
