"""A training of integers, whose weights a few lines compute from summary.json and the data alone.

The gradient of a batch is the mean of its samples, whatever the weights are, and the samples are multiples of the batch
size. So all sums are exact in float32, in any order, and only the divisions by the number of ranks round. ``replayed``
is given what the run says about its members, and imports nothing of pipesgd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


Span = tuple[int, list[int], list[int], int]
"""First iteration, members, slices that are given back, and the next slice that nobody had."""


def spans_of(generations: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Return the layout of samples of each generation in summary.json, from its first iteration on."""
    spans: list[Span] = [(generations[0]["first_iteration"], generations[0]["members"], [], 0)]
    for generation in generations[1:]:
        given_back, fresh = rest(spans[-1], generation["first_iteration"])
        lost = [number for lost in generation["lost"] for number in lost["slices_given_back"]]
        spans.append((generation["first_iteration"], generation["members"], [*given_back, *lost], fresh))
    return spans


def rest(span: Span, end: int) -> tuple[list[int], int]:
    """Return what iterations before ``end`` leave of a span: slices still given back, and the next fresh one."""
    first, members, given_back, fresh = span
    given = (end - first) * len(members)
    return given_back[given:], fresh + max(0, given - len(given_back))


def span_at(spans: Sequence[Span], iteration: int) -> Span:
    """Return the span of ``iteration``."""
    return next(span for span in reversed(spans) if span[0] <= iteration)


def slice_of(spans: Sequence[Span], iteration: int, member: int) -> int:
    """Return the number of the slice that ``member`` takes in ``iteration``."""
    first, members, given_back, fresh = span_at(spans, iteration)
    n = (iteration - first) * len(members) + members.index(member)
    return given_back[n] if n < len(given_back) else fresh + n - len(given_back)


def summed_by(generations: Sequence[Mapping[str, Any]], iteration: int) -> list[int]:
    """Return the members whose gradients the mean of ``iteration`` has."""
    members: list[int] = next(one for one in reversed(generations) if one["iterations_done"] <= iteration)["members"]
    return members


def replayed(summary: Mapping[str, Any], iterations: int) -> Tensor:
    """Return the weights after ``iterations``, (VALUES,), given what summary.json says of the members."""
    samples = all_values(SAMPLES)
    generations = summary["generations"]
    members = generations[0]["members"]
    length = SAMPLES // (len(members) * BATCH) * len(members)
    spans = spans_of(generations)
    weights = torch.zeros(VALUES)
    for iteration in range(iterations):
        those = summed_by(generations, iteration)
        total = torch.zeros(VALUES)
        for member in those:
            start = slice_of(spans, iteration, member) % length * BATCH
            total += samples[start : start + BATCH].sum(0) / BATCH
        weights -= total / len(those)
    return weights
