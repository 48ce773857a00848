"""Pipe-SGD in one process, written from the recursion in the paper and independent of pipesgd's code.

``w[s+1] = w[s] - Opt(mean over ranks of g[s-K+1])`` at the learning rate of iteration s-K+1; an update with a
negative index is skipped; after the last iteration the K-1 updates that remain are applied. During a warm-up
K is 1.

With a prediction, a rank computes its g[t] on other weights: see ``predicted``.
"""

from __future__ import annotations

import copy
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
    prediction: str = "none",
    clip: Callable[[list[Tensor]], None] = lambda gradients: None,
    lr_of: Callable[[int], float] | None = None,
) -> list[list[float]]:
    """Train ``model`` in place on ``batches[iteration][rank]``; return the loss of every iteration and rank."""
    parameters = list(model.parameters())
    means: list[list[Tensor]] = []
    locals_: list[list[list[Tensor]]] = []  # by iteration and rank
    computed_on: list[list[Tensor]] = []
    before: list[Tensor] | None = None  # weights before the last update
    squares = [torch.zeros_like(parameter) for parameter in parameters]
    losses: list[list[float]] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[Tensor], index: int) -> None:
        gradients = [gradient.clone() for gradient in gradients]
        clip(gradients)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        if lr_of is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr_of(index)
        optimizer.step()

    agreements = [1.0] * len(batches[0])  # running means of the cosine between a rank's gradient and the mean
    missed = [[torch.zeros_like(parameter) for parameter in parameters] for _ in batches[0]]

    def apply(index: int) -> None:
        nonlocal before
        for rank, local in enumerate(locals_[index]):
            share = 1 - (1 - agreements[rank]) / 3
            missed[rank] = [
                0.7 * e + share * (g - m) for e, g, m in zip(missed[rank], local, means[index], strict=True)
            ]
            mine, mean_ = (torch.cat([part.reshape(-1) for part in parts]) for parts in (local, means[index]))
            if mine.norm() > 0 and mean_.norm() > 0:
                cosine = float(torch.cosine_similarity(mine, mean_, dim=0))
                agreements[rank] += 0.05 * (round(cosine, 5) - agreements[rank])
        before = [parameter.detach().clone() for parameter in parameters]
        mean = means[index]
        if prediction == "dc":
            for i, (g, now, then) in enumerate(zip(mean, before, computed_on[index], strict=True)):
                squares[i] = 0.95 * squares[i] + 0.05 * g * g
                mean[i] = g + 2.0 / (squares[i].sqrt() + 1e-7) * g * g * (now - then)
        step(model, optimizer, mean, index)

    def predicted(rank: int, in_flight: range) -> nn.Module:
        """Return a copy of the model with the weights on which this rank computes its gradient."""
        guess, its_optimizer = copy.deepcopy((model, optimizer))
        for index in in_flight:
            if prediction in ("local", "eager"):
                gradients = locals_[index][rank]
                if prediction == "eager":
                    carried = 0.7 if index == in_flight[0] else 0.0
                    share = 1 - (1 - agreements[rank]) / 3
                    gradients = [share * g + carried * e for g, e in zip(gradients, missed[rank], strict=True)]
                step(guess, its_optimizer, gradients, index)
            elif prediction == "nesterov":
                step(guess, its_optimizer, [torch.zeros_like(parameter) for parameter in parameters], index)
            elif prediction == "previous" and applied:
                step(guess, its_optimizer, means[applied - 1], index)
            elif prediction == "spectrain" and before is not None:
                with torch.no_grad():
                    for target, now, last in zip(guess.parameters(), parameters, before, strict=True):
                        target.add_(now - last)
        if prediction == "eager":
            with torch.no_grad():
                for target, now in zip(guess.parameters(), parameters, strict=True):
                    target.add_((1 - agreements[rank]) * (target - now))
        return guess

    applied = 0
    for iteration, of_ranks in enumerate(batches):
        computed_on.append([parameter.detach().clone() for parameter in parameters])
        models = [predicted(rank, range(applied, iteration)) for rank in range(len(of_ranks))]
        values = [loss_of(of_rank, batch) for of_rank, batch in zip(models, of_ranks, strict=True)]
        locals_.append(
            [
                list(torch.autograd.grad(value, list(of_rank.parameters())))
                for value, of_rank in zip(values, models, strict=True)
            ]
        )
        means.append([torch.stack(parts).mean(0) for parts in zip(*locals_[-1], strict=True)])
        losses.append([value.item() for value in values])
        in_flight = 0 if iteration < warmup_iterations else width - 1
        while applied <= iteration - in_flight:
            apply(applied)
            applied += 1
    while applied < len(batches):
        apply(applied)
        applied += 1
    return losses
