"""Strategies that draw codecs and values, an own codec, and functions for the operations of codecs, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from pipesgd.codecs.base import Codec, OwnCodec
from pipesgd.codecs.options import Bf16, CodecOptions, Fp16, Int4, Int8
from pipesgd.systems.codecs.qsgd import Qsgd
from pipesgd.systems.codecs.sign import Sign
from pipesgd.systems.codecs.ternary import Ternary
from pipesgd.systems.codecs.truncate16 import Truncate16

LARGEST = float(np.finfo(np.float32).max)
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 2.0**-126, -(2.0**-101), 2.0**-100, LARGEST, -LARGEST, 65520.0, 1.0)
BLOCKS = (1, 2, 3, 7, 8, 9, 32, 33, 64, 1025)

FLOATS: tuple[Callable[[], Codec], ...] = (Truncate16().make, Bf16().make, Fp16().make)


def made(options: type[CodecOptions], *, stochastic: bool | None = None, **others: Any) -> Codec:
    """Return the codec with these options; error feedback, which codecs leave to their callers, is off."""
    if stochastic is not None:
        others["rounding"] = "stochastic" if stochastic else "nearest"
    return options(error_feedback=False, **others).make()


class Half(OwnCodec):
    """A codec of the user's own: values as bfloat16."""

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        wire.view(torch.bfloat16).copy_(values)

    def decompress(self, wire: Tensor, values: Tensor) -> None:
        values.copy_(wire.view(torch.bfloat16))


@st.composite
def codecs(draw: st.DrawFn, kinds: tuple[str, ...] = ("float", "linear", "sign")) -> Codec:
    kind = draw(st.sampled_from(kinds))
    if kind == "float":
        return draw(st.sampled_from(FLOATS))()
    block = draw(st.sampled_from(BLOCKS))
    if kind == "sign":
        return made(Sign, block=block)
    stochastic = draw(st.booleans())
    levels = draw(st.sampled_from([0, 1, 2, 7, 8, 127]))
    if levels:
        return made(Qsgd, levels=levels, block=block, stochastic=stochastic)
    return made(draw(st.sampled_from([Int8, Int4, Ternary])), block=block, stochastic=stochastic)


@st.composite
def floats32(draw: st.DrawFn, numel: int) -> Tensor:
    """Draw ``numel`` finite float32 values of any magnitude; within a block, magnitudes may span the whole range."""
    if numel <= 20 and draw(st.booleans()):
        anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
        return torch.tensor(draw(st.lists(anything, min_size=numel, max_size=numel)), dtype=torch.float32)
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low = draw(st.sampled_from([-149, -126, -105, -20, -1, 0, 100, 126]))
    high = draw(st.integers(low, 127))
    values = generator.choice([-1.0, 1.0], numel) * 2.0 ** generator.uniform(low, high + 0.999, numel)
    special = generator.random(numel) < draw(st.sampled_from([0.0, 0.1, 0.9]))
    values = np.where(special, generator.choice(SPECIAL, numel), values)
    return torch.from_numpy(values.astype(np.float32))


@st.composite
def cases(draw: st.DrawFn, count: int = 1, **which: Any) -> tuple[Any, ...]:
    """Draw a codec, a key, and ``count`` tensors of one awkward size."""
    codec = draw(codecs(**which))
    block = codec.block
    numel = draw(st.sampled_from([0, 1, block - 1, block, block + 1, 2 * block + 3, 4 * block]) | st.integers(0, 150))
    key = draw(st.integers(0, 2**32 - 1))
    return codec, key, *(draw(floats32(numel)) for _ in range(count))


def encoded(codec: Codec, values: Tensor, key: int = 0, residual: Tensor | None = None) -> Tensor:
    """Return the message; ``residual`` is changed in place, ``values`` are not."""
    wire = torch.full((codec.wire_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(values.clone(), residual, wire, key)
    return wire


def decoded(codec: Codec, wire: Tensor, numel: int) -> Tensor:
    values = torch.full((numel,), float("nan"))
    codec.decode(wire, values)
    return values


def through(codec: Codec, values: Tensor, key: int = 0, residual: Tensor | None = None) -> Tensor:
    return decoded(codec, encoded(codec, values, key, residual), values.numel())


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if the tensors are equal bit for bit; all NaNs count as equal."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(0.0, float("inf"), float("-inf")).view(torch.int32),
        other.nan_to_num(0.0, float("inf"), float("-inf")).view(torch.int32),
    )
