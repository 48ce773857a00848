"""torch's own tests of DDP and of collectives: what passes with gloo, and what with pipesgd's backend in its place.

    python -m experiments.torch_ddp_tests            two ranks, each backend in turn: torch_ddp_tests.csv

Needs the package expecttest, which torch's tests import. ``torch_ddp_suite`` says how they are run without a GPU. With
pipesgd, the large sums are either those of at least 1 MiB, as by default, or all sums of more than one value.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import command
from experiments.results import REPOSITORY, Row, save
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks

WORLD_SIZE = 2
CONTENDERS: dict[str, dict[str, str]] = {
    "gloo": {},
    "fp32": {"PIPESGD_CODEC": "fp32"},
    "fp32, all sums": {"PIPESGD_CODEC": "fp32", "PIPESGD_LEAST_BYTES": "8"},
    "int8": {"PIPESGD_CODEC": "int8"},
    "int8, all sums": {"PIPESGD_CODEC": "int8", "PIPESGD_LEAST_BYTES": "8"},
}
"""Environment of each run; all but the first use the backend pipesgd."""
QUICK = ("test_all_reduce_sum", "test_DistributedDataParallelCPU", "test_monitored_barrier_gloo")
SUITE_SECONDS = 900.0
KINDS = ("passed", "failed", "skipped")


def outcomes(contender: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Run torch's tests, or only those in ``names``; return by test what became of it, and why.

    Raises:
        RunError: the run did not come to its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "outcomes.json", Path(folder) / "log"
        backend = "gloo" if contender == "gloo" else "pipesgd"
        words = [sys.executable, "-m", "experiments.torch_ddp_suite", backend, str(file), str(WORLD_SIZE), *names]
        environment = os.environ | CONTENDERS[contender]
        with log.open("wb") as stream:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
            try:
                subprocess.run(words, cwd=REPOSITORY, env=environment, timeout=SUITE_SECONDS, check=False, **streams)
            except subprocess.TimeoutExpired:
                raise RunError(f"the tests with {contender} must end within {SUITE_SECONDS:g} s") from None
        if not file.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise RunError(f"the tests with {contender} must end; their last line: {(lines or [''])[-1]}")
        found: dict[str, list[str]] = json.loads(file.read_text(encoding="utf-8"))
        return found


def is_about_ddp(test: str) -> bool:
    """Return True if the test's name says that it is about DistributedDataParallel."""
    return "ddp" in test.lower() or "DistributedDataParallel" in test


def table(found: dict[str, dict[str, list[str]]]) -> list[Row]:
    """Return a row for each test: its outcome with every contender, and the reason of the first that is not a pass."""
    rows: list[Row] = []
    for test in found["gloo"]:
        of_test = {contender: outcome[test] for contender, outcome in found.items()}
        reasons = [f"{contender}: {why}" for contender, (kind, why) in of_test.items() if kind != "passed"]
        kinds = {contender: kind for contender, (kind, _) in of_test.items()}
        rows.append({"test": test, "ddp": is_about_ddp(test), **kinds, "why": reasons[0] if reasons else ""})
    return rows


def counted(rows: Sequence[Row], contender: str) -> dict[str, int]:
    """Return how many of the tests passed, failed and were skipped."""
    counts = Counter(row[contender] for row in rows)
    return {kind: counts[kind] for kind in KINDS}


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("torch_ddp_tests", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    command.check_alone("torch_ddp_tests", ranks.by_torchrun, "the tests start their ranks themselves")
    if importlib.util.find_spec("expecttest") is None:
        raise UserInputError("torch_ddp_tests must have the package expecttest, which torch's tests import")
    found = {}
    with command.progress(console, "torch's tests", len(CONTENDERS)) as advance:
        for contender in CONTENDERS:
            found[contender] = outcomes(contender, QUICK if arguments.quick else ())
            advance(1, contender)
    rows = table(found)
    summary = {
        about: {contender: counted([row for row in rows if row["ddp"] == ddp], contender) for contender in CONTENDERS}
        for about, ddp in (("DDP", True), ("other", False))
    }
    extra = {"ranks": WORLD_SIZE, "environments": CONTENDERS, "summary": summary}
    save("torch_ddp_tests", rows, extra=extra, folder=arguments.output)
    shown = [
        {"tests": about, "with": contender, **{kind: str(count) for kind, count in counts.items()}}
        for about, by_contender in summary.items()
        for contender, counts in by_contender.items()
    ]
    command.show("torch's own tests", shown)
    differing = [row for row in rows if any(row[contender] != row["gloo"] for contender in CONTENDERS)]
    if differing:
        command.show("Other than with gloo", [{name: str(value) for name, value in row.items()} for row in differing])


if __name__ == "__main__":
    command.run(main)
