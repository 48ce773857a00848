"""A line on accuracy for runs with late or coarse gradients: what the nearest training that was measured has lost."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from pipesgd.config import TrainConfig

MEASURED = Path(__file__).with_name("accuracy.json")
"""Rows of ``experiments/results/accuracy.csv``: the trainings that are finished, each with a method."""
FINE = ("fp32", "fp16", "bf16", "truncate16")
"""Codecs whose rounding the table does not tell from none."""
CODECS = {"int8": "int8", "int4": "int4", "powersgd": "low rank"}
"""Codecs of the table, and what it calls them."""
MOST_SYMBOLS = 512
"""Rows of an embedding up to which a text counts as one of bytes."""


def method(width: int, codec: str) -> str | None:
    """Return what the table calls a width and a codec; None if it has no such row.

    >>> method(2, "bf16"), method(1, "int4"), method(3, "int4")
    ('width 2', 'compress int4', None)
    """
    if codec in FINE:
        return "width 2" if width == 2 else None
    known = CODECS.get(codec)
    return None if known is None else {1: f"compress {known}", 2: f"width 2, {known}"}.get(width)


def workload(model: nn.Module) -> str | None:
    """Return what the table calls the training that is most like that of ``model``; None if none is."""
    sizes = [(one.numel(), one.requires_grad) for one in model.parameters()]
    if 2 * sum(size for size, trained in sizes if trained) < sum(size for size, _ in sizes):
        return "LoRA"
    modules = list(model.modules())
    rows = [one.num_embeddings for one in modules if isinstance(one, nn.Embedding)]
    if rows:
        if not any(type(one).__name__.endswith(("LayerNorm", "RMSNorm")) for one in modules):
            return None
        return "transformer, bytes" if max(rows) <= MOST_SYMBOLS else "transformer, byte pairs"
    return "convnet, batch norm" if any(isinstance(one, _ConvNd) for one in modules) else None


def line(model: nn.Module, *, width: int, codec: str, iterations: int) -> str | None:
    """Return the line; None for a run whose gradients are neither late nor of fewer than 8 bits."""
    if width == 1 and codec in (*FINE, "int8"):
        return None
    name, like = method(width, codec), workload(model)
    rows = [row for row in _measured() if row["method"] == name and row["workload"] == like]
    if not rows:
        return (
            f"accuracy: no training like this one was measured with width {width}, {codec}: compare it with one at "
            "width 1 without a codec"
        )
    row = min(rows, key=lambda one: abs(math.log(one["iterations"] / max(1, iterations))))
    sign = 1 if row["of_loss"] else -1
    cost, *between = (sign * row[one] for one in ("cost", "cost_low", "cost_high"))
    what, unit = ("loss", " %") if row["of_loss"] else ("accuracy", " points")
    measured = row["method"].replace("low rank", "factors of rank 4")
    return (
        f"accuracy: {measured} in the nearest training that was measured ({like}, {row['iterations']} iterations, "
        f"{row['seeds']} seeds): {what} {cost:+.1f}{unit} from synchronous training "
        f"({min(between):+.1f} to {max(between):+.1f})"
    )


def line_of_run(config: TrainConfig, model: nn.Module, iterations: int) -> str | None:
    """Return what is known of the accuracy of runs like this one; None if there is nothing to be said."""
    if config.pipeline.strategy != "pipelined" or config.in_windows:
        return None
    codec = config.compression.chosen().codec
    return line(model, width=config.pipeline.width, codec=codec, iterations=iterations)


@functools.cache
def _measured() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found
