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
    synchronous_start: int = 0,
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
        in_flight = 0 if iteration < synchronous_start else width - 1
        while applied <= iteration - in_flight:
            apply(applied)
            applied += 1
    while applied < len(batches):
        apply(applied)
        applied += 1
    return losses


def local_steps(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    loss_of: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Sequence[Any]],
    *,
    steps: int,
    width: int,
    synchronous_start: int = 0,
    outer: Callable[[list[Tensor]], list[Tensor]] = lambda movement: movement,
    average_state: bool = False,
) -> list[list[float]]:
    """Train ``model`` in place by windows of local steps, written from the definition; return losses likewise.

    A window's movement is its start minus its end, on each rank. The mean movement of window n-K+1 is subtracted from
    the weights, as ``outer`` makes it, when window n ends. The next window starts there, minus this rank's own movement
    in each window that is still on its way, times its last cosine with a mean squared. ``outer`` changes nothing by
    default: the result is then the mean of the ranks' weights. With ``average_state``, the optimizers' tensors that are
    shaped like their parameters are replaced by their means, too, after every window.
    """
    parameters = list(model.parameters())
    ranks = [copy.deepcopy(model) for _ in batches[0]]
    optimizers = [make_optimizer(rank.parameters()) for rank in ranks]
    cosines = [1.0] * len(ranks)
    on_their_way: list[list[list[Tensor]]] = []  # by window and rank
    losses: list[list[float]] = []

    def arrive() -> None:
        movements = on_their_way.pop(0)
        mean, cosines[:] = _mean_and_cosines(movements)
        with torch.no_grad():
            for parameter, change in zip(parameters, outer(mean), strict=True):
                parameter.sub_(change)

    iteration = 0
    while iteration < len(batches):
        length, in_flight = (1, 0) if iteration < synchronous_start else (steps, width - 1)
        window = batches[iteration : iteration + length]
        iteration += len(window)
        losses += [[] for _ in window]
        movements = []
        for rank, (its_model, optimizer) in enumerate(zip(ranks, optimizers, strict=True)):
            with torch.no_grad():
                for index, (own, agreed) in enumerate(zip(its_model.parameters(), parameters, strict=True)):
                    own.copy_(agreed)
                    for late in on_their_way:
                        own.sub_(late[rank][index] * cosines[rank] ** 2)
            start = [own.detach().clone() for own in its_model.parameters()]
            for number, of_ranks in enumerate(window, iteration - len(window)):
                losses[number].append(_own_step(its_model, optimizer, loss_of, of_ranks[rank]))
            movements.append([a - b.detach() for a, b in zip(start, its_model.parameters(), strict=True)])
        on_their_way.append(movements)
        while len(on_their_way) > in_flight:
            arrive()
        if average_state:
            for of_ranks in zip(*(its_model.parameters() for its_model in ranks), strict=True):
                states = [optimizer.state[own] for optimizer, own in zip(optimizers, of_ranks, strict=True)]
                for name in [name for name, value in states[0].items() if value.shape == of_ranks[0].shape]:
                    mean = sum(state[name] for state in states) / len(ranks)
                    for state in states:
                        state[name] = mean.clone()
    while on_their_way:
        arrive()
    return losses


def _own_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Any], Tensor],
    batch: Any,
) -> float:
    """Do an iteration of one rank by itself; return the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def _mean_and_cosines(movements: list[list[Tensor]]) -> tuple[list[Tensor], list[float]]:
    """Return the mean of the ranks' movements, and the cosine of each rank's with it, 0 if negative."""
    mean = [sum(parts[1:], parts[0]) / len(movements) for parts in zip(*movements, strict=True)]
    cosines = []
    for own in movements:
        one, other = (torch.cat([part.reshape(-1) for part in parts]) for parts in (own, mean))
        cosines.append(max(round(float(torch.cosine_similarity(one, other, dim=0)), 5), 0.0))
    return mean, cosines


def weight_streaming(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    loss_of: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Sequence[Any]],
    *,
    steps: int,
    width: int,
    fragments: Sequence[slice],
) -> list[list[float]]:
    """Train ``model`` in place by local steps of which each window ends with the exchange of one fragment.

    A rank's weights are a position and how far the rank has moved from there. After window n it hands over how far it
    has moved fragment n mod F, and when that has arrived from all ranks, ``width`` - 1 windows later, the mean moves
    the agreed weights. The position is the agreed weights, moved by this rank's own part in place of means on their
    way, times its last cosine with a mean squared. At the end, every fragment is handed over once more. Returns the
    losses, by iteration and rank.
    """
    agreed = list(model.parameters())
    ranks = [copy.deepcopy(model) for _ in batches[0]]
    optimizers = [make_optimizer(rank.parameters()) for rank in ranks]
    positions = [[value.detach().clone() for value in agreed] for _ in ranks]
    cosines = [1.0] * len(ranks)
    on_their_way: list[tuple[slice, list[list[Tensor]]]] = []
    turn = 0

    def arrive() -> None:
        which, movements = on_their_way.pop(0)
        mean, cosines[:] = _mean_and_cosines(movements)
        for value, change in zip(agreed[which], mean, strict=True):
            value.sub_(change)

    @torch.no_grad()
    def exchange() -> None:
        nonlocal turn
        which = fragments[turn % len(fragments)]
        turn += 1
        moved = [
            [start - own for start, own in zip(position, rank.parameters(), strict=True)]
            for position, rank in zip(positions, ranks, strict=True)
        ]
        on_their_way.append((which, [one[which] for one in moved]))
        while len(on_their_way) > width - 1:
            arrive()
        for rank, (its_model, left) in enumerate(zip(ranks, moved, strict=True)):
            left[which] = [torch.zeros_like(part) for part in left[which]]
            positions[rank] = [value.detach().clone() for value in agreed]
            for late, movements in on_their_way:
                for start, part in zip(positions[rank][late], movements[rank], strict=True):
                    start.sub_(part * cosines[rank] ** 2)
            for own, start, part in zip(its_model.parameters(), positions[rank], left, strict=True):
                own.copy_(start - part)

    losses: list[list[float]] = []
    for number, of_ranks in enumerate(batches, start=1):
        losses.append([])
        for its_model, optimizer, batch in zip(ranks, optimizers, of_ranks, strict=True):
            losses[-1].append(_own_step(its_model, optimizer, loss_of, batch))
        if number % steps == 0:
            exchange()
    for _ in fragments:
        exchange()
    with torch.no_grad():
        while on_their_way:
            arrive()
    return losses


def elastic_averaging(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    loss_of: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Sequence[Any]],
    *,
    steps: int,
    width: int,
    moving_rate: float,
    synchronous_start: int = 0,
) -> list[list[float]]:
    """Train ``model``, the centre, in place by EASGD, written from equations 5 and 6 of the paper; return losses.

    At the end of a window, each rank's weights x become x - a (x - centre), and the centre gets a times the sum of all
    x - centre, with the x of ``width`` - 1 windows before. A last, shorter window counts as one.
    """
    centre = list(model.parameters())
    ranks = [copy.deepcopy(model) for _ in batches[0]]
    optimizers = [make_optimizer(rank.parameters()) for rank in ranks]
    on_their_way: list[list[list[Tensor]]] = []  # the ranks' weights, by window and rank
    losses: list[list[float]] = []

    @torch.no_grad()
    def arrive() -> None:
        for own, parts in zip(centre, zip(*on_their_way.pop(0), strict=True), strict=True):
            own.add_(sum(part - own for part in parts), alpha=moving_rate)

    iteration = 0
    while iteration < len(batches):
        length, in_flight = (1, 0) if iteration < synchronous_start else (steps, width - 1)
        window = batches[iteration : iteration + length]
        for of_ranks in window:
            losses.append([])
            for rank, optimizer, batch in zip(ranks, optimizers, of_ranks, strict=True):
                losses[-1].append(_own_step(rank, optimizer, loss_of, batch))
        iteration += len(window)
        on_their_way.append([[x.detach().clone() for x in rank.parameters()] for rank in ranks])
        with torch.no_grad():
            for rank in ranks:
                for x, own in zip(rank.parameters(), centre, strict=True):
                    x.sub_(x - own, alpha=moving_rate)
        while len(on_their_way) > in_flight:
            arrive()
    while on_their_way:
        arrive()
    return losses
