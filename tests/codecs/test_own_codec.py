"""Codecs of the user's own: what is refused before one is used, and what is made of its two functions."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from _all_reduces import ALGORITHMS
from _codec_cases import Half
from _memory_transport import MemoryTransport, run_threads
from torch import Tensor

from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.flat import CompressionConfig
from pipesgd.codecs.options import codec_named
from pipesgd.codecs.own import OwnCodecOptions, codec_options, try_codec
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.errors import UserInputError


class Configured(Half):
    def __init__(self, codec_block: int = 3):
        self.block = codec_block


class GivesBack(Half):
    gives_back = True


class TooFew(Half):
    def wire_bytes(self, numel: int) -> int:
        return 2 * numel - 1


class TooMany(Half):
    def wire_bytes(self, numel: int) -> int:
        return 2 * numel + 4

    def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        super().compress(values, wire[4:], key)

    def decompress(self, wire: Tensor, values: Tensor) -> None:
        super().decompress(wire[4:], values)


class Nothing(Half):
    def wire_bytes(self, numel: int) -> int:
        return 2 * (numel - 1)


class Half1(Half):
    def wire_bytes(self, numel: int) -> int:
        return numel * 16 / 8  # type: ignore[return-value]


class Random(Half):
    def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        super().compress(values + torch.rand_like(values), wire, key)


class Changes(Half):
    def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        super().compress(values.mul_(2), wire, key)


class Eats(Half):
    def decompress(self, wire: Tensor, values: Tensor) -> None:
        super().decompress(wire, values)
        wire.zero_()


class Adds(Half):
    def decompress(self, wire: Tensor, values: Tensor) -> None:
        values.add_(wire.view(torch.bfloat16))


class Divides(Half):
    def decompress(self, wire: Tensor, values: Tensor) -> None:
        super().decompress(wire, values)
        values.div_(0)


class Shifts(Half):
    def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        super().compress(values + 1, wire, key)


class Clamps(Half):
    def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        super().compress(values.nan_to_num(), wire, key)


class Fails(Half):
    def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        raise RuntimeError("no idea")


class NoBlock(Half):
    block = 0


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (NoBlock, "block of X must be a whole number of at least 1; got 0"),
        (Half1, "wire_bytes(1) of X must be a whole number of at least 1; got 2.0"),
        (Nothing, "wire_bytes(1) of X must be a whole number of at least 1; got 0"),
        (TooFew, "codec X must encode 1 values in 1 bytes; got RuntimeError: self.size(-1) must be divisible by 2"),
        (
            TooMany,
            "codec X must write all of the 6 bytes that it announces for 1 values; got 4 that depend on what was there "
            "before",
        ),
        (Random, "codec X must encode the same values and key to the same bytes; got others"),
        (Changes, "compress of X must leave the values as they are; got others of 1 values"),
        (Eats, "decompress of X must leave the bytes as they are; got others of 1 values"),
        (Adds, "codec X must decode the same bytes to the same values, all 1; got others"),
        (Divides, "codec X must decode finite values to finite ones; got others of 1 values"),
        (Shifts, "codec X must decode zeros to zeros; got others of 1 values"),
        (Clamps, "codec X must keep what is not finite so; got 0 for nan"),
        (Fails, "codec X must encode 1 values in 2 bytes; got RuntimeError: no idea"),
    ],
)
def test_a_codec_that_breaks_the_contract_is_refused_in_one_line(codec: type[OwnCodec], message: str) -> None:
    with pytest.raises(UserInputError) as caught:
        try_codec("X", codec(), "cpu")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_good_codec_leaves_the_same_trace_everywhere() -> None:
    assert try_codec("X", Half(), "cpu") == try_codec("Y", GivesBack(), "cpu")
    assert try_codec("X", Configured(8), "cpu") != try_codec("X", Half(), "cpu")  # other sizes are tried


def test_a_codec_is_found_made_and_described() -> None:
    given = codec_options(GivesBack())
    assert (given.codec, given.gives_back) == (f"{__name__}:GivesBack", True)
    assert given.describe() == f"{__name__}:GivesBack with error feedback"
    assert not codec_options(Half()).gives_back
    assert codec_options("int8") == codec_named("int8")
    assert codec_options(given) is given


@pytest.mark.parametrize(
    ("options", "block", "gives_back"),
    [({}, 3, False), ({"codec_block": 5}, 5, False), ({"error_feedback": "on"}, 3, True)],
)
def test_a_codec_is_made_with_the_options_that_it_names(
    options: dict[str, object], block: int, gives_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(Configured=Configured))
    made = CompressionConfig(codec="mine:Configured", **options).chosen()  # type: ignore[arg-type]
    assert isinstance(made, OwnCodecOptions)
    assert (made.made.block, made.gives_back) == (block, gives_back)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "mine:Nothing"}, r"^codec must be a function of mine; got mine:Nothing, which it does not have$"),
        (
            {"codec": "mine:number"},
            r"^codec must be made by mine:number as a pipesgd\.codecs\.base\.OwnCodec; got int$",
        ),
        (
            {"codec": "mine:Half", "codec_block": 5},
            "^codec-block must be left out with --codec mine:Half, which has no",
        ),
        (
            {"codec": "mine:Half", "rounding": "nearest"},
            "^rounding must be left out with --codec mine:Half, which has no",
        ),
        ({"codec": "mine:Half", "qsgd_levels": 5}, "^qsgd-levels must be left out with --codec module:function"),
        ({"codec": "mine:"}, "^codec must be module:function, with a module as Python imports it"),
    ],
)
def test_a_codec_that_cannot_be_made_is_refused_in_one_line(
    options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = types.SimpleNamespace(Half=Half, number=lambda: 3)
    monkeypatch.setitem(sys.modules, "mine", mine)
    with pytest.raises(UserInputError, match=message):
        CompressionConfig(**options).chosen()  # type: ignore[arg-type]


@pytest.mark.parametrize("with_residual", [False, True])
def test_the_four_operations_are_those_of_a_built_in_codec_bit_for_bit(with_residual: bool) -> None:
    numbers = torch.Generator().manual_seed(0)
    received, values, residual = (torch.randn(1001, generator=numbers) for _ in range(3))
    values[[3, 5, 7]] = torch.tensor([float("inf"), float("-inf"), 3e38 * 1.13])
    wires = []
    for codec in (Half(), codec_named("bf16").make()):
        message, wire = (torch.empty(2002, dtype=torch.uint8) for _ in range(2))
        own, kept = values.clone(), residual.clone()
        codec.encode(received.clone(), None, message, 0)
        codec.decode_add_encode(message, own, kept if with_residual else None, wire, 0)
        added, replaced = received.clone(), received.clone()
        codec.decode_add(wire, added)
        codec.decode(wire, replaced)
        wires.append([message, wire, kept, added, replaced])
    assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(*wires, strict=True))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_sum_and_residuals_are_what_was_put_in(name: str) -> None:
    numbers = torch.Generator().manual_seed(1)
    inputs = [torch.randn(203, generator=numbers) for _ in range(4)]
    residuals = [0.1 * torch.randn(203, generator=numbers) for _ in range(4)]
    meant = torch.stack([a + b for a, b in zip(inputs, residuals, strict=True)]).sum(0)

    def reduce(transport: MemoryTransport) -> Tensor:
        all_reduce = ScheduledAllReduce(transport, ALGORITHMS[name](transport.rank, 4), GivesBack(), segment_bytes=64)
        flat = inputs[transport.rank].clone()
        all_reduce(flat, residuals[transport.rank], key=7)
        assert transport.bytes_sent == all_reduce.wire_bytes(flat)
        return flat

    sums, _ = run_threads(4, reduce)
    assert all(torch.equal(one, sums[0]) for one in sums)
    torch.testing.assert_close(sums[0] + torch.stack(residuals).sum(0), meant, rtol=0, atol=1e-5)
    assert sums[0].sub(meant).abs().max() > 1e-3
