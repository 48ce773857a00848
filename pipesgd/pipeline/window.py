"""The iterations that a rank does by itself between two exchanges of local steps, and what they have moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipesgd.pipeline.prediction import SwappedWeights

T = TypeVar("T")


class Window:
    """The iterations of one rank between two exchanges.

    Args:
        parameters: the parameters that the rank's own optimizer updates.
        weights: their weights: the true ones are those of the outer optimizer, and a window changes the others.
    """

    def __init__(self, parameters: Sequence[Tensor], weights: SwappedWeights):
        self.parameters = parameters
        self._weights = weights
        self._start: list[Tensor] = []
        """Weights at the start of the window; empty before it."""
        self._left: dict[int, Tensor] = {}
        """Movements that were not exchanged when the last window ended, by number of the parameter."""
        self._since = [0] * len(parameters)
        """Number of iterations since the last exchange of each parameter."""

    @property
    def steps(self) -> int:
        """Number of iterations so far."""
        return min(self._since)

    @property
    def unexchanged(self) -> int:
        """Number of iterations since the last exchange of the parameter that has waited longest for its turn."""
        return max(self._since)

    def begin(self) -> None:
        """Let the parameters hold the weights that the rank kept when the last window ended, if it keeps its own.

        Movements that were not exchanged are kept, too, from the weights that are there after the exchange.
        """
        if self._start:
            self._weights.begin(self._start)
        elif self._left:
            self.work()

    def step(self, update: Callable[[], T]) -> T:
        """Do ``update``, which changes the parameters in place, on this rank's weights; return what it returns."""
        self.work()
        result = update()
        self.worked()
        return result

    def worked(self) -> None:
        """Count an iteration whose update has been done after ``work``."""
        # An optimizer may have given the parameters other storage.
        self._weights.predicted = [parameter.data for parameter in self.parameters]
        self._since = [steps + 1 for steps in self._since]

    def end(self, exchanged: Sequence[int]) -> list[Tensor | None]:
        """Return what is exchanged, by parameter. The next step begins another window.

        Args:
            exchanged: numbers of the parameters whose movements are exchanged; it is None for the others.
        """
        self.work()
        taken = self.take(exchanged, [parameter.data for parameter in self.parameters])
        for number in exchanged:
            self._since[number] = 0
        return taken

    def take(self, exchanged: Sequence[int], now: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the movements to the weights ``now`` of the parameters that are ``exchanged``."""
        torch._foreach_sub_(self._start, list(now))
        self._left, self._start = dict(enumerate(self._start)), []
        moved = {number: self._left.pop(number) for number in exchanged}
        return [moved.get(number) for number in range(len(now))]

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of steps, and copies of the weights at the start and now if there are any."""
        weights = self._weights
        begun = bool(self._start) and weights.are_valid
        return {
            "steps": self.steps,
            "since": list(self._since),
            "start": [tensor.clone() for tensor in self._start] if begun else [],
            "now": [tensor.clone() for tensor in weights.predicted] if begun else [],
            "left": {number: tensor.clone() for number, tensor in self._left.items()},
        }

    def of_members(self, alike: Mapping[str, Any], taken: Sequence[Mapping[str, Any]], share: float) -> dict[str, Any]:
        """Return the state in which this rank has the movements of the ranks ``taken`` over, times ``share``.

        The window begins again, so that these are all that the next exchange has.
        """
        moved = [_movements(state) for state in taken]
        places = _movements(alike).items()
        left = {
            place: torch.stack([of_rank[place] for of_rank in moved]).sum(0) * share if moved else torch.zeros_like(one)
            for place, one in places
        }
        return {**alike, "start": [], "now": [], "left": left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``; the parameters' true weights must be those of that moment already."""
        device = self.parameters[0].device
        self._start = []
        self._left = {number: tensor.to(device, copy=True) for number, tensor in state["left"].items()}
        self._since = list(state["since"])
        if state["start"]:
            self._weights.work()
            self._start = [tensor.to(device, copy=True) for tensor in state["start"]]
            torch._foreach_copy_([parameter.data for parameter in self.parameters], list(state["now"]))

    def work(self) -> None:
        """Let the parameters hold this rank's weights, from which the window begins if it has not begun."""
        weights = self._weights
        if not weights.are_valid:  # others were loaded, or an error has put the true ones in
            self._start = []
        weights.work()
        if not self._start:
            self._start = [parameter.data.clone() for parameter in self.parameters]
            if self._left:
                moved = [self.parameters[number].data for number in self._left]
                torch._foreach_sub_(moved, list(self._left.values()))
                self._left = {}


def _movements(state: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return the movements of a ``state_dict`` that were not exchanged, by number of the parameter."""
    if not state["start"]:
        return dict(state["left"])
    pairs = zip(state["start"], state["now"], strict=True)
    return {place: start - now for place, (start, now) in enumerate(pairs)}
