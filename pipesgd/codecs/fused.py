"""What all codecs share whose loops decode, add and encode in one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class FusedCodec(ABC):
    """The four operations of a ``Codec``, from two: encode, after adding what was received if there is anything, and
    decode, which replaces or adds."""

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
