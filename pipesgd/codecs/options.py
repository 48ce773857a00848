"""Options of the codec, with their checks."""

from __future__ import annotations

from dataclasses import dataclass

from pipesgd.checks import one_of, refuse
from pipesgd.errors import UserInputError
from pipesgd.functions import OWN, check_function, kind
from pipesgd.options import check_read, check_values, option

FLOAT_CODECS = ("fp32", "truncate16", "bf16", "fp16")
BLOCK_CODECS = ("int8", "int4", "ternary", "qsgd", "sign")
DENSE_CODECS = FLOAT_CODECS + BLOCK_CODECS
"""Names of the codecs that every hop of an all-reduce can decode, add up and encode."""
CODECS = (*DENSE_CODECS, "topk", "powersgd")
ROUNDINGS = ("nearest", "stochastic")
ON_OFF = ("on", "off")
NATIVE_CODECS = ("fp32", "bf16", "fp16", "powersgd")
"""Names of the codecs whose values, or factors, torch's own all-reduce can add up."""

MAX_BLOCK = 1 << 20
MAX_LEVELS = 127
DEFAULT_BLOCKS = {"int8": 1024, "int4": 256, "ternary": 1024, "qsgd": 64, "sign": 1024}


@dataclass(frozen=True, kw_only=True)
class CodecOptions:
    """Options of the codec that encodes gradients."""

    codec: str = option("fp32", choices=CODECS, kind=kind)
    """Encoding of gradients: fp32 (unchanged), truncate16, bf16, fp16, int8, int4, ternary (about 2 bits a value),
    qsgd (4), sign (1), topk (the largest values of a tensor), powersgd (low-rank factors) or module:function (returns
    an OwnCodec); auto chooses one (see --cluster)."""
    codec_block: int | None = option(None, at_least=1, read_by={"codec": (*BLOCK_CODECS, OWN)})
    """Number of values that share a scale: 1024 by default for int8, ternary and sign, 256 for int4, 64 for qsgd."""
    rounding: str | None = option(None, choices=ROUNDINGS, read_by={"codec": ("int8", "int4", "ternary", "qsgd", OWN)})
    """Rounding of int8, int4, ternary and qsgd: nearest, or stochastic (unbiased). The default for ternary and qsgd is
    stochastic, as in their papers, unless --error-feedback is on."""
    error_feedback: str | None = option(None, choices=ON_OFF, read_by={"codec": (*DENSE_CODECS[1:], OWN)})
    """Error feedback, on or off: add what a rank's encodings leave out to its gradient of the next iteration. On by
    default below 8 bits a value where rounding is to nearest: int4, sign."""
    qsgd_levels: int = option(7, at_least=1, read_by={"codec": ("qsgd",)})
    """Levels of --codec qsgd: up to 1, 7 or 127 take 2, 4 or 8 bits."""
    density: float = option(0.01, above_zero=True, read_by={"codec": ("topk",)})
    """Share of the values that --codec topk sends."""
    density_warmup: int = option(0, at_least=0, read_by={"codec": ("topk",)})
    """Iterations in which --codec topk lowers the density from a quarter to --density, by a constant factor."""
    momentum_correction: float = option(0.0, at_least=0, read_by={"codec": ("topk",)})
    """Momentum that --codec topk applies before it selects values (with --momentum 0 for the optimizer; with
    --local-steps it is momentum of movements, and the optimizer keeps its own)."""
    low_rank: int = option(4, at_least=1, read_by={"codec": ("powersgd",)})
    """Rank of the factors that --codec powersgd sends for a matrix."""

    def __post_init__(self) -> None:
        check_function("codec", self.codec, kind(self.codec), (*CODECS, OWN))
        check_read(self)
        check_values(self)
        refuse(
            ((self.codec_block or 0) > MAX_BLOCK, f"codec-block must be at most {MAX_BLOCK}; got {self.codec_block}"),
            (self.qsgd_levels > MAX_LEVELS, f"qsgd-levels must be at most {MAX_LEVELS}; got {self.qsgd_levels}"),
            (self.density > 1, f"density must be at most 1; got {self.density}"),
            (self.momentum_correction >= 1, f"momentum-correction must be below 1; got {self.momentum_correction}"),
            (self.codec == "ternary" and self.stochastic and self.gives_back,
             "error-feedback must be off with --codec ternary --rounding stochastic, whose errors are larger than "
             "most values: residuals would grow until they are not finite; got on"),
        )  # fmt: skip
        if self.codec == "qsgd" and self.gives_back:
            most = ((1 if self.stochastic else 2) * self.qsgd_levels) ** 2 - 1
            refuse(
                (most == 0,
                 "error-feedback must be off with --codec qsgd --qsgd-levels 1 --rounding stochastic, or residuals can "
                 "grow without end; got on"),
                (self.block > most,
                 f"codec-block must be at most {most} with --codec qsgd --qsgd-levels {self.qsgd_levels} "
                 f"--error-feedback on, or residuals can grow without end; got {self.block}"),
            )  # fmt: skip

    @property
    def stochastic(self) -> bool:
        """True if rounding is stochastic."""
        if self.rounding is None:
            return self.codec in ("ternary", "qsgd") and self.error_feedback != "on"
        return self.rounding == "stochastic"

    @property
    def gives_back(self) -> bool:
        """True if a residual is kept and added in the next iteration."""
        if self.error_feedback is None:
            few_bits = self.codec in BLOCK_CODECS and self.codec != "int8" and self.qsgd_levels <= 7
            return few_bits and not self.stochastic
        return self.error_feedback == "on"

    @property
    def block(self) -> int:
        """Number of values that share a scale."""
        return self.codec_block or DEFAULT_BLOCKS[self.codec]

    def check_all_reduce(self, all_reduce: str) -> None:
        """Raise ``UserInputError`` unless the codec works with this all-reduce."""
        if all_reduce == "native" and self.codec not in NATIVE_CODECS:
            raise UserInputError(
                f"codec must be {one_of(NATIVE_CODECS)} with --all-reduce native, in which torch sums; got {self.codec}"
            )
        if all_reduce == "native" and self.error_feedback == "on":
            raise UserInputError("error-feedback must be off with --all-reduce native, in which torch rounds; got on")
        if self.codec == "topk" and all_reduce != "ring":
            raise UserInputError(
                f"all-reduce must be ring with --codec topk, whose values are gathered around it; got {all_reduce}"
            )

    def check_outer(self, outer: str) -> None:
        """Raise ``UserInputError`` unless the codec works with this outer optimizer of local steps.

        Elastic averaging needs a codec that keeps no residual. What an encoding leaves out of a difference from the
        centre is still in the next one, since the centre has not moved by it. A residual would add it a second time,
        and again in every window in which the value is left out.
        """
        if outer == "nesterov" and self.momentum_correction > 0:
            raise UserInputError(
                "momentum-correction must be 0 with --outer nesterov, whose momentum it would replace; got "
                f"{self.momentum_correction}"
            )
        if outer != "elastic":
            return
        if self.codec in ("topk", "powersgd"):
            raise UserInputError(
                "codec must keep no residual with --outer elastic, whose next difference has what was left out of this "
                f"one; got {self.codec}"
            )
        if self.gives_back:
            default = "" if self.error_feedback == "on" else f", the default of {self.codec}"
            raise UserInputError(
                "error-feedback must be off with --outer elastic, whose next difference has what was left out of this "
                f"one; got on{default}"
            )

    def describe(self) -> str:
        """Describe the codec in a few words."""
        words = [self.codec]
        if self.codec in BLOCK_CODECS:
            words.append(f"in blocks of {self.block}")
        if self.codec == "qsgd":
            words.append(f"with {self.qsgd_levels} levels")
        if self.codec == "topk":
            words.append(f"with density {self.density:g}")
        if self.codec == "powersgd":
            words.append(f"of rank {self.low_rank}")
        if self.stochastic:
            words.append("rounded stochastically")
        if self.gives_back:
            words.append("with error feedback")
        return " ".join(words)
