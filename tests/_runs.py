"""Whole runs of the command in forked ranks, and of the programs in examples/, and their results."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import TIMEOUT, run_as_ranks, run_module, run_ranks
from conftest import REPOSITORY

from experiments import timed_configurations
from experiments.command import torchrun
from pipesgd.calibrate import calibrate
from pipesgd.cli import parse
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks, Standing
from pipesgd.run.console import screen
from pipesgd.run.output import TAKEN
from pipesgd.train import train

EXAMPLES = REPOSITORY / "examples"
SHORT = "--hidden-sizes 20 --batch-size 16 --iterations 12 --lr 0.05"
"""Options of a run that takes no longer than it must."""


def train_as_a_rank(ranks: Ranks, words: list[str], restart_count: int = 0) -> tuple[str, str, str]:
    """Run the command once and return (kind and text of the error, stdout, stderr)."""
    ranks.restart_count = restart_count
    if restart_count:
        ranks.mark_job(f"{TAKEN} {parse(words).run.output}")
    out = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            train(words, ranks, screen(ranks, out))
            error = ""
        except (UserInputError, RunError) as failure:
            error = f"{type(failure).__name__}: {failure}"
    return error, out.getvalue(), err.getvalue()


def train_each_as_a_rank(ranks: Ranks, runs: dict[str, list[str]]) -> dict[str, str]:
    """Run the command once for each of ``runs``, with connections of its own; return the kinds and texts of errors."""
    multiprocessing.current_process().daemon = False  # a daemon may have no loader workers
    errors = {}
    for name, words in runs.items():
        own = Ranks(
            rank=ranks.rank,
            world_size=ranks.world_size,
            store=dist.PrefixStore(name, ranks.store),
            local_rank=ranks.rank,
            standing=Standing(TIMEOUT),
        )
        errors[name], _, _ = train_as_a_rank(own, words)
        own.leave()
    return errors


def train_on_forked_ranks(words: list[str], world_size: int) -> str | None:
    """Train on forked ranks instead of those of ``run_training``; return the error of rank 0, if there is one."""
    errors = [error for error, _, _ in run_ranks(world_size, train_as_a_rank, words, process_group=False)]
    return errors[0] or None


def run_job_on_forked_ranks(testbed: object, words: Sequence[str], log: Path, *, deadline: float) -> None:
    """Do a job of experiments that ``run_job`` would do on a testbed of two nodes; a failure is raised."""
    run_ranks(2, _do_job, words[1], list(words[2:]), process_group=False)


def _do_job(ranks: Ranks, module: str, words: list[str]) -> None:
    jobs = {"pipesgd.calibrate": calibrate, "experiments.timed_configurations": timed_configurations.main}
    jobs[module](words, ranks, screen(ranks, io.StringIO()))


def run(world_size: int, words: str, output: Path, restart_count: int = 0) -> list[tuple[str, str, str]]:
    options = [*shlex.split(words), "--output", str(output)]
    return run_ranks(world_size, train_as_a_rank, options, restart_count, process_group=False)


def summary(output: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return result


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """Return iteration and accuracy of each evaluation that TensorBoard shows."""
    # Imported here: the ranks that use this module, and their fork server, need no reader of events.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("test/accuracy")]


def lose_the_last_checkpoint(output: Path) -> None:
    """Delete the last checkpoint, as if the run had been interrupted before its end."""
    last = max((output / "checkpoints").iterdir(), key=lambda path: int(path.name.partition("-")[2]))
    shutil.rmtree(last)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files in a folder, by their paths in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def succeed(world_size: int, words: str, output: Path, restart_count: int = 0) -> dict[str, Any]:
    results = run(world_size, words, output, restart_count)
    assert [error for error, _, _ in results] == [""] * world_size
    return summary(output)


def _in_folder(ranks: Ranks, folder: str, words: list[str]) -> tuple[str, str, str]:
    sys.path.insert(0, folder)
    os.environ["OWN_RANK"] = str(ranks.rank)
    return train_as_a_rank(ranks, words)


def run_in(folder: Path, world_size: int, words: str, output: Path) -> list[tuple[str, str, str]]:
    """Run the command as ``run`` does, where modules in ``folder`` can be imported; OWN_RANK is the rank."""
    options = [*shlex.split(words), "--output", str(output)]
    return run_ranks(world_size, _in_folder, str(folder), options, process_group=False)


def succeed_in(folder: Path, world_size: int, words: str, output: Path) -> dict[str, Any]:
    """Run the command as ``run_in`` does, without an error; return its summary."""
    results = run_in(folder, world_size, words, output)
    assert [error for error, _, _ in results] == [""] * world_size
    return summary(output)


def program_of(name: str) -> str:
    """Return the code of a program of examples/, as pages show it: without its docstring and future imports."""
    program = (EXAMPLES / name).read_text(encoding="utf-8")
    return program.partition('"""\n\n')[2].partition("\n")[2].lstrip("\n")


def shown_programs(page: str) -> list[str]:
    """Return the blocks of Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def command_in(text: str) -> list[str]:
    """Return the first command of a page or a docstring, as words after torchrun's name."""
    found = re.search(r"^    torchrun (.*?[^\\])$", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return shlex.split(found[1].replace("\\\n", " "))


def succeed_as_told(text: str, output: Path) -> dict[str, Any]:
    """Run the first command of a page or a docstring in examples/, in forked ranks; return its summary."""
    words = command_in(text)
    start = words.index("pipesgd.train") + 1
    return succeed_in(EXAMPLES, int(words[1]), shlex.join(words[start:]), output)


def run_words(words: list[str], **environment: str) -> str:
    """Run torchrun with ``words`` in examples/; return what it printed."""
    return _run_torchrun(words, EXAMPLES, environment={**os.environ, **environment})


def run_program(program: Path, folder: Path, *arguments: str, deadline: float = 120.0) -> str:
    """Run a program by torchrun on two ranks, in ``folder``; return what it printed."""
    _, _, _, *words = torchrun(2, str(program), *arguments)
    return _run_torchrun(words, folder, deadline=deadline)


def _run_torchrun(words: list[str], folder: Path, **options: Any) -> str:
    """Run torchrun, which itself need not import torch again; its ranks are processes as they always are."""
    done = run_module("torch.distributed.run", *words, folder=folder, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_example(name: str, folder: Path) -> str:
    """Run the program ``name`` of examples/ on two ranks, in ``folder``; return what it printed."""
    return run_as_ranks(2, EXAMPLES / name, folder)


def run_scenario(program: Path, scenario: str, folder: Path) -> list[Any]:
    """Run a scenario of a program of tests/integrations; return what each rank found."""
    run_program(program, folder, scenario, str(folder), deadline=170)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


def on_a_gpu(*scenarios: str) -> list[Any]:
    """Return parameters of a test for these scenarios of such a program with a GPU that its two ranks share."""
    without = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    return [pytest.param(f"{scenario} on a GPU", marks=without) for scenario in scenarios]
