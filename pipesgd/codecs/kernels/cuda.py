"""Codec loops on NVIDIA GPUs, in Triton: the functions of ``kernels/cpu.py``, and their bytes, bit for bit.

One program encodes or decodes one block, in tiles of its bytes: the lanes of a tile are the bytes, and each byte's
values, one of every plane, are processed in turn. An encoding passes over the block up to three times (largest
magnitude, sum, bytes) and adds up received bytes, values and residual again in each: nothing is stored before the last.

To keep the bytes the same as on a CPU, no product is fused with a sum (``enable_fp_fusion=False``), quotients and roots
are rounded to nearest (Triton's ``/`` is not), values are rounded by adding 1.5 * 2**23, and the sums that choose a
scale are sums of integers. Two things may differ: an encoding leaves ``values`` as they were; and the sign and payload
of NaNs, values or scales, may be others, since a GPU makes all NaNs that it computes alike.

With TRITON_INTERPRET=1 in the environment before Triton is imported the same code runs on CPU tensors, slowly.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32, int16

from pipesgd.codecs.kernels import kinds

# Kernels can read a global constant only if it has Triton's own type.
_ABSMAX, _NORM = tl.constexpr(kinds.ABSMAX), tl.constexpr(kinds.NORM)
_BF16, _FP16 = tl.constexpr(kinds.BF16), tl.constexpr(kinds.FP16)
_ROUNDER, _ROUNDER_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
_MAGNITUDE, _INFINITY = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_TINY, _HUGE = tl.constexpr(2.0**-100), tl.constexpr(2.0**128 - 2.0**105)
_FINE, _FINER = tl.constexpr(1023.0), tl.constexpr(4095.0)

_WARPS = 4
_SMALLEST_TILE, _LARGEST_TILE = 32 * _WARPS, 1024
"""Fewest and most lanes: at least one a thread, since two that share one could read what the other has written."""

_NUMBERS = ("n", "block", "key")
_POINTERS = ("received", "received_scales", "values", "residual", "wire", "scales")


def _kernel(function: Any) -> Any:
    """Compile once for each codec: not again for every length, key and alignment, in the middle of an iteration."""
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(
        function,
        do_not_specialize=[name for name in arguments if name in _NUMBERS],
        do_not_specialize_on_alignment=[name for name in arguments if name in _POINTERS],
    )


# --- Parts of kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _whole(x):
    """Return ``x``, below 2**22, rounded to a whole number."""
    return _bits(x + _ROUNDER) - _ROUNDER_BITS


@triton.jit
def _hash(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _level(byte, bits: tl.constexpr, shift: tl.constexpr):
    """Return the whole number in these bits of a byte, two's complement."""
    return (byte.to(tl.int32) << (32 - bits - shift)) >> (32 - bits)


@triton.jit
def _signed(byte, shift: tl.constexpr, positive, negative):
    return tl.where((byte.to(tl.int32) >> shift) & 1 != 0, negative, positive)


@triton.jit
def _block_at(n, block, in_a_byte: tl.constexpr):
    """Return the first value, number of values, first byte and number of bytes of this program's block."""
    number = tl.program_id(0).to(tl.int64)
    first = number * block
    size = tl.minimum(n - first, block).to(tl.int32)
    return first, size, number * ((block + in_a_byte - 1) // in_a_byte), (size + in_a_byte - 1) // in_a_byte


@triton.jit
def _with_residual(v, residual, at, mask):
    if residual is not None:
        v = tl.load(residual + at, mask, 0.0) + v
    return tl.where(mask, v, 0.0)  # a scale that is not finite reaches into lanes that have no value


@triton.jit
def _linear_values(received, scale, values, residual, byte, at, mask, bits: tl.constexpr, plane: tl.constexpr):
    """Return the values of a plane plus what was received and the residual; zero in the lanes beyond ``mask``."""
    v = tl.load(values + at, mask, 0.0)
    if received is not None:
        v += scale * _level(tl.load(received + byte, mask, 0), bits, plane * bits).to(tl.float32)
    return _with_residual(v, residual, at, mask)


@triton.jit
def _sign_values(received, positive, negative, values, residual, byte, at, mask, plane: tl.constexpr):
    v = tl.load(values + at, mask, 0.0)
    if received is not None:
        v += _signed(tl.load(received + byte, mask, 0), plane, positive, negative)
    return _with_residual(v, residual, at, mask)


# --- Linear codecs: whole numbers times a scale for each block --------------------------------------------------------


@_kernel
def _encode_linear(
    received,
    received_scales,
    values,
    residual,
    wire,
    scales,
    n,
    block,
    key,
    bits: tl.constexpr,
    levels: tl.constexpr,
    rule: tl.constexpr,
    clip: tl.constexpr,
    stochastic: tl.constexpr,
    tile: tl.constexpr,
):
    planes: tl.constexpr = 8 // bits
    resolution: tl.constexpr = 15 if bits >= 4 else 8  # random bits of a value
    first, size, payload, nbytes = _block_at(n, block, planes)
    number = tl.program_id(0)
    values += first
    wire += payload
    scale_received = 0.0
    if received is not None:
        received += payload
        scale_received = tl.load(received_scales + number)
    if residual is not None:
        residual += first

    # 1. Find the largest magnitude.
    lanes = tl.zeros([tile], tl.int32)
    for begin in range(0, nbytes, tile):
        byte = begin + tl.arange(0, tile)
        for plane in tl.static_range(planes):
            at = plane * nbytes + byte
            mask = (byte < nbytes) & (at < size)
            v = _linear_values(received, scale_received, values, residual, byte, at, mask, bits, plane)
            lanes = tl.maximum(lanes, _bits(v) & _MAGNITUDE)
    largest = tl.max(lanes, 0)
    finite = largest < _INFINITY
    sent = finite & (_float(largest) >= _TINY)
    top = tl.where(sent, _float(largest), 1.0)

    # 2. Choose the magnitude that gets the highest level.
    if rule == _ABSMAX:
        top = tl.minimum(top, _HUGE)
    else:
        inverse = tl.div_rn(_FINE, top)
        sums = tl.zeros([tile], tl.int64)
        for begin in range(0, nbytes, tile):
            byte = begin + tl.arange(0, tile)
            for plane in tl.static_range(planes):
                at = plane * nbytes + byte
                mask = (byte < nbytes) & (at < size)
                v = _linear_values(received, scale_received, values, residual, byte, at, mask, bits, plane)
                steps = _whole(tl.abs(v) * inverse)
                sums += (steps * steps).to(tl.int64)
        total = tl.sum(sums, 0).to(tl.float32)
        if rule == _NORM:
            top = tl.minimum(tl.sqrt_rn(total) * tl.div_rn(top, _FINE), _HUGE)
        else:
            top = tl.minimum(top, clip * tl.sqrt_rn(tl.div_rn(total, size.to(tl.float32))) * tl.div_rn(top, _FINE))
    scale = tl.where(sent, tl.div_rn(top, levels * 1.0), 0.0)
    tl.store(scales + number, _float(tl.where(finite, _bits(scale), _NAN)))

    # 3. Write the bytes, and keep what they leave out.
    inverse = tl.div_rn(levels * 1.0, top)
    plane_key = (key + first).to(tl.int32).to(tl.uint32, bitcast=True)
    for begin in range(0, nbytes, tile):
        byte = begin + tl.arange(0, tile)
        whole_byte = tl.zeros([tile], tl.int32)
        for plane in tl.static_range(planes):
            at = plane * nbytes + byte
            mask = (byte < nbytes) & (at < size)
            v = _linear_values(received, scale_received, values, residual, byte, at, mask, bits, plane)
            exact = v * inverse
            if stochastic:
                random = _hash(plane_key + byte.to(tl.uint32)) << (4 * plane * bits)
                steps = (random.to(tl.int32, bitcast=True) >> (31 - resolution)) | 1
                exact += steps.to(tl.float32) * 2.0 ** (-1 - resolution)
            q = tl.minimum(tl.maximum(_whole(exact), -levels), levels)
            q = tl.where(sent & mask, q, 0)
            whole_byte |= (q & ((1 << bits) - 1)) << (plane * bits)
            if residual is not None:
                tl.store(residual + at, tl.where(finite, v - scale * q.to(tl.float32), 0.0), mask)
        tl.store(wire + byte, whole_byte.to(tl.uint8), byte < nbytes)


@_kernel
def _decode_linear(wire, scales, values, n, block, bits: tl.constexpr, add: tl.constexpr, tile: tl.constexpr):
    first, size, payload, nbytes = _block_at(n, block, 8 // bits)
    scale = tl.load(scales + tl.program_id(0))
    for begin in range(0, nbytes, tile):
        byte = begin + tl.arange(0, tile)
        whole_byte = tl.load(wire + payload + byte, byte < nbytes, 0)
        for plane in tl.static_range(8 // bits):
            at = plane * nbytes + byte
            mask = (byte < nbytes) & (at < size)
            v = scale * _level(whole_byte, bits, plane * bits).to(tl.float32)
            if add:
                v = tl.load(values + first + at, mask, 0.0) + v
            tl.store(values + first + at, v, mask)


# --- Sixteen-bit floats ----------------------------------------------------------------------------------------------


@triton.jit
def _from_word(word, kind: tl.constexpr):
    return word.to(tl.float16, bitcast=True).to(tl.float32) if kind == _FP16 else _float(word.to(tl.int32) << 16)


@triton.jit
def _to_word(v, kind: tl.constexpr):
    if kind == _FP16:
        word = v.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        whole = _bits(v)
        nan = (_INFINITY - (whole & _MAGNITUDE)) >> 31  # all ones for NaN, which must stay one
        if kind == _BF16:
            whole += (0x7FFF + ((whole >> 16) & 1)) & ~nan
        word = ((whole >> 16) | (nan & 0x40)).to(tl.int16)
    return word


@_kernel
def _encode_16(received, values, residual, wire, n, kind: tl.constexpr, tile: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    mask = at < n
    v = tl.load(values + at, mask, 0.0)
    if received is not None:
        v += _from_word(tl.load(received + at, mask, 0), kind)
    v = _with_residual(v, residual, at, mask)
    word = _to_word(v, kind)
    tl.store(wire + at, word, mask)
    if residual is not None:
        v -= _from_word(word, kind)
        tl.store(residual + at, tl.where((_bits(v) & _MAGNITUDE) < _INFINITY, v, 0.0), mask)


@_kernel
def _decode_16(wire, values, n, kind: tl.constexpr, add: tl.constexpr, tile: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    mask = at < n
    v = _from_word(tl.load(wire + at, mask, 0), kind)
    if add:
        v = tl.load(values + at, mask, 0.0) + v
    tl.store(values + at, v, mask)


# --- Signs, with the mean of the positive and of the negative values of each block ------------------------------------


@_kernel
def _encode_sign(received, received_scales, values, residual, wire, scales, n, block, tile: tl.constexpr):
    first, size, payload, nbytes = _block_at(n, block, 8)
    number = tl.program_id(0).to(tl.int64)
    values += first
    wire += payload
    positive_received, negative_received = 0.0, 0.0
    if received is not None:
        received += payload
        positive_received = tl.load(received_scales + 2 * number)
        negative_received = tl.load(received_scales + 2 * number + 1)
    if residual is not None:
        residual += first

    # 1. Find the largest magnitude.
    lanes = tl.zeros([tile], tl.int32)
    for begin in range(0, nbytes, tile):
        byte = begin + tl.arange(0, tile)
        for plane in tl.static_range(8):
            at = plane * nbytes + byte
            mask = (byte < nbytes) & (at < size)
            v = _sign_values(received, positive_received, negative_received, values, residual, byte, at, mask, plane)
            lanes = tl.maximum(lanes, _bits(v) & _MAGNITUDE)
    largest = tl.max(lanes, 0)
    finite = largest < _INFINITY
    sent = finite & (_float(largest) >= _TINY)
    top = tl.where(sent, _float(largest), 1.0)

    # 2. Compute the mean of the values that are not negative, and of the negative ones.
    inverse = tl.div_rn(_FINER, top)
    sums, negative_sums, negatives = tl.zeros([tile], tl.int64), tl.zeros([tile], tl.int64), tl.zeros([tile], tl.int32)
    for begin in range(0, nbytes, tile):
        byte = begin + tl.arange(0, tile)
        for plane in tl.static_range(8):
            at = plane * nbytes + byte
            mask = (byte < nbytes) & (at < size)
            v = _sign_values(received, positive_received, negative_received, values, residual, byte, at, mask, plane)
            steps = _whole(tl.abs(v) * inverse)
            sign = _bits(v) >> 31  # all ones for negative values
            sums += steps.to(tl.int64)
            negative_sums += (steps & sign).to(tl.int64)
            negatives -= sign
    of_negatives, count = tl.sum(negative_sums, 0), tl.sum(negatives, 0)
    of_positives = tl.sum(sums, 0) - of_negatives
    unit = tl.div_rn(top, _FINER)
    positive = unit * tl.div_rn(of_positives.to(tl.float32), tl.maximum(size - count, 1).to(tl.float32))
    negative = unit * tl.div_rn(of_negatives.to(tl.float32), tl.maximum(count, 1).to(tl.float32))
    positive = tl.where(sent, positive, 0.0)
    negative = tl.where(sent, negative, 0.0) * -1.0  # Triton's own minus would subtract from zero: no -0.0
    tl.store(scales + 2 * number, _float(tl.where(finite, _bits(positive), _NAN)))
    tl.store(scales + 2 * number + 1, _float(tl.where(finite, _bits(negative), _NAN)))

    # 3. Write the bytes, and keep what they leave out.
    for begin in range(0, nbytes, tile):
        byte = begin + tl.arange(0, tile)
        whole_byte = tl.zeros([tile], tl.int32)
        for plane in tl.static_range(8):
            at = plane * nbytes + byte
            mask = (byte < nbytes) & (at < size)
            v = _sign_values(received, positive_received, negative_received, values, residual, byte, at, mask, plane)
            bit = (_bits(v) >> 31) & 1
            whole_byte |= bit << plane
            if residual is not None:
                tl.store(residual + at, tl.where(finite, v - tl.where(bit != 0, negative, positive), 0.0), mask)
        tl.store(wire + byte, whole_byte.to(tl.uint8), byte < nbytes)


@_kernel
def _decode_sign(wire, scales, values, n, block, add: tl.constexpr, tile: tl.constexpr):
    first, size, payload, nbytes = _block_at(n, block, 8)
    number = tl.program_id(0).to(tl.int64)
    positive, negative = tl.load(scales + 2 * number), tl.load(scales + 2 * number + 1)
    for begin in range(0, nbytes, tile):
        byte = begin + tl.arange(0, tile)
        whole_byte = tl.load(wire + payload + byte, byte < nbytes, 0)
        for plane in tl.static_range(8):
            at = plane * nbytes + byte
            mask = (byte < nbytes) & (at < size)
            v = _signed(whole_byte, plane, positive, negative)
            if add:
                v = tl.load(values + first + at, mask, 0.0) + v
            tl.store(values + first + at, v, mask)


# --- Functions that codecs call: tensors in, tensors out --------------------------------------------------------------


def _scales(wire: Tensor | None, nbytes: int) -> Any:
    return None if wire is None else wire[:nbytes].view(float32)


def _payload(wire: Tensor | None, begin: int) -> Any:
    return None if wire is None else wire[begin:]


_SETTINGS = {"num_warps": _WARPS, "enable_fp_fusion": False}


def _run(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    if programs > 0:
        kernel[(programs,)](*arguments, **constants, **_SETTINGS)


def _tile(block: int, in_a_byte: int) -> int:
    """Return the number of lanes for blocks of ``block`` values."""
    return min(max(_SMALLEST_TILE, triton.next_power_of_2(triton.cdiv(block, in_a_byte))), _LARGEST_TILE)


def encode_linear(
    received: Tensor | None,
    values: Tensor,
    residual: Tensor | None,
    wire: Tensor,
    *,
    bits: int,
    block: int,
    levels: int,
    rule: int,
    clip: float,
    stochastic: bool,
    key: int,
) -> None:
    """Encode as whole numbers of ``bits`` (8, 4 or 2) bits in [-levels, levels] times a scale for each block."""
    n = values.numel()
    blocks = triton.cdiv(n, block)
    _run(
        *(_encode_linear, blocks, _payload(received, 4 * blocks), _scales(received, 4 * blocks), values, residual),
        *(_payload(wire, 4 * blocks), _scales(wire, 4 * blocks), n, block, key - (key >> 31 << 32)),
        bits=bits,
        levels=levels,
        rule=rule,
        clip=clip,
        stochastic=stochastic,
        tile=_tile(block, 8 // bits),
    )


def decode_linear(wire: Tensor, values: Tensor, *, bits: int, block: int, add: bool) -> None:
    """Decode what ``encode_linear`` made of values; add it to ``values`` if ``add``, else replace them."""
    n = values.numel()
    blocks = triton.cdiv(n, block)
    _run(
        *(_decode_linear, blocks, _payload(wire, 4 * blocks), _scales(wire, 4 * blocks), values, n, block),
        bits=bits,
        add=add,
        tile=_tile(block, 8 // bits),
    )


def encode_16(received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, *, kind: int) -> None:
    """Encode as sixteen-bit floats of this kind."""
    words = None if received is None else received.view(int16)
    n = values.numel()
    programs = triton.cdiv(n, _LARGEST_TILE)
    _run(_encode_16, programs, words, values, residual, wire.view(int16), n, kind=kind, tile=_LARGEST_TILE)


def decode_16(wire: Tensor, values: Tensor, *, kind: int, add: bool) -> None:
    """Decode what ``encode_16`` made of values; add it to ``values`` if ``add``, else replace them."""
    n = values.numel()
    programs = triton.cdiv(n, _LARGEST_TILE)
    _run(_decode_16, programs, wire.view(int16), values, n, kind=kind, add=add, tile=_LARGEST_TILE)


def encode_sign(received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, *, block: int) -> None:
    """Encode as signs, with the means of the values that are not negative and of those that are, for each block."""
    n = values.numel()
    blocks = triton.cdiv(n, block)
    _run(
        *(_encode_sign, blocks, _payload(received, 8 * blocks), _scales(received, 8 * blocks), values, residual),
        *(_payload(wire, 8 * blocks), _scales(wire, 8 * blocks), n, block),
        tile=_tile(block, 8),
    )


def decode_sign(wire: Tensor, values: Tensor, *, block: int, add: bool) -> None:
    """Decode what ``encode_sign`` made of values; add it to ``values`` if ``add``, else replace them."""
    n = values.numel()
    blocks = triton.cdiv(n, block)
    _run(
        *(_decode_sign, blocks, _payload(wire, 8 * blocks), _scales(wire, 8 * blocks), values, n, block),
        add=add,
        tile=_tile(block, 8),
    )
