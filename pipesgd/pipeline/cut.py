"""The parameters that an optimizer trains now, cut into buckets, and how the gradients of each are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from pipesgd.errors import UserInputError
from pipesgd.optim.step import trainable_identities, trainable_parameters
from pipesgd.pipeline.buckets import bucket_indices
from pipesgd.pipeline.exchanges import Exchanges
from pipesgd.pipeline.in_flight import Layout


@dataclass(frozen=True)
class Cut:
    """Parameters in buckets; ``Cut.of`` makes one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    into: str
    """Number of buckets, or the largest size of one, as the user wrote it."""
    parameters: list[Tensor]
    """Parameters that the optimizer trains."""
    exchanges: Exchanges
    indices: list[list[int]]
    """Indices of the parameters of each bucket, in the order in which the buckets leave."""
    identities: list[int]
    """``trainable_identities`` of the optimizer when this was made."""
    buckets: list[list[Tensor]]
    """Parameters of each bucket."""
    exchange: list[str]
    """Exchange of each bucket's gradients."""
    dense: list[list[Tensor]]
    """Parameters of each bucket whose gradients must be dense: all but embeddings that are exchanged by rows."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, into: str, exchanges: Exchanges) -> Self:
        """Return the parameters that ``optimizer`` trains now in buckets, each of which has one kind of exchange.

        Raises:
            UserInputError: there is no parameter to train, or there are fewer than buckets; or a forward pass would
                change one.
        """
        parameters, identities = trainable_parameters(optimizer), trainable_identities(optimizer)
        _check_max_norm(model, parameters)
        indices = bucket_indices(model, parameters, into, exchanges.apart())
        buckets = [[parameters[index] for index in bucket] for bucket in indices]
        exchange = [exchanges.of(bucket[0]) for bucket in buckets]
        dense = [[] if how == "rows" else bucket for bucket, how in zip(buckets, exchange, strict=True)]
        return cls(model, optimizer, into, parameters, exchanges, indices, identities, buckets, exchange, dense)

    @property
    def layout(self) -> Layout:
        """Layout of the gradient of these parameters."""
        return Layout(self.parameters, self.indices, self.exchange)


def _check_max_norm(model: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Refuse embeddings that shorten the rows of a batch in place: each rank has other batches, so replicas diverge."""
    trained = set(map(id, parameters))
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag) or id(layer.weight) not in trained:
            continue
        if layer.max_norm is not None:
            raise UserInputError(
                "max_norm must be None in an embedding that is trained, since each rank's forward passes would shorten "
                f"other rows of its weights; got {layer.max_norm:g} in {name or 'the model'}"
            )
