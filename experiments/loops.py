"""The training loops that bench_pipelined compares, each with a model and an optimizer of its own."""

from __future__ import annotations

import copy
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from pipesgd import Pipelined
from pipesgd.ranks import Ranks

LEARNING_RATE, MOMENTUM = 0.01, 0.9

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Images, float32 (B, C, H, W), and labels, int64 (B,)."""


class Loop(Protocol):
    """A training loop, one iteration at a time."""

    model: nn.Module

    def iterate(self, images: Tensor, labels: Tensor) -> None:
        """Forward, backward, and the update that is due."""

    def flush(self) -> None:
        """Apply the gradients that are still in flight."""

    def close(self) -> None:
        """End its threads."""


class Plain:
    """The loop that everybody writes: DDP's, or without communication if ``model`` is no DDP."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._optimizer = sgd(model)

    def iterate(self, images: Tensor, labels: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        cross_entropy(self.model(images), labels).backward()
        self._optimizer.step()

    def flush(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """It has no thread."""


class Piped:
    """Our loop."""

    def __init__(self, model: nn.Module, ranks: Ranks, *, width: int, all_reduce: str):
        self.model = model
        self._pipeline = Pipelined(model, sgd(model), width=width, all_reduce=all_reduce, ranks=ranks)

    def iterate(self, images: Tensor, labels: Tensor) -> None:
        cross_entropy(self.model(images), labels).backward()
        self._pipeline.step()

    def flush(self) -> None:
        self._pipeline.flush()

    def close(self) -> None:
        self._pipeline.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every loop."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def make_loops(model: nn.Module, ranks: Ranks) -> dict[str, Loop]:
    """Every loop, with a copy of ``model`` each. All ranks call this together."""
    return {
        "ddp": Plain(DistributedDataParallel(copy.deepcopy(model))),
        "pipelined width 2, ring": Piped(copy.deepcopy(model), ranks, width=2, all_reduce="ring"),
        "pipelined width 2, native": Piped(copy.deepcopy(model), ranks, width=2, all_reduce="native"),
        "synchronous (width 1), ring": Piped(copy.deepcopy(model), ranks, width=1, all_reduce="ring"),
        "local (no communication)": Plain(copy.deepcopy(model)),
    }
