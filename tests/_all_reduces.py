"""Every all-reduce that is made of a schedule, and codecs for small buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipesgd.codecs.options import CodecOptions, codec_named
from timing_model.schedules import SCHEDULES, Schedule, hierarchical

ALGORITHMS: dict[str, Callable[[int, int], Schedule]] = {
    **SCHEDULES,
    "hierarchical, 2 a node": lambda rank, p: hierarchical(rank, p, 2 if p % 2 == 0 else 1),
    "hierarchical, 3 a node": lambda rank, p: hierarchical(rank, p, 3 if p % 3 == 0 else p),
}


def options(codec: str, **others: Any) -> CodecOptions:
    """Return options with small blocks, so that a small buffer has many of them."""
    block = {} if codec in ("fp32", "truncate16", "bf16", "fp16") else {"block": 8}
    return codec_named(codec, **block, **others)
