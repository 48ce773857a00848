"""Pipe-SGD's truncation of floats to sixteen bits."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipesgd.codecs.options import Sixteen


@dataclass(frozen=True)
class Truncate16(Sixteen):
    """The upper half of the float32 word: Pipe-SGD's truncation (Li et al., NeurIPS 2018, "T").

    It takes 16 bits a value and is biased toward zero. The error of a value x is below 2**-7 |x| (2**-133 for
    denormals): a sum that is re-encoded at every hop shrinks with the number of ranks; ``Bf16`` does not do that.
    """

    name: str = field(default="truncate16", init=False)
