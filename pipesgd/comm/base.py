"""What an all-reduce is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Finish = Callable[[Tensor], None]
"""What is done with a part of a sum as soon as it is there."""


def leave(part: Tensor) -> None:
    """Nothing."""


class AllReduce(Protocol):
    """Sums a flat tensor over all ranks, in place, leaving the same bytes on every rank.

    One instance serves one thread. It never takes a mean: that is ``gradients.take_mean``'s.
    """

    def __call__(self, flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = leave) -> None:
        """Replace ``flat`` (numel,) by its sum over the ranks, as exactly as the codec on the wire allows.

        Args:
            flat: the values, contiguous.
            residual: shaped like ``flat``, or None. It is added to the values first, and is afterwards what this rank's
                encodings have left out: the sums and all ranks' residuals together are what all ranks put in.
            key: 32 bits, the same on all ranks, that choose the random numbers of a codec that draws any.
            finish: called with the parts of ``flat``, each once, when this rank has its sum and needs it no more: while
                it is still in the cache, and others are on the wire. Where the mean is taken.

        Raises:
            CommunicationError: a peer was lost, or silent for longer than the deadline.
        """

    def wire_bytes(self, flat: Tensor) -> int:
        """Bytes that this rank sends to reduce ``flat``, headers of the network apart."""
