"""Codecs of the user's own: made by a function, or given as an object, and tried before they are used."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from pipesgd.codecs.base import Codec, OwnCodec
from pipesgd.codecs.options import CODECS, CodecOptions, codec_named
from pipesgd.errors import UserInputError
from pipesgd.functions import OWN, call, check_function, check_used, function_of, in_one_line, kind

SIZES = (1, 2, 63, 1000)
"""Numbers of values that a codec is tried on, in addition to one block and a part of the next one."""


@dataclass(frozen=True, kw_only=True)
class OwnCodecOptions(CodecOptions):
    """A codec of the user's own, with what is asked for in place of its own choices."""

    name: str
    """Module and class of the codec, or the function that has made it."""
    made: OwnCodec
    """The codec."""
    rounding: str | None = None
    """Rounding that the codec was asked for."""
    error_feedback: bool | None = None
    """True or False where the codec's own choice, ``gives_back``, does not count."""

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def gives_back(self) -> bool:
        return self.made.gives_back if self.error_feedback is None else self.error_feedback

    def make(self, device: str = "cpu") -> Codec:
        return self.made


def codec_options(codec: str | CodecOptions | OwnCodec) -> CodecOptions:
    """Return a codec with its options that is given so, by its name, or as an object of the user's own.

    Raises:
        UserInputError: there is no such codec; or a function of the user's own fails or makes no codec.
    """
    if isinstance(codec, OwnCodec):
        return OwnCodecOptions(name=codec.name, made=codec)
    if not isinstance(codec, str):
        return codec
    check_function("codec", codec, kind(codec), (*CODECS, OWN))
    return own_codec(codec) if kind(codec) == OWN else codec_named(codec)


def own_codec(
    name: str, *, block: int | None = None, rounding: str | None = None, error_feedback: bool | None = None
) -> OwnCodecOptions:
    """Return the codec that the function ``name`` of the user's own makes, from those options that it reads.

    Raises:
        UserInputError: the function fails, does not read one of the options, or makes no codec.
    """
    function = function_of("codec", name, {})
    offered = {"codec_block": block, "rounding": rounding}
    check_used("codec", name, function, {option: value for option, value in offered.items() if value is not None})
    made = call("codec", name, function, offered)
    if not isinstance(made, OwnCodec):
        raise UserInputError(
            f"codec must be made by {name} as a pipesgd.codecs.base.OwnCodec; got {type(made).__name__}"
        )
    return OwnCodecOptions(name=name, made=made, rounding=rounding, error_feedback=error_feedback)


def try_codec(name: str, codec: OwnCodec, device: str) -> str:
    """Return the SHA-256 of what the codec ``name`` makes of some values on ``device``, after a check of its contract.

    Raises:
        UserInputError: the codec does not keep to the contract of ``OwnCodec``.
    """
    if not (type(codec.block) is int and codec.block >= 1):
        raise UserInputError(f"block of {name} must be a whole number of at least 1; got {codec.block!r}")
    digest = hashlib.sha256()
    numbers = torch.Generator().manual_seed(0)
    for numel in sorted({*SIZES, codec.block, codec.block + codec.block // 2 + 1}):
        values = torch.randn(numel, generator=numbers, dtype=torch.float32).to(device)
        wire, decoded = _message(name, codec, values)
        if not decoded.isfinite().all():
            raise UserInputError(f"codec {name} must decode finite values to finite ones; got others of {numel} values")
        for tensor in (wire, decoded):
            digest.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
        if _message(name, codec, torch.zeros_like(values))[1].any():
            raise UserInputError(f"codec {name} must decode zeros to zeros; got others of {numel} values")
        for bad in (float("nan"), float("inf"), float("-inf")):
            values[numel // 2] = bad
            found = _message(name, codec, values)[1][numel // 2].item()
            if abs(found) < float("inf"):
                raise UserInputError(f"codec {name} must keep what is not finite so; got {found:g} for {bad}")
    return digest.hexdigest()


def _message(name: str, codec: OwnCodec, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of ``values``, and the values that these decode to, after two more tries with other memory."""
    numel = values.numel()
    with in_one_line(f"codec {name} must say how many bytes {numel} values take"):
        nbytes = codec.wire_bytes(numel)
    if not (type(nbytes) is int and nbytes >= 1):
        raise UserInputError(f"wire_bytes({numel}) of {name} must be a whole number of at least 1; got {nbytes!r}")
    given = values.clone()
    wires = [values.new_full((nbytes,), fill, dtype=torch.uint8) for fill in (0, 0, 255)]
    for wire in wires:
        with in_one_line(f"codec {name} must encode {numel} values in {nbytes} bytes"):
            codec.encode(values, None, wire, 1)
    if not _same(values, given):
        raise UserInputError(f"compress of {name} must leave the values as they are; got others of {numel} values")
    if not torch.equal(wires[0], wires[1]):
        raise UserInputError(f"codec {name} must encode the same values and key to the same bytes; got others")
    if unwritten := int((wires[0] != wires[2]).sum()):
        raise UserInputError(
            f"codec {name} must write all of the {nbytes} bytes that it announces for {numel} values; got {unwritten} "
            "that depend on what was there before"
        )
    found = [torch.full_like(values, fill) for fill in (0.0, 1.0)]
    for decoded in found:
        with in_one_line(f"codec {name} must decode {nbytes} bytes to {numel} values"):
            codec.decode(wires[0], decoded)
    if not torch.equal(wires[0], wires[1]):
        raise UserInputError(f"decompress of {name} must leave the bytes as they are; got others of {numel} values")
    if not _same(*found):
        raise UserInputError(f"codec {name} must decode the same bytes to the same values, all {numel}; got others")
    return wires[0], found[0]


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
