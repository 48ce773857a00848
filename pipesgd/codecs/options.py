"""Codecs as a training loop names them: one frozen object each, which holds its options, checks them and makes it.

Those of published systems, and PowerSGD, are next to what they do: ``codec_named`` imports them when they are named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pipesgd.checks import check_one_of, refuse
from pipesgd.guests import guest
from pipesgd.options import check_values, option

if TYPE_CHECKING:
    from torch import Tensor

    from pipesgd.codecs.base import Codec

FLOAT_CODECS = ("fp32", "truncate16", "bf16", "fp16")
BLOCK_CODECS = ("int8", "int4", "ternary", "qsgd", "sign")
DENSE_CODECS = FLOAT_CODECS + BLOCK_CODECS
"""Names of the codecs that every hop of an all-reduce can decode, add up and encode."""
BUCKET_CODECS = (*DENSE_CODECS, "powersgd")
"""Names of the codecs that sum a bucket of the gradient on its own."""
CODECS = (*DENSE_CODECS, "topk", "powersgd")
ROUNDINGS = ("nearest", "stochastic")
NATIVE_CODECS = ("fp32", "bf16", "fp16", "powersgd")
"""Names of the codecs whose values, or factors, torch's own all-reduce can add up."""

FACTOR_CODECS = ("fp32", "bf16", "int8")
"""Names of the codecs of factors of low rank."""

MAX_BLOCK = 1 << 20


@dataclass(frozen=True)
class CodecOptions:
    """A codec with its options, which is what ``codec=`` takes: ``Int4(block=64)``, for instance, or ``TopK(0.01)``.

    Messages call options as the command does.
    """

    name: str = field(init=False)
    """Name of the codec, which is compared between ranks as its options are."""

    def __post_init__(self) -> None:
        check_values(self)
        feedback = getattr(self, "error_feedback", None)
        refuse((feedback not in (None, False, True), f"error-feedback must be True or False; got {feedback!r}"))

    @property
    def codec(self) -> str:
        """Name of the codec, as ``--codec`` has it."""
        return self.name

    @property
    def stochastic(self) -> bool:
        """True if values are rounded up or down at random."""
        return False

    @property
    def gives_back(self) -> bool:
        """True if a residual is kept and added in the next iteration."""
        return False

    @property
    def remembers(self) -> bool:
        """True if anything that was not sent is kept for the next iteration."""
        return self.gives_back

    @property
    def multiplies(self) -> bool:
        """True if every rank multiplies matrices, whose products must have the same bits on all of them."""
        return False

    @property
    def own_momentum(self) -> float:
        """Momentum that the codec applies in place of the optimizer's; 0 for none."""
        return 0.0

    def make(self, device: str = "cpu") -> Codec:
        """Return the codec for tensors on this kind of device ("cpu" or "cuda")."""
        raise AssertionError(f"{self.codec} is no codec of single values")

    def describe(self) -> str:
        """Describe the codec in a few words."""
        return " ".join([self.codec, *self._words()])

    def _words(self) -> list[str]:
        words = ["rounded stochastically"] * self.stochastic
        return [*words, *["with error feedback"] * self.gives_back]

    def said_of(self, parameters: Iterable[Tensor]) -> str:
        """Return what is to be said of a training of ``parameters`` with this codec, after a comma; mostly nothing."""
        return ""

    def settings(self) -> dict[str, Any]:
        """Return the codec and its options by the names that messages give them, to be compared between ranks."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"codec" if name == "name" else f"codec's {name}": value for name, value in values.items()}

    def facts(self) -> dict[str, Any]:
        """Return what rules between options ask about the codec (``pipesgd.rules``)."""
        return {
            "codec": self.codec,
            "gives_back": self.gives_back,
            "remembers": self.remembers,
            "error_feedback": getattr(self, "error_feedback", None),
            "factors": getattr(self, "factors", "fp32"),
            "dense_start": getattr(self, "dense_start", 0),
            "own_momentum": self.own_momentum,
        }


@dataclass(frozen=True)
class Fp32(CodecOptions):
    """Values as they are, of any dtype; float32 takes 32 bits. Exact."""

    name: str = field(default="fp32", init=False)

    def make(self, device: str = "cpu") -> Codec:
        from pipesgd.codecs.floats import Uncompressed

        return Uncompressed()


@dataclass(frozen=True)
class Sixteen(CodecOptions):
    """Shared parts of the codecs that send sixteen bits a value."""

    error_feedback: bool = False
    """True to add what a rank's encodings leave out to its gradient of the next iteration."""

    @property
    def gives_back(self) -> bool:
        return self.error_feedback

    def make(self, device: str = "cpu") -> Codec:
        from pipesgd.codecs.floats import SixteenBits

        return SixteenBits(self.codec, device)


@dataclass(frozen=True)
class Bf16(Sixteen):
    """bfloat16, rounded to nearest, ties to even (Kalamkar et al., 2019, "A Study of BFLOAT16").

    It takes 16 bits a value. Rounding to nearest is deterministic: biased for a given value, but not toward zero. The
    error of a value x is at most 2**-8 |x| (2**-134 for denormals). Values that round beyond 3.39e38 become infinite.
    """

    name: str = field(default="bf16", init=False)


@dataclass(frozen=True)
class Fp16(Sixteen):
    """IEEE half precision, rounded to nearest, ties to even (IEEE 754-2008; Micikevicius et al., ICLR 2018).

    It takes 16 bits a value. Rounding is deterministic, hence biased for a given value. The error of a value x is at
    most 2**-11 |x|, and at most 2**-25 for |x| below 2**-14. Sums of 65520 and more become infinite.
    """

    name: str = field(default="fp16", init=False)


@dataclass(frozen=True)
class Blocks(CodecOptions):
    """Shared parts of the codecs of whole numbers times a scale for each block of values.

    Subclasses say the defaults of ``block`` and of what is None here: rounding is to nearest, and error feedback is on
    below 8 bits a value if rounding is to nearest.
    """

    block: int = option(1024, at_least=1, named="codec-block")
    """Number of values that share a scale."""
    rounding: str | None = option(None, choices=ROUNDINGS)
    """Rounding: nearest, or stochastic (unbiased)."""
    error_feedback: bool | None = None
    """True to add what a rank's encodings leave out to its gradient of the next iteration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse((self.block > MAX_BLOCK, f"codec-block must be at most {MAX_BLOCK}; got {self.block}"))

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def gives_back(self) -> bool:
        return not self.stochastic if self.error_feedback is None else self.error_feedback

    def _words(self) -> list[str]:
        return [f"in blocks of {self.block}", *super()._words()]

    def _linear(self, device: str, *, bits: int, levels: int, rule: int | None = None, clip: float = 0.0) -> Codec:
        from pipesgd.codecs.blocks import Linear
        from pipesgd.codecs.kernels.kinds import ABSMAX

        return Linear(
            self.codec,
            bits=bits,
            levels=levels,
            block=self.block,
            stochastic=self.stochastic,
            rule=ABSMAX if rule is None else rule,
            clip=clip,
            device=device,
        )


@dataclass(frozen=True)
class Int8(Blocks):
    """Eight bits a value, -127 to 127 times largest magnitude / 127: Pipe-SGD's quantization (Li et al., 2018, "Q").

    It takes 8 + 32 / block bits a value. Each block has its own scale: a few outliers would set the range of a whole
    tensor. The error of a value is at most 1/254 of the largest magnitude of its block; with stochastic rounding it is
    at most 1/127, and unbiased. Error feedback is off by default.
    """

    name: str = field(default="int8", init=False)

    @property
    def gives_back(self) -> bool:
        return bool(self.error_feedback)

    def make(self, device: str = "cpu") -> Codec:
        return self._linear(device, bits=8, levels=127)


@dataclass(frozen=True)
class Int4(Blocks):
    """Four bits a value, -7 to 7 times the largest magnitude / 7, a scale for each block (Dettmers, ICLR 2016).

    It takes 4 + 32 / block bits a value. The error of a value is at most 1/14 of the largest magnitude of its block;
    with stochastic rounding it is at most 1/7, and unbiased.
    """

    name: str = field(default="int4", init=False)
    block: int = option(256, at_least=1, named="codec-block")

    def make(self, device: str = "cpu") -> Codec:
        return self._linear(device, bits=4, levels=7)


_HERE: dict[str, type[CodecOptions]] = {one.name: one for one in (Fp32, Bf16, Fp16, Int8, Int4)}


def codec_named(name: str, **options: Any) -> CodecOptions:
    """Return the built-in codec with this name and these options.

    Raises:
        UserInputError: there is no such codec, or an option has a value that is not allowed.

    >>> codec_named("int8", rounding="stochastic").describe()
    'int8 in blocks of 1024 rounded stochastically'
    """
    check_one_of("codec", name, CODECS)
    kind: type[CodecOptions] = _HERE[name] if name in _HERE else guest(name)
    return kind(**options)
