"""How well a guess agrees with the mean over ranks that arrives: this rank's own gradient, say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesgd.strategy import Comparison

COMPARED_DIGITS = 5
"""After the point, of comparisons: the same values, added up in another order, must compare as the same."""
AGREEMENT_DECAY = 0.95
"""Of the running mean of cosines between this rank's gradients and the means that arrived: about 20 iterations."""


class Agreement:
    """What this rank has seen of its guesses lately."""

    def __init__(self) -> None:
        self.cosine = 1.0
        """A running mean of cosines between this rank's gradients and the means."""
        self.missed: list[Tensor] = []
        """By what its guesses missed the means, added up and fading; empty until a prediction wants it."""

    def saw(self, comparison: Comparison | None) -> None:
        """Take note of a mean that has arrived."""
        if comparison is not None and comparison.cosine is not None:
            # So written, cosines of exactly 1 leave it at exactly 1.
            self.cosine += (1 - AGREEMENT_DECAY) * (comparison.cosine - self.cosine)

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return sum(tensor.nbytes for tensor in self.missed)

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on the same after a restart."""
        return {"cosine": self.cosine, "missed": [tensor.clone() for tensor in self.missed]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self.cosine = state["cosine"]
        self.missed = [tensor.clone() for tensor in state["missed"]]


def compare(mean: Sequence[Tensor], guess: Sequence[Tensor]) -> Comparison:
    """How well ``guess``, of real numbers, stood for ``mean``."""
    dots = [
        torch.dot(_wide(one), _wide(other))
        for a, b in ((mean, guess), (mean, mean), (guess, guess))
        for one, other in zip(a, b, strict=True)
    ]
    # From the device all at once; Python adds them up in float64.
    both, means, guesses = (sum(of_tensors) for of_tensors in torch.stack(dots).view(3, -1).tolist())
    if not (math.isfinite(means + guesses) and means > 0 and guesses > 0):
        return Comparison(cosine=None, relative_error=None)
    squared_error = round((means + guesses - 2 * both) / means, COMPARED_DIGITS)
    return Comparison(
        cosine=round(both / math.sqrt(means * guesses), COMPARED_DIGITS),
        relative_error=math.sqrt(max(squared_error, 0.0)),
    )


def _wide(tensor: Tensor) -> Tensor:
    """The values in one dimension, of float32 at least: sums of shorter floats overflow, or lose nearly all digits."""
    flat = tensor.reshape(-1)
    return flat.float() if flat.itemsize < torch.float32.itemsize else flat
