"""Protocol of codecs, which turn values into the bytes that travel and back, and the parts that several share."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor


class Codec(Protocol):
    """Encoder of float32 values for the hops of an all-reduce. It has no state: the same input gives the same bytes.

    A message holds the values of one segment and is encoded by itself. Its scales, if any, come first, then the
    payload. Zeros stay zeros, except among other values with ``Sign``. A NaN arrives as a NaN; an infinity does not
    become finite either. Where values share a scale, no value of their block is finite then.

    All tensors are contiguous: values and residuals are float32 (numel,), messages uint8 (``wire_bytes(numel)``,). The
    tensors of messages begin at multiples of 4 bytes.
    """

    name: str
    block: int
    """Number of values that share a scale: a message should hold a multiple of it."""
    unbiased: bool
    """True if the mean of what is decoded, over all random choices, is the value."""
    in_place: bool
    """True if a message is the values' own memory, so that nothing has to be encoded."""

    def wire_bytes(self, numel: int) -> int:
        """Return the exact size of a message of ``numel`` values in bytes, the codec's own headers included."""

    def encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        """Encode ``values`` plus ``residual`` into ``wire``; the residual becomes what ``wire`` leaves out of them.

        The residual is 0 where that is not finite, since it would come back in every iteration. ``values`` may be
        overwritten. ``key`` (32 bits) chooses the random numbers, if the codec draws any.
        """

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Replace ``values`` by those in ``wire``."""

    def decode_add(self, wire: Tensor, values: Tensor) -> None:
        """Add the values in ``wire`` to ``values``."""

    def decode_add_encode(
        self, received: Tensor, values: Tensor, residual: Tensor | None, wire: Tensor, key: int
    ) -> None:
        """Do ``decode_add`` of ``received``, then ``encode``, in one pass over blocks that stay in cache."""


class FusedCodec(ABC):
    """A ``Codec`` whose loops decode, add and encode in one pass.

    Its four operations are made of two: one encodes, after adding what was received, if anything; the other decodes,
    and replaces or adds.
    """

    in_place = False

    @abstractmethod
    def _encode(
        self, received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, key: int
    ) -> None: ...

    @abstractmethod
    def _decode(self, wire: Tensor, values: Tensor, *, add: bool) -> None: ...

    def encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        self._encode(None, values, residual, wire, key)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        self._decode(wire, values, add=False)

    def decode_add(self, wire: Tensor, values: Tensor) -> None:
        self._decode(wire, values, add=True)

    def decode_add_encode(
        self, received: Tensor, values: Tensor, residual: Tensor | None, wire: Tensor, key: int
    ) -> None:
        self._encode(received, values, residual, wire, key)


def mixed(*numbers: int) -> int:
    """Return a key of random numbers, the same on every machine: 32 bits that depend on all bits of ``numbers``, each
    below 2**64."""
    return int.from_bytes(hashlib.blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=4).digest(), "little")
