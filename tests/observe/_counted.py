"""Runs a program on real ranks, and prints what its model in DistributedDataParallel does in an iteration.

torchrun ... _counted.py PROGRAM
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

models: list[DistributedDataParallel] = []
backwards: list[int] = []
passes = 0


class Counted(DistributedDataParallel):
    """A model whose backward passes are counted by a hook of its output."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        models.append(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if torch.is_grad_enabled():
            _last(output).register_hook(_count)
        return output


def _last(output: Any) -> torch.Tensor:
    """Return a tensor whose gradient each backward pass takes: of several, the loss, which is the smallest."""
    values = list(output.values()) if isinstance(output, dict) else output
    found = [values] if isinstance(values, torch.Tensor) else [one for one in values if isinstance(one, torch.Tensor)]
    return min((one for one in found if one.requires_grad), key=torch.Tensor.numel)


def _count(_: Any) -> None:
    global passes
    passes += 1


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    global passes
    backwards.append(passes)
    passes = 0


torch.nn.parallel.DistributedDataParallel = Counted  # type: ignore[misc]
torch.nn.parallel.distributed.DistributedDataParallel = Counted  # type: ignore[misc]
register_optimizer_step_post_hook(_stepped)
runpy.run_path(sys.argv[1], run_name="__main__")
told = models[-1]._get_ddp_logging_data()
sizes = str(told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]).split(",")
tensors = [one.numel() for one in models[-1].parameters() if one.requires_grad]
if os.environ["RANK"] == "0":
    print("counted:", json.dumps({"tensors": tensors, "buckets": len(sizes), "passes": backwards[5]}))
