"""An optimizer of the user's own that keeps gradients from one step to the next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Differences(torch.optim.Optimizer):
    """A user's optimizer, which follows twice the gradient minus the last one; it may keep that without a copy."""

    def __init__(self, parameters: Iterable[Tensor], *, clones: bool):
        super().__init__(parameters, {"lr": 0.1, "clones": clones})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                last = self.state[parameter].get("last", [parameter.grad])[0]
                parameter.add_(2 * parameter.grad - last, alpha=-group["lr"])
                self.state[parameter]["last"] = [parameter.grad.clone() if group["clones"] else parameter.grad]
