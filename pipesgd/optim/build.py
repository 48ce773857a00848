"""torch's own optimizers and schedules, by their names on the command line."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from pipesgd.config import OptimizationConfig
from pipesgd.membership.record import Record
from pipesgd.shards import is_dtensor


def check_model(config: OptimizationConfig, model: nn.Module) -> None:
    """Raise ``UserInputError`` unless ``model`` has the parameters that the optimizer of ``config`` works on."""
    if config.optimizer == "muon":
        from pipesgd.optim.muon import hidden_matrices

        hidden_matrices(model)


def build_optimizer(config: OptimizationConfig, model: nn.Module) -> Optimizer:
    """Build the optimizer that ``config`` names for all parameters of ``model``, which must be where it computes.

    Raises:
        UserInputError: as ``check_model``.
    """
    decay = config.weight_decay
    parameters = list(model.parameters())
    # One pass over memory a step, and a prediction takes further steps (DECISIONS.md). torch has it for real numbers,
    # and not for plain tensors next to DTensors.
    fused = all(parameter.is_floating_point() and not is_dtensor(parameter) for parameter in parameters)
    if config.optimizer == "adam":
        return Adam(parameters, lr=config.lr, betas=config.betas, weight_decay=decay, fused=fused)
    if config.optimizer == "adamw":
        return AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=decay, fused=fused)
    if config.optimizer == "adagrad":
        return Adagrad(parameters, lr=config.lr, weight_decay=decay)
    if config.optimizer == "muon":
        from pipesgd.optim.muon import MuonWithAdamW, hidden_matrices

        matrices = hidden_matrices(model)
        hidden = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in parameters if id(parameter) not in hidden]
        return MuonWithAdamW(matrices, others, lr=config.lr, weight_decay=decay)
    nesterov = config.optimizer == "nesterov"
    return SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=decay, nesterov=nesterov, fused=fused)


def build_schedule(config: OptimizationConfig, optimizer: Optimizer, iterations: int) -> LRScheduler:
    """Build the schedule that ``config`` names for a run of ``iterations``; it is stepped once an iteration."""
    if config.schedule == "one-cycle":
        # The momentum is not cycled: --momentum means what it says.
        return OneCycleLR(optimizer, max_lr=config.lr, total_steps=iterations, cycle_momentum=False)
    rise = config.lr_warmup
    if rise:
        for group in optimizer.param_groups:
            group["max_lr"] = group["lr"]  # as one-cycle leaves it: a synchronous start then knows where the rise ends

    def share(iteration: int) -> float:
        if iteration < rise:
            return (iteration + 1) / rise
        if config.schedule == "cosine":
            return (1 + math.cos(math.pi * (iteration - rise) / max(1, iterations - rise))) / 2
        return 1.0

    return LambdaLR(optimizer, share)


def scale_rates(optimizer: Optimizer, schedule: LRScheduler, factor: float) -> None:
    """Multiply the learning rates of ``optimizer``, now and in its ``schedule``, by ``factor``."""
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr", "max_lr", "min_lr"):
            if name in group:
                group[name] *= factor
    schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]
    schedule._last_lr = [rate * factor for rate in schedule._last_lr]  # torch has no other way to set it


def follow(schedule: LRScheduler, record: Record, done: int) -> None:
    """Let ``schedule`` go to where the first ranks of ``record`` would be with the samples of ``done`` iterations."""
    most = getattr(schedule, "total_steps", math.inf)  # epochs may end in the middle of an iteration
    schedule.last_epoch = min(record.progress(done), most) - 1  # type: ignore[assignment]  # between two iterations
    schedule.step()
