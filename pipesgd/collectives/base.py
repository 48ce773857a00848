"""What an all-reduce is."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AllReduce(Protocol):
    """Sums a flat tensor over all ranks, in place, leaving the same bytes on every rank.

    One instance serves one thread. It never takes a mean: that is ``gradients.take_mean``'s.
    """

    def __call__(self, flat: Tensor) -> None:
        """Replace ``flat`` (numel,) by its sum over the ranks.

        Raises:
            CommunicationError: a peer was lost, or silent for longer than the deadline.
        """

    def wire_bytes(self, flat: Tensor) -> int:
        """Bytes that this rank sends to reduce ``flat``, headers of the network apart."""
