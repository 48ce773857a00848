"""Tests of the codecs' docstrings: bytes, errors, zeros, values that are not finite, residuals, sums."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from _codec_cases import BLOCKS, FLOATS, LARGEST, cases, codecs, decoded, encoded, floats32, made, same, through
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipesgd.codecs.base import Codec
from pipesgd.codecs.floats import Uncompressed
from pipesgd.codecs.options import FLOAT_CODECS, Bf16, Fp16, Int4, Int8
from pipesgd.systems.codecs.qsgd import Qsgd
from pipesgd.systems.codecs.sign import Sign
from pipesgd.systems.codecs.ternary import CLIP_NEAREST, CLIP_STOCHASTIC, Ternary
from pipesgd.systems.codecs.truncate16 import Truncate16

# --- Bytes ------------------------------------------------------------------------------------------------------------


@given(case=cases(2))
def test_a_message_is_filled_and_nothing_behind_it(case: tuple[Any, ...]) -> None:
    codec, key, values, residual = case
    nbytes = codec.wire_bytes(values.numel())
    messages = []
    for garbage in (0x00, 0xFF):
        room = torch.full((nbytes + 64,), garbage, dtype=torch.uint8)
        codec.encode(values.clone(), residual.clone(), room[:nbytes], key)
        assert bool((room[nbytes:] == garbage).all())
        messages.append(room[:nbytes])
    assert torch.equal(*messages)


@pytest.mark.parametrize(
    ("make", "bits", "header_bits"),
    [(partial(made, Int8), 8, 32), (partial(made, Int4), 4, 32), (partial(made, Ternary), 2, 32)]
    + [(partial(made, Sign), 1, 64)]
    + [(partial(made, Qsgd, levels=levels), bits, 32) for levels, bits in ((1, 2), (2, 4), (7, 4), (8, 8))],
)
def test_bits_per_value_are_as_announced(make: Any, bits: int, header_bits: int) -> None:
    """Whole blocks of whole bytes take exactly these bits; otherwise each block is padded to whole bytes."""
    for block in (8, 16, 1024):
        assert make(block=block).wire_bytes(5 * block) * 8 == 5 * (block * bits + header_bits)
    for block in BLOCKS:
        codec = make(block=block)
        assert codec.wire_bytes(0) == 0
        for numel in range(1, 3 * block + 2):
            last = (numel - 1) % block + 1
            assert codec.wire_bytes(last) == header_bits // 8 + math.ceil(last * bits / 8)
            assert codec.wire_bytes(numel) == (numel - last) // block * codec.wire_bytes(block) + codec.wire_bytes(last)


def test_sixteen_bits_are_two_bytes() -> None:
    assert all(make().wire_bytes(numel) == 2 * numel for make in FLOATS for numel in range(100))
    assert Uncompressed().wire_bytes(7) == 28


@given(case=cases(), cut=st.integers(0, 4))
def test_a_cut_between_blocks_changes_no_value(case: tuple[Any, ...], cut: int) -> None:
    """A message is encoded on its own, block by block (with nearest rounding; noise depends on the position)."""
    codec, key, values = case
    at = min(cut * codec.block, values.numel())
    parts = values[:at], values[at:]
    if codec.unbiased or at % codec.block:
        return
    assert codec.wire_bytes(values.numel()) == sum(codec.wire_bytes(part.numel()) for part in parts)
    whole = through(codec, values, key)
    assert same(whole, torch.cat([through(codec, part.clone(), key) for part in parts]))


# --- Errors -----------------------------------------------------------------------------------------------------------


def worst_error(codec: Codec, block: Tensor) -> Tensor:
    """Return the largest error of each value of one block (float64) that the docstrings allow."""
    magnitudes = block.abs()
    largest, n = float(magnitudes.max()), block.numel()
    if codec.name == "truncate16":
        return (2.0**-7 * magnitudes).clamp_min(2.0**-133)
    if codec.name == "bf16":
        return (2.0**-8 * magnitudes).clamp_min(2.0**-134)
    if codec.name == "fp16":
        return torch.where(magnitudes < 2.0**-14, torch.full_like(block, 2.0**-25), 2.0**-11 * magnitudes)
    if largest < 2.0**-100:
        return magnitudes
    if codec.name == "sign":
        return torch.full_like(block, largest * (1 + 2.0**-22))
    share = 1.0 if codec.unbiased else 0.5
    rounding = largest * 2.0**-22
    if codec.name == "ternary":
        clip = CLIP_STOCHASTIC if codec.unbiased else CLIP_NEAREST
        root_mean_square = largest * float((block / largest).square().mean().sqrt())
        most, least = (min(largest, clip * (root_mean_square + sign * largest / 2046)) for sign in (1, -1))
        return torch.maximum(torch.full_like(block, share * most), magnitudes - least) + rounding
    if codec.name == "qsgd":
        norm = largest * float((block / largest).square().sum().sqrt()) + math.sqrt(n) * largest / 2046
        return torch.full_like(block, share * norm / codec._encoding["levels"] + rounding)
    return torch.full_like(block, share * largest / {"int8": 127, "int4": 7}[codec.name] + rounding)


@given(case=cases())
def test_no_error_is_larger_than_stated(case: tuple[Any, ...]) -> None:
    codec, key, values = case
    errors = (through(codec, values, key).double() - values.double()).abs()
    for begin in range(0, values.numel(), codec.block):
        block = values[begin : begin + codec.block].double()
        of_block = errors[begin : begin + codec.block]
        overflow = block.abs() >= {"fp16": 65520.0, "bf16": (2 - 2.0**-8) * 2.0**127}.get(codec.name, math.inf)
        assert bool((of_block[overflow] == math.inf).all()), "beyond the range it is infinite"
        assert bool((of_block <= worst_error(codec, block))[~overflow].all())


@given(values=floats32(1000))
def test_truncation_is_toward_zero_and_the_others_are_torchs(values: Tensor) -> None:
    assert bool((through(Truncate16().make(), values).abs() <= values.abs()).all())
    assert same(through(Bf16().make(), values), values.bfloat16().float())
    assert same(through(Fp16().make(), values), values.half().float())


@given(case=cases(kinds=("sign",)))
def test_signs_leave_no_more_squared_error_than_the_values_squares(case: tuple[Any, ...]) -> None:
    codec, key, values = case
    rest = through(codec, values, key).double() - values.double()
    for begin in range(0, values.numel(), codec.block):
        block = slice(begin, begin + codec.block)
        unit = max(float(values[block].abs().max()), 1e-300)
        assert (
            float((rest[block] / unit).square().sum()) <= float((values.double()[block] / unit).square().sum()) + 1e-6
        )


@pytest.mark.parametrize("codec", [made(Int8, block=4), made(Int4, block=4)])
def test_ties_go_to_the_even_level(codec: Codec) -> None:
    levels = codec._encoding["levels"]  # if this is the largest value, levels are whole numbers
    values = torch.tensor([0.5, 1.5, -2.5, levels], dtype=torch.float32)
    assert through(codec, values).tolist() == [0.0, 2.0, -2.0, levels]
    assert through(Bf16().make(), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])).tolist() == [1.0, 1 + 2.0**-6]


def test_clipping_is_where_the_papers_say() -> None:
    """One of 64 values is an outlier: the root mean square is 1/8 of it."""
    values = torch.zeros(64)
    values[5] = 8.0
    for stochastic, clip in ((True, 2.5), (False, 1.224)):
        sent = through(made(Ternary, block=64, stochastic=stochastic), values)
        assert sent[5] == pytest.approx(clip, rel=1e-3)
        assert sent.count_nonzero() == 1


# --- Values that codecs keep ------------------------------------------------------------------------------------------


@given(codec=codecs(), numel=st.integers(0, 100), key=st.integers(0, 2**32 - 1), negative=st.booleans())
def test_zeros_stay_zeros(codec: Codec, numel: int, key: int, negative: bool) -> None:
    zeros = torch.full((numel,), -0.0 if negative else 0.0)
    assert torch.equal(through(codec, zeros, key), zeros)
    if numel and codec.name != "sign":
        among_others = torch.arange(numel, dtype=torch.float32) % 3 - 1
        assert bool((through(codec, among_others, key)[among_others == 0] == 0).all())


@given(
    codec=codecs(kinds=("linear", "sign")).filter(lambda codec: codec.name != "qsgd"),
    value=st.floats(2.0**-99, LARGEST, width=32),
    numel=st.integers(1, 150),
    key=st.integers(0, 2**32 - 1),
)
def test_values_that_are_alike_stay_what_they_are(codec: Codec, value: float, numel: int, key: int) -> None:
    """Values stay equal up to the last bits; stochastic rounding draws nothing: the largest value is on a level."""
    values = torch.full((numel,), value)
    values[::3] *= -1
    torch.testing.assert_close(through(codec, values, key).double(), values.double(), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("kind", [Int8, Int4, Ternary])
def test_what_lies_on_a_level_stays_there(kind: Any, stochastic: bool) -> None:
    """Encoding forwarded values again costs nothing: the whole numbers are the same, whatever is drawn.

    Ternary may clip the scale a second time; the others' scales change by rounding at most.
    """
    values = torch.randn(999, generator=torch.Generator().manual_seed(0))
    nearest, again = (made(kind, block=100, stochastic=drawn) for drawn in (False, stochastic))
    message = encoded(nearest, values)
    once = decoded(nearest, message, 999)
    for key in range(300):
        second = encoded(again, once, key)
        assert torch.equal(second[40:], message[40:])
        if kind is not Ternary:
            torch.testing.assert_close(decoded(again, second, 999), once, rtol=2.0**-22, atol=0)


@given(case=cases(kinds=("float",)))
def test_sixteen_bits_are_encoded_again_without_loss(case: tuple[Any, ...]) -> None:
    codec, key, values = case
    once = through(codec, values, key)
    assert same(through(codec, once, key), once)


# --- Values that are not finite ---------------------------------------------------------------------------------------


@given(case=cases(2), bad=st.sampled_from([math.nan, math.inf, -math.inf]), data=st.data())
def test_what_is_not_finite_stays_so_and_spoils_no_other_block(
    case: tuple[Any, ...], bad: float, data: st.DataObject
) -> None:
    codec, key, values, residual = case
    if not values.numel():
        return
    at = data.draw(st.integers(0, values.numel() - 1))
    spoilt, kept, kept_of_spoilt = values.clone(), residual.clone(), residual.clone()
    spoilt[at] = bad
    sent = through(codec, values, key, kept)
    sent_of_spoilt = through(codec, spoilt, key, kept_of_spoilt)
    alone = codec.name in FLOAT_CODECS
    first = at if alone else at // codec.block * codec.block
    touched = slice(first, first + (1 if alone else codec.block))
    assert not sent_of_spoilt[touched].isfinite().any()
    assert not math.isnan(bad) or sent_of_spoilt[touched].isnan().all()
    assert bool(kept_of_spoilt.isfinite().all())
    assert bool((kept_of_spoilt[touched] == 0).all())
    sent_of_spoilt[touched], kept_of_spoilt[touched] = sent[touched], kept[touched]
    assert same(sent_of_spoilt, sent)
    assert same(kept_of_spoilt, kept)


@pytest.mark.parametrize("word", [0x7F800001, 0x7F80FFFF, -0x7FFFFF, 0x7FFFFFFF, -1])
def test_every_nan_stays_one(word: int) -> None:
    """NaNs whose upper half alone would be an infinity, or that rounding would carry over to zero, are included."""
    nan = torch.tensor([word], dtype=torch.int32).view(torch.float32)
    assert all(bool(through(make(), nan).isnan()) for make in FLOATS)


# --- Sums and residuals -----------------------------------------------------------------------------------------------


@given(case=cases(2))
def test_the_residual_is_exactly_what_was_not_sent(case: tuple[Any, ...]) -> None:
    """The residual is computed in float32, operation by operation; 0 if the sum or the sent value is not finite."""
    codec, key, values, before = case
    after = before.clone()
    sent = through(codec, values, key, after)
    expected = (before + values) - sent
    expected[~expected.isfinite()] = 0.0
    assert torch.equal(after, expected)


@given(case=cases(3))
def test_decoding_adds_and_encodes_as_if_done_one_after_the_other(case: tuple[Any, ...]) -> None:
    codec, key, others, values, before = case
    received = encoded(codec, others, key ^ 1)
    added = values.clone()
    codec.decode_add(received, added)
    assert same(added, values + decoded(codec, received, values.numel()))
    for residual in (None, before):
        kept, kept_at_once = (None, None) if residual is None else (residual.clone(), residual.clone())
        at_once = torch.full_like(received, 0x5A)
        codec.decode_add_encode(received, values.clone(), kept_at_once, at_once, key)
        assert torch.equal(at_once, encoded(codec, added, key, kept))
        assert kept is None or same(kept, kept_at_once)


def test_uncompressed_is_the_values_own_memory() -> None:
    codec, values = Uncompressed(), torch.tensor([1.5, -2.0])
    wire, other = values.view(torch.uint8), torch.tensor([0.25, 1.0])
    codec.encode(values, None, wire, 0)
    codec.decode(wire, values)
    codec.decode_add_encode(other.view(torch.uint8), values, None, wire, 0)
    assert values.tolist() == [1.75, -1.0]
