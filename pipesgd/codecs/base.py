"""Protocol of codecs, which turn values into the bytes that travel and back, and the parts that several share."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Encoder of float32 values for the hops of an all-reduce. It has no state: the same input gives the same bytes.

    A message holds the values of one segment and is encoded by itself. Its scales, if any, come first, then the
    payload. Zeros stay zeros, except among other values with ``Sign``. A NaN arrives as a NaN; an infinity does not
    become finite either. Where values share a scale, no value of their block is finite then.

    All tensors are contiguous: values and residuals are float32 (numel,), messages uint8 (``wire_bytes(numel)``,). The
    tensors of messages begin at multiples of 4 bytes.
    """

    @property
    def name(self) -> str:
        """Name of the codec, for text that people read."""

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


class OwnCodec(FusedCodec):
    """A ``Codec`` of the user's own: a subclass that says how values become bytes, and how bytes become values again.

    ``Pipelined(..., codec=Mine())`` and ``--codec module:Mine`` use it in every all-reduce but torch's own. A message
    holds the values of a segment, at least one, and stands alone: nothing may be remembered from one message to the
    next. All ranks decode the bytes that one of them has made, and must hold the same weights afterwards. Therefore

    - the same values and key give the same bytes, and the same bytes the same values, on every rank;
    - exactly ``wire_bytes(numel)`` bytes are written, and exactly ``numel`` values are decoded;
    - finite values stay finite, and zeros zeros; what is not finite stays so, or nobody would notice that gradient.

    Every rank tries all of this on some values before a codec is used. Values are float32 (numel,), bytes uint8
    (``wire_bytes(numel)``,). Both are contiguous, on the device of the gradients, and begin at multiples of 4 bytes.

    Sums and error feedback are made of the two functions. A codec that can do better in one pass also overrides
    ``encode``, ``decode``, ``decode_add`` and ``decode_add_encode`` of ``Codec``.

    Example:
        >>> class Half(OwnCodec):
        ...     def wire_bytes(self, numel: int) -> int:
        ...         return 2 * numel
        ...     def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        ...         wire.view(torch.float16).copy_(values)
        ...     def decompress(self, wire: Tensor, values: Tensor) -> None:
        ...         values.copy_(wire.view(torch.float16))
        >>> codec, values = Half(), torch.tensor([1.0, 0.1])
        >>> wire = torch.empty(codec.wire_bytes(2), dtype=torch.uint8)
        >>> codec.encode(values, None, wire, key=0)
        >>> codec.decode_add(wire, values)
        >>> values
        tensor([2.0000, 0.2000])
    """

    block = 1
    """Number of values that share a scale: all messages but a chunk's last hold a multiple of it."""
    unbiased = False
    """True if the mean of what is decoded, over all keys, is the value."""
    gives_back = False
    """True to keep what an encoding leaves out and add it in the next iteration (error feedback), unless
    ``--error-feedback`` says otherwise. It is meant for codecs of few bits."""

    @property
    def name(self) -> str:
        """Module and class of the codec, as ``--codec`` names it."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Return the size in bytes of a message of ``numel`` values, scales included."""

    @abstractmethod
    def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        """Write ``values`` to all of ``wire``, and leave them as they are.

        ``key``, 32 bits, is another one for every message and the same whenever a run is repeated: random numbers, if
        any, must come from it.
        """

    @abstractmethod
    def decompress(self, wire: Tensor, values: Tensor) -> None:
        """Replace all of ``values`` by what ``wire`` holds, and leave ``wire`` as it is."""

    def _encode(self, received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        if received is not None:
            self._decode(received, values, add=True)
        if residual is None:
            self.compress(values, wire, key)
            return
        values.add_(residual)
        self.compress(values, wire, key)
        self.decompress(wire, residual)
        torch.sub(values, residual, out=residual)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _decode(self, wire: Tensor, values: Tensor, *, add: bool) -> None:
        decoded = torch.empty_like(values) if add else values
        self.decompress(wire, decoded)
        if add:
            values.add_(decoded)


def mixed(*numbers: int) -> int:
    """Return a key of random numbers, the same on every machine: 32 bits that depend on all bits of ``numbers``, each
    below 2**64."""
    return int.from_bytes(hashlib.blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=4).digest(), "little")
