"""Data sets of the table: those of pipesgd.train with a part of their test samples, which many trainings evaluate."""

from __future__ import annotations

import dataclasses

import torch

from pipesgd.data.datasets import load_dataset
from pipesgd.data.samples import Batch, BatchedDataset, DataSplits

TESTED_ON = 4
"""Every one of this many test samples is evaluated."""


class EveryFew(BatchedDataset):
    """Every ``TESTED_ON``-th sample of others, the first one among them."""

    def __init__(self, samples: BatchedDataset) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return -(-len(self._samples) // TESTED_ON)

    def __getitem__(self, indices: torch.Tensor) -> Batch:
        return self._samples[TESTED_ON * indices]


def fashion_mnist() -> DataSplits:
    """Return Fashion-MNIST."""
    return _tested_on_a_part(load_dataset("fashion-mnist", None, image_size=28))


def python_stdlib(context: int) -> DataSplits:
    """Return the text of Python's own library."""
    return _tested_on_a_part(load_dataset("python-stdlib", None, image_size=28, context=context))


def _tested_on_a_part(splits: DataSplits) -> DataSplits:
    return dataclasses.replace(splits, test=EveryFew(splits.test))
