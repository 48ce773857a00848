"""Elastic averaging (EASGD): ranks keep their own weights, and a common centre and they pull each other.

Zhang, Choromanska and LeCun, NeurIPS 2015, equations 5 and 6. Windows of local steps exchange differences from the
outer weights, which are the centre, in place of movements. With rank i of p, window n, centre w, width K and moving
rate a:

.. math::

    D_i^n &= w^n - \\theta_i^n \\\\
    s_i^{n+1} &= \\theta_i^n + a D_i^n \\\\
    w^{n+1} &= w^n - p a \\Big(w^n - \\frac 1 p \\sum_i \\theta_i^{n-K+1}\\Big)

Every rank has a copy of the centre, bit-identical, so there is no server. At width 1 that is the paper's synchronous
form. At larger widths the centre follows the ranks' weights of K-1 windows before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from pipesgd.flat_buffer import are_finite
from pipesgd.pipeline.prediction import Agreement, Prediction, SwappedWeights, Unapplied, compare
from pipesgd.pipeline.window import Window
from pipesgd.sections import check_moving_rate, moving_rate_for
from pipesgd.strategy import Comparison


class ElasticAveraging:
    """Windows, prediction and outer learning rate of elastic averaging, in place of those of local steps.

    Args:
        moving_rate: share of its way to the centre that a rank is pulled after each window; None for the default.
        ranks: number of ranks.

    Raises:
        UserInputError: the moving rate is above 1 / ``ranks``.
    """

    def __init__(self, moving_rate: float | None, ranks: int):
        self.moving_rate = moving_rate_for(moving_rate, ranks)
        """Moving rate of each rank."""
        check_moving_rate(self.moving_rate, ranks)
        self.lr = ranks * self.moving_rate
        """Learning rate of the outer optimizer."""
        self.prediction: type[Prediction] = Elastic
        """Prediction of the pipeline of the centre."""

    def window(self, parameters: Sequence[Tensor], weights: SwappedWeights) -> Window:
        """Return a window of these ``parameters`` and their ``weights``."""
        return ElasticWindow(parameters, weights, self.moving_rate)


@final
class Elastic(Prediction):
    """Differences from the centre of elastic averaging: they predict nothing, since ranks keep their own weights.

    A difference was taken from the centre as it was when its window ended. By the time the mean of the differences
    arrives, the centre may have moved, and the mean is corrected by as much. So at any width the centre moves by a
    share of its way to a mean of weights, and never beyond it, as it would by late differences.

    The comparison with the mean is how far ranks drift apart.
    """

    keeps_gradients = True
    at_width_1 = True

    def keep(self, local: Sequence[Tensor | None]) -> list[Tensor]:
        own = [difference for difference in local if difference is not None]  # which windows have of all parameters
        return [*own, *(centre.clone() for centre in self.weights.true)]

    def compare(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> Comparison | None:
        if not kept or any(tensor.is_complex() for tensor in kept):
            return None
        return compare(mean, kept[: len(mean)])

    def correct(self, mean: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        moved = torch._foreach_sub([parameter.data for parameter in self._parameters], list(kept[len(mean) :]))
        torch._foreach_add_(list(mean), moved)

    def predict(self, in_flight: Sequence[Unapplied], agreement: Agreement) -> None:
        return


class ElasticWindow(Window):
    """A window that exchanges the centre minus the rank's own weights, and leaves these where they are pulled to."""

    def __init__(self, parameters: Sequence[Tensor], weights: SwappedWeights, moving_rate: float):
        super().__init__(parameters, weights)
        self._moving_rate = moving_rate

    def take(self, exchanged: Sequence[int], now: Sequence[Tensor]) -> list[Tensor | None]:
        differences = list(torch._foreach_sub(self._weights.true, list(now)))
        self._start = list(torch._foreach_add(list(now), differences, alpha=self._moving_rate))
        if not are_finite(self._start):  # nor is the mean, and no later one would be: begin at the centre again
            self._start = []
        return [*differences]
