"""Options of codecs as the command has them: flat, those of all codecs in one section, which becomes one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipesgd.codecs.options import (
    BLOCK_CODECS,
    CODECS,
    DENSE_CODECS,
    FACTOR_CODECS,
    ROUNDINGS,
    CodecOptions,
    codec_named,
)
from pipesgd.functions import OWN, check_function, kind
from pipesgd.options import check_read, check_values, option

ON_OFF = ("on", "off")
_FIELDS = {
    "codec_block": "block",
    "qsgd_levels": "levels",
    "factor_codec": "factors",
    "rank_compression": "compression",
}
"""Names of options where the objects have others, since these belong to one codec."""


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
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
    qsgd_levels: int | None = option(None, at_least=1, read_by={"codec": ("qsgd",)})
    """Levels of --codec qsgd, 7 by default: up to 1, 7 or 127 take 2, 4 or 8 bits."""
    density: float | None = option(None, above_zero=True, read_by={"codec": ("topk",)})
    """Share of the values that --codec topk sends, 0.01 by default."""
    density_warmup: int | None = option(None, at_least=0, read_by={"codec": ("topk",)})
    """Iterations in which --codec topk lowers the density from a quarter to --density, by a constant factor; 0 by
    default."""
    momentum_correction: float | None = option(None, at_least=0, read_by={"codec": ("topk",)})
    """Momentum that --codec topk applies before it selects values, 0 by default (with --momentum 0 for the optimizer;
    with --local-steps it is momentum of movements, and the optimizer keeps its own)."""
    low_rank: int | None = option(None, at_least=1, read_by={"codec": ("powersgd",)})
    """Rank of the factors that --codec powersgd sends for a matrix, 4 by default."""
    rank_compression: float | None = option(None, at_least=2, read_by={"codec": ("powersgd",)})
    """Number of times by which the factors of a matrix have fewer values than it: each matrix then has a rank by its
    size, in place of --low-rank."""
    factor_codec: str | None = option(None, choices=FACTOR_CODECS, read_by={"codec": ("powersgd",)})
    """Encoding of the factors of --codec powersgd, fp32 by default: bf16 sends half of its bytes, int8 about a quarter.
    What that leaves out comes with later gradients."""
    dense_start: int | None = option(None, at_least=0, read_by={"codec": ("powersgd",)})
    """First iterations in which --codec powersgd sends whole gradients, encoded like its factors; 0 by default."""

    def __post_init__(self) -> None:
        check_function("codec", self.codec, kind(self.codec), (*CODECS, OWN))
        check_read(self)
        check_values(self)
        _ = self.described

    @property
    def described(self) -> CodecOptions:
        """Codec with its options; of one of the user's own, which may not be imported yet, its name and feedback."""
        if kind(self.codec) == OWN:
            return _Unmade(self.codec, self.error_feedback == "on")
        return codec_named(self.codec, **self._given())

    def chosen(self) -> CodecOptions:
        """Return the codec with its options; one of the user's own is made.

        Raises:
            UserInputError: the user's function fails, does not read one of the options, or makes no codec.
        """
        if kind(self.codec) != OWN:
            return self.described
        from pipesgd.codecs.own import own_codec  # imports torch, which takes seconds

        return own_codec(self.codec, **self._given())

    def _given(self) -> dict[str, Any]:
        """Return the options that are given, by the names that they have in a codec's object."""
        options = {name: value for name, value in vars(self).items() if name != "codec" and value is not None}
        if "error_feedback" in options:
            options["error_feedback"] = options["error_feedback"] == "on"
        return {_FIELDS.get(name, name): value for name, value in options.items()}


@dataclass(frozen=True)
class _Unmade(CodecOptions):
    """Name and error feedback of a codec of the user's own that is not imported yet."""

    name: str
    error_feedback: bool

    @property
    def gives_back(self) -> bool:
        return self.error_feedback
