"""Linear codecs: whole numbers of a few bits times a scale for each block of values."""

from __future__ import annotations

import math
from types import ModuleType

from torch import Tensor

from pipesgd.codecs.base import FusedCodec
from pipesgd.codecs.kernels import kernels_for


class Linear(FusedCodec):
    """Codec of whole numbers in [-levels, levels], of 8, 4 or 2 bits, times a scale for each block of values.

    A message is the scales (float32), then each block's payload in whole bytes. With 4 or 2 bits, byte j of a block
    holds value j and, above it, values j + h, j + 2h, ..., where h is the block's bytes: loops over them vectorize.

    Rounding is to the nearest level, ties to even, or stochastic: up or down with probabilities that make it unbiased,
    except for the resolution of the random numbers, 15 bits for a value of 8 or 4 bits, 8 for one of 2: the mean is off
    by at most 2**-16 or 2**-9 of the scale, up as often as down. Levels are one scale apart: the error of a value is at
    most half the scale, and below the scale with stochastic rounding, plus what is clipped.

    Two errors come on top of those stated here and by the codecs' options. Float32 rounds the scale and its products:
    2**-22 of the largest magnitude of the block. And a block whose largest magnitude is below 2**-100 is sent as zeros.
    """

    def __init__(
        self,
        name: str,
        *,
        bits: int,
        levels: int,
        block: int,
        stochastic: bool,
        rule: int,
        clip: float = 0.0,
        device: str = "cpu",
    ):
        self.name = name
        self.block = block
        self.unbiased = stochastic
        self._bits = bits
        self._kernels: ModuleType = kernels_for(device)
        self._encoding = {
            "bits": bits,
            "block": block,
            "levels": levels,
            "rule": rule,
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
