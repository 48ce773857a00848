"""Time blocks of iterations of the trainer that is imported, once: ``torchrun ... timed_blocks.py OUT [quick]``.

Run this as a file, with the trainer and the experiments of its own commit in PYTHONPATH. Rank 0 writes the seconds
that an iteration takes on the slowest rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import paired
from experiments.bench_pipelined import UNTIMED_ITERATIONS, WORKLOADS, make_blocks
from experiments.loops import make_loops
from pipesgd.config import DEFAULT_TIMEOUT
from pipesgd.data import load_dataset
from pipesgd.exit import run_and_exit
from pipesgd.ranks import Ranks

BLOCK, LEFT_OUT = 10, "local (no communication)"


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Time them."""
    data = ranks.raise_together("data", lambda: load_dataset("fashion-mnist", None, image_size=64))
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    seconds = {}
    for workload in WORKLOADS[:1] if "quick" in words else WORKLOADS:
        loops = make_loops(workload.build(data), ranks)
        loops.pop(LEFT_OUT).close()
        blocks = make_blocks(loops, workload.batches(data, ranks, UNTIMED_ITERATIONS + BLOCK))
        for name, times in paired.interleave(blocks, rounds=1, warm_up=1).items():
            seconds[f"{workload.name}: {name}"] = float(times[0])
        for loop in loops.values():
            loop.close()
    if ranks.rank == 0:
        Path(words[0]).write_text(json.dumps(seconds), encoding="utf-8")


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
