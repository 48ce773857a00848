"""No communication at all: the time that no strategy can be faster than."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pipesgd.checks import check_one_of
from pipesgd.config import ON_NONFINITE
from pipesgd.strategies.base import StepReport
from pipesgd.strategies.replication import apply_gradients, trainable_parameters


class Local:
    """Every rank trains a model of its own, from the same initial values, on its own samples.

    Not a way to train: the physical limit of an iteration's time, to compare the others with. An evaluation
    gives the mean accuracy of the ranks' models, each on its part of the test set.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, on_nonfinite: str = "stop"):
        check_one_of("on_nonfinite", on_nonfinite, ON_NONFINITE)
        self.iteration = 0
        self.module = model
        self.replicated = False
        self._optimizer = optimizer
        self._parameters = trainable_parameters(optimizer)
        self._skip_nonfinite = on_nonfinite == "skip"

    def step(self) -> StepReport:
        """Apply this rank's gradients.

        Raises:
            NonFiniteGradientError: they hold a NaN or an infinity.
        """
        iteration = self.iteration
        self.iteration += 1
        return apply_gradients(self._optimizer, self._parameters, iteration, skip_nonfinite=self._skip_nonfinite)

    def flush(self) -> StepReport:
        """Nothing is ever in flight."""
        return StepReport()

    @contextlib.contextmanager
    def true_weights(self) -> Iterator[None]:
        """This rank's own: there are no others."""
        yield

    def average_buffers(self) -> None:
        """They stay this rank's own."""

    def state_dict(self) -> dict[str, Any]:
        """The iteration."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self.iteration = state["iteration"]

    def close(self) -> None:
        """Nothing runs beside the training loop."""
