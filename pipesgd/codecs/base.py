"""What a codec is: how values become the bytes that travel, and values again."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Codec(Protocol):
    """Encodes float32 values for the hops of an all-reduce. It has no state: the same input gives the same bytes.

    A message holds the values of one segment and is encoded by itself. Its scales, if any, come first, then the
    payload. Zeros stay zeros, but among others with ``Sign``. A NaN arrives as a NaN; what an infinity becomes is not
    finite either. Where values share a scale, no value of their block is finite then.

    All tensors are contiguous: values and residuals float32 (numel,), messages uint8 (``wire_bytes(numel)``,). Those of
    messages begin at multiples of 4 bytes.
    """

    name: str
    block: int
    """Values that share a scale: a message should hold a multiple of it."""
    unbiased: bool
    """Whether the mean of what is decoded, over all random choices, is the value."""
    in_place: bool
    """Whether a message is the values' own memory, so that nothing has to be encoded."""

    def wire_bytes(self, numel: int) -> int:
        """Bytes of a message of ``numel`` values, headers of our own included: exact."""

    def encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        """Make ``wire`` of ``values`` plus ``residual``; afterwards the residual is what ``wire`` does not say of them.

        That is 0 where the two differ by what is not finite: it would come back in every iteration.
        ``values`` may be overwritten. ``key`` (32 bits) chooses the random numbers, if the codec draws any.
        """

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Replace ``values`` by what ``wire`` says."""

    def decode_add(self, wire: Tensor, values: Tensor) -> None:
        """Add what ``wire`` says to ``values``."""

    def decode_add_encode(
        self, received: Tensor, values: Tensor, residual: Tensor | None, wire: Tensor, key: int
    ) -> None:
        """``decode_add`` of ``received``, then ``encode``, in one pass over blocks that stay in cache."""
