"""torch's own tests of DDP and of collectives, run with one backend; ``torch_ddp_tests`` starts this and compares.

    python -m experiments.torch_ddp_suite pipesgd outcomes.json 2       on two ranks

The tests are those of ``torch.testing._internal.distributed.distributed_test``, which needs the package expecttest.
They choose what to skip, and some branches, by the name of the backend. They are therefore told "gloo", and the
functions that make groups get "pipesgd" in its place.

Most tests of DDP ask for a GPU, though few need one. Here, "cuda" is another name of the CPU for them, and DDP is not
told ``device_ids``. A test that does need a GPU fails then, with any backend.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import pipesgd.backend

GPUS = 8
"""Number of GPUs that the tests are told of."""
TOO_LONG = ("test_ddp_uneven_inputs",)
"""Tests that are left out: on two cores this one takes more than the 400 s after which torch ends it."""


class CudaIsTheCpu(TorchFunctionMode):
    """A mode in which calls of torch that name the device "cuda" get the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _on_cpu(value, name) for name, value in (kwargs or {}).items()}
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "to":
            args = (args[0], *(_on_cpu(value, "device") for value in args[1:]))
        return func(*args, **kwargs)


def _on_cpu(value: Any, name: str) -> Any:
    """Return the value of an argument, the CPU in place of any GPU; a number is one if the argument is a device."""
    number = name == "device" and isinstance(value, int) and not isinstance(value, bool)
    if number or (isinstance(value, torch.device | str) and str(value).startswith("cuda")):
        return torch.device("cpu")
    return value


class _Nothing:
    """A substitute for torch's streams, events and choice of a GPU: there is nothing to order."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def pretend_gpus() -> None:
    """Let the tests of this process find GPUs; for a process that does nothing else."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: GPUS
    cuda.current_device = lambda: 0
    for name in ("Stream", "Event", "device", "stream", "current_stream", "set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, _Nothing)
    module: Any = nn.Module
    moved = module.to
    module.cuda = lambda self, device=None: self
    module.to = lambda self, *args, **kwargs: moved(
        self,
        *(_on_cpu(value, "device") for value in args),
        **{name: _on_cpu(value, name) for name, value in kwargs.items()},
    )
    ddp: Any = DistributedDataParallel
    made = ddp.__init__

    @functools.wraps(made)
    def make(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        made(self, module, **options)

    ddp.__init__ = make


def use(backend: str) -> None:
    """Make groups of ``backend`` wherever gloo is asked for."""
    for name in ("init_process_group", "new_group"):
        make = getattr(dist, name)

        def made(*args: Any, make: Any = make, **kwargs: Any) -> Any:
            if kwargs.get("backend") == "gloo":
                kwargs["backend"] = backend
            return make(*args, **kwargs)

        setattr(dist, name, functools.wraps(make)(made))


def test_class(world_size: int) -> type[unittest.TestCase]:
    """Return the class of torch's tests, whose ranks are forked: they start in a tenth of a second."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(world_size), "INIT_METHOD": ""}
    from torch.testing._internal import common_distributed
    from torch.testing._internal.common_distributed import DistTestCases
    from torch.testing._internal.distributed import distributed_test

    common_distributed.TEST_CUDA = True
    for feature in ("ddp", "gpu", "cuda", "subgroup"):
        DistTestCases.backend_feature[feature].add(pipesgd.backend.NAME)

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            pretend_gpus()
            with CudaIsTheCpu():
                super()._run(*args, **kwargs)  # type: ignore[no-untyped-call]

    return Tests


class Outcomes(unittest.TextTestResult):
    """Keeps what became of each test, and why."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.of: dict[str, tuple[str, str]] = {}

    def _keep(self, test: unittest.TestCase, kind: str, why: str = "") -> None:
        self.of[test.id().rpartition(".")[2]] = (kind, why)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 (unittest's name)
        super().addSuccess(test)
        self._keep(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802 (unittest's name)
        super().addSkip(test, reason)
        self._keep(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802 (unittest's name)
        super().addFailure(test, err)
        self._keep(test, "failed", last_line(err))

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802 (unittest's name)
        super().addError(test, err)
        self._keep(test, "failed", last_line(err))


def last_line(error: Any) -> str:
    """Return the line of the ranks' tracebacks that says what went wrong."""
    text = "".join(traceback.format_exception_only(*error[:2]))
    lines = [line.strip() for line in text.splitlines()]
    named = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exceeded", "Failed")) and ":" in line]
    inner = [line for line in named if not line.startswith("RuntimeError: Process")]
    inner.sort(key=lambda line: "gloo/transport" in line)  # the other rank's connection was only closed
    return (inner or named or lines or [""])[0][:200]


def main() -> None:
    backend, file, world_size, *words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TEMP_DIR"] = folder
        tests = test_class(int(world_size))
        use(backend)
        names = [
            name
            for name in unittest.TestLoader().getTestCaseNames(tests)
            if name not in TOO_LONG and (not words or name in words)
        ]
        runner = unittest.TextTestRunner(resultclass=Outcomes, verbosity=2)
        result: Any = runner.run(unittest.TestSuite(tests(name) for name in names))
        Path(file).write_text(json.dumps(result.of), encoding="utf-8")


if __name__ == "__main__":
    main()
