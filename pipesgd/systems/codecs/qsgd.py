"""QSGD: whole numbers of a few levels times the norm of each block of values."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipesgd.checks import refuse
from pipesgd.codecs.base import Codec
from pipesgd.codecs.kernels.kinds import NORM
from pipesgd.codecs.options import Blocks
from pipesgd.options import option

MAX_LEVELS = 127


@dataclass(frozen=True)
class Qsgd(Blocks):
    """0 to s times the block's Euclidean norm / s, with a sign: QSGD (Alistarh et al., NeurIPS 2017, section 3.1).

    It takes 8, 4 or 2 bits a value for s up to 127, 7 and 1, plus 32 / block. The paper's variable-length codes would
    save more, but cost a pass that does not vectorize. With stochastic rounding, as in the paper, it is unbiased. The
    error of a value is at most norm / s; half of that with rounding to nearest. In a block of 512, say, that is more
    than most values, again at every hop. The norm is that of magnitudes rounded to 1/1023 of the block's largest one,
    at most sqrt(block) / 2046 of it away from the exact one; beyond float32's range it stays at the end of that range.

    With rounding to nearest, a block of (2 s)**2 equal values becomes zeros: error feedback needs smaller blocks.

    Rounding is stochastic by default, unless error feedback is asked for, which is then off by default.
    """

    name: str = field(default="qsgd", init=False)
    block: int = option(64, at_least=1, named="codec-block")
    levels: int = option(7, at_least=1, named="qsgd-levels")
    """Levels, s: up to 1, 7 or 127 take 2, 4 or 8 bits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse((self.levels > MAX_LEVELS, f"qsgd-levels must be at most {MAX_LEVELS}; got {self.levels}"))
        most = ((1 if self.stochastic else 2) * self.levels) ** 2 - 1
        refuse(
            (self.gives_back and most == 0,
             "error-feedback must be off with --codec qsgd --qsgd-levels 1 --rounding stochastic, or residuals can "
             "grow without end; got on"),
            (self.gives_back and self.block > most,
             f"codec-block must be at most {most} with --codec qsgd --qsgd-levels {self.levels} --error-feedback on, "
             f"or residuals can grow without end; got {self.block}"),
        )  # fmt: skip

    @property
    def stochastic(self) -> bool:
        return self.error_feedback is not True if self.rounding is None else super().stochastic

    @property
    def gives_back(self) -> bool:
        return super().gives_back if self.error_feedback is not None or self.levels <= 7 else False

    def _words(self) -> list[str]:
        blocks, *others = super()._words()
        return [blocks, f"with {self.levels} levels", *others]

    def make(self, device: str = "cpu") -> Codec:
        bits = 2 if self.levels == 1 else 4 if self.levels <= 7 else 8
        return self._linear(device, bits=bits, levels=self.levels, rule=NORM)
