"""Construction of the reducer that options name."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipesgd.checks import check_at_least
from pipesgd.codecs.base import Codec, OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.codecs.own import try_codec
from pipesgd.comm.connections import Connections
from pipesgd.errors import UserInputError
from pipesgd.guests import guest
from pipesgd.ranks import Ranks, check_same
from pipesgd.reducers.base import Gathering, GradientCodec, Reducer
from pipesgd.reducers.dense import DenseReducer

GATHERING = ("factors", "rows")
"""Names of the guests that gather what gradients are made of, in the order in which their buckets leave."""

COMPILE_SECONDS = 900.0
"""Seconds that ranks wait for one that compiles a codec's loops for the first time, on a busy machine."""


def check_reducer(
    options: CodecOptions, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], seed: int
) -> None:
    """Raise ``UserInputError`` unless ``options`` allow exchanging gradients of ``parameters`` for ``optimizer``."""
    check_at_least("seed", seed, 0)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UserInputError("optimizer must take dense gradients, as means over ranks are; got SparseAdam")
    check_momentum(options, optimizer)
    if isinstance(options, GradientCodec):
        options.check(parameters)


def check_momentum(options: CodecOptions, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UserInputError`` if ``optimizer`` has a momentum now, as a schedule may set it, in addition to the one in
    ``options``."""
    if not options.own_momentum:
        return
    if momenta := [group["momentum"] for group in optimizer.param_groups if group.get("momentum")]:
        raise UserInputError(f"momentum must be 0 with momentum_correction, which replaces it; got {momenta[0]}")


def make_reducer(options: CodecOptions, connections: Connections, *, device: str, seed: int) -> Reducer:
    """Return the reducer that sums gradients on ``device`` ("cpu" or "cuda") over ``connections``."""
    codec = compiled_codec(options, connections.ranks, device)
    if isinstance(options, GradientCodec):
        return options.reducer(connections, codec, seed=seed)
    return dense_reducer(options, codec, connections, seed=seed)


def dense_reducer(options: CodecOptions, codec: Codec, connections: Connections, *, seed: int) -> DenseReducer:
    """Return the reducer that sends every value over ``connections``, encoded by ``codec`` as ``options`` say."""
    return DenseReducer(
        connections.all_reduce(codec),
        exact=codec.in_place,
        error_feedback=options.gives_back,
        seed=seed if options.stochastic or isinstance(codec, OwnCodec) else None,
    )


def check_eligible(reduce: str, model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Raise ``UserInputError`` if ``reduce`` is one of ``GATHERING`` for which no trained parameter is fit."""
    if reduce not in GATHERING:
        return
    known = set(map(id, gathering(reduce).weights(model)))
    if not any(id(parameter) in known for parameter in parameters):
        raise UserInputError(f"reduce must be matrix unless {gathering(reduce).eligible}; got {reduce}")


def gathering(kind: str) -> type[Gathering]:
    """Return the class of the reducer of ``GATHERING`` with this name."""
    found: type[Gathering] = guest(kind)
    return found


def make_gathering_reducer(kind: str, connections: Connections) -> Gathering:
    """Return the reducer of ``GATHERING`` with this name, which gathers over ``connections``."""
    ranks = connections.ranks
    return gathering(kind)(connections.all_gather(), rank=ranks.rank, world_size=ranks.world_size)


def compiled_codec(options: CodecOptions, ranks: Ranks, device: str) -> Codec:
    """Return the codec for tensors on ``device`` once it is ready on all ``ranks``, which call this together.

    Raises:
        UserInputError: a codec of the user's own does not keep to its contract on some rank.
        DisagreementError: it does not do the same on all ranks.
    """
    codec = options.make(device)
    ranks.enter("compilation of the codec")
    if isinstance(codec, OwnCodec):
        trial = ranks.raise_together("codec", functools.partial(try_codec, options.codec, codec, device))
        check_same(ranks, f"what {options.codec} encodes some values to", trial)
    compile_loops(codec, device)
    ranks.all_gather_object("a compiled codec", None, within=COMPILE_SECONDS)
    return codec


def compile_loops(codec: Codec, device: str) -> None:
    """Compile or load the codec's loops now, since in the first iteration other ranks would wait for it."""
    values = torch.zeros(1, dtype=torch.float32, device=device)
    wire = torch.zeros(codec.wire_bytes(1), dtype=torch.uint8, device=device)
    codec.encode(values, None, wire, 0)
    codec.decode(wire, values)
