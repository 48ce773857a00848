"""Data and models of ``experiments/accuracy.py`` that ``pipesgd.train`` does not have, as module:function.

- ``byte_pairs=N``: the source text of Python's library in a vocabulary of N symbols that is learned from it;
- ``tied_transformer``: the command's transformer, whose output layer has the weights of the embedding;
- ``adapted_transformer=R``: the same, trained on the library's comments and strings, with adapters of rank R;
- ``batch_norm_convnet``: three convolutions with batch normalisation.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipesgd.data import CROSS_ENTROPY, ShardedBatches
from pipesgd.data.samples import Batch, BatchedDataset
from pipesgd.data.text import TextWindows, read_text
from pipesgd.data.transformer import Transformer

# ---- A vocabulary of byte pairs

WORDS = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+| ?[^\sA-Za-z0-9_]+|\s+")
"""Pattern of the parts of a text that no symbol crosses; they are the whole text."""

Pair = tuple[int, int]


class SymbolWindows(BatchedDataset):
    """Windows of ``context + 1`` consecutive symbols, as ``TextWindows`` cuts bytes."""

    def __init__(self, symbols: NDArray[np.int16], *, context: int, num_classes: int) -> None:
        samples = len(symbols) // (context + 1)
        self._windows = torch.from_numpy(symbols[: samples * (context + 1)].reshape(samples, context + 1))
        self.num_classes = num_classes

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, indices: Tensor) -> Batch:
        windows = self._windows[indices].long()  # (B, context + 1)
        return windows[:, :-1], windows[:, 1:]


def byte_pairs(vocabulary: str, context: int) -> tuple[SymbolWindows, SymbolWindows]:
    """Return windows of the training and the test text of Python's library in ``vocabulary`` symbols."""
    number = int(vocabulary)
    train, test = (SymbolWindows(of, context=context, num_classes=number) for of in _encoded_library(number))
    return train, test


@functools.cache
def _encoded_library(vocabulary: int) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    train, test = read_text("python-stdlib")
    merges = learned_merges(train, vocabulary - 256)
    return encoded(train, merges), encoded(test, merges)


def learned_merges(text: bytes, number: int) -> list[Pair]:
    """Return at most ``number`` pairs of symbols that become one, in order; the first becomes symbol 256.

    It is always the pair that is most frequent by then, of equally frequent ones the largest.

    References:
        Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016, section 3.2.
    """
    counted = Counter(WORDS.findall(text))
    words, counts = [list(word) for word in counted], list(counted.values())
    found: Counter[Pair] = Counter()
    places: dict[Pair, set[int]] = {}
    """Numbers of the words that have had a pair."""

    def count(index: int, sign: int) -> None:
        for pair in itertools.pairwise(words[index]):
            found[pair] += sign * counts[index]
            places.setdefault(pair, set()).add(index)

    for index in range(len(words)):
        count(index, 1)
    merges = []
    for symbol in range(256, 256 + number):
        best = max(found, key=lambda pair: (found[pair], pair))
        if not found[best]:
            break  # every word is one symbol
        merges.append(best)
        for index in places.pop(best):
            count(index, -1)
            words[index] = _merged(words[index], best, symbol)
            count(index, 1)
    return merges


def _merged(symbols: Sequence[int], pair: Pair, symbol: int) -> list[int]:
    """Return ``symbols`` with ``symbol`` in place of every ``pair``, from the left."""
    result: list[int] = []
    at = 0
    while at < len(symbols):
        if tuple(symbols[at : at + 2]) == pair:
            result.append(symbol)
            at += 2
        else:
            result.append(symbols[at])
            at += 1
    return result


def encoded(text: bytes, merges: Sequence[Pair]) -> NDArray[np.int16]:
    """Return the symbols of ``text``.

    >>> encoded(b"aaab", learned_merges(b"aaab aaab", 1)).tolist()
    [256, 97, 98]
    """
    symbol_of = {pair: 256 + number for number, pair in enumerate(merges)}

    @functools.cache
    def of_word(word: bytes) -> list[int]:
        symbols = list(word)
        while known := [symbol_of[pair] for pair in itertools.pairwise(symbols) if pair in symbol_of]:
            symbols = _merged(symbols, merges[min(known) - 256], min(known))
        return symbols

    return np.array([symbol for word in WORDS.findall(text) for symbol in of_word(word)], np.int16)


# ---- Transformers

BASE_ITERATIONS, BASE_BATCH, BASE_LR = 1000, 32, 0.004
"""Training of the model that gets adapters."""
ADAPTED_SCALE = 2.0
"""Factor on what an adapter adds."""
PROSE = re.compile(rb"#[^\n]*\n|\"\"\".*?\"\"\"", re.DOTALL)
"""Pattern of comments and of strings of several lines, with some code where a quote in a comment is not closed."""


def tied_transformer(
    sample_shape: tuple[int, ...], num_classes: int, layers: int, heads: int, embedding: int
) -> Transformer:
    """Return the command's transformer with one table of weights for its embedding and its output layer."""
    model = Transformer(
        vocabulary=num_classes, context=sample_shape[0], layers=layers, heads=heads, embedding=embedding
    )
    model.output.weight = model.symbols.weight
    return model


class Adapter(nn.Module):
    """A linear layer that stays as it is, and a product of two thin matrices that is trained and added to it.

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.1.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + ADAPTED_SCALE * self.up(self.down(x))
        return result


def adapted_transformer(
    rank: str, sample_shape: tuple[int, ...], num_classes: int, layers: int, heads: int, embedding: int
) -> Transformer:
    """Return a transformer trained on prose, of which only adapters at the projections of its attention are trained."""
    shape = (sample_shape, num_classes, layers, heads, embedding)
    model = tied_transformer(*shape)
    model.load_state_dict(_weights_for_prose(*shape))
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in ("queries_keys_values", "to_residual"):
            if hasattr(module, "queries_keys_values"):
                setattr(module, name, Adapter(getattr(module, name), int(rank)))
    return model


@functools.cache
def _weights_for_prose(
    sample_shape: tuple[int, ...], num_classes: int, layers: int, heads: int, embedding: int
) -> dict[str, Tensor]:
    """Return weights after a training on the comments and strings of Python's library, the same for every seed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in another order would be other weights
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = tied_transformer(sample_shape, num_classes, layers, heads, embedding)
            text, _ = read_text("python-stdlib")
            prose = TextWindows(b"".join(PROSE.findall(text)), context=sample_shape[0])
            _train(model, ShardedBatches(prose, batch_size=BASE_BATCH, rank=0, world_size=1, seed=0).from_iteration(0))
    finally:
        torch.set_num_threads(threads)
    return model.state_dict()


def _train(model: nn.Module, batches: Iterable[Batch]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=BASE_LR, total_steps=BASE_ITERATIONS, cycle_momentum=False
    )
    for (inputs, labels), _ in zip(batches, range(BASE_ITERATIONS), strict=False):
        optimizer.zero_grad()
        CROSS_ENTROPY(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


# ---- Images


def batch_norm_convnet(sample_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return three convolutions of 16, 32 and 64 channels, each with batch normalisation, and a linear layer."""
    return nn.Sequential(
        *(_convolution(sample_shape[0], 16), nn.MaxPool2d(2)),
        *(_convolution(16, 32), nn.MaxPool2d(2)),
        _convolution(32, 64),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes)),
    )


def _convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
