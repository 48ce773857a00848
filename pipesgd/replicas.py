"""The proof that all ranks hold the same weights, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from pipesgd.errors import ReplicasDivergedError
from pipesgd.launch import Ranks


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 of the bytes of all parameters, in the model's order, in hexadecimal."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = parameter.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hashes_of_ranks(model: nn.Module, ranks: Ranks) -> list[str]:
    """The hash of every rank's weights, in rank order. All ranks call this together."""
    hashes: list[str] = ranks.exchange("a hash of the weights", weights_sha256(model))
    return hashes


def check_replicas(hashes: Sequence[str], iteration: int) -> None:
    """Check that the ranks' hashes are one.

    Raises:
        ReplicasDivergedError: they are not; the message says which ranks hold what.
    """
    if len(set(hashes)) > 1:
        held = ", ".join(f"rank {rank}: {text[:12]}" for rank, text in enumerate(hashes))
        raise ReplicasDivergedError(f"weights must be the same on all ranks after iteration {iteration}; got {held}")
