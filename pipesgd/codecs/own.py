"""Codecs of the user's own: made by a function, or given as an object, and tried before they are used."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.errors import UserInputError
from pipesgd.functions import OWN, call, check_used, function_of, in_one_line, kind

SIZES = (1, 2, 63, 1000)
"""Numbers of values that a codec is tried on, in addition to one block and a part of the next one."""


@dataclass(frozen=True, kw_only=True)
class OwnCodecOptions(CodecOptions):
    """Options of a codec of the user's own, with the codec itself; ``codec`` is its name."""

    made: OwnCodec
    """The codec."""

    def __post_init__(self) -> None:
        """Check nothing: the options that name the codec have been checked."""

    @property
    def gives_back(self) -> bool:
        """True if a residual is kept and added in the next iteration."""
        return self.made.gives_back if self.error_feedback is None else self.error_feedback == "on"


def codec_options(codec: str | CodecOptions | OwnCodec) -> CodecOptions:
    """Return the options of a codec that is given by its name, by its options, or as an object.

    A codec of the user's own is made, and comes with its options.

    Raises:
        UserInputError: there is no such codec; or a function of the user's own fails, does not read one of the options,
            or makes no codec.
    """
    if isinstance(codec, OwnCodec):
        return OwnCodecOptions(codec=codec.name, made=codec)
    chosen = CodecOptions(codec=codec) if isinstance(codec, str) else codec
    name = chosen.codec
    if kind(name) != OWN or isinstance(chosen, OwnCodecOptions):
        return chosen
    function = function_of("codec", name, {})
    offered = {"codec_block": chosen.codec_block, "rounding": chosen.rounding}
    check_used("codec", name, function, {option: value for option, value in offered.items() if value is not None})
    made = call("codec", name, function, offered)
    if not isinstance(made, OwnCodec):
        raise UserInputError(
            f"codec must be made by {name} as a pipesgd.codecs.base.OwnCodec; got {type(made).__name__}"
        )
    given = {item.name: getattr(chosen, item.name) for item in dataclasses.fields(CodecOptions)}
    return OwnCodecOptions(**given, made=made)


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
