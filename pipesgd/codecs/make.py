"""Construction of the dense codec that options name."""

from __future__ import annotations

from pipesgd.codecs.base import Codec
from pipesgd.codecs.floats import Bf16, Fp16, Uncompressed
from pipesgd.codecs.options import CodecOptions
from pipesgd.codecs.own import OwnCodecOptions
from pipesgd.guests import guest


def make_codec(options: CodecOptions, device: str = "cpu") -> Codec:
    """Return the codec for tensors on this kind of device ("cpu" or "cuda")."""
    if isinstance(options, OwnCodecOptions):
        return options.made
    made: Codec
    match options.codec:
        case "fp32":
            made = Uncompressed()
        case "bf16":
            made = Bf16(device)
        case "fp16":
            made = Fp16(device)
        case "int8" | "int4":
            from pipesgd.codecs.blocks import Int4, Int8

            kind = Int8 if options.codec == "int8" else Int4
            made = kind(block=options.block, stochastic=options.stochastic, device=device)
        case "truncate16":
            made = guest("truncate16")(device)
        case "ternary":
            made = guest("ternary")(block=options.block, stochastic=options.stochastic, device=device)
        case "qsgd":
            made = guest("qsgd")(
                levels=options.qsgd_levels, block=options.block, stochastic=options.stochastic, device=device
            )
        case "sign":
            made = guest("sign")(block=options.block, device=device)
        case name:
            raise AssertionError(f"{name} is no dense codec")
    return made
