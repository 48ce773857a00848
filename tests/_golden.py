"""Golden trajectories: losses and weights of short runs of ``pipesgd.train``, which no refactoring may change.

    python tests/_golden.py            compares with golden.json; exit code 1 and the names of those that differ
    python tests/_golden.py --record   writes golden.json, after a change that is meant to change them

Ranks are forked from this process. torch is set to compute as every x86 processor can, so that bits do not depend on
the machine; they do depend on torch's version.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
"""Environment in which torch and its libraries compute the same bits on every x86 processor, square roots excepted: MKL
takes them from an approximation that differs between processors, so no run here has an optimizer of Adam's kind."""
GOLDEN = Path(__file__).with_name("golden.json")
PLAIN = (
    "--dataset digits --hidden-sizes 100 100 --batch-size 16 --lr 0.1 --momentum 0.9 --iterations 24 --seed 3 "
    "--checkpoint-iterations 8 --timeout 60"
)


@dataclass(frozen=True)
class Golden:
    """A run: its options, which replace those of ``PLAIN``, and its number of ranks."""

    words: str
    ranks: int = 3
    killed: bool = False
    """True if a rank is killed in the middle, so that the run is resumed."""


CONFIGURATIONS = {
    "plain": Golden(""),
    "plain, resumed": Golden("", killed=True),
    "width 1": Golden("--width 1"),
    "one cycle, whose start is synchronous, resumed": Golden("--schedule one-cycle", killed=True),
    "width 3, no prediction": Golden("--width 3 --prediction none"),
    "width 2, prediction local, nesterov, clipped": Golden("--prediction local --optimizer nesterov --clip-norm 1"),
    "int8, error feedback, small segments, two streams": Golden(
        "--codec int8 --error-feedback on --segment-bytes 1000 --connections 2"
    ),
    "int4, stochastic, resumed": Golden("--codec int4 --rounding stochastic --error-feedback on", killed=True),
    "topk": Golden("--codec topk"),
    "powersgd, resumed": Golden("--codec powersgd --low-rank 2", killed=True),
    "halving-doubling, bf16": Golden("--all-reduce halving-doubling --codec bf16", ranks=4),
    "recursive-doubling": Golden("--all-reduce recursive-doubling", ranks=4),
    "all-to-all, accumulation, guard": Golden("--all-reduce all-to-all --accumulation 2 --guard"),
    "native, convnet, buffers": Golden("--all-reduce native --model convnet --iterations 8"),
    "ddp": Golden("--strategy ddp"),
    "ps-sync": Golden("--strategy ps-sync"),
}


def trajectory(golden: Golden, folder: Path) -> dict[str, Any]:
    """Return the loss of every iteration, and a hash of the final weights."""
    from experiments.forked_ranks import TRAINING, Kill, run
    from experiments.kill_anywhere import log_of, trained

    kills = [Kill(phase=TRAINING, rank=1, call=12, seconds=0.0, all_ranks=True)] if golden.killed else []
    options = {one.split()[0]: f"--{one}" for one in f" {PLAIN} {golden.words}".split(" --")[1:]}
    if "model" in options:  # another one than mlp
        del options["hidden-sizes"]
    if run(" ".join(options.values()), golden.ranks, folder, kills) != len(kills):
        raise RuntimeError(log_of(folder))
    found = trained(folder)
    return {"losses": [loss for _, loss in found.losses], "weights": found.weights}


def trajectories() -> dict[str, dict[str, Any]]:
    """Run every configuration and return the trajectories by name."""
    _import_and_compile_once()
    found = {}
    for name, golden in CONFIGURATIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = trajectory(golden, Path(folder))
    gc.unfreeze()  # so that this process can end in good order
    return found


def _import_and_compile_once() -> None:
    """Do here what every forked rank would otherwise do for itself, and no more."""
    from experiments.forked_ranks import import_all
    from pipesgd.cli import parse
    from pipesgd.codecs.options import codec_named
    from pipesgd.reducers.make import compile_loops

    import_all()
    importlib.import_module("sklearn.datasets")
    parse(["--dataset", "digits"])  # tyro imports its parts when they are needed
    for codec in ("int8", "int4", "bf16"):
        compile_loops(codec_named(codec).make("cpu"), "cpu")
    gc.freeze()  # a rank that collects garbage would copy all of this


def main() -> None:
    """Compare the trajectories with golden.json, or record them."""
    if any(os.environ.get(name) != value for name, value in PORTABLE.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **PORTABLE})
    found = trajectories()
    if sys.argv[1:] == ["--record"]:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    differing = [name for name in {**golden, **found} if golden.get(name) != found.get(name)]
    if differing:
        sys.exit(f"trajectories must be those in {GOLDEN.name}; not so: {'; '.join(differing)}")


if __name__ == "__main__":
    sys.path += [str(Path(__file__).resolve().parent.parent)]
    main()
