"""The exchange that options name."""

from __future__ import annotations

from pipesgd.codecs.make import make_codec
from pipesgd.codecs.options import CodecOptions
from pipesgd.collectives.make import Connections
from pipesgd.exchanges.base import Exchange
from pipesgd.exchanges.dense import DenseExchange


def make_exchange(options: CodecOptions, connections: Connections, *, device: str, seed: int) -> Exchange:
    """How gradients on ``device`` ("cpu" or "cuda") are summed over ``connections``."""
    codec = make_codec(options, device)
    return DenseExchange(
        connections.all_reduce(codec),
        exact=codec.name == "fp32",
        error_feedback=options.gives_back,
        seed=seed,
    )
