"""Whole runs of the command in forked ranks, and of the programs in examples/, and their results."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from _ranks import run_ranks
from conftest import REPOSITORY

from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import screen
from pipesgd.run.output import TAKEN
from pipesgd.train import train


def train_as_a_rank(ranks: Ranks, words: list[str], restart_count: int = 0) -> tuple[str, str, str]:
    """Run the command once and return (kind and text of the error, stdout, stderr)."""
    ranks.restart_count = restart_count
    if restart_count:
        ranks.mark_job(TAKEN)
    out = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            train(words, ranks, screen(ranks, out))
            error = ""
        except (UserInputError, RunError) as failure:
            error = f"{type(failure).__name__}: {failure}"
    return error, out.getvalue(), err.getvalue()


def run(world_size: int, words: str, output: Path, restart_count: int = 0) -> list[tuple[str, str, str]]:
    options = [*shlex.split(words), "--output", str(output)]
    return run_ranks(world_size, train_as_a_rank, options, restart_count, process_group=False)


def summary(output: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return result


def succeed(world_size: int, words: str, output: Path, restart_count: int = 0) -> dict[str, Any]:
    results = run(world_size, words, output, restart_count)
    assert [error for error, _, _ in results] == [""] * world_size
    return summary(output)


def run_example(name: str, folder: Path, world_size: int = 2, *arguments: str) -> str:
    """Run the program ``name`` of examples/ by torchrun in ``folder``; return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command += [str(REPOSITORY / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
