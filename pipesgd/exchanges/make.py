"""The exchange that options name."""

from __future__ import annotations

import torch

from pipesgd.codecs.base import Codec
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
    _compile(codec, device)
    return DenseExchange(
        connections.all_reduce(codec),
        exact=codec.name == "fp32",
        error_feedback=options.gives_back,
        seed=seed,
    )


def _compile(codec: Codec, device: str) -> None:
    """Have the codec's loops compiled, or loaded, now: in the first iteration other ranks would wait for it."""
    values = torch.zeros(1, device=device)
    wire = torch.zeros(codec.wire_bytes(1), dtype=torch.uint8, device=device)
    codec.encode(values, None, wire, 0)
    codec.decode(wire, values)
