"""TernGrad: -1, 0 or 1 times a scale for each block of values."""

from __future__ import annotations

from pipesgd.codecs.blocks import Linear
from pipesgd.codecs.kernels.kinds import CLIPPED

CLIP_STOCHASTIC = 2.5
"""Root mean squares at which TernGrad clips (section 3.3 of its paper)."""
CLIP_NEAREST = 1.224
"""Root mean squares at which rounding to nearest clips, for the least squared error of normal values (Max, 1960)."""


class Ternary(Linear):
    """-1, 0 or 1 times a scale: TernGrad (Wen et al., NeurIPS 2017, equations 1 to 3 and section 3.3).

    It takes 2 + 32 / block bits a value. The scale is the largest magnitude, clipped at 2.5 root mean squares of the
    block. With stochastic rounding, as in the paper, it is unbiased except for what is clipped, and the error of a
    value is at most the scale. With rounding to nearest, for use with error feedback, it is clipped at 1.224, where the
    squared error is least, and the error is at most half of the scale, or what is clipped. Stochastic rounding does not
    go with error feedback: its errors are larger than most values, and residuals grow until they are not finite.

    The paper shares one scale among the workers so that a server can add up their whole numbers. Here every hop decodes
    and encodes again, and all ranks decode the owner's bytes: they share its scale.
    """

    name = "ternary"
    _rule = CLIPPED

    def __init__(self, *, block: int = 1024, stochastic: bool = True, device: str = "cpu"):
        clip = CLIP_STOCHASTIC if stochastic else CLIP_NEAREST
        super().__init__(bits=2, levels=1, block=block, stochastic=stochastic, clip=clip, device=device)
