"""Gradients of eight-bit floats: a codec of your own, used by the command.

    torchrun --nproc-per-node 2 -m pipesgd.train --codec own_codec:Fp8 --lr 0.05

Run it in this folder. docs/extending.md explains it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipesgd import OwnCodec

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 2.0**-100  # so that zeros can be divided by it


class Fp8(OwnCodec):
    """One scale, then a byte for each value: a float of 4 bits of exponent and 3 of mantissa."""

    gives_back = True

    def wire_bytes(self, numel: int) -> int:
        return 4 + numel

    def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        scale = (values.abs().max() / LARGEST).clamp(min=SMALLEST_SCALE)
        wire[:4].view(torch.float32).copy_(scale)
        wire[4:].view(torch.float8_e4m3fn).copy_(values / scale)

    def decompress(self, wire: Tensor, values: Tensor) -> None:
        values.copy_(wire[4:].view(torch.float8_e4m3fn))
        values.mul_(wire[:4].view(torch.float32))
