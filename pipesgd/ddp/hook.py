"""The communication hook of DistributedDataParallel that both doors register, and the models that accept it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipesgd.errors import UserInputError


def check_model(ddp_model: DistributedDataParallel) -> None:
    """Refuse what is not a DistributedDataParallel whose gradients can be taken over.

    Raises:
        UserInputError: it is another module, has a communication hook already, or reduces in mixed precision.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise UserInputError(f"ddp_model must be a DistributedDataParallel; got {type(ddp_model).__name__}")
    if ddp_model._comm_hooks:
        hook = ddp_model._comm_hooks[0][0]
        raise UserInputError(f"ddp_model must have no communication hook; got one with {hook.__qualname__}")
    if ddp_model.mixed_precision is not None:
        raise UserInputError("ddp_model must be made without mixed_precision=; use torch.autocast in the loop")


def comm_hook(take: Callable[[GradBucket], Future[Tensor]], bucket: GradBucket) -> Future[Tensor]:
    """Have ``take``, the state that the hook is registered with, take a bucket; torch calls this for each of them."""
    return take(bucket)


def done(buffer: Tensor) -> Future[Tensor]:
    """Return the future of a bucket whose ``buffer`` will hold the result when the last bucket's hook returns."""
    future: Future[Tensor] = Future(devices=[] if buffer.device.type == "cpu" else [buffer.device])
    future.set_result(buffer)
    return future


# torch compares a hook's annotations with these types, and those above are strings.
comm_hook.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}
