"""A training of integers, whose weights a few lines compute from summary.json and the data alone.

The gradient of a batch is the mean of its samples, whatever the weights are, and the samples are multiples of the batch
size. So all sums are exact in float32, in any order, and only the divisions by the number of ranks round. ``replayed``
is given what the run says about its members, and imports nothing of pipesgd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

BATCH, VALUES, SAMPLES = 4, 300, 4000
OPTIONS = (
    "--dataset experiments.integer_sums:numbers --model experiments.integer_sums:Weights "
    f"--loss experiments.integer_sums:dot --batch-size {BATCH} --lr 1 --momentum 0 --codec fp32"
)


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples (VALUES,) in a fixed order, multiples of BATCH."""

    def __init__(self, samples: int):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Any:
        return ((values, torch.zeros(())) for values in all_values(self.samples))


def all_values(samples: int) -> Tensor:
    """Return the samples, float32 (samples, VALUES)."""
    return BATCH * torch.randint(-50, 51, (samples, VALUES), generator=torch.Generator().manual_seed(7)).float()


def numbers() -> tuple[Numbers, Numbers]:
    """Return the training set and the test set."""
    return Numbers(SAMPLES), Numbers(BATCH)


class Weights(nn.Module):
    """Samples (B, VALUES) to their products with the weights, (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(VALUES))

    def forward(self, samples: Tensor) -> Tensor:
        return samples @ self.values


def dot(products: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the products."""
    return products.mean()


def replayed(summary: Mapping[str, Any], iterations: int) -> Tensor:
    """Return the weights after ``iterations``, (VALUES,), given what summary.json says of the members."""
    samples = all_values(SAMPLES)
    generations = summary["generations"]
    members = generations[0]["members"]
    length = SAMPLES // (len(members) * BATCH) * len(members)
    spans: list[tuple[int, list[int], list[int], int]] = [(generations[0]["first_iteration"], members, [], 0)]
    for generation in generations[1:]:
        first, old, given_back, fresh = spans[-1]
        begin = generation["first_iteration"]
        given = (begin - first) * len(old)
        back = [*given_back[given:], *(one for lost in generation["lost"] for one in lost["slices_given_back"])]
        spans.append((begin, generation["members"], back, fresh + max(0, given - len(given_back))))
    weights = torch.zeros(VALUES)
    for iteration in range(iterations):
        first, ranks, given_back, fresh = next(span for span in reversed(spans) if span[0] <= iteration)
        summed_by = next(one for one in reversed(generations) if one["iterations_done"] <= iteration)["members"]
        total = torch.zeros(VALUES)
        for member in summed_by:
            n = (iteration - first) * len(ranks) + ranks.index(member)
            number = given_back[n] if n < len(given_back) else fresh + n - len(given_back)
            start = number % length * BATCH
            total += samples[start : start + BATCH].sum(0) / BATCH
        weights -= total / len(summed_by)
    return weights
