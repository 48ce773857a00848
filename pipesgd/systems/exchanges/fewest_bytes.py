"""Poseidon's choice between exchanging a gradient whole, by rows and by factors: what sends fewer bytes."""

from __future__ import annotations

from torch import nn

from pipesgd.codecs.base import Codec
from pipesgd.pipeline.in_flight import WHOLE
from pipesgd.reducers.make import GATHERING, gathering
from pipesgd.systems.exchanges.gathering import sends_less


def fewest_bytes(model: nn.Module, rows: int, codec: Codec, world_size: int) -> dict[str, str]:
    """Return what sends fewer bytes of each trained embedding and linear layer, by name, given the batch.

    The rule is that of structure-aware communication (Zhang et al., "Poseidon", USENIX ATC 2017), which knows shapes
    and the batch alone: a linear layer gathers as many factors, and an embedding as many rows, as a rank has ``rows``
    of input in an iteration. An embedding cannot have more than all of its rows, and one with sparse gradients is
    exchanged by rows whatever that sends.

    Args:
        model: the model.
        rows: rows of a layer's input on each rank in an iteration: samples, or symbols where samples are made of them.
        codec: codec of gradients that are summed whole.
        world_size: number of ranks.

    >>> from pipesgd.codecs.floats import Uncompressed
    >>> layers = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 2))
    >>> fewest_bytes(layers, 8, Uncompressed(), world_size=4)
    {'0.weight': 'factors', '1.weight': 'matrix'}
    """
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(one.weight) for one in embeddings if one.sparse}
    kinds = {id(weight): kind for kind in GATHERING for weight in gathering(kind).weights(model)}
    chosen = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (kind := kinds.get(id(parameter))) is None:
            continue
        count = min(rows, len(parameter)) if kind == "rows" else rows
        gathers = sends_less(gathering(kind).part_bytes(count, parameter), parameter, codec, world_size)
        chosen[name] = kind if gathers or id(parameter) in sparse else WHOLE
    return chosen
