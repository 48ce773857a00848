"""Images in a Hugging Face data set on a disk (``DatasetDict.save_to_disk``), trained by the command.

python hf_dataset.py DIGITS        # makes such a folder of scikit-learn's digits; needs the package datasets
torchrun --nproc-per-node 2 -m pipesgd.train --dataset hf_dataset:splits --data-dir DIGITS --model convnet
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, load_from_disk

Sample = tuple[torch.Tensor, int]


class Pairs(torch.utils.data.Dataset[Sample]):
    """Rows of one split as pairs (input, target). Columns are read from the disk when a batch is made."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows.with_format("torch")
        self.num_classes = rows.features["label"].num_classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:  # a whole batch at once, which is faster
        batch = self.rows[indices]
        return [(pixels / 16, int(label)) for pixels, label in zip(batch["pixels"], batch["label"], strict=True)]


def splits(data_dir: Path) -> tuple[Pairs, Pairs]:
    """Return the training set and the test set in the folder --data-dir."""
    data = load_from_disk(data_dir)
    return Pairs(data["train"]), Pairs(data["test"])


def save_digits(folder: Path) -> None:
    """Write scikit-learn's digits as a Hugging Face data set."""
    from datasets import Array3D, ClassLabel, Features
    from sklearn.datasets import load_digits

    digits = load_digits()
    features = Features({"pixels": Array3D((1, 8, 8), "float32"), "label": ClassLabel(10)})
    rows = {"pixels": digits.images[:, None].astype("float32"), "label": digits.target}
    data: DatasetDict = Dataset.from_dict(rows, features=features).train_test_split(test_size=300, seed=0)
    data.save_to_disk(folder)


if __name__ == "__main__":
    save_digits(Path(sys.argv[1]))
