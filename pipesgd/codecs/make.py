"""Construction of the dense codec that options name."""

from __future__ import annotations

from pipesgd.codecs.base import Codec
from pipesgd.codecs.blocks import Int4, Int8, Qsgd, Sign, Ternary
from pipesgd.codecs.floats import Bf16, Fp16, Truncate16, Uncompressed
from pipesgd.codecs.options import CodecOptions
from pipesgd.codecs.own import OwnCodecOptions

_SIXTEEN = {"truncate16": Truncate16, "bf16": Bf16, "fp16": Fp16}
_ROUNDED = {"int8": Int8, "int4": Int4, "ternary": Ternary}


def make_codec(options: CodecOptions, device: str = "cpu") -> Codec:
    """Return the codec for tensors on this kind of device ("cpu" or "cuda")."""
    if isinstance(options, OwnCodecOptions):
        return options.made
    name = options.codec
    if name == "fp32":
        return Uncompressed()
    if name in _SIXTEEN:
        return _SIXTEEN[name](device)
    if name in _ROUNDED:
        return _ROUNDED[name](block=options.block, stochastic=options.stochastic, device=device)
    if name == "qsgd":
        return Qsgd(levels=options.qsgd_levels, block=options.block, stochastic=options.stochastic, device=device)
    if name == "sign":
        return Sign(block=options.block, device=device)
    raise AssertionError(f"{name} is no dense codec")
