"""Codec loops on the CPU, compiled by numba, kept on disk between runs, and run without Python's lock.

Each loop makes several simple passes over a block of values, which stays in the first-level cache, rather than one
complicated pass, so that LLVM turns every pass into vector instructions. For that, the largest magnitude is searched
among the bits of the floats as integers (which also finds NaN and infinity, the largest of all), a value is rounded by
adding 1.5 * 2**23 to it, and sums that choose a scale are sums of integers, so that the order of the additions, which
differs between machines, changes no byte.

An array of size 0 stands for "none". ``kernels/cuda.py`` has the same functions and makes the same bytes.

``encode_*`` take contiguous arguments: the bytes ``received`` (or None), which are decoded and added to ``values``
(float32) first; ``residual`` (float32, or None), which is added too; and ``wire``, the bytes to make. Values are
overwritten. Afterwards the residual is what the bytes leave out; nothing is kept of a block with a NaN or an infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from pipesgd.codecs.kernels.kept import keep
from pipesgd.codecs.kernels.kinds import ABSMAX, BF16, FP16, NORM

# Scalars of fixed width: numba would compute in 64 bits.
_F, _I, _U = np.float32, np.int32, np.uint32

_ROUNDER, _ROUNDER_BITS = _F(12582912.0), _I(0x4B400000)
_MAGNITUDE, _INFINITY = _I(0x7FFFFFFF), _I(0x7F800000)
_TINY = _F(2.0**-100)
_HUGE = _F(2.0**128 - 2.0**105)
"""Largest range: the highest level times its scale, which is rounded, must not become infinite."""
_FINE = _F(1023.0)
"""Steps up to a block's largest magnitude, in which magnitudes are counted where a scale needs their sum."""


@intrinsic
def _bits(context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def _float(context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _to_half(context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


@intrinsic
def _from_half(context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


def _kernel(function: Any) -> Any:
    return keep(njit(nogil=True, error_model="numpy")(function))


# --- Passes over one block -------------------------------------------------------------------------------------------


@_kernel
def _largest(v):
    """Return the bits of the largest magnitude; at least those of infinity if a value is not finite."""
    largest = _I(0)
    for i in range(v.size):
        largest = _I(max(largest, _I(_bits(v[i]) & _MAGNITUDE)))
    return largest


@_kernel
def _add_to(e, v):
    for i in range(v.size):
        e[i] += v[i]


@_kernel
def _sum_of_squares(v, inverse):
    """Return the sum of squares of the values in whole steps; the largest magnitude has 1023 steps."""
    total = np.int64(0)
    for begin in range(0, v.size, 1024):  # the squares of 1024 values add up to less than 2**31
        part = v[begin : min(begin + 1024, v.size)]
        squares = _I(0)
        for i in range(part.size):
            steps = _I(_bits(part[i] * inverse + _ROUNDER) - _ROUNDER_BITS)
            squares = _I(squares + _I(steps * steps))
        total += squares
    return total


@_kernel
def _hash(x):
    """Return 32 bits that look random, by the finalizer "lowbias32": the same wherever they are computed."""
    x = _U(_U(x ^ (x >> _U(16))) * _U(0x7FEB352D))
    x = _U(_U(x ^ (x >> _U(15))) * _U(0x846CA68B))
    return _U(x ^ (x >> _U(16)))


@njit(inline="always")
def _noise(random, bits, plane):
    """Return odd multiples of a small step in (-1/2, 1/2), symmetric, from the random bits that a byte's values share.

    It has at most 15 bits: its sum with 127 is exact then, and a whole number, even one unit off, stays what it is.
    """
    resolution = min(4 * bits, 15)
    steps = _I(_I(_I(random) << _I(4 * bits * plane)) >> _I(31 - resolution)) | _I(1)
    return _F(_I(steps)) * _F(2.0 ** (-1 - resolution))


@njit(inline="always")
def _level(x, inverse, levels, noise, bits, simple):
    """Return the whole number nearest to ``x * inverse + noise`` in [-levels, levels], in ``bits`` bits."""
    t = x * inverse
    if not simple:  # a simple one cannot leave the range
        t = min(max(t + noise, -levels), levels)
    return _I(_bits(t + _ROUNDER) & _I((1 << bits) - 1))


@njit(inline="always")
def _quantize(v, inverse, levels, w, bits, simple, stochastic, key):
    """Write whole numbers in two's complement: value j of a plane in byte j, 8 / bits planes to a block."""
    none = _F(0.0)
    h = w.size
    if bits == 8:
        if simple:
            for i in range(h):
                w[i] = np.uint8(_level(v[i], inverse, levels, none, 8, True))
        elif not stochastic:
            for i in range(h):
                w[i] = np.uint8(_level(v[i], inverse, levels, none, 8, False))
        else:
            for i in range(h):
                noise = _noise(_hash(_U(key + _U(i))), 8, 0)
                w[i] = np.uint8(_level(v[i], inverse, levels, noise, 8, False))
        return
    if v.size * bits < 8 * h:  # the last plane is shorter, which is rare
        for i in range(h):
            random = _hash(_U(key + _U(i)))
            byte = _I(0)
            for plane in range(8 // bits):
                if plane * h + i < v.size:
                    noise = _noise(random, bits, plane) if stochastic else none
                    byte |= _level(v[plane * h + i], inverse, levels, noise, bits, simple) << (plane * bits)
            w[i] = np.uint8(byte)
        return
    a, b = v[:h], v[h : 2 * h]
    if bits == 4:
        if simple:
            for i in range(h):
                low = _level(a[i], inverse, levels, none, 4, True)
                w[i] = np.uint8(_I(low | _I(_level(b[i], inverse, levels, none, 4, True) << _I(4))))
        elif not stochastic:
            for i in range(h):
                low = _level(a[i], inverse, levels, none, 4, False)
                w[i] = np.uint8(_I(low | _I(_level(b[i], inverse, levels, none, 4, False) << _I(4))))
        else:
            for i in range(h):
                random = _hash(_U(key + _U(i)))
                low = _level(a[i], inverse, levels, _noise(random, 4, 0), 4, False)
                high = _level(b[i], inverse, levels, _noise(random, 4, 1), 4, False)
                w[i] = np.uint8(_I(low | _I(high << _I(4))))
        return
    c, d = v[2 * h : 3 * h], v[3 * h :]
    if not stochastic:
        for i in range(h):
            first = _level(a[i], inverse, levels, none, 2, False)
            second = _I(_level(b[i], inverse, levels, none, 2, False) << _I(2))
            third = _I(_level(c[i], inverse, levels, none, 2, False) << _I(4))
            fourth = _I(_level(d[i], inverse, levels, none, 2, False) << _I(6))
            w[i] = np.uint8(_I(_I(first | second) | _I(third | fourth)))
    else:
        for i in range(h):
            random = _hash(_U(key + _U(i)))
            first = _level(a[i], inverse, levels, _noise(random, 2, 0), 2, False)
            second = _I(_level(b[i], inverse, levels, _noise(random, 2, 1), 2, False) << _I(2))
            third = _I(_level(c[i], inverse, levels, _noise(random, 2, 2), 2, False) << _I(4))
            fourth = _I(_level(d[i], inverse, levels, _noise(random, 2, 3), 2, False) << _I(6))
            w[i] = np.uint8(_I(_I(first | second) | _I(third | fourth)))


@njit(inline="always")
def _dequantize_plane(u, p, scale, up, left, sign):
    if sign == 0:
        for i in range(p.size):
            p[i] = scale * _F(_I(_I(u[i]) << _I(up)) >> _I(left))
    elif sign > 0:
        for i in range(p.size):
            p[i] += scale * _F(_I(_I(u[i]) << _I(up)) >> _I(left))
    else:
        for i in range(p.size):
            p[i] -= scale * _F(_I(_I(u[i]) << _I(up)) >> _I(left))


@njit(inline="always")
def _dequantize(w, v, scale, bits, sign):
    """Replace ``v`` by the values (sign 0), add them to it (1), or subtract them from it (-1)."""
    h = w.size
    _dequantize_plane(w, v[:h], scale, 32 - bits, 32 - bits, sign)
    if bits <= 4:
        _dequantize_plane(w, v[h : 2 * h], scale, 32 - 2 * bits, 32 - bits, sign)
    if bits == 2:
        _dequantize_plane(w, v[2 * h : 3 * h], scale, 26, 30, sign)
        _dequantize_plane(w, v[3 * h :], scale, 24, 30, sign)


@_kernel
def _range(v, largest, rule, clip):
    """Return the magnitude of the highest level; 0 for a block of (almost) nothing, NaN for one that is not finite."""
    if largest >= _INFINITY:
        return _F(np.nan)
    a = _float(largest)
    if a < _TINY:
        return _F(0.0)
    if rule == ABSMAX:
        return min(a, _HUGE)
    total = _F(_sum_of_squares(v, _FINE / a))
    if rule == NORM:
        return min(np.sqrt(total) * (a / _FINE), _HUGE)
    return min(a, clip * np.sqrt(total / _F(v.size)) * (a / _FINE))


# --- Linear codecs: whole numbers times a scale for each block --------------------------------------------------------


@njit(inline="always")
def _encode_linear(received, values, residual, wire, block, bits, levels, rule, clip, stochastic, key):
    n = values.size
    blocks = (n + block - 1) // block
    in_a_byte = 8 // bits
    nbytes = (block + in_a_byte - 1) // in_a_byte
    scales = wire[: 4 * blocks].view(np.float32)
    received_scales = received[: min(received.size, 4 * blocks)].view(np.float32)
    simple = rule == ABSMAX and not stochastic
    for b in range(blocks):
        begin = b * block
        v = values[begin : min(n, begin + block)]
        at = 4 * blocks + b * nbytes
        to = at + (v.size + in_a_byte - 1) // in_a_byte
        w = wire[at:to]
        if received.size > 0:
            _dequantize(received[at:to], v, received_scales[b], bits, 1)
        if residual.size > 0:
            e = residual[begin : begin + v.size]
            _add_to(e, v)
            v = e
        top = _range(v, _largest(v), rule, clip)
        scales[b] = top / _F(levels)
        if top > _F(0.0):
            _quantize(v, _F(levels) / top, _F(levels), w, bits, simple, stochastic, _U(key + _U(begin)))
            if residual.size > 0:
                _dequantize(w, v, scales[b], bits, -1)
        else:  # (almost) nothing, or not finite: there is no residual
            w[:] = np.uint8(0)
            if residual.size > 0 and top != _F(0.0):
                v[:] = _F(0.0)


@njit(inline="always")
def _decode_linear(wire, values, block, bits, add):
    n = values.size
    blocks = (n + block - 1) // block
    in_a_byte = 8 // bits
    nbytes = (block + in_a_byte - 1) // in_a_byte
    scales = wire[: 4 * blocks].view(np.float32)
    for b in range(blocks):
        v = values[b * block : min(n, b * block + block)]
        at = 4 * blocks + b * nbytes
        _dequantize(wire[at : at + (v.size + in_a_byte - 1) // in_a_byte], v, scales[b], bits, add)


# One function for each number of bits, which LLVM then knows.


@_kernel
def _encode_8(received, values, residual, wire, block, levels, rule, clip, stochastic, key):
    _encode_linear(received, values, residual, wire, block, 8, levels, rule, clip, stochastic, key)


@_kernel
def _encode_4(received, values, residual, wire, block, levels, rule, clip, stochastic, key):
    _encode_linear(received, values, residual, wire, block, 4, levels, rule, clip, stochastic, key)


@_kernel
def _encode_2(received, values, residual, wire, block, levels, rule, clip, stochastic, key):
    _encode_linear(received, values, residual, wire, block, 2, levels, rule, clip, stochastic, key)


@_kernel
def _decode_8(wire, values, block, add):
    _decode_linear(wire, values, block, 8, add)


@_kernel
def _decode_4(wire, values, block, add):
    _decode_linear(wire, values, block, 4, add)


@_kernel
def _decode_2(wire, values, block, add):
    _decode_linear(wire, values, block, 2, add)


_ENCODE_LINEAR = {8: _encode_8, 4: _encode_4, 2: _encode_2}
_DECODE_LINEAR = {8: _decode_8, 4: _decode_4, 2: _decode_2}


# --- Sixteen-bit floats ----------------------------------------------------------------------------------------------

_IN_CACHE = 1024
"""Number of values that are processed together where a codec has no blocks."""


@_kernel
def _encode_16(received, values, residual, wire, kind):
    words, received_words = wire.view(np.int16), received.view(np.int16)
    for begin in range(0, values.size, _IN_CACHE):
        v = values[begin : begin + _IN_CACHE]
        w = words[begin : begin + _IN_CACHE]
        if received.size > 0:
            _decode_words(received_words[begin : begin + _IN_CACHE], v, kind, 1)
        if residual.size > 0:
            e = residual[begin : begin + _IN_CACHE]
            _add_to(e, v)
            v = e
        if kind == FP16:
            for i in range(v.size):
                w[i] = _to_half(v[i])
        else:
            for i in range(v.size):
                word = _bits(v[i])
                nan = _I(_I(_INFINITY - _I(word & _MAGNITUDE)) >> _I(31))  # all ones for NaN, which must stay one
                if kind == BF16:
                    word = _I(word + _I(_I(_I(0x7FFF) + _I(_I(word >> _I(16)) & _I(1))) & ~nan))
                w[i] = np.int16(_I(_I(word >> _I(16)) | _I(nan & _I(0x40))))
        if residual.size > 0:
            _decode_words(w, v, kind, -1)
            if _largest(v) >= _INFINITY:
                for i in range(v.size):
                    v[i] = v[i] if abs(v[i]) < np.inf else _F(0.0)


@_kernel
def _decode_words(w, v, kind, sign):
    """Replace ``v`` by the values (sign 0), add them to it (1), or subtract them from it (-1)."""
    if kind == FP16:
        if sign == 0:
            for i in range(v.size):
                v[i] = _from_half(w[i])
        elif sign > 0:
            for i in range(v.size):
                v[i] += _from_half(w[i])
        else:
            for i in range(v.size):
                v[i] -= _from_half(w[i])
    elif sign == 0:
        for i in range(v.size):
            v[i] = _float(_I(_I(w[i]) << _I(16)))
    elif sign > 0:
        for i in range(v.size):
            v[i] += _float(_I(_I(w[i]) << _I(16)))
    else:
        for i in range(v.size):
            v[i] -= _float(_I(_I(w[i]) << _I(16)))


# --- Signs, with the mean of the positive and of the negative values of each block ------------------------------------

_FINER = _F(4095.0)
"""Steps up to a block's largest magnitude, in which magnitudes are counted for a mean."""


@_kernel
def _encode_1(received, values, residual, wire, block):
    n = values.size
    blocks = (n + block - 1) // block
    nbytes = (block + 7) // 8
    means = wire[: 8 * blocks].view(np.float32)
    received_means = received[: min(received.size, 8 * blocks)].view(np.float32)
    for b in range(blocks):
        v = values[b * block : min(n, b * block + block)]
        at = 8 * blocks + b * nbytes
        w = wire[at : at + (v.size + 7) // 8]
        if received.size > 0:
            u = received[at : at + (v.size + 7) // 8]
            _add_signs(u, v, received_means[2 * b], received_means[2 * b + 1], _F(1.0))
        if residual.size > 0:
            e = residual[b * block : b * block + v.size]
            _add_to(e, v)
            v = e
        largest = _largest(v)
        unit = _F(0.0)
        if largest >= _INFINITY:
            unit = _F(np.nan)
        elif _float(largest) >= _TINY:
            unit = _float(largest) / _FINER
        if unit > _F(0.0):
            positive, negative = _mean_steps(v, _FINER / _float(largest))
        else:
            positive, negative = _F(1.0), _F(1.0)
        means[2 * b], means[2 * b + 1] = unit * positive, -(unit * negative)
        _pack_signs(v, w)
        if residual.size > 0:
            if largest >= _INFINITY:
                v[:] = _F(0.0)
            else:
                _add_signs(w, v, means[2 * b], means[2 * b + 1], _F(-1.0))


@_kernel
def _mean_steps(v, inverse):
    """Return the mean magnitude, in steps, of the values that are not negative, and of the negative ones."""
    sums, negative_sums, negatives = np.int64(0), np.int64(0), np.int64(0)
    for begin in range(0, v.size, 65536):  # the steps of 65536 values add up to less than 2**31
        part = v[begin : min(begin + 65536, v.size)]
        of_all, of_negatives, count = _I(0), _I(0), _I(0)
        for i in range(part.size):
            steps = _I(_bits(abs(part[i]) * inverse + _ROUNDER) - _ROUNDER_BITS)
            sign = _I(_bits(part[i]) >> _I(31))  # all ones for negative values
            of_all = _I(of_all + steps)
            of_negatives = _I(of_negatives + _I(steps & sign))
            count = _I(count - sign)
        sums += of_all
        negative_sums += of_negatives
        negatives += count
    positive = _F(sums - negative_sums) / _F(max(v.size - negatives, 1))
    return positive, _F(negative_sums) / _F(max(negatives, 1))


@_kernel
def _pack_signs(v, w):
    h = w.size
    for shift in range(8):
        plane = v[min(shift * h, v.size) : min(shift * h + h, v.size)]
        u = w[: plane.size]
        if shift == 0:
            w[:] = np.uint8(0)
        for i in range(plane.size):
            u[i] |= np.uint8(_U(_U(_bits(plane[i])) >> _U(31)) << _U(shift))


@_kernel
def _add_signs(w, v, positive, negative, factor):
    """Add ``factor`` times the values to ``v``; for factor 0, replace ``v`` by the values."""
    h = w.size
    for shift in range(8):
        plane = v[min(shift * h, v.size) : min(shift * h + h, v.size)]
        u = w[: plane.size]
        if factor == _F(0.0):
            for i in range(plane.size):
                plane[i] = negative if (u[i] >> np.uint8(shift)) & np.uint8(1) else positive
        else:
            for i in range(plane.size):
                plane[i] += factor * (negative if (u[i] >> np.uint8(shift)) & np.uint8(1) else positive)


@_kernel
def _decode_1(wire, values, block, factor):
    n = values.size
    blocks = (n + block - 1) // block
    nbytes = (block + 7) // 8
    means = wire[: 8 * blocks].view(np.float32)
    for b in range(blocks):
        v = values[b * block : min(n, b * block + block)]
        at = 8 * blocks + b * nbytes
        _add_signs(wire[at : at + (v.size + 7) // 8], v, means[2 * b], means[2 * b + 1], factor)


# --- Functions that codecs call: tensors in, tensors out --------------------------------------------------------------

_NO_BYTES, _NO_VALUES = np.empty(0, np.uint8), np.empty(0, np.float32)


def _bytes_of(wire: Tensor | None) -> Any:
    return _NO_BYTES if wire is None else wire.numpy()


def _values_of(residual: Tensor | None) -> Any:
    return _NO_VALUES if residual is None else residual.numpy()


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
    _ENCODE_LINEAR[bits](
        *(_bytes_of(received), values.numpy(), _values_of(residual), wire.numpy()),
        *(block, levels, rule, _F(clip), stochastic, _U(key)),
    )


def decode_linear(wire: Tensor, values: Tensor, *, bits: int, block: int, add: bool) -> None:
    """Decode what ``encode_linear`` made of values; add it to ``values`` if ``add``, else replace them."""
    _DECODE_LINEAR[bits](wire.numpy(), values.numpy(), block, int(add))


def encode_16(received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, *, kind: int) -> None:
    """Encode as sixteen-bit floats of this kind."""
    _encode_16(_bytes_of(received), values.numpy(), _values_of(residual), wire.numpy(), kind)


def decode_16(wire: Tensor, values: Tensor, *, kind: int, add: bool) -> None:
    """Decode what ``encode_16`` made of values; add it to ``values`` if ``add``, else replace them."""
    _decode_words(wire.numpy().view(np.int16), values.numpy(), kind, int(add))


def encode_sign(received: Tensor | None, values: Tensor, residual: Tensor | None, wire: Tensor, *, block: int) -> None:
    """Encode as signs, with the means of the values that are not negative and of those that are, for each block."""
    _encode_1(_bytes_of(received), values.numpy(), _values_of(residual), wire.numpy(), block)


def decode_sign(wire: Tensor, values: Tensor, *, block: int, add: bool) -> None:
    """Decode what ``encode_sign`` made of values; add it to ``values`` if ``add``, else replace them."""
    _decode_1(wire.numpy(), values.numpy(), block, _F(add))
