"""Computation of one rank: the gradients of one batch."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from pipesgd.config import TrainConfig
from pipesgd.data import find_loss
from pipesgd.data.samples import micro_batches_of, outputs_of
from pipesgd.strategy import Span, Strategy

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of torch.autocast for each precision; None for no autocast."""


def forward_backward(
    strategy: Strategy, samples: Any, config: TrainConfig, scaler: torch.amp.GradScaler, iteration: int
) -> tuple[float, tuple[Span, ...]]:
    """Add the gradients of the next batch, which is on the model's device, to ``.grad`` by micro-batches.

    Returns its loss and the spans.
    """
    device, micro_batches = torch.device(config.run.device), config.optimization.accumulation
    autocast, mean_loss = AUTOCAST[config.optimization.precision], find_loss(config.model.loss)
    begin = time.perf_counter()
    batch = next(samples)
    now = time.perf_counter()
    spans = [Span("data", iteration, begin, now)]
    losses = []
    for number, (inputs, targets) in enumerate(micro_batches_of(batch, micro_batches)):
        with contextlib.nullcontext() if number + 1 == micro_batches else strategy.accumulating():
            begin = now
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                loss = mean_loss(outputs_of(strategy.module, inputs), targets) / micro_batches
            predicted = time.perf_counter()
            scaler.scale(loss).backward()
            losses.append(loss.detach())
            now = time.perf_counter()
        spans += [Span("forward", iteration, begin, predicted), Span("backward", iteration, predicted, now)]
    return float(torch.stack(losses).sum()), tuple(spans)
