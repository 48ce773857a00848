"""QSGD: whole numbers of a few levels times the norm of each block of values."""

from __future__ import annotations

from pipesgd.codecs.blocks import Linear
from pipesgd.codecs.kernels.kinds import NORM


class Qsgd(Linear):
    """0 to s times the block's Euclidean norm / s, with a sign: QSGD (Alistarh et al., NeurIPS 2017, section 3.1).

    It takes 8, 4 or 2 bits a value for s up to 127, 7 and 1, plus 32 / block. The paper's variable-length codes would
    save more, but cost a pass that does not vectorize. With stochastic rounding, as in the paper, it is unbiased. The
    error of a value is at most norm / s; half of that with rounding to nearest. In a block of 512, say, that is more
    than most values, again at every hop. The norm is that of magnitudes rounded to 1/1023 of the block's largest one,
    at most sqrt(block) / 2046 of it away from the exact one; beyond float32's range it stays at the end of that range.

    With rounding to nearest, a block of (2 s)**2 equal values becomes zeros: error feedback needs smaller blocks.
    """

    name = "qsgd"
    _rule = NORM

    def __init__(self, *, levels: int = 7, block: int = 64, stochastic: bool = True, device: str = "cpu"):
        bits = 2 if levels == 1 else 4 if levels <= 7 else 8
        super().__init__(bits=bits, levels=levels, block=block, stochastic=stochastic, device=device)
