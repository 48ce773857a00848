"""Computation of one rank: its data and its model, and the gradients of one batch."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipesgd.config import TrainConfig
from pipesgd.data import DataSplits, ShardedBatches, make_workload
from pipesgd.errors import UserInputError
from pipesgd.optim.build import check_model
from pipesgd.ranks import Ranks
from pipesgd.run.evaluation import by_label
from pipesgd.strategy import Span, Strategy

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of torch.autocast for each precision; None for no autocast."""


def load(config: TrainConfig, ranks: Ranks) -> tuple[DataSplits, ShardedBatches, nn.Module, torch.device]:
    """Return the data set, this rank's batches of it, the model, and its device."""
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise UserInputError("device must be cpu where torch finds no GPU; got cuda")
    torch.manual_seed(config.optimization.seed)
    data, model = make_workload(config)
    batches = ShardedBatches(
        data.train,
        batch_size=config.samples_per_rank,
        rank=min(ranks.rank, ranks.world_size - 1),  # a rank that is only a server draws no batch
        world_size=ranks.world_size,
        seed=config.optimization.seed,
        loader_workers=config.data.workers,
    )
    check_model(config.optimization, model)
    torch.manual_seed(config.optimization.seed * ranks.world_size + ranks.rank)  # from here on, ranks differ
    return data, batches, model, torch.device(config.run.device)


def forward_backward(
    strategy: Strategy, samples: Any, config: TrainConfig, scaler: torch.amp.GradScaler, iteration: int
) -> tuple[float, tuple[Span, ...]]:
    """Load one batch and add its gradients to ``.grad`` by micro-batches; return its loss and the spans."""
    device, micro_batches = torch.device(config.run.device), config.optimization.accumulation
    autocast = AUTOCAST[config.optimization.precision]
    begin = time.perf_counter()
    batch = [tensor.to(device, non_blocking=True) for tensor in next(samples)]
    now = time.perf_counter()
    spans = [Span("data", iteration, begin, now)]
    losses = []
    for number, (inputs, labels) in enumerate(zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True)):
        with contextlib.nullcontext() if number + 1 == micro_batches else strategy.accumulating():
            begin = now
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                loss = cross_entropy(*by_label(strategy.module(inputs), labels)) / micro_batches
            predicted = time.perf_counter()
            scaler.scale(loss).backward()
            losses.append(loss.detach())
            now = time.perf_counter()
        spans += [Span("forward", iteration, begin, predicted), Span("backward", iteration, predicted, now)]
    return float(torch.stack(losses).sum()), tuple(spans)
