"""torch's own optimizers and schedules by the names of the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from pipesgd.config import OptimizationConfig


def build_optimizer(config: OptimizationConfig, parameters: Iterable[Parameter]) -> Optimizer:
    """The optimizer that ``config`` names."""
    decay = config.weight_decay
    if config.optimizer == "adam":
        return Adam(parameters, lr=config.lr, weight_decay=decay)
    if config.optimizer == "adamw":
        return AdamW(parameters, lr=config.lr, weight_decay=decay)
    nesterov = config.optimizer == "nesterov"
    return SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=decay, nesterov=nesterov)


def build_schedule(config: OptimizationConfig, optimizer: Optimizer, iterations: int) -> LRScheduler:
    """The schedule that ``config`` names, over a run of ``iterations``; stepped once an iteration."""
    if config.schedule == "one-cycle":
        # Its own cycling of the momentum is left off: --momentum means what it says.
        return OneCycleLR(optimizer, max_lr=config.lr, total_steps=iterations, cycle_momentum=False)
    if config.schedule == "cosine":
        return LambdaLR(optimizer, lambda iteration: (1 + math.cos(math.pi * iteration / iterations)) / 2)
    return LambdaLR(optimizer, lambda iteration: 1.0)
