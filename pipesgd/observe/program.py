"""Runs a training program as one rank of several that are not there, and counts what a plan must know about it.

    python -m pipesgd.observe.program DESCRIPTOR WORLD_SIZE PROGRAM [ARGUMENTS]

``pipesgd.observe.plan`` starts this, in a process and a folder of their own. It writes a line of JSON to the
file descriptor for each step of the optimizer, and one with an ``Observed`` at the end.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipesgd.process import follow_launcher

NAME = "echo"
STEPS, UNTIMED = 12, 4
"""Steps of the optimizer after which the program ends, and those that are not timed: the first ones take longer."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Figures of an iteration of a training program."""

    tensors: list[int]
    """Values of each parameter's gradient, in the order of the model."""
    in_ddp: bool
    """True if DistributedDataParallel exchanges the gradients."""
    buckets: int
    """Buckets of DistributedDataParallel; else all sums over the ranks in an iteration."""
    passes: int
    """Backward passes in an iteration."""
    compute_s: float
    """Median time of all that an iteration does but the optimizer's step and the exchange."""
    compute_range_s: tuple[float, float]
    """The shortest and the longest of these times."""
    update_s: float
    """Median time of the optimizer's step."""


class EchoGroup(dist.ProcessGroup):
    """A process group whose other ranks have what this one has: sums are multiples, gathered values are copies.

    Other ranks are only in its answers, so sending to one, or receiving, is refused. torch's own backend for one
    process, "fake", does not run the backward pass of DistributedDataParallel on a CPU.

    Args:
        rank: rank of this process.
        world_size: number of ranks that there seem to be.
    """

    seconds = 0.0
    """Time that operations of all such groups took."""
    sums = 0
    """Number of sums of all such groups."""

    def __init__(self, rank: int, world_size: int):
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # torch's stubs know its other constructor alone
        self._world_size = world_size

    def getBackendName(self) -> str:  # noqa: N802 (torch calls it by this name)
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        EchoGroup.sums += 1
        if opts is not None and opts.reduceOp == dist.ReduceOp.SUM:
            begin = time.perf_counter()
            for tensor in tensors:
                tensor.mul_(self._world_size)
            EchoGroup.seconds += time.perf_counter() - begin
        return _Done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return _Done(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Done([])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        for of_ranks, own in zip(outputs, inputs, strict=True):
            for one in of_ranks:
                one.copy_(own)
        return _Done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self.allgather(outputs, inputs) if outputs else _Done(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:  # type: ignore[override]
        for own, of_ranks in zip(outputs, inputs, strict=False):
            own.copy_(of_ranks[self.rank()])
        return _Done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:  # type: ignore[override]
        self.scatter(outputs, inputs)
        return self.allreduce(outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for one, own in zip(outputs, inputs, strict=True):
            one.copy_(own)
        return _Done(outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        output.view(self._world_size, -1).copy_(own.reshape(1, -1).expand(self._world_size, -1))
        return _Done(output)

    def _reduce_scatter_base(self, output: Tensor, values: Tensor, opts: Any = None) -> dist.Work:
        output.copy_(values.view(self._world_size, -1)[self.rank()].view_as(output))
        return self.allreduce([output], opts)

    # Newer versions of torch look for these names.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def send(self, *_: Any, **__: Any) -> dist.Work:
        raise RuntimeError("a program must not send to single ranks while it is observed for a plan: there are none")

    recv = recv_anysource = send


class _Done(dist.Work):
    """Handle of an operation that is complete."""

    def __init__(self, result: Any):
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class Observer:
    """Counts what a program does, from its first step of an optimizer on, and ends the process after ``STEPS``.

    Where a program has several optimizers, an iteration ends with the step of the one that stepped first.

    Args:
        tell: function that is given a mapping after each step.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None]):
        self._tell = tell
        self._models: list[DistributedDataParallel] = []
        self._first: torch.optim.Optimizer | None = None
        self._passes = 0
        self._began = self._updates = 0.0
        self._at: list[tuple[float, float, float, int, int]] = []
        """After each step: the clock, then seconds of steps, seconds of exchanges, sums and passes until then."""

    def watch(self) -> None:
        """Watch all models in DistributedDataParallel, and all optimizers, that are made from now on."""
        make = DistributedDataParallel.__init__

        @functools.wraps(make)
        def made(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            make(model, *args, **kwargs)
            self._models.append(model)

        DistributedDataParallel.__init__ = made  # type: ignore[assignment, method-assign]
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        _wait_for_device()
        self._began = time.perf_counter()
        given = [*args, *kwargs.values()]
        closure = next((one for one in given if callable(one)), None)
        if closure is None:
            return None
        # Lightning computes in a closure that it hands to the step; its time is not the step's.

        def timed() -> Any:
            begin = time.perf_counter()
            found = closure()
            _wait_for_device()
            self._updates -= time.perf_counter() - begin
            return found

        def inside(one: Any) -> Any:
            return timed if one is closure else one

        return tuple(map(inside, args)), {name: inside(one) for name, one in kwargs.items()}

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _wait_for_device()
        now = time.perf_counter()
        self._updates += now - self._began
        if self._first is None:
            self._first = optimizer
            self._trained(optimizer)[-1].register_post_accumulate_grad_hook(self._count_pass)
        if optimizer is not self._first:
            return
        self._at.append((now, self._updates, EchoGroup.seconds, EchoGroup.sums, self._passes))
        self._tell({"step": len(self._at)})
        if len(self._at) == STEPS:
            self.end()

    def _count_pass(self, _: Tensor) -> None:
        self._passes += 1

    def _trained(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the parameters whose gradients are exchanged: those of the model, or of the optimizer."""
        if self._models:
            return [one for one in self._models[-1].module.parameters() if one.requires_grad]
        return [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]

    def end(self) -> None:
        """Tell what was counted, if that was enough, and end the process at once: nothing of the program runs any more.

        An exception would let a program save what it has.
        """
        timed = self._at[UNTIMED:]
        if self._first is not None and len(timed) > 1:
            each = [[b - a for a, b in zip(one, other, strict=True)] for one, other in pairwise(timed)]
            seconds, updates, exchanges, sums, passes = (list(column) for column in zip(*each, strict=True))
            compute = [a - b - c for a, b, c in zip(seconds, updates, exchanges, strict=True)]
            observed = Observed(
                tensors=[one.numel() for one in self._trained(self._first)],
                in_ddp=bool(self._models),
                buckets=_buckets(self._models[-1]) if self._models else round(statistics.median(sums)),
                passes=max(1, round(statistics.median(passes))),
                compute_s=max(0.0, statistics.median(compute)),
                compute_range_s=(max(0.0, min(compute)), max(0.0, max(compute))),
                update_s=statistics.median(updates),
            )
            self._tell({"observed": asdict(observed)})
        else:
            self._tell({"steps": len(self._at)})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _buckets(model: DistributedDataParallel) -> int:
    """Return the number of buckets, which torch cuts again after the first iteration, by the order of gradients."""
    told = model._get_ddp_logging_data()
    return len(str(told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]).split(","))


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class _Inert:
    """A door of pipesgd that leaves everything to DistributedDataParallel: a plan is for the program without it."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a loop must have DistributedDataParallel, or sums of its own, while it is observed for a plan; got Pipelined"
    )


def prepare(world_size: int) -> None:
    """Let ``torch.distributed`` make groups of ``EchoGroup`` only, and doors of pipesgd do nothing."""
    dist.Backend.register_backend(
        NAME,
        lambda of_torch, _: EchoGroup(of_torch.group_rank, of_torch.group_size),
        extended_api=True,
        devices=["cpu", "cuda"],
    )
    initialize, new_group = dist.init_process_group, dist.new_group

    def init_process_group(*_: Any, timeout: Any = None, **__: Any) -> None:
        initialize(NAME, rank=0, world_size=world_size, store=dist.HashStore(), timeout=timeout)

    def group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **__: Any) -> Any:
        return new_group(ranks, timeout=timeout, backend=NAME)

    for of_torch in (dist, dist.distributed_c10d):
        of_torch.init_process_group = init_process_group  # type: ignore[attr-defined]
        of_torch.new_group = group  # type: ignore[attr-defined]

    import pipesgd.ddp.attached
    import pipesgd.ddp.compressed

    for module in (pipesgd.ddp, pipesgd.ddp.attached, pipesgd.ddp.compressed):
        module.attach = module.compress = _Inert  # type: ignore[attr-defined]
    pipesgd.Pipelined = pipesgd.LocalSteps = _refuse  # type: ignore[misc, assignment]


def main() -> None:
    """Run the program, as Python would."""
    descriptor, world_size, program, *arguments = sys.argv[1:]
    follow_launcher()  # it has a process group of its own, which no signal to the command reaches
    told = os.fdopen(int(descriptor), "w", buffering=1, encoding="utf-8")
    observer = Observer(lambda values: print(json.dumps(values), file=told))
    prepare(int(world_size))
    observer.watch()
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")
    observer.end()


if __name__ == "__main__":
    main()
