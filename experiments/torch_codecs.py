"""Codecs as one would write them in torch, for comparison: bf16, and int8 and int4 with a scale for each block.

Their bytes equal those of ``pipesgd.codecs``, except for the order of int4's halves and for ties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 2.0**-100


@dataclass(frozen=True, kw_only=True)
class TorchCodec:
    """Functions of tensors: values float32 (numel,), scales float32 (blocks,), and a payload of the whole numbers."""

    block: int
    in_a_byte: int
    """Values that share an element of the payload."""
    dtype: torch.dtype
    """Type of the payload's elements."""
    encode: Callable[[Tensor, Tensor, Tensor], None]
    """Function of values, scales and payload that fills the latter two."""
    decode: Callable[[Tensor, Tensor, Tensor], None]
    """Function of scales, payload and values that replaces the values."""
    hop: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    """Function of received scales and payload, values, and scales and payload to fill: adds, and encodes the sums."""

    def message(self, numel: int) -> tuple[Tensor, Tensor]:
        """Return room for the scales and the payload of ``numel`` values, a multiple of the block."""
        return torch.empty(numel // self.block), torch.empty(numel // self.in_a_byte, dtype=self.dtype)


def _made(
    block: int,
    in_a_byte: int,
    dtype: torch.dtype,
    encode: Callable[[Tensor, Tensor, Tensor], None],
    values_of: Callable[[Tensor, Tensor], Tensor],
) -> TorchCodec:
    """Return the codec whose messages ``encode`` writes, and ``values_of`` reads from scales and payload."""

    def decode(scales: Tensor, payload: Tensor, values: Tensor) -> None:
        values.copy_(values_of(scales, payload))

    def hop(received_scales: Tensor, received: Tensor, values: Tensor, scales: Tensor, payload: Tensor) -> None:
        values.add_(values_of(received_scales, received))
        encode(values, scales, payload)

    return TorchCodec(block=block, in_a_byte=in_a_byte, dtype=dtype, encode=encode, decode=decode, hop=hop)


def _encode_bf16(values: Tensor, scales: Tensor, payload: Tensor) -> None:
    payload.copy_(values)


def _values_bf16(scales: Tensor, payload: Tensor) -> Tensor:
    return payload


def _whole_numbers(values: Tensor, scales: Tensor, levels: int) -> Tensor:
    """Return the whole numbers, int8 (blocks, block), and fill the scales."""
    blocks = values.view(scales.numel(), -1)
    scale = (blocks.abs().amax(dim=1, keepdim=True) / levels).clamp_min(TINY)
    scales.copy_(scale.squeeze(1))
    return (blocks / scale).round().to(torch.int8)


def _encode_int8(values: Tensor, scales: Tensor, payload: Tensor) -> None:
    payload.copy_(_whole_numbers(values, scales, 127).view(-1))


def _values_int8(scales: Tensor, payload: Tensor) -> Tensor:
    return (payload.view(scales.numel(), -1) * scales.unsqueeze(1)).view(-1)


def _encode_int4(values: Tensor, scales: Tensor, payload: Tensor) -> None:
    low, high = _whole_numbers(values, scales, 7).chunk(2, dim=1)
    payload.copy_(((low & 15) | (high << 4)).reshape(-1))


def _values_int4(scales: Tensor, payload: Tensor) -> Tensor:
    both = payload.view(scales.numel(), -1)
    whole = torch.cat([(both << 4) >> 4, both >> 4], dim=1)  # arithmetic shifts: the sign is kept
    return (whole * scales.unsqueeze(1)).view(-1)


TORCH_CODECS = {
    "bf16": _made(1024, 1, torch.bfloat16, _encode_bf16, _values_bf16),
    "int8": _made(1024, 1, torch.int8, _encode_int8, _values_int8),
    "int4": _made(256, 2, torch.int8, _encode_int4, _values_int4),
}
