"""Construction of the strategy that a configuration names, and the length of its synchronous start.

A run imports only its own strategy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from pipesgd.config import TrainConfig
from pipesgd.guests import guest
from pipesgd.optim.build import build_schedule
from pipesgd.optim.clipping import Clipping
from pipesgd.pipeline.exchanges import Reduce
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.pipeline.width import SynchronousStart
from pipesgd.pipeline_config import SERVER_STRATEGIES
from pipesgd.ranks import Ranks
from pipesgd.sections import AUTO
from pipesgd.strategy import Strategy

MOST_TRIED = 10_000
"""Most iterations of a schedule that are tried out for the length of a start; longer ones have its shape."""


def make_strategy(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    ranks: Ranks,
    reduce: Reduce | None = None,
) -> Strategy:
    """Return the strategy for this rank, a worker. All ranks of the job call this, or ``serve``, together.

    ``reduce`` is the exchange of gradients, by default that of ``config``, which must not be auto then.
    """
    pipeline, updates = config.pipeline, config.updates
    if config.in_windows:
        from pipesgd.pipeline.local_steps import LocalSteps

        return LocalSteps(
            model,
            optimizer,
            config.windows,
            width=pipeline.width,
            codec=config.compression.chosen(),
            wire=config.wire,
            updates=updates,
            scaler=scaler,
            seed=config.optimization.seed,
            ranks=ranks,
        )
    if pipeline.strategy == "pipelined":
        return make_pipeline(config, model, optimizer, scaler, ranks, reduce)
    clip = Clipping(norm=config.updates.clip_norm, value=config.updates.clip_value)
    if pipeline.strategy == "local":
        from pipesgd.baselines.local import Local

        return Local(model, optimizer, clip=clip, scaler=scaler, on_nonfinite=updates.on_nonfinite)
    if pipeline.strategy == "ddp":
        from pipesgd.baselines.ddp import Ddp

        return Ddp(
            model,
            optimizer,
            hook=pipeline.ddp_hook,
            clip=clip,
            scaler=scaler,
            on_nonfinite=updates.on_nonfinite,
            timeout=config.timeout,
            ranks=ranks,
        )
    assert pipeline.strategy in SERVER_STRATEGIES
    servers: Strategy = _make_servers(config, model, optimizer, scaler, ranks)
    return servers


def make_pipeline(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    ranks: Ranks,
    reduce: Reduce | None = None,
) -> Pipelined:
    """Return the pipeline of strategy "pipelined"; for ``reduce`` see ``make_strategy``."""
    return Pipelined(
        model,
        optimizer,
        width=config.pipeline.width,
        codec=config.compression.chosen(),
        wire=config.wire if reduce is None else dataclasses.replace(config.wire, reduce=reduce),
        updates=config.updates,
        scaler=scaler,
        seed=config.optimization.seed,
        ranks=ranks,
    )


def start_iterations(config: TrainConfig, iterations: int) -> int:
    """Return how many of all ``iterations`` the synchronous start has.

    Of more than ``MOST_TRIED`` iterations in which one-cycle raises the learning rate, it is a close estimate.
    """
    if config.pipeline.strategy != "pipelined" or (config.pipeline.width == 1 and not config.in_windows):
        return 0
    if config.in_windows:
        return min(config.updates.start_in_windows, iterations)
    if config.updates.synchronous_start != AUTO:
        return min(int(config.updates.synchronous_start), iterations)
    # A rise by --lr-warmup does not grow with the length of the run.
    tried = iterations if config.optimization.lr_warmup else min(iterations, MOST_TRIED)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.optimization.lr)
    schedule = build_schedule(config.optimization, optimizer, tried)
    width = SynchronousStart(config.pipeline.width)
    for iteration in range(tried):
        if width.of(iteration, optimizer.param_groups) > 1:
            return round(iteration * iterations / tried)
        optimizer.step()  # torch warns of schedules that are ahead of their optimizer
        schedule.step()
    return iterations


def serve(config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Run a parameter server on a rank of its own until all workers have closed their strategies.

    Raises:
        CommunicationError: a worker was lost.
    """
    _make_servers(config, model, optimizer, None, ranks).serve()


def _make_servers(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    ranks: Ranks,
) -> Any:
    pipeline = config.pipeline
    options: dict[str, Any] = {
        "servers": pipeline.servers,
        "placement": pipeline.server_placement,
        "on_nonfinite": config.updates.on_nonfinite,
        "timeout": config.timeout,
        "ranks": ranks,
    }
    if pipeline.strategy == "easgd-async":
        return guest("elastic servers")(
            model,
            optimizer,
            local_steps=config.windows.local_steps,
            moving_rate=config.windows.moving_rate,
            clip=Clipping(norm=config.updates.clip_norm, value=config.updates.clip_value),
            scaler=scaler,
            **options,
        )
    bound = 0 if pipeline.strategy == "ps-sync" else pipeline.staleness_bound
    return guest("parameter servers")(model, optimizer, staleness_bound=bound, **options)
