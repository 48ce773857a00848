"""Finding the rank to kill, waiting for it, and reading the lines of a restarted run; real processes, no training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.kill_and_resume import RESUMED, appears, ends_within, pids_of_ranks


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with a rank that ends when its input does."""
    words = [sys.executable, "-c", "print('started', flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, env={**os.environ, "RANK": "3"}) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its environment can be read from now on
        yield process
        process.kill()


def test_a_rank_is_found_among_the_children(waiting: subprocess.Popen[bytes]) -> None:
    assert pids_of_ranks(os.getpid())[3] == waiting.pid
    assert pids_of_ranks(waiting.pid) == {}


def test_a_process_is_waited_for(waiting: subprocess.Popen[bytes]) -> None:
    assert not ends_within(waiting, 0.01)
    waiting.kill()
    assert ends_within(waiting, 60.0)


def test_a_file_is_waited_for_while_the_process_lives(waiting: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    assert appears(tmp_path / "there", waiting)
    waiting.kill()
    assert not appears(tmp_path / "never", waiting)


@pytest.mark.parametrize(
    ("line", "iteration"),
    [("continuing after iteration 475 of 1500", "475"), ("no checkpoint yet: starting from the beginning", None)],
)
def test_what_a_restarted_run_says_is_understood(line: str, iteration: str | None) -> None:
    found = RESUMED.search(f"mlp on digits\n{line}\n")
    assert found is not None
    assert found[1] == iteration
    assert RESUMED.search("mlp on digits\n") is None
