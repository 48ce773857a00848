"""Seconds that importing pipesgd takes beyond importing torch.

    python -m experiments.bench_import              bench_import.csv

Each import runs in a process of its own that has imported torch before its clock starts. The cases take turns in every
round, and the files are in the system's cache after an untimed round. Importing torch itself is timed for comparison.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import Console

from experiments import command
from experiments.paired import interleave_here, interquartile_range, median
from experiments.results import REPOSITORY, Row, save
from pipesgd.ranks import Ranks

ROUNDS, QUICK_ROUNDS = 20, 1
TARGET_S = 0.3
"""Target for an import beyond torch's, in seconds."""
TORCH = "import torch"
CASES = (
    "import pipesgd",
    "from pipesgd import Pipelined",
    "from pipesgd import *",
    "import pipesgd.ddp, pipesgd.backend",
)


def import_seconds(statement: str, before: str) -> float:
    """Return the seconds that ``statement`` takes in a process that has run ``before``."""
    program = f"import time; {before}; begin = time.perf_counter(); {statement}; print(time.perf_counter() - begin)"
    words = [sys.executable, "-c", program]
    return float(subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout)


def summarize(seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return a row for each case; the import of torch has no target."""
    rows: list[Row] = []
    for case, times in seconds.items():
        target = None if case == TORCH else TARGET_S
        rows.append(
            {
                "case": case,
                "median_s": median(times),
                "iqr_s": interquartile_range(times),
                "target_s": target,
                "target_met": None if target is None else median(times) <= target,
                "rounds": len(times),
            }
        )
    return rows


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("bench_import", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    command.check_alone("bench_import", ranks.by_torchrun, "it starts processes of its own")
    contenders = {TORCH: partial(import_seconds, TORCH, "pass")}
    contenders |= {case: partial(import_seconds, case, TORCH) for case in CASES}
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    with command.progress(console, "imports", 1 + rounds) as advance:
        seconds = interleave_here(contenders, rounds, warm_up=1, after_round=lambda: advance(1, "round"))
    rows = summarize(seconds)
    save("bench_import", rows, folder=arguments.output)
    command.show(
        "Imports, beyond torch's",
        [
            {
                "case": row["case"],
                "ms": f"{row['median_s'] * 1e3:.1f}",
                "IQR ms": f"{row['iqr_s'] * 1e3:.1f}",
                "": {None: "", True: "met", False: "MISSED"}[row["target_met"]],
            }
            for row in rows
        ],
    )


if __name__ == "__main__":
    command.run(main)
