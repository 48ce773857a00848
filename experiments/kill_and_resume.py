"""Kill -9 on a random rank at a random moment: does torchrun's restart end in exactly the same weights?

    python -m experiments.kill_and_resume      kill_and_resume.csv; exit code 1 if any run ends differently

One run is left alone. Every other run of the same command loses one rank at a moment drawn uniformly from
the time that the undisturbed run trained, is restarted by torchrun, and resumes from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from experiments import command
from experiments.results import REPOSITORY, Row, save
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.output import METRICS_FILE, SUMMARY_FILE

WORLD_SIZE = 4
ITERATIONS, QUICK_ITERATIONS = 600, 200
KILLS, QUICK_KILLS = 20, 2
POLL_SECONDS = 0.01
DEADLINE_SECONDS = 300.0
"""Seconds after which a run counts as hung."""

RESUMED = re.compile(r"continuing after iteration (\d+) of|no checkpoint yet: starting from the beginning")


@contextlib.contextmanager
def training(folder: Path, iterations: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start torchrun, yield it and end it; output goes to ``folder/log``, the run's files to ``folder/run``."""
    words = f"--max-restarts=3 -m pipesgd.train --dataset digits --model mlp --width 2 --iterations {iterations}"
    words += " --momentum 0.9 --checkpoint-iterations 25 --timeout 60 --output"
    arguments = command.torchrun(WORLD_SIZE, *words.split(), str(folder / "run"))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(arguments, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()  # torchrun ends its ranks too; nothing happens if it has ended
            process.wait()


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for ``process``; return True if it ends within ``seconds``."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def appears(path: Path, process: subprocess.Popen[bytes]) -> bool:
    """Wait for ``path``; return True if it appears in time, before ``process`` ends."""
    deadline = time.perf_counter() + DEADLINE_SECONDS
    while not path.exists() and time.perf_counter() < deadline:
        if ends_within(process, POLL_SECONDS):
            break
    return path.exists()


def undisturbed(folder: Path, iterations: int) -> tuple[str, float]:
    """Return the hash of the trained weights, and the seconds between the beginning and the end of training."""
    with training(folder, iterations) as process:
        if appears(folder / "run" / METRICS_FILE, process):
            begin = time.perf_counter()
            appears(folder / "run" / SUMMARY_FILE, process)
            seconds = time.perf_counter() - begin
        if not ends_within(process, DEADLINE_SECONDS) or process.returncode != 0:
            raise RunError(f"the undisturbed run must end with exit code 0; it said:\n{log_of(folder)}")
    return weights_sha256(folder), seconds


def disturbed(folder: Path, iterations: int, rank: int, delay: float, expected: str) -> Row | None:
    """Kill ``rank`` ``delay`` seconds after training began and return the outcome; None if it was too late."""
    begin = time.perf_counter()
    with training(folder, iterations) as process:
        if not appears(folder / "run" / METRICS_FILE, process):
            raise RunError(f"a run failed before it was disturbed; it said:\n{log_of(folder)}")
        if ends_within(process, delay):
            return None
        killed = time.perf_counter() - begin
        with contextlib.suppress(KeyError, ProcessLookupError):  # the rank has ended, so no restart follows
            os.kill(pids_of_ranks(process.pid)[rank], signal.SIGKILL)
        ended = ends_within(process, DEADLINE_SECONDS)
        wall = time.perf_counter() - begin
    restarts = list(RESUMED.finditer(log_of(folder)))
    if process.returncode == 0 and not restarts:
        return None
    return {
        "rank_killed": rank,
        "killed_after_start_s": killed,
        "restarts": len(restarts),
        "resumed_after_iteration": int(restarts[0][1] or 0) if restarts else None,
        "exit_code": process.returncode if ended else None,
        "identical": ended and process.returncode == 0 and weights_sha256(folder) == expected,
        "wall_s": wall,
    }


def pids_of_ranks(torchrun: int) -> dict[int, int]:
    """Return the process ID of each rank, among the children of the process ``torchrun``."""
    pids: dict[int, int] = {}
    for children in Path(f"/proc/{torchrun}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                pids |= {int(entry[5:]): pid for entry in environment if entry.startswith(b"RANK=")}
    return pids


def weights_sha256(folder: Path) -> str:
    """Return the hash of the trained weights, as the run in ``folder`` reports it."""
    summary = json.loads((folder / "run" / SUMMARY_FILE).read_text(encoding="utf-8"))
    return str(summary["weights_sha256"])


def log_of(folder: Path) -> str:
    """Return what the run in ``folder`` printed."""
    return (folder / "log").read_text(encoding="utf-8", errors="replace")


def compute(kills: int, iterations: int, seed: int, output: Path, console: Console) -> list[Row]:
    """Return a row for every kill that hit; the output of runs that ended differently is kept in ``output``."""
    chance = random.Random(seed)
    rows: list[Row] = []
    with command.progress(console, "kill and resume", kills + 1) as advance:
        with tempfile.TemporaryDirectory() as folder:
            expected, training_seconds = undisturbed(Path(folder), iterations)
        advance(1, f"undisturbed run done, {training_seconds:.1f} s of training")
        while len(rows) < kills:
            rank, delay = chance.randrange(WORLD_SIZE), chance.uniform(0.0, training_seconds)
            with tempfile.TemporaryDirectory() as folder:
                row = disturbed(Path(folder), iterations, rank, delay, expected)
                if row is None:
                    continue
                rows.append({"run": len(rows), **row})
                if not row["identical"]:
                    shutil.copy(Path(folder) / "log", output / f"kill_and_resume.run-{len(rows) - 1}.log")
            advance(1, f"{len(rows)} of {kills} killed, {sum(row['identical'] for row in rows)} identical")
    return rows


def show(rows: list[Row]) -> None:
    """Print the rows as a table for people."""
    title = f"{sum(row['identical'] for row in rows)} of {len(rows)} runs ended in the same weights"
    texts = [
        {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in row.items()}
        for row in rows
    ]
    command.show(title, texts)


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("kill_and_resume", __doc__)
    options.add_argument("--kills", type=command.at_least(1), help=f"runs with a kill ({KILLS}; quick: {QUICK_KILLS})")
    options.add_argument("--seed", type=command.at_least(0), default=0, help="seed of the ranks and moments (0)")
    arguments = command.parse(options, words)
    command.check_alone("kill_and_resume", by_torchrun, "it starts torchrun itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """The command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    iterations = QUICK_ITERATIONS if arguments.quick else ITERATIONS
    kills = arguments.kills or (QUICK_KILLS if arguments.quick else KILLS)
    rows = compute(kills, iterations, arguments.seed, arguments.output, console)
    save("kill_and_resume", rows, extra={"iterations": iterations}, folder=arguments.output)
    show(rows)
    if not all(row["identical"] for row in rows):
        raise RunError("every run must end in the weights of the undisturbed one; see the table")


if __name__ == "__main__":
    command.run(main)
