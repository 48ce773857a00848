"""The exchange that options name."""

from __future__ import annotations

from pipesgd.codecs.make import make_codec
from pipesgd.codecs.options import CodecOptions
from pipesgd.collectives.make import Connections
from pipesgd.exchanges.base import Exchange
from pipesgd.exchanges.dense import DenseExchange
from pipesgd.exchanges.powersgd import PowerSgdExchange
from pipesgd.exchanges.topk import TopKExchange


def make_exchange(options: CodecOptions, connections: Connections, *, device: str, seed: int) -> Exchange:
    """How gradients on ``device`` ("cpu" or "cuda") are summed over ``connections``."""
    ranks = connections.ranks
    if options.codec == "topk":
        return TopKExchange(
            connections.all_gather(),
            rank=ranks.rank,
            world_size=ranks.world_size,
            density=options.density,
            density_warmup=options.density_warmup,
            momentum=options.momentum_correction,
        )
    if options.codec == "powersgd":
        return PowerSgdExchange(
            connections.all_reduce(), world_size=ranks.world_size, low_rank=options.low_rank, seed=seed
        )
    codec = make_codec(options, device)
    return DenseExchange(
        connections.all_reduce(codec),
        exact=codec.name == "fp32",
        error_feedback=options.gives_back,
        seed=seed,
    )
