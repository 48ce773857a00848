"""A simulated GPU: torch checks on which device every tensor is, and computes nothing."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._subclasses import FakeTensorMode


class PretendedGpu(FakeTensorMode):
    """A mode in which tensors on "cuda" have a shape, a dtype and a device, but no values.

    Mixing devices is an error, as on a GPU. Code that reads a single value gets True or 1.0. Threads take turns in the
    mode, since torch's own serves only one thread.
    """

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._of_thread = threading.local()
        super().__init__()

    # torch says that all tensors are on "meta" while this is true: that must hold only for the thread that computes, or
    # another one that reads a tensor's device at that moment, without a turn, makes tensors there.
    @property
    def in_kernel_invocation(self) -> bool:  # type: ignore[override]
        return getattr(self._of_thread, "in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._of_thread.in_kernel = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1.0
        with self._turn:
            return super().__torch_dispatch__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendedGpu:
        return self  # a copy of a tensor belongs to the same mode


class _Unordered:
    """A substitute for torch's streams and events: nothing is computed, so there is nothing to order."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Unordered:
        return _Unordered()

    def wait_event(self, event: _Unordered) -> None: ...


def pretend_cuda(mode: PretendedGpu) -> None:
    """Make threads of this process that open a stream compute in ``mode``; for a process that does nothing else."""
    torch.cuda.Stream = torch.cuda.Event = _Unordered  # type: ignore[misc, assignment]
    torch.cuda.current_stream = _Unordered  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: mode  # type: ignore[assignment, misc, return-value]
    # Replace those torch methods that ask the driver for a tensor's device before they ask any mode.
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
    torch.Tensor.copy_ = _copy  # type: ignore[method-assign]
    torch.Tensor.__getitem__ = _item  # type: ignore[method-assign, assignment]


def _copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    copied: torch.Tensor = torch.ops.aten.copy_.default(tensor, source, non_blocking)
    return copied


def _item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    if isinstance(index, int):
        return tensor.select(0, index)
    if isinstance(index, slice):
        return torch.ops.aten.slice.Tensor(tensor, 0, index.start, index.stop, index.step or 1)
    indices = index if isinstance(index, tuple) else (index,)  # tensors, and slices of everything before them
    return torch.ops.aten.index.Tensor(tensor, [None if isinstance(one, slice) else one for one in indices])


def as_loaded(state: Any) -> Any:
    """Return ``state`` as it is read from a file with ``map_location="cpu"``; to be called in an open mode."""
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {name: as_loaded(value) for name, value in state.items()}
    return [as_loaded(value) for value in state] if isinstance(state, list | tuple) else state
