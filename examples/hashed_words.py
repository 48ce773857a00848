"""Short texts of two kinds, told apart by their words: an embedding of 100,000 rows that is exchanged by rows.

    torchrun --nproc-per-node 2 -m pipesgd.train --dataset hashed_words:texts --model hashed_words:Classifier \
        --embedding 16 --reduce rows --optimizer adagrad --lr 0.1 --epochs 1

Run it in this folder. docs/semantics.md explains --reduce.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

ROWS = 100_000
WORDS = 8  # in a text


def row_of(word: str) -> int:
    """Return the row of a word: its hash, so that no vocabulary is needed."""
    return zlib.crc32(word.encode()) % ROWS


class Texts(Dataset[tuple[Tensor, int]]):
    """Texts of a few words, half of which are typical of their kind, as rows int64 (WORDS,), with the kind."""

    num_classes = 2

    def __init__(self, samples: int, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        self.kinds = torch.randint(2, (samples,), generator=numbers)
        typical = torch.randint(100, (samples, WORDS // 2), generator=numbers) + 100 * self.kinds[:, None]
        others = torch.randint(200, 50_000, (samples, WORDS - WORDS // 2), generator=numbers)
        words = torch.cat([typical, others], dim=1)
        self.rows = torch.tensor([[row_of(f"word {word}") for word in text] for text in words.tolist()])

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], int(self.kinds[index])


def texts(seed: int) -> tuple[Texts, Texts]:
    """Return the training set and the test set."""
    return Texts(2000, seed), Texts(400, seed + 1)


class Classifier(nn.Module):
    """Rows of words (B, WORDS) to a score for each kind, (B, num_classes)."""

    def __init__(self, num_classes: int, embedding: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(ROWS, embedding, sparse=True)
        self.scores = nn.Linear(embedding, num_classes)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.words(rows))
        return scores
