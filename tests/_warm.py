"""Work that the fork server does once before it forks ranks: imports, and compiling the loops of the codecs."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import sys
import threading
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent
# The fork server's path begins with the folder that pytest was started in, the repository. It comes last, as in
# conftest.py: ranks are forked with what is imported here, and CI tests the installed wheel.
sys.path[:] = [*(entry for entry in sys.path if entry), str(TESTS.parent), str(TESTS)]

from _pool import held  # noqa: E402 (found in the path only now)

from experiments.forked_ranks import import_all  # noqa: E402 (found in the path only now)
from pipesgd.cli import parse  # noqa: E402
from pipesgd.codecs.options import DENSE_CODECS, codec_named  # noqa: E402
from pipesgd.reducers.make import compile_loops  # noqa: E402

IMPORTS = (
    *("_runs", "_small_problem"),  # and with them pytest and hypothesis
    "sklearn.datasets",  # of ranks that train on digits
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel"),  # of islands
    "torch.distributed.launcher.api",  # of torchrun
    "matplotlib.figure",
    *("encodings.idna", "rich._emoji_codes", "torch.utils.serialization.config"),  # of what a run says and saves
    "pipesgd.baselines.ddp",
)
"""Modules that many ranks, or other processes that are forked, would otherwise import one by one."""

HUGE_PAGE = 1 << 21
MADV_COLLAPSE = 25
"""Advice of Linux 6.1 or later: huge pages now, which a fork copies the addresses of in a third of the time."""


def _in_huge_pages() -> None:
    """Move this process's own memory into huge pages, where the system can."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, access, _, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if access == "rw-p" and begin < end and name in ([], ["[heap]"]):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def _compile_once() -> None:
    """Compile a model and a step: the first time takes torch two seconds, which a rank that is forked later saves."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.compile(model, backend="aot_eager")(torch.ones(1, 2)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    torch.compiler.reset()


gc.disable()  # imports and numba make hundreds of thousands of objects, none of them garbage
import_all()
for name in IMPORTS:
    importlib.import_module(name)
held()  # looks for what cases may change
parse(["--dataset", "digits"])  # tyro imports its parts when they are needed
if importlib.util.find_spec("tqdm"):  # of Lightning and Transformers; torch.compile would start the thread of its bars
    importlib.import_module("tqdm").tqdm.monitor_interval = 0
_compile_once()
# On a machine without compiled loops, two processes of tests meet in the middle: each keeps them on disk for the other.
backwards = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
for codec in DENSE_CODECS[::-1] if backwards else DENSE_CODECS:
    compile_loops(codec_named(codec).make("cpu"), "cpu")
assert threading.active_count() == 1, "a process with threads cannot be forked"
if sys.platform == "linux":
    _in_huge_pages()
gc.freeze()  # a rank that collects garbage would copy all of this
gc.enable()
