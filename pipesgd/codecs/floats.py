"""Codecs that send floats unchanged, or in sixteen bits."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from pipesgd.codecs.base import FusedCodec
from pipesgd.codecs.kernels import kernels_for
from pipesgd.codecs.kernels.kinds import BF16, FP16


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


class Sixteen(FusedCodec):
    """Shared parts of the codecs that send sixteen bits a value."""

    name: str
    block = 32  # messages begin at whole cache lines
    unbiased = False
    _kind: int

    def __init__(self, device: str = "cpu"):
        self._kernels: ModuleType = kernels_for(device)

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        self._kernels.encode_16(received, values, residual, wire, kind=self._kind)

    def _decode(self, wire: Tensor, values: Tensor, *, add: bool) -> None:
        self._kernels.decode_16(wire, values, kind=self._kind, add=add)


class Bf16(Sixteen):
    """bfloat16, rounded to nearest, ties to even (Kalamkar et al., 2019, "A Study of BFLOAT16").

    It takes 16 bits a value. Rounding to nearest is deterministic: biased for a given value, but not toward zero. The
    error of a value x is at most 2**-8 |x| (2**-134 for denormals). Values that round beyond 3.39e38 become infinite.
    """

    name = "bf16"
    _kind = BF16


class Fp16(Sixteen):
    """IEEE half precision, rounded to nearest, ties to even (IEEE 754-2008; Micikevicius et al., ICLR 2018).

    It takes 16 bits a value. Rounding is deterministic, hence biased for a given value. The error of a value x is at
    most 2**-11 |x|, and at most 2**-25 for |x| below 2**-14. Sums of 65520 and more become infinite.
    """

    name = "fp16"
    _kind = FP16
