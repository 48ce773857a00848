"""Everything that a run must keep to continue bit for bit, taken from and given back to its parts."""

from __future__ import annotations

import collections
import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipesgd.strategies.base import Strategy


@dataclass(kw_only=True)
class RunState:
    """The parts of a run that change while it runs. The position in the data follows from the iteration."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    strategy: Strategy
    losses: collections.deque[float]
    """Of this rank's last batches, an epoch of them."""
    seconds: float = field(default=0.0, init=False)
    """Wall clock of the run up to the checkpoint that it was continued from."""

    def snapshot(self, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """(what is equal on all ranks, what is this rank's own), after ``seconds`` of wall clock in all."""
        with self.strategy.true_weights() if self.strategy.replicated else contextlib.nullcontext():
            replica = {
                # Their storage: a parameter may have another one afterwards.
                "parameters": {name: parameter.data for name, parameter in self.model.named_parameters()},
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
            }
        shared = replica if self.strategy.replicated else {}
        own = {
            **({} if self.strategy.replicated else replica),
            "buffers": dict(self.model.named_buffers()),
            "strategy": self.strategy.state_dict(),
            "losses": list(self.losses),
            "seconds": seconds,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        }
        return shared, own

    def restore(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Go back to a ``snapshot``."""
        replica = shared if self.strategy.replicated else own
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(replica["parameters"][name])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(own["buffers"][name])
        self.optimizer.load_state_dict(replica["optimizer"])
        self.schedule.load_state_dict(replica["schedule"])
        self.strategy.load_state_dict(own["strategy"])
        self.losses.extend(own["losses"])
        self.seconds = own["seconds"]
        torch.set_rng_state(own["rng"])
        if own["cuda_rng"] is not None:
            torch.cuda.set_rng_state(own["cuda_rng"])
