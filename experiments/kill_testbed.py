"""Leftovers of a testbed that is killed in the middle of a job: there must be none.

    python -m experiments.kill_testbed                      ten kills, every second one a Ctrl-C: kill_testbed.csv

Each run starts ``python -m experiments.testbed`` with a training that would not end, waits until it has written a
checkpoint, and sends SIGKILL to the command alone, or SIGINT to its process group, as a terminal does. Then it
counts the processes, their namespaces, and the bridges that are left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from experiments import command
from experiments.results import REPOSITORY, Row, save
from experiments.testbed.namespaces import descendants
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks

NODES = "4"
KILLS, QUICK_KILLS = 10, 2
START_SECONDS, END_SECONDS = 120.0, 30.0
TRAINING = "-m pipesgd.train --hidden-sizes 50 --iterations 1000000 --checkpoint-iterations 20 --output"


def kill_one(number: signal.Signals) -> Row:
    """Start a testbed with a job, kill it with signal ``number``, and count what is left."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--nodes", NODES, "--rate", "500mbit", "--", *TRAINING.split(), f"{folder}/run"]
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.testbed", *words],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        while not list(Path(folder).glob("run/checkpoints/*/shared.pt")):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RunError("the testbed must run a job before it can be killed; it ended or did not start one")
            time.sleep(0.05)
        family = descendants(process.pid)
        inside = namespaces_of(family) - namespaces_of([os.getpid()])
        handles = [os.pidfd_open(pid) for pid in family]
        begin = time.monotonic()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        process.wait(END_SECONDS)
        alive = [handle for handle in handles if not has_ended(handle, begin + END_SECONDS)]
        seconds = time.monotonic() - begin
        for handle in handles:
            os.close(handle)
    everybody = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {
        "signal": number.name,
        "processes": len(family),
        "namespaces": len(inside),
        "processes_left": len(alive),
        "namespaces_left": len(inside & namespaces_of(everybody)),
        "bridges_left": int(Path("/sys/class/net/switch").exists()),
        "seconds": round(seconds, 2),
    }


def has_ended(handle: int, deadline: float) -> bool:
    """Return True if the process of this pidfd ends before ``deadline``, a time of ``time.monotonic``."""
    return bool(select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0])


def namespaces_of(pids: Iterable[int]) -> set[str]:
    """Return the network and process namespaces that these processes are in."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            found |= {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("net", "pid")}
    return found


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("kill_testbed", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    # Where this runs in the background of a shell, SIGINT is ignored, and what it starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = []
    kills = QUICK_KILLS if arguments.quick else KILLS
    with command.progress(console, "killed testbeds", kills) as advance:
        for index in range(kills):
            rows.append(kill_one((signal.SIGKILL, signal.SIGINT)[index % 2]))
            advance(1, f"{index + 1} of {kills}")
    save("kill_testbed", rows, folder=arguments.output)
    command.show(
        "Left behind by a killed testbed",
        [{name.replace("_", " "): str(value) for name, value in row.items()} for row in rows],
    )
    if any(row[f"{what}_left"] for row in rows for what in ("processes", "namespaces", "bridges")):
        raise RunError("a killed testbed must leave nothing behind; see the table")


if __name__ == "__main__":
    command.run(main)
