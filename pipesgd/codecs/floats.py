"""Codecs that send floats unchanged, or in sixteen bits."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from pipesgd.codecs.base import FusedCodec
from pipesgd.codecs.kernels import kernels_for
from pipesgd.codecs.kernels.kinds import BF16, FP16, TRUNCATE16

KINDS = {"truncate16": TRUNCATE16, "bf16": BF16, "fp16": FP16}
"""Kinds of sixteen-bit floats, by codec."""


class Uncompressed:
    """Values as they are, of any dtype; float32 takes 32 bits. Exact."""

    name = "fp32"
    block = 1
    unbiased = True
    in_place = True

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        pass  # values and wire are the same memory

    def decode(self, wire: Tensor, values: Tensor) -> None:
        pass

    def decode_add(self, wire: Tensor, values: Tensor) -> None:
        values.add_(wire.view(values.dtype))

    def decode_add_encode(
        self, received: Tensor, values: Tensor, residual: Tensor | None, wire: Tensor, key: int
    ) -> None:
        self.decode_add(received, values)


class SixteenBits(FusedCodec):
    """Floats of sixteen bits, of one of the kinds in ``KINDS``."""

    block = 32  # messages begin at whole cache lines
    unbiased = False

    def __init__(self, name: str, device: str = "cpu"):
        self.name = name
        self._kind = KINDS[name]
        self._kernels: ModuleType = kernels_for(device)

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        self._kernels.encode_16(received, values, residual, wire, kind=self._kind)

    def _decode(self, wire: Tensor, values: Tensor, *, add: bool) -> None:
        self._kernels.decode_16(wire, values, kind=self._kind, add=add)
