"""TernGrad: -1, 0 or 1 times a scale for each block of values."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipesgd.checks import refuse
from pipesgd.codecs.base import Codec
from pipesgd.codecs.kernels.kinds import CLIPPED
from pipesgd.codecs.options import Blocks

CLIP_STOCHASTIC = 2.5
"""Root mean squares at which TernGrad clips (section 3.3 of its paper)."""
CLIP_NEAREST = 1.224
"""Root mean squares at which rounding to nearest clips, for the least squared error of normal values (Max, 1960)."""


@dataclass(frozen=True)
class Ternary(Blocks):
    """-1, 0 or 1 times a scale: TernGrad (Wen et al., NeurIPS 2017, equations 1 to 3 and section 3.3).

    It takes 2 + 32 / block bits a value. The scale is the largest magnitude, clipped at 2.5 root mean squares of the
    block. With stochastic rounding, as in the paper, it is unbiased except for what is clipped, and the error of a
    value is at most the scale. With rounding to nearest, for use with error feedback, it is clipped at 1.224, where the
    squared error is least, and the error is at most half of the scale, or what is clipped. Stochastic rounding does not
    go with error feedback: its errors are larger than most values, and residuals grow until they are not finite.

    The paper shares one scale among the workers so that a server can add up their whole numbers. Here every hop decodes
    and encodes again, and all ranks decode the owner's bytes: they share its scale.

    Rounding is stochastic by default, unless error feedback is asked for, which is then off by default.
    """

    name: str = field(default="ternary", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            (self.stochastic and self.gives_back,
             "error-feedback must be off with --codec ternary --rounding stochastic, whose errors are larger than "
             "most values: residuals would grow until they are not finite; got on"),
        )  # fmt: skip

    @property
    def stochastic(self) -> bool:
        return self.error_feedback is not True if self.rounding is None else super().stochastic

    def make(self, device: str = "cpu") -> Codec:
        clip = CLIP_STOCHASTIC if self.stochastic else CLIP_NEAREST
        return self._linear(device, bits=2, levels=1, rule=CLIPPED, clip=clip)
