"""Processes that do the cases of tests as ranks, one after another: starting one takes three times as long as a case.

They come from a fork server that has imported torch once, so that one starts in a tenth of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from conftest import REPOSITORY
from torch.distributed.device_mesh import DeviceMesh

import pipesgd
import timing_model
from pipesgd.membership.secret import job_secret
from pipesgd.ranks import Ranks, Standing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests._warm"])  # found where pytest is started: in the repository

_PACKAGES = tuple(str(Path(str(package.__file__)).parent) for package in (pipesgd, timing_model))
"""Folders of the packages, which may be among those of others that are installed."""

PUT_BACK_SECONDS = 60.0
"""Seconds after which a process that has done a case, and is to become what it was, is taken to hang."""

FOREIGN = ("importlib.metadata", "os", "socket", "threading", "time", "torch", "torch.cuda", "torch.distributed")
"""Modules of others that cases change."""


@dataclass(frozen=True)
class Case:
    """The job of a process as one rank."""

    rank: int
    world_size: int
    folder: str
    timeout: float
    deadline: float
    process_group: bool
    fresh: bool
    function: Callable[..., Any]
    args: tuple[Any, ...]

    def do(self) -> Any:
        store = dist.FileStore(str(Path(self.folder) / "store"), self.world_size)
        standing = Standing(self.timeout)
        ranks = Ranks(rank=self.rank, world_size=self.world_size, store=store, local_rank=self.rank, standing=standing)
        if os.environ.get("PIPESGD_TESTED_TRANSPORT") == "tls":
            ranks.secret = job_secret()
        if self.process_group:
            ranks.start_process_group("cpu", self.timeout)
        value = self.function(ranks, *self.args)
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pipesgd")]
        if left:
            raise AssertionError(f"threads left behind: {left}")
        return value


class Process:
    """A process that does cases, seen from this one."""

    def __init__(self) -> None:
        self.pipe, there = FORKS.Pipe()
        self._process = FORKS.Process(target=_rank_main, args=(there,), daemon=True)
        self._process.start()
        there.close()

    def can_go_on(self) -> bool:
        """Let it put back what its case has changed, now that all peers have answered; return False if it ends."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
            self.pipe.send_bytes(b"all have answered")
            return self.pipe.poll(PUT_BACK_SECONDS) and self.pipe.recv_bytes() == b"as before"
        return False

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


waiting: list[Process] = []
"""Processes that have done a case and can do another one."""


@atexit.register
def _end_all() -> None:
    while waiting:
        waiting.pop().end()


def _rank_main(pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        while True:
            order = pipe.recv_bytes()
            case: Case | None = None
            try:
                case = pickle.loads(order)
                faulthandler.dump_traceback_later(case.deadline, exit=True, file=sys.__stderr__)
                are_held, put_back = held(), _put_back()
                # A plain pickle: multiprocessing's own would share the memory of tensors, which ends with this process.
                pipe.send_bytes(pickle.dumps(("returned", case.do())))
            except BaseException:  # noqa: BLE001 (the test that waits gets it)
                pipe.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
                break
            if case.fresh:
                break
            faulthandler.cancel_dump_traceback_later()
            pipe.recv_bytes()  # peers may need this rank's connections until they have answered
            if dist.is_initialized():
                dist.destroy_process_group()
            put_back()
            _forget()
            del case
            gc.collect()  # connections in cycles, too
            for thread in threading.enumerate():
                if isinstance(thread, threading.Timer):  # ends by itself
                    thread.join()
            if not are_held():
                break
            pipe.send_bytes(b"as before")
    finally:  # EOFError: the process of the tests has ended
        # torch's groups are not torn down here: their peers may be gone.
        pipe.close()
        os._exit(0)


_spaces: dict[str, list[Mapping[str, object]]] = {}
"""Names in each module that a case may change, and in its classes."""


def held() -> Callable[[], bool]:
    """Return what tells whether names, handlers and threads are as they are now, and no other file or mesh is there."""
    for name in sys.modules.keys() - _spaces.keys():
        module = sys.modules[name]
        ours = _is_ours(str(getattr(module, "__dict__", {}).get("__file__", "")))
        _spaces[name] = [vars(module)] if ours or name in FOREIGN else []
        if ours:
            kinds = (one for one in list(vars(module).values()) if isinstance(one, type) and one.__module__ == name)
            _spaces[name] += [vars(kind) for kind in kinds]
    names = [(space, dict(space)) for spaces in _spaces.values() for space in spaces]
    others, files = (_handlers(), threading.active_count()), _open_files()

    def are_held() -> bool:
        same = (_handlers(), threading.active_count()) == others and _open_files() <= files
        # torch keeps meshes in its caches: later, equal ones would bring back the names of groups that are gone.
        same = same and not any(type(one) is DeviceMesh for one in gc.get_objects())
        return same and all(_is_held(before, space) for space, before in names)

    return are_held


def _is_held(before: Mapping[str, object], space: Mapping[str, object]) -> bool:
    """Return True if all names mean what they did, but for steps of optimizers: torch wraps that of a class once."""
    if before.items() <= space.items():
        return True
    changed = [name for name, value in before.items() if space.get(name) is not value]
    return all(name == "step" and getattr(space.get(name), "hooked", False) for name in changed)


def _is_ours(file: str) -> bool:
    """Return True if a case may change the module in this file, in a process that does others later."""
    in_repository = file.startswith(str(REPOSITORY)) and not file.startswith(sys.prefix)  # make's .venv is in it
    return in_repository or file.startswith(_PACKAGES)


def _forget() -> None:
    """Empty the caches of tests: what they hold is of the ranks of a case, as meshes are."""
    for spaces in _spaces.values():
        for space in spaces:
            if str(space.get("__file__", "")).startswith(str(REPOSITORY / "tests")):
                for value in space.values():
                    if hasattr(value, "cache_clear"):
                        value.cache_clear()


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)]


def _open_files() -> set[str]:
    """Return the paths of files that are open: a run that fails holds the lock of its folder until its process ends."""
    paths = set()
    for link in Path("/proc/self/fd").glob("*"):  # on Linux
        with contextlib.suppress(OSError):  # it was open only to list the others
            paths.add(str(link.readlink()))
    return {path for path in paths if path.startswith("/") and not path.startswith(("/dev/", "/proc/"))}


def _put_back() -> Callable[[], None]:
    """Return what gives this process the environment, paths, random numbers, threads and defaults that it has now."""
    environment, folder, path, words = dict(os.environ), Path.cwd(), list(sys.path), list(sys.argv)
    drawn, drawn_by_numpy, drawn_by_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    dtype, hook = torch.get_default_dtype(), sys.excepthook
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()

    def put_back() -> None:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:], sys.argv[:] = path, words
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        torch.set_rng_state(drawn_by_torch)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        sys.excepthook = hook  # torch's process groups have one
        multiprocessing.current_process().daemon = True

    return put_back
