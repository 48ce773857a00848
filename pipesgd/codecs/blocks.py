"""Linear codecs: whole numbers of a few bits times a scale for each block of values."""

from __future__ import annotations

import math
from types import ModuleType

from torch import Tensor

from pipesgd.codecs.base import FusedCodec
from pipesgd.codecs.kernels import kernels_for
from pipesgd.codecs.kernels.kinds import ABSMAX, CLIPPED, NORM

CLIP_STOCHASTIC = 2.5
"""Root mean squares at which TernGrad clips (section 3.3 of its paper)."""
CLIP_NEAREST = 1.224
"""Root mean squares at which rounding to nearest clips, for the least squared error of normal values (Max, 1960)."""


class _Linear(FusedCodec):
    """Codec of whole numbers in [-levels, levels], of 8, 4 or 2 bits, times a scale for each block of values.

    A message is the scales (float32), then each block's payload in whole bytes. With 4 or 2 bits, byte j of a block
    holds value j and, above it, values j + h, j + 2h, ..., where h is the block's bytes: loops over them vectorize.

    Rounding is to the nearest level, ties to even, or stochastic: up or down with probabilities that make it unbiased,
    except for the resolution of the random numbers, 15 bits for a value of 8 or 4 bits, 8 for one of 2: the mean is off
    by at most 2**-16 or 2**-9 of the scale, up as often as down. Levels are one scale apart: the error of a value is at
    most half the scale, and below the scale with stochastic rounding, plus what is clipped.

    Two errors come on top of those stated here and below. Float32 rounds the scale and its products: 2**-22 of the
    largest magnitude of the block. And a block whose largest magnitude is below 2**-100 is sent as zeros.
    """

    name: str
    _rule: int

    def __init__(self, *, bits: int, levels: int, block: int, stochastic: bool, clip: float = 0.0, device: str = "cpu"):
        self.block = block
        self.unbiased = stochastic
        self._bits = bits
        self._kernels: ModuleType = kernels_for(device)
        self._encoding = {
            "bits": bits,
            "block": block,
            "levels": levels,
            "rule": self._rule,
            "clip": clip,
            "stochastic": stochastic,
        }
        self._decoding = {"bits": bits, "block": block}

    def wire_bytes(self, numel: int) -> int:
        blocks, rest = divmod(numel, self.block)
        payload = blocks * math.ceil(self.block * self._bits / 8) + math.ceil(rest * self._bits / 8)
        return 4 * (blocks + (rest > 0)) + payload

    def _encode(self, received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        self._kernels.encode_linear(received, values, residual, wire, key=key, **self._encoding)

    def _decode(self, wire: Tensor, values: Tensor, *, add: bool) -> None:
        self._kernels.decode_linear(wire, values, add=add, **self._decoding)


class Int8(_Linear):
    """Eight bits a value, -127 to 127 times largest magnitude / 127: Pipe-SGD's quantization (Li et al., 2018, "Q").

    It takes 8 + 32 / block bits a value. Each block has its own scale: a few outliers would set the range of a whole
    tensor. The error of a value is at most 1/254 of the largest magnitude of its block; with stochastic rounding it is
    at most 1/127, and unbiased.
    """

    name = "int8"
    _rule = ABSMAX

    def __init__(self, *, block: int = 1024, stochastic: bool = False, device: str = "cpu"):
        super().__init__(bits=8, levels=127, block=block, stochastic=stochastic, device=device)


class Int4(_Linear):
    """Four bits a value, -7 to 7 times the largest magnitude / 7, a scale for each block (Dettmers, ICLR 2016).

    It takes 4 + 32 / block bits a value. The error of a value is at most 1/14 of the largest magnitude of its block;
    with stochastic rounding it is at most 1/7, and unbiased.
    """

    name = "int4"
    _rule = ABSMAX

    def __init__(self, *, block: int = 256, stochastic: bool = False, device: str = "cpu"):
        super().__init__(bits=4, levels=7, block=block, stochastic=stochastic, device=device)


class Ternary(_Linear):
    """-1, 0 or 1 times a scale: TernGrad (Wen et al., NeurIPS 2017, equations 1 to 3 and section 3.3).

    It takes 2 + 32 / block bits a value. The scale is the largest magnitude, clipped at 2.5 root mean squares of the
    block. With stochastic rounding, as in the paper, it is unbiased except for what is clipped, and the error of a
    value is at most the scale. With rounding to nearest, for use with error feedback, it is clipped at 1.224, where the
    squared error is least, and the error is at most half of the scale, or what is clipped. Stochastic rounding does not
    go with error feedback: its errors are larger than most values, and residuals grow until they are not finite.

    The paper shares one scale among the workers so that a server can add up their whole numbers. Here every hop decodes
    and encodes again, and all ranks decode the owner's bytes: they share its scale.
    """

    name = "ternary"
    _rule = CLIPPED

    def __init__(self, *, block: int = 1024, stochastic: bool = True, device: str = "cpu"):
        clip = CLIP_STOCHASTIC if stochastic else CLIP_NEAREST
        super().__init__(bits=2, levels=1, block=block, stochastic=stochastic, clip=clip, device=device)


class Qsgd(_Linear):
    """0 to s times the block's Euclidean norm / s, with a sign: QSGD (Alistarh et al., NeurIPS 2017, section 3.1).

    It takes 8, 4 or 2 bits a value for s up to 127, 7 and 1, plus 32 / block. The paper's variable-length codes would
    save more, but cost a pass that does not vectorize. With stochastic rounding, as in the paper, it is unbiased. The
    error of a value is at most norm / s; half of that with rounding to nearest. In a block of 512, say, that is more
    than most values, again at every hop. The norm is that of magnitudes rounded to 1/1023 of the block's largest one,
    at most sqrt(block) / 2046 of it away from the exact one; beyond float32's range it stays at the end of that range.

    With rounding to nearest, a block of (2 s)**2 equal values becomes zeros: error feedback needs smaller blocks.
    """

    name = "qsgd"
    _rule = NORM

    def __init__(self, *, levels: int = 7, block: int = 64, stochastic: bool = True, device: str = "cpu"):
        bits = 2 if levels == 1 else 4 if levels <= 7 else 8
        super().__init__(bits=bits, levels=levels, block=block, stochastic=stochastic, device=device)


class Sign(FusedCodec):
    """Signs, and the mean of the values on either side of zero in each block: 1-bit SGD (Seide et al., 2014).

    It takes 1 + 64 / block bits a value, is biased, and is made for error feedback. The means leave the least squared
    error (except for steps of 1/4095 of the largest magnitude, in which they are counted), which is never larger than
    the values' own squares. So residuals stay bounded, also those of values that are always zero, which a single scale
    for both signs would let grow. The error of a value is at most the largest magnitude of its block. Zeros among other
    values become the mean of their side; -0.0 is on the negative one. A block whose largest magnitude is below 2**-100
    is sent as zeros.
    """

    name = "sign"
    unbiased = False

    def __init__(self, *, block: int = 1024, device: str = "cpu"):
        self.block = block
        self._kernels: ModuleType = kernels_for(device)

    def wire_bytes(self, numel: int) -> int:
        blocks, rest = divmod(numel, self.block)
        return 8 * (blocks + (rest > 0)) + blocks * math.ceil(self.block / 8) + math.ceil(rest / 8)

    def _encode(self, received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        self._kernels.encode_sign(received, values, residual, wire, block=self.block)

    def _decode(self, wire: Tensor, values: Tensor, *, add: bool) -> None:
        self._kernels.decode_sign(wire, values, block=self.block, add=add)
