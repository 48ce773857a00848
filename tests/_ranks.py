"""Real ranks for tests: functions run in processes of their own, over gloo, with a deadline; and commands.

A rank that does not come back in time prints the stacks of all its threads, and is killed.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from _pool import FORKS, Case, Process, waiting
from conftest import REPOSITORY

from experiments.forked_ranks import rank_environment

TIMEOUT = 20.0
"""Seconds that a rank waits for another one, in tests that are not about timeouts."""

DEADLINE = 60.0
"""Seconds after which a rank that has not answered is taken to hang."""


class RankFailed(AssertionError):  # noqa: N818 (a failed assertion, in another process)
    """A rank raised, or did not answer within the deadline."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    deadline: float = DEADLINE,
    process_group: bool = True,
    fresh: bool = False,
) -> list[Any]:
    """Run ``function(ranks, *args)`` in ``world_size`` processes; return what each returned, in rank order.

    ``function`` must be at the top level of a module, and its result picklable. torch's process group is started for
    it, unless ``process_group`` is false. An exception that a test expects must be returned, not raised.

    Processes serve one case after another. One whose modules, threads or signal handlers a case has changed ends with
    it; ``fresh`` is for a case that changes something else, or in which a rank must end before its peers do.

    Raises:
        RankFailed: a rank raised (with its traceback), died, hung, or left a thread behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        used = [waiting.pop() if waiting and not fresh else Process() for _ in range(world_size)]
        for rank, one in enumerate(used):
            case = Case(rank, world_size, folder, timeout, deadline, process_group, fresh, function, args)
            one.pipe.send_bytes(pickle.dumps(case))
        end = time.monotonic() + deadline + 5.0  # gives a hanging rank time to dump its own stacks first
        answers = [_answer(one.pipe, end) for one in used]
        problems = [f"rank {rank} {kind}: {text}" for rank, (kind, text) in enumerate(answers) if kind != "returned"]
        for one in reversed(used):
            if not fresh and not problems and one.can_go_on():
                waiting.append(one)
            else:
                one.end()
        if problems:
            raise RankFailed("\n".join(problems))
        return [value for _, value in answers]


def error_of(function: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return the kind and the text of the error that a call raises, which a test compares; "no error" without one."""
    try:
        function(*args, **options)
    except Exception as error:  # noqa: BLE001 (the test compares it)
        return f"{type(error).__name__}: {error}"
    return "no error"


def _answer(pipe: Connection, end: float) -> tuple[str, Any]:
    if not pipe.poll(max(0.0, end - time.monotonic())):
        return "silent", "no answer within the deadline; its stacks are on stderr"
    try:
        answer: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return "died", "without an answer"
    return answer


def run_module(
    module: str,
    *words: str,
    folder: Path = REPOSITORY,
    environment: Mapping[str, str] = os.environ,
    deadline: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module words`` in ``folder`` to its end, in a process that need not import torch first.

    Returns its exit code, and what it and the processes that it started have printed.

    Raises:
        RankFailed: it did not end within the deadline.
    """
    with tempfile.TemporaryDirectory() as printed:
        # It may start processes of its own, so it is no daemon.
        process = FORKS.Process(target=_module_main, args=(module, words, folder, dict(environment), printed))
        process.start()
        try:
            process.join(deadline)
        finally:
            process.kill()
        stdout, stderr = _said(printed)
        if process.exitcode is None:
            raise RankFailed(f"{module} did not end within {deadline} s; it said:\n{stdout}{stderr}")
        return subprocess.CompletedProcess([module, *words], process.exitcode, stdout, stderr)


def start_module(module: str, *words: str, folder: Path, printed: Path) -> BaseProcess:
    """Start ``python -m module words`` in ``folder`` in a session of its own, in a process as of ``run_module``.

    What it prints goes to the files, or named pipes, "stdout" and "stderr" in the folder ``printed``.
    """
    arguments = (module, words, folder, dict(os.environ), str(printed))
    process = FORKS.Process(target=_session_main, args=arguments)
    process.start()
    return process


def _session_main(*arguments: Any) -> None:
    os.setsid()
    _module_main(*arguments)


def run_as_ranks(
    world_size: int, program: Path, folder: Path, deadline: float = 120.0, *, imports_again: bool = True
) -> str:
    """Run a program in ``folder`` on ranks with torchrun's environment, in processes that need not import torch first.

    Returns what they have printed. A rank that has not ended 5 s before the deadline prints where its threads are.
    Each imports this package again, so that a module that the program forgets to import is missing, unless
    ``imports_again`` is false.

    Raises:
        RankFailed: a rank failed, or did not end within the deadline.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent holds one
    with tempfile.TemporaryDirectory() as printed:
        processes = []
        for rank in range(world_size):
            environment = {**os.environ, **rank_environment(rank, world_size, store.port, attempt=0)}
            arguments = (program, folder, environment, printed, deadline, imports_again)
            process = FORKS.Process(target=_rank_of_program_main, args=arguments)
            process.start()
            processes.append(process)
        end = time.monotonic() + deadline
        try:
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
        stdout, stderr = _said(printed)
        codes = [process.exitcode for process in processes]
        if any(code != 0 for code in codes):
            raise RankFailed(f"{program.name}: ranks ended with {codes}; they said:\n{stdout}{stderr}")
        return stdout


def _rank_of_program_main(
    program: Path, folder: Path, environment: Mapping[str, str], printed: str, deadline: float, imports_again: bool
) -> None:
    faulthandler.dump_traceback_later(deadline - 5.0, file=sys.__stderr__)
    for name in list(sys.modules):
        if imports_again and name.partition(".")[0] in ("pipesgd", "timing_model"):
            del sys.modules[name]
    sys.path.insert(0, str(program.parent))
    _module_main(program.stem, (), folder, environment, printed)


def _said(printed: str) -> tuple[str, str]:
    """Return what the processes of a folder have printed, on each stream."""
    stdout, stderr = (Path(printed, name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return stdout, stderr


def _module_main(module: str, words: Sequence[str], folder: Path, environment: Mapping[str, str], printed: str) -> None:
    for stream, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(Path(printed, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv[1:] = words
    sys.modules.pop(module, None)  # a new process has not imported it yet, and runpy warns of one that has
    runpy.run_module(module, run_name="__main__", alter_sys=True)
