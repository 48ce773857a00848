"""A line on accuracy for runs with late or coarse gradients: what the nearest training that was measured has lost."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from pipesgd.codecs.options import CodecOptions
from pipesgd.config import TrainConfig
from pipesgd.sections import Updates, differing

MEASURED = Path(__file__).with_name("accuracy.json")
"""Rows of ``experiments/results/accuracy.csv``: the trainings that are finished, each with a method."""
FINE = ("fp32", "fp16", "bf16", "truncate16")
"""Codecs whose rounding the table does not tell from none."""
CODECS = {
    ("int8", 1024, False, False): "int8",
    ("int4", 256, False, True): "int4",
    ("int4", 32, False, True): "int4, blocks of 32",
    ("int4", 128, False, True): "int4, blocks of 128",
    ("int4", 256, True, False): "int4, stochastic",
}
"""Names in the table of codecs but low rank, by name, block, rounding at random, and giving back what was left out."""
RANK = 4
"""Rank of "low rank" in the table."""
NOT_LATE = ("guard", "clip_norm", "clip_value", "on_nonfinite")
"""Options of updates that are not those of late gradients."""
MOST_SYMBOLS = 512
"""Rows of an embedding up to which a text counts as one of bytes."""


def method(width: int, codec: CodecOptions, iterations: int) -> str | None:
    """Return what the table calls a width and a codec in a training of this length; None if it has no such row.

    >>> from pipesgd.codecs.options import Int4, Int8
    >>> method(2, Int8(), 100), method(1, Int4(block=32), 100), method(3, Int4(), 100)
    ('width 2, int8', 'compress int4, blocks of 32', None)
    """
    if codec.codec in FINE:
        return "width 2" if width == 2 else None
    options = codec.codec, getattr(codec, "block", 0), codec.stochastic, codec.gives_back
    known = _low_rank(codec, iterations) if codec.codec == "powersgd" else CODECS.get(options)
    return None if known is None else {1: f"compress {known}", 2: f"width 2, {known}"}.get(width)


def _low_rank(codec: Any, iterations: int) -> str | None:
    """Return what the table calls factors of low rank, without whole gradients or after a quarter of them to a half."""
    is_dense = iterations <= 4 * codec.dense_start <= 2 * iterations
    if codec.compression is not None or codec.factors != "fp32" or (codec.dense_start and not is_dense):
        return None
    rank = "" if codec.rule.rank == RANK else f", rank {codec.rule.rank}"
    return f"low rank{rank}{', dense start of a quarter' * (codec.dense_start > 0)}"


def workload(model: nn.Module, optimizer: str = "") -> str | None:
    """Return what the table calls the training that is most like that of ``model``; None if none is.

    With Adagrad it is the one with Adagrad, whatever the model: late gradients cost most there.
    """
    if optimizer.lower() == "adagrad":
        return "MLP, Adagrad"
    sizes = [(one.numel(), one.requires_grad) for one in model.parameters()]
    modules = list(model.modules())
    rows = [one.num_embeddings for one in modules if isinstance(one, nn.Embedding)]
    if 2 * sum(size for size, trained in sizes if trained) < sum(size for size, _ in sizes):
        return "LoRA" if rows else None
    if rows:
        if not any(type(one).__name__.endswith(("LayerNorm", "RMSNorm")) for one in modules):
            return None
        return "transformer, bytes" if max(rows) <= MOST_SYMBOLS else "transformer, byte pairs"
    return "convnet, batch norm" if any(isinstance(one, _ConvNd) for one in modules) else None


def line(
    model: nn.Module,
    *,
    width: int,
    codec: CodecOptions,
    iterations: int,
    updates: Updates | None = None,
    optimizer: str = "",
) -> str | None:
    """Return the line; None for a run whose gradients are neither late nor of fewer than 8 bits.

    Late gradients of the table have the default prediction and start; ``updates`` are those of the run, and
    ``optimizer`` the name of its optimizer.
    """
    if width == 1 and codec.codec in (*FINE, "int8"):
        return None
    others = {} if width == 1 or updates is None else differing(updates, but=NOT_LATE)
    name, like = method(width, codec, iterations), workload(model, optimizer)
    rows = [row for row in _measured() if row["method"] == name and row["workload"] == like and not others]
    if not rows:
        words = [f"{option.replace('_', ' ')} {value}" for option, value in others.items()]
        how = ", ".join([f"width {width}", *words, codec.describe()])
        return (
            f"accuracy: no training like this one was measured with {how}: compare it with one at width 1 without a "
            "codec"
        )
    row = min(rows, key=lambda one: abs(math.log(one["iterations"] / max(1, iterations))))
    sign = 1 if row["of_loss"] else -1
    cost, *between = (sign * row[one] for one in ("cost", "cost_low", "cost_high"))
    what, unit = ("loss", " %") if row["of_loss"] else ("accuracy", " points")
    measured = row["method"].replace("low rank, rank", "factors of rank").replace("low rank", f"factors of rank {RANK}")
    return (
        f"accuracy: {measured} in the nearest training that was measured ({like}, {row['iterations']} iterations, "
        f"{row['seeds']} seeds): {what} {cost:+.1f}{unit} from synchronous training "
        f"({min(between):+.1f} to {max(between):+.1f})"
    )


def line_of_run(config: TrainConfig, model: nn.Module, iterations: int) -> str | None:
    """Return what is known of the accuracy of runs like this one; None if there is nothing to be said."""
    if config.pipeline.strategy != "pipelined" or config.in_windows:
        return None
    return line(
        model,
        width=config.pipeline.width,
        codec=config.compression.chosen(),
        iterations=iterations,
        updates=config.updates,
        optimizer=config.optimization.optimizer,
    )


@functools.cache
def _measured() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found
