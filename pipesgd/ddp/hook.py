"""The communication hook of DistributedDataParallel that both doors register, and the models that accept it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import laid_out_like
from pipesgd.optim.step import make_hookable, trainable_parameters
from pipesgd.pipeline.true_weights_hooks import Hook


def check_model(ddp_model: DistributedDataParallel) -> None:
    """Refuse what is not a DistributedDataParallel whose gradients can be taken over.

    Raises:
        UserInputError: it is another module, has a communication hook already, reduces in mixed precision, or leaves
            buckets out.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise UserInputError(_no_ddp(ddp_model))
    for hook, state in ddp_model._comm_hooks:
        if isinstance(state, BucketHook):
            if state.is_free:
                continue
            raise UserInputError("ddp_model must be attached or compressed once; got one that is: close() that first")
        raise UserInputError(f"ddp_model must have no communication hook; got one with {hook.__qualname__}")
    if ddp_model.mixed_precision is not None:
        raise UserInputError("ddp_model must be made without mixed_precision=; use torch.autocast in the loop")
    if getattr(ddp_model, "skip_all_reduce_unused_params", False):  # newer torch's; its hooks see some buckets alone
        raise UserInputError("ddp_model must be made without skip_all_reduce_unused_params=True; got it")


def _no_ddp(model: Any) -> str:
    """Return what to say of what is no DistributedDataParallel, and how it becomes one."""
    remedy = ": wrap it before, DistributedDataParallel(model)" if isinstance(model, nn.Module) else ""
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        remedy = ": compile what is inside, DistributedDataParallel(torch.compile(layers))"
    return f"ddp_model must be a DistributedDataParallel; got {type(model).__name__}{remedy}"


def check_dense_embeddings(ddp_model: DistributedDataParallel) -> None:
    """Refuse embeddings with sparse gradients, whose buckets torch hands over as sparse tensors.

    Raises:
        UserInputError: the model has one that is trained.
    """
    for name, layer in ddp_model.module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            raise _sparse(f"those of {name or 'the model'}")


def gradients_of(bucket: GradBucket) -> list[Tensor]:
    """Return the gradients in a bucket of torch, in its memory, each with the shape and strides of torch's own one.

    ``GradBucket.gradients`` takes what lies in the memory order of the parameter for contiguous, and leaves complex
    gradients in pairs of real numbers.

    Raises:
        UserInputError: they are sparse.
    """
    parameters, buffer = bucket.parameters(), bucket.buffer()
    if buffer.layout is not torch.strided:
        raise _sparse(f"one of shape {tuple(parameters[0].shape)}")
    values = buffer.view(parameters[0].dtype) if parameters[0].is_complex() else buffer
    parts = values.split([parameter.numel() for parameter in parameters])
    return [laid_out_like(parameter, part) for parameter, part in zip(parameters, parts, strict=True)]


def _sparse(got: str) -> UserInputError:
    return UserInputError(
        "gradients must be dense in a loop with DistributedDataParallel, which hands over no other ones together; got "
        f"sparse ones, {got} (use sparse=False in torch.nn.Embedding)"
    )


def check_all_held(ddp_model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that does not hold all parameters whose gradients torch reduces.

    Raises:
        UserInputError: it is none, lacks some, or holds others.
    """
    if not hasattr(optimizer, "param_groups"):
        raise UserInputError(f"optimizer must be one of torch.optim; got {type(optimizer).__name__}")
    held = {id(parameter) for parameter in trainable_parameters(optimizer)}
    trained = {
        id(parameter): name
        for name, parameter in ddp_model._get_data_parallel_params(ddp_model.module, named_params=True)
        if parameter.requires_grad
    }
    if missing := [name for key, name in trained.items() if key not in held]:
        raise UserInputError(
            "optimizer must hold all parameters of ddp_model that require a gradient; "
            f"got one without {missing[0]} ({len(missing)} of {len(trained)} are missing); pipesgd.ddp.compress works "
            "with any number of optimizers"
        )
    if others := len(held - trained.keys()):
        raise UserInputError(f"optimizer must hold parameters of ddp_model alone; got {others} others")


def frozen_since(ddp_model: DistributedDataParallel, parameters: Sequence[Tensor]) -> UserInputError | None:
    """Return the error for ``parameters`` that were frozen while they were attached; None if none was.

    torch waits for their gradients, and hands over no others of their buckets.
    """
    frozen = [one for one in parameters if not one.requires_grad]
    if not frozen:
        return None
    name = next(name for name, one in ddp_model.module.named_parameters() if one is frozen[0])
    return UserInputError(
        f"parameters must not be frozen while the model is attached; got {name} ({len(frozen)} of {len(parameters)}): "
        "close() the pipeline, make the DistributedDataParallel again, and attach that"
    )


class Places(dict[int, int]):
    """Places of the ``parameters`` that are trained, by their ids; torch's buckets may have others.

    Raises ``UserInputError`` for a parameter that is in a bucket, since it was frozen after DistributedDataParallel was
    made.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        super().__init__({id(parameter): place for place, parameter in enumerate(parameters)})

    def __missing__(self, key: int) -> int:
        raise UserInputError(
            "parameters must be frozen before DistributedDataParallel is made; got some that were frozen since: "
            "close() the pipeline, make the DistributedDataParallel again, and attach that"
        )


def step_without_gradient() -> UserInputError:
    """Return the error for a step of the loop's optimizer that follows no backward pass, or one in ``no_sync()``."""
    return UserInputError(
        "optimizer.step() must follow a backward pass outside of no_sync(), which hands over no gradient (to step on "
        "each rank's own: attach(..., windows=Windows(local_steps=H))); got a step without a new gradient"
    )


def before_update(begin: Callable[[], None], args: Any, kwargs: Any) -> Any:
    """Call ``begin`` before an optimizer updates anything: now, or after the closure that its ``step`` gets.

    Args:
        begin: prepares the update.
        args, kwargs: arguments of the optimizer's pre-hook of a step.

    Returns:
        What the hook must return.
    """
    closure = kwargs.get("closure") or next(iter(args[1:]), None)
    if closure is None:
        begin()
        return None

    def compute_first() -> Any:
        with torch.enable_grad():
            result = closure()
        begin()
        return result

    return (args[0], compute_first), {name: value for name, value in kwargs.items() if name != "closure"}


def check_no_scaler(frame: FrameType | None) -> None:
    """Refuse an optimizer's step in ``frame`` that an enabled GradScaler has called, which nothing else tells.

    Raises:
        UserInputError: there is one among the callers.
    """
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            if caller.is_enabled():
                raise UserInputError(
                    "scaler must be the loop's GradScaler, whose steps reach this optimizer: attach(..., scaler=scaler)"
                )
            return
        frame = frame.f_back


_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""Code with which torch calls an optimizer's step between its hooks."""


def is_of_base_class(optimizer: torch.optim.Optimizer, frame: FrameType | None) -> bool:
    """Return True in hooks of a step that another step of ``optimizer`` calls, that of a class derived from its class.

    torch calls the hooks for both.
    """
    steps = 0
    while frame is not None:
        steps += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


class InLoop(Protocol):
    """Pipeline that is attached to a loop, and does its part before and after the steps of the loop's optimizer."""

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Prepare the update that the optimizer's step does."""

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End that update."""

    def take_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket of gradients from torch."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the pipeline because of ``error``."""


def check_no_join(ddp_model: DistributedDataParallel, inputs: Any) -> None:
    """Refuse a forward pass in ``ddp_model.join()``; those that end on all ranks at once are right.

    Raises:
        UserInputError: there is one.
    """
    if ddp_model._join_config.enable and not ddp_model._join_config.throw_on_early_termination:
        raise UserInputError(
            "inputs must be even: all ranks must train on the same number of batches, since a rank that waits in "
            "ddp_model.join() takes no step; got a forward pass in join() without throw_on_early_termination=True"
        )


class LoopHooks:
    """Hooks that call a pipeline attached to a loop; it is ended if torch refuses the communication hook."""

    def __init__(self, attached: InLoop, ddp_model: DistributedDataParallel, optimizer: torch.optim.Optimizer):
        make_hookable(optimizer)

        @torch._disable_dynamo  # a compiled step calls both outside of its graphs
        def before_step(stepping: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            nested = is_of_base_class(stepping, sys._getframe())
            return None if nested else attached.before_step(stepping, args, kwargs)

        @torch._disable_dynamo
        def after_step(stepping: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not is_of_base_class(stepping, sys._getframe()):
                attached.after_step(stepping, args, kwargs)

        self._take = attached.take_bucket
        self._of_buckets: BucketHook | None = None
        self._handles = [
            optimizer.register_step_pre_hook(before_step),
            optimizer.register_step_post_hook(after_step),
            ddp_model.register_forward_pre_hook(Hook(check_no_join)),
        ]
        self._removed = False
        try:
            self._of_buckets = register_comm_hook(ddp_model, self._take)
        except BaseException as error:
            self.remove()
            attached.__exit__(type(error), error, None)
            raise

    def before_forward_of(self, ddp_model: DistributedDataParallel, call: Callable[[nn.Module, Any], None]) -> None:
        """Have ``call`` called before each forward pass."""
        self._handles.append(ddp_model.register_forward_pre_hook(Hook(call)))

    def before_update_of(self, scaler: torch.amp.GradScaler, call: Callable[[], None]) -> None:
        """Have ``call`` called before each update of the loop's scaler, which torch has no hook for, until ``remove``.

        Several pipelines may share a scaler.
        """
        update = scaler.update

        def call_and_update(*args: Any, **kwargs: Any) -> None:
            if not self._removed:
                call()
            update(*args, **kwargs)

        scaler.__dict__["update"] = call_and_update

    def remove(self) -> None:
        """Remove all but the communication hook, which torch keeps, and which is left to the next pipeline."""
        for handle in self._handles:
            handle.remove()
        if self._of_buckets is not None:
            self._of_buckets.release(self._take)
        self._removed = True


class BucketHook(Hook):
    """The state of ``comm_hook``. torch lets a model have one communication hook, ever, so pipelines follow in it."""

    is_free = False
    """True if the pipeline that takes the buckets is closed."""

    def follow(self, take: Callable[[GradBucket], Future[Tensor]]) -> None:
        """Let ``take`` take the buckets from now on."""
        self._call = take
        self.is_free = False

    def release(self, take: Callable[[GradBucket], Future[Tensor]]) -> None:
        """Leave the buckets to the next pipeline, unless that takes them already: one may be closed twice."""
        self.is_free |= self._call == take


def register_comm_hook(ddp_model: DistributedDataParallel, take: Callable[[GradBucket], Future[Tensor]]) -> BucketHook:
    """Let ``take`` take the buckets of ``ddp_model``, which ``check_model`` accepts, but not those of a copy of it."""
    for _, state in ddp_model._comm_hooks:
        if isinstance(state, BucketHook):
            state.follow(take)
            return state
    hook = BucketHook(take)
    ddp_model.register_comm_hook(hook, comm_hook)
    return hook


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
