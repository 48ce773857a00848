"""1-bit SGD: the sign of each value, and two means for each block of values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType

from torch import Tensor

from pipesgd.checks import refuse
from pipesgd.codecs.base import Codec, FusedCodec
from pipesgd.codecs.kernels import kernels_for
from pipesgd.codecs.options import MAX_BLOCK, CodecOptions
from pipesgd.options import option


@dataclass(frozen=True)
class Sign(CodecOptions):
    """Signs, and the mean of the values on either side of zero in each block: 1-bit SGD (Seide et al., 2014).

    It takes 1 + 64 / block bits a value, is biased, and is made for error feedback. The means leave the least squared
    error (except for steps of 1/4095 of the largest magnitude, in which they are counted), which is never larger than
    the values' own squares. So residuals stay bounded, also those of values that are always zero, which a single scale
    for both signs would let grow. The error of a value is at most the largest magnitude of its block. Zeros among other
    values become the mean of their side; -0.0 is on the negative one. A block whose largest magnitude is below 2**-100
    is sent as zeros.
    """

    name: str = field(default="sign", init=False)
    block: int = option(1024, at_least=1, named="codec-block")
    """Number of values that share two means."""
    error_feedback: bool | None = None
    """True, the default, to add what a rank's encodings leave out to its gradient of the next iteration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse((self.block > MAX_BLOCK, f"codec-block must be at most {MAX_BLOCK}; got {self.block}"))

    @property
    def gives_back(self) -> bool:
        return self.error_feedback is not False

    def _words(self) -> list[str]:
        return [f"in blocks of {self.block}", *super()._words()]

    def make(self, device: str = "cpu") -> Codec:
        return SignCodec(self.block, device)


class SignCodec(FusedCodec):
    """Encoder of ``Sign``."""

    name = "sign"
    unbiased = False

    def __init__(self, block: int, device: str):
        self.block = block
        self._kernels: ModuleType = kernels_for(device)

    def wire_bytes(self, numel: int) -> int:
        blocks, rest = divmod(numel, self.block)
        return 8 * (blocks + (rest > 0)) + blocks * math.ceil(self.block / 8) + math.ceil(rest / 8)

    def _encode(self, received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        self._kernels.encode_sign(received, values, residual, wire, block=self.block)

    def _decode(self, wire: Tensor, values: Tensor, *, add: bool) -> None:
        self._kernels.decode_sign(wire, values, block=self.block, add=add)
