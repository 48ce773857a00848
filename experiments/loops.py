"""Training loops that the benches compare, each with its own model and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy

from pipesgd import LocalSteps, Pipelined, Windows
from pipesgd.ddp import AttachedPipeline
from pipesgd.ranks import Ranks

LEARNING_RATE, MOMENTUM = 0.01, 0.9

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Images, float32 (B, C, H, W), and labels, int64 (B,)."""

Door: TypeAlias = Callable[[Any, torch.optim.Optimizer], Any]
"""Function of a model in DistributedDataParallel and its optimizer, which returns something to ``close``."""


class Loop(Protocol):
    """A training loop, one iteration at a time."""

    model: nn.Module

    def iterate(self, images: Tensor, labels: Tensor) -> None:
        """Run forward, backward, and the update that is due."""

    def flush(self) -> None:
        """Apply the gradients that are still in flight."""

    def close(self) -> None:
        """End the loop's threads."""


class Plain:
    """The usual training loop: with DDP, or without communication if ``model`` is not wrapped in DDP.

    ``door`` lets the loop train in another way, and returns what ends that: ``pipesgd.ddp``'s functions.
    """

    def __init__(self, model: nn.Module, door: Door | None = None):
        self.model = model
        self._optimizer = sgd(model)
        self._opened = None if door is None else door(model, self._optimizer)

    def iterate(self, images: Tensor, labels: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        cross_entropy(self.model(images), labels).backward()
        self._optimizer.step()

    def flush(self) -> None:
        """Apply the gradients in flight, if the loop is attached to a pipeline; else there are none."""
        if isinstance(self._opened, AttachedPipeline):
            self._opened.flush()

    def close(self) -> None:
        """Close the door, if there is one."""
        if self._opened is not None:
            self._opened.close()


def to_fp16(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let a model in DistributedDataParallel exchange gradients in fp16, by torch's hook; this is a ``Door``."""
    model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)


class Piped:
    """The training loop with ``Pipelined``, or ``LocalSteps`` if there are several, and these options of it."""

    def __init__(self, model: nn.Module, ranks: Ranks, *, local_steps: int = 1, **options: Any):
        self.model = model
        self._pipeline: Pipelined | LocalSteps
        if local_steps == 1:
            self._pipeline = Pipelined(model, sgd(model), ranks=ranks, **options)
        else:
            self._pipeline = LocalSteps(model, sgd(model), Windows(local_steps=local_steps), ranks=ranks, **options)

    def iterate(self, images: Tensor, labels: Tensor) -> None:
        cross_entropy(self.model(images), labels).backward()
        self._pipeline.step()

    def flush(self) -> None:
        self._pipeline.flush()

    def close(self) -> None:
        self._pipeline.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that every loop uses."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
