"""Construction of the strategy that a configuration names. A run imports only its own strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipesgd.config import TrainConfig
from pipesgd.guests import guest
from pipesgd.optim.clipping import Clipping
from pipesgd.pipeline.exchanges import Reduce
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.pipeline_config import SERVER_STRATEGIES
from pipesgd.ranks import Ranks
from pipesgd.strategy import Strategy


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
    pipeline, run = config.pipeline, config.run
    if pipeline.in_windows:
        from pipesgd.pipeline.local_steps import LocalSteps

        return LocalSteps(
            model,
            optimizer,
            local_steps=pipeline.local_steps,
            outer=pipeline.outer or "average",
            outer_lr=pipeline.outer_lr,
            outer_momentum=pipeline.outer_momentum,
            moving_rate=pipeline.moving_rate,
            average_state=pipeline.average_state,
            fragments=pipeline.fragments,
            **_pipeline_options(config, scaler, ranks),
        )
    if pipeline.strategy == "pipelined":
        return make_pipeline(config, model, optimizer, scaler, ranks, reduce)
    clip = Clipping(norm=config.optimization.clip_norm, value=config.optimization.clip_value)
    if pipeline.strategy == "local":
        from pipesgd.baselines.local import Local

        return Local(model, optimizer, clip=clip, scaler=scaler, on_nonfinite=run.on_nonfinite)
    if pipeline.strategy == "ddp":
        from pipesgd.baselines.ddp import Ddp

        return Ddp(
            model,
            optimizer,
            hook=pipeline.ddp_hook,
            clip=clip,
            scaler=scaler,
            on_nonfinite=run.on_nonfinite,
            timeout=run.timeout,
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
        prediction=config.pipeline.prediction,
        guard=config.pipeline.guard,
        buckets=config.pipeline.buckets,
        reduce=config.pipeline.reduce if reduce is None else reduce,
        **_pipeline_options(config, scaler, ranks),
    )


def serve(config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Run a parameter server on a rank of its own until all workers have closed their strategies.

    Raises:
        CommunicationError: a worker was lost.
    """
    _make_servers(config, model, optimizer, None, ranks).serve()


def _pipeline_options(config: TrainConfig, scaler: torch.amp.GradScaler, ranks: Ranks) -> dict[str, Any]:
    pipeline, run = config.pipeline, config.run
    return {
        "width": pipeline.width,
        "warmup_iterations": pipeline.warmup_iterations,
        "clip_norm": config.optimization.clip_norm,
        "clip_value": config.optimization.clip_value,
        "scaler": scaler,
        "codec": config.compression.chosen(),
        "all_reduce": pipeline.all_reduce,
        "segment_bytes": pipeline.segment_bytes,
        "connections": pipeline.connections,
        "rate_limit": pipeline.rate_limit,
        "on_nonfinite": run.on_nonfinite,
        "timeout": run.timeout,
        "seed": config.optimization.seed,
        "ranks": ranks,
    }


def _make_servers(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    ranks: Ranks,
) -> Any:
    pipeline, run = config.pipeline, config.run
    options: dict[str, Any] = {
        "servers": pipeline.servers,
        "placement": pipeline.server_placement,
        "on_nonfinite": run.on_nonfinite,
        "timeout": run.timeout,
        "ranks": ranks,
    }
    if pipeline.strategy == "easgd-async":
        return guest("elastic servers")(
            model,
            optimizer,
            local_steps=pipeline.local_steps,
            moving_rate=pipeline.moving_rate,
            clip=Clipping(norm=config.optimization.clip_norm, value=config.optimization.clip_value),
            scaler=scaler,
            **options,
        )
    bound = 0 if pipeline.strategy == "ps-sync" else pipeline.staleness_bound
    return guest("parameter servers")(model, optimizer, staleness_bound=bound, **options)
