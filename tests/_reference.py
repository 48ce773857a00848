"""Pipe-SGD in one process, written from the recursion of the paper and from nothing of ours.

``w[s+1] = w[s] - Opt(mean over ranks of g[s-K+1])`` at the learning rate of iteration s-K+1; an update with a
negative index is skipped; after the last iteration the K-1 updates that remain are applied. During a warm-up
K is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def pipe_sgd(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Sequence[Any]],
    *,
    width: int,
    warmup_iterations: int = 0,
    lr_of: Callable[[int], float] | None = None,
) -> list[list[float]]:
    """Train ``model`` in place on ``batches[iteration][rank]``; the loss of every iteration and rank."""
    parameters = list(model.parameters())
    means: list[list[Tensor]] = []
    losses: list[list[float]] = []

    def apply(index: int) -> None:
        for parameter, mean in zip(parameters, means[index], strict=True):
            parameter.grad = mean.clone()
        if lr_of is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr_of(index)
        optimizer.step()

    applied = 0
    for iteration, of_ranks in enumerate(batches):
        values = [loss_of(model, batch) for batch in of_ranks]
        gradients = [torch.autograd.grad(value, parameters) for value in values]
        means.append([torch.stack(parts).mean(0) for parts in zip(*gradients, strict=True)])
        losses.append([value.item() for value in values])
        in_flight = 0 if iteration < warmup_iterations else width - 1
        while applied <= iteration - in_flight:
            apply(applied)
            applied += 1
    while applied < len(batches):
        apply(applied)
        applied += 1
    return losses
