"""Training without any communication, which gives a lower bound on the time of every strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipesgd.optim.clipping import Clipping
from pipesgd.optim.step import SynchronousUpdate
from pipesgd.pipeline_config import Buffers
from pipesgd.strategy import StepReport, Strategy


class Local(Strategy):
    """Every rank trains a model of its own, from the same initial values, on its own samples.

    This is not a way to train, but the physical limit of an iteration's time, to compare the others with. An
    evaluation gives the mean accuracy of the ranks' models, each on its part of the test set.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: str = "stop",
    ):
        self.iteration = 0
        self.module = model
        self.replicated = False
        self._update = SynchronousUpdate(optimizer, clip=clip, scaler=scaler, on_nonfinite=on_nonfinite)

    def step(self) -> StepReport:
        """Apply this rank's gradients.

        Raises:
            NonFiniteGradientError: the gradients hold a NaN or an infinity.
            UserInputError: parameters were frozen, unfrozen or added.
        """
        self._update.check_parameters("local training")
        iteration = self.iteration
        self.iteration += 1
        return self._update.apply(iteration)

    def combine_buffers(self, how: Buffers) -> None:
        """Leave the buffers this rank's own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration and the loss scale."""
        return {"iteration": self.iteration, "loss_scale": self._update.loss_scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self.iteration = state["iteration"]
        self._update.loss_scale.load_state_dict(state["loss_scale"])

    def close(self) -> None:
        """Do nothing, since nothing runs alongside the training loop."""
