"""Pipe-SGD in a loop of Hugging Face Accelerate, after ``accelerator.prepare``."""

from __future__ import annotations

from typing import Any

from pipesgd import ddp
from pipesgd.ddp import AttachedPipeline
from pipesgd.errors import UserInputError


def attach(accelerator: Any, model: Any, optimizer: Any, **options: Any) -> AttachedPipeline:
    """Let the loop of an Accelerator be Pipe-SGD; the loop stays as it is. See ``pipesgd.ddp.attach``.

    ``accelerator.accumulate``, ``clip_grad_norm_`` and ``unwrap_model`` work as always.

    Args:
        accelerator: the loop's Accelerator.
        model: the model that ``accelerator.prepare`` returned, which wraps it in DistributedDataParallel.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        options: options of ``pipesgd.ddp.attach``, without ``scaler``, which the Accelerator has.

    Raises:
        UserInputError: the optimizer was not prepared, the model is not wrapped, or a value is out of range.
    """
    if "scaler" in options:
        raise UserInputError("scaler must be left out: the Accelerator has its own")
    if not hasattr(optimizer, "optimizer"):
        raise UserInputError(
            f"optimizer must be what accelerator.prepare(model, optimizer) returned; got {type(optimizer).__name__}"
        )
    return ddp.attach(model, optimizer.optimizer, scaler=accelerator.scaler, **options)
