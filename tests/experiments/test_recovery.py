"""Costs of a kill, from stamps that are given, and of a real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import recovery
from experiments.recovery import BATCH, BEHIND, ELASTIC, RANKS, RESTART, TORCHFT, cost, kill, ranks_of, read

BEFORE = [(0.1 * number, number) for number in range(11)]


@pytest.mark.parametrize(
    ("way", "pause", "begin", "log", "seconds", "samples"),
    [
        (ELASTIC, 0.0, 11, "2 slices (16 samples) are given out again", 0.0, 16),
        (ELASTIC, 0.4, 11, "1 slice (8 samples) is given out again\n" * 3, 0.4, 24),
        (RESTART, 5.0, 7, "", 5.0 + 0.4, 4 * RANKS * BATCH),
        (TORCHFT, 3.0, 10, "", 3.0 + 0.1, (RANKS - 1) * BATCH),
    ],
)
def test_what_is_lost_follows_from_when_which_iterations_were_done(
    way: str, pause: float, begin: int, log: str, seconds: float, samples: int
) -> None:
    after = [(1.1 + pause + 0.1 * index, begin + index) for index in range(BEHIND + 10)]
    found = cost(way, BEFORE, after, log)
    assert found["iteration_s"] == pytest.approx(0.1)
    assert found["seconds_lost"] == pytest.approx(seconds)
    assert found["samples_lost"] == samples


def test_a_line_that_is_half_written_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "stamps"
    file.write_text("1.5 7\n2.5 8\n3.5 1", encoding="ascii")
    assert read(file) == [(1.5, 7), (2.5, 8)]


@pytest.mark.slow
def test_ranks_are_found_by_their_environment(tmp_path: Path) -> None:
    file = tmp_path / "stamps"
    wait = [sys.executable, "-c", "print(flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    variables = [{"RANK": "2"}, {}]  # a rank, and one that starts ranks
    processes = [
        subprocess.Popen(wait, env={**os.environ, recovery.STAMPS: str(file), **own}, **pipes) for own in variables
    ]
    for process in processes:
        process.stdout.readline()
    assert ranks_of(file) == {2: processes[0].pid}
    assert ranks_of(tmp_path / "others") == {}
    for process in processes:
        process.communicate(b"\n")


@pytest.mark.slow
@pytest.mark.parametrize("way", [ELASTIC, RESTART])
def test_a_run_that_is_killed_recovers(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(recovery, "BEHIND", 20)
    killed: list[int] = []
    real = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: (killed.append(number), real(pid, number))[1])
    found = kill(way, 0)
    assert killed[0] == signal.SIGKILL
    assert found.iteration_s >= 0.05
    assert found.samples_lost >= BATCH
    assert (found.seconds_lost > 2.0) == (way == RESTART)
