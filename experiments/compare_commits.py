"""Cost of a step in this version and in an earlier commit, interleaved: ratios by row, and their mean.

    python -m experiments.compare_commits --baseline c7f0a3b      compare_commits.csv

The two versions take turns: in every round each runs once, in rotated order. There are several kinds of turn. One on
loopback starts four ranks and times blocks of iterations, as bench_pipelined does; one on the testbed is a run of
pipesgd.train on four nodes at 200 Mbit/s, with the MLP 784-1000-1000-10 and 512 samples a rank; the others run a short
bench. Each version is measured by the programs of its own commit, since modules are renamed between commits. A ratio
is the time of this version over that of the baseline in the same round. The table has the geometric mean of ratios,
with a bootstrap interval over rounds. Parts that both versions share (DistributedDataParallel and torch's own
all-reduce) are measured as controls: their ratios show how large the noise is.

The baseline is checked out into a temporary folder. Finished turns are kept in runs/compare_commits.json, by a hash of
this version's code: the same command resumes where it was stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments import command
from experiments.cells import sources
from experiments.kept_runs import KeptRuns
from experiments.paired import CONFIDENCE, RESAMPLES, Ratio, median, turns
from experiments.results import REPOSITORY, Row, load, save
from experiments.testbed import Link, Testbed
from experiments.testbed_jobs import run_job
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.output import SUMMARY_FILE

STATE = Path("runs/compare_commits.json")
"""Record of finished turns, relative to the folder that the command is started in (as in pipesgd.train)."""
ROUNDS, QUICK_ROUNDS = 20, 2
RANKS, RATE = 4, 200e6
MEAN_AT_MOST, LOW_END_AT_MOST = 1.01, 1.02
"""Targets for the geometric mean over all rows but controls, and for the low end of every interval."""
TURN_SECONDS = 300.0
"""Seconds after which a turn counts as hung."""
CONTROLS = ("ddp", "torch's own")
"""Parts of the names of rows that measure what both versions share."""
BLOCKS = Path("experiments", "timed_blocks.py")
"""Program of a turn on loopback, relative to the folder of a version."""
CELL = (
    "--dataset fashion-mnist --model mlp --hidden-sizes 1000 1000 --batch-size 512 --lr 0.05 --iterations 16 "
    "--checkpoint-iterations 1000000"
)
CELLS = {"testbed, width 2": "--width 2", "testbed, width 2, int8": "--width 2 --codec int8"}
NEW, OLD = "this", "baseline"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A short bench, and the columns where its table has the seconds."""

    name: str
    options: str
    keys: tuple[str, ...]
    """Columns that name a row."""
    columns: dict[str, str]
    """Columns of seconds, each with the suffix that it adds to the row's name."""
    ranks: int = 0
    """Number of ranks that torchrun starts; 0 for a bench of one process."""


BENCHES = {
    bench.name: bench
    for bench in (
        Bench(
            name="bench_ring",
            options="--quick",
            keys=("p", "nbytes"),
            columns={"ring_median_s": "", "native_median_s": ", torch's own"},
            ranks=2,
        ),
        Bench(
            name="bench_codecs",
            options="--codecs bf16 int8 int4 --rivals",
            keys=("size", "contender", "operation"),
            columns={"median_s": ""},
        ),
        Bench(name="bench_timing_model", options="--quick", keys=("case",), columns={"median_s": ""}),
    )
}
KINDS = ("loopback", "testbed", *BENCHES)
HARNESS = (
    Path(__file__),
    REPOSITORY / BLOCKS,
    *(
        Path(__file__).with_name(f"{name}.py")
        for name in (*BENCHES, "bench_pipelined", "loops", "paired", "testbed_jobs")
    ),
)
"""Files that are hashed with the measured code, so that results of another harness do not count."""


@dataclass(frozen=True)
class Turn:
    """The times of one version in one round."""

    seconds: dict[str, float]
    """Seconds by row."""


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Yield a temporary folder with the files of ``commit``. Raises ``UserInputError`` if there is no such commit."""
    with tempfile.TemporaryDirectory(prefix="baseline-") as name:
        folder = Path(name) / "code"
        done = _git("worktree", "add", "--detach", str(folder), commit)
        if done.returncode:
            raise UserInputError(f"baseline must be a commit of this repository; got {commit}: {done.stderr.strip()}")
        try:
            if not (folder / BLOCKS).exists():
                raise UserInputError(f"baseline must be a commit that has {BLOCKS}; got {commit}")
            yield folder
        finally:
            _git("worktree", "remove", "--force", str(folder))


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)


def blocks_turn(code: Path, quick: bool) -> dict[str, float]:
    """Time blocks of iterations on four ranks over loopback, with the trainer in the folder ``code``."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "seconds.json"
        _run(command.torchrun(RANKS, str(code / BLOCKS), str(out), *(["quick"] if quick else [])), code)
        seconds: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
        return seconds


def bench_turn(code: Path, bench: Bench) -> dict[str, float]:
    """Run a bench in the folder ``code`` and return the seconds in its table, by the row's name."""
    with tempfile.TemporaryDirectory() as name:
        words = ["-m", f"experiments.{bench.name}", *bench.options.split(), "--output", name]
        _run(command.torchrun(bench.ranks, *words) if bench.ranks else [sys.executable, *words], code)
        [table] = Path(name).glob("*.csv")
        return {
            f"{bench.name}: {' '.join(str(row[key]) for key in bench.keys)}{suffix}": row[column]
            for row in load(table)
            for column, suffix in bench.columns.items()
        }


def _run(words: Sequence[str], code: Path) -> None:
    done = subprocess.run(
        words, cwd=code, env=_environment(code), capture_output=True, text=True, timeout=TURN_SECONDS, check=False
    )
    if done.returncode:
        raise RunError(f"a turn of {code.name} must succeed; it said: {done.stderr[-1000:]}")


def testbed_turn(testbed: Testbed, code: Path) -> dict[str, float]:
    """Run each of ``CELLS`` on the testbed, with the trainer in the folder ``code``."""
    seconds = {}
    with tempfile.TemporaryDirectory() as name:
        for number, (row, words) in enumerate(CELLS.items()):
            folder = Path(name) / str(number)
            line = ["-m", "pipesgd.train", *CELL.split(), *words.split(), "--output", str(folder)]
            log = Path(name) / f"{number}.log"
            failure = run_job(testbed, line, log, deadline=TURN_SECONDS, cwd=code, env=_environment(code))
            if failure is not None:
                raise RunError(f"a turn of {code.name} must succeed; got {failure}")
            summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
            seconds[row] = max(summary["iteration_seconds_of_ranks"])
    return seconds


def _environment(code: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}


def compute(arguments: Namespace, kept: KeptRuns[Turn], console: Console) -> dict[str, list[list[float]]]:
    """Return, by row, the times of this version and of the baseline, in the order of rounds."""
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    kinds = arguments.only or list(KINDS)
    key = f"{arguments.baseline}, code {sources(*HARNESS)[:16]}{', quick' if arguments.quick else ''}"
    done = kept.load()
    todo = [
        (kind, which, index) for index in range(-1, rounds) for kind in kinds for which in turns([NEW, OLD], index)
    ]  # round -1 warms up: loops are compiled, files are read into memory
    missing = sum(f"{key}, {kind}, {which}, {index}" not in done for kind, which, index in todo)
    command.say_kept(console, len(todo), missing)
    seconds: dict[str, list[list[float]]] = {}
    with contextlib.ExitStack() as stack:
        code = {NEW: REPOSITORY, OLD: stack.enter_context(checkout(arguments.baseline))}
        turn: dict[str, Callable[[Path], dict[str, float]]] = {
            "loopback": partial(blocks_turn, quick=arguments.quick),
            **{name: partial(bench_turn, bench=bench) for name, bench in BENCHES.items()},
        }
        if "testbed" in kinds:
            turn["testbed"] = partial(testbed_turn, stack.enter_context(Testbed(nodes=RANKS, link=Link(rate=RATE))))
        advance = stack.enter_context(command.progress(console, "comparison", max(1, missing)))
        for kind, which, index in todo:
            words = f"{key}, {kind}, {which}, {index}"
            if words not in done:
                done[words] = Turn(turn[kind](code[which]))
                kept.add(words, done[words])
                advance(1, f"round {index + 1} of {rounds}, {kind}, {which}")
            if index >= 0:
                for row, time in done[words].seconds.items():
                    seconds.setdefault(row, [[], []])[which == OLD].append(time)
    return seconds


def geometric(ratios: Sequence[Sequence[float]]) -> Ratio:
    """Return the geometric mean of ratios, (rows, rounds), with a percentile bootstrap interval over rounds.

    >>> geometric([[2.0, 2.0], [0.5, 0.5]])
    Ratio(median=1.0, low=1.0, high=1.0)
    """
    logs = np.log(np.asarray(ratios, float)).mean(axis=0)  # (rounds,)
    drawn = np.random.default_rng(0).choice(logs, (RESAMPLES, logs.size)).mean(axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Ratio(*(round(float(np.exp(one)), 12) for one in (logs.mean(), low, high)))


def summarize(seconds: Mapping[str, Sequence[Sequence[float]]]) -> list[Row]:
    """Return a line for every row, and one for the mean of those that are not controls."""
    ratios = {row: np.divide(this, old).tolist() for row, (this, old) in seconds.items()}
    ours = [row for row in ratios if not is_control(row)]
    lines = [
        _line(row, median(seconds[row][0]), median(seconds[row][1]), geometric([ratios[row]]), len(ratios[row]))
        for row in ratios
    ]
    everything = geometric([ratios[row] for row in ours])
    return [*lines, _line("all but controls", None, None, everything, min(len(ratios[row]) for row in ours))]


def _line(row: str, this: float | None, baseline: float | None, ratio: Ratio, rounds: int) -> Row:
    return {
        "row": row,
        "this_median_s": this,
        "baseline_median_s": baseline,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "rounds": rounds,
    }


def is_control(row: str) -> bool:
    """Return True if the row measures what both versions share."""
    return any(word in row for word in CONTROLS)


def missed(rows: Sequence[Row]) -> list[str]:
    """Return the names of the rows that missed their target."""
    ours = [row for row in rows if not is_control(row["row"])]
    found = [row["row"] for row in ours if row["ratio_low"] > LOW_END_AT_MOST]
    if rows[-1]["ratio"] > MEAN_AT_MOST:
        found.append(rows[-1]["row"])
    return found


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table for people."""
    command.show(
        f"This code's time / the baseline's; target: {MEAN_AT_MOST} on average, no interval above {LOW_END_AT_MOST}",
        [
            {
                "": row["row"],
                "ms": "" if row["this_median_s"] is None else f"{1e3 * row['this_median_s']:.2f}",
                "baseline ms": "" if row["baseline_median_s"] is None else f"{1e3 * row['baseline_median_s']:.2f}",
                "ratio": f"{row['ratio']:.4f}",
                "95 %": f"{row['ratio_low']:.4f} to {row['ratio_high']:.4f}",
            }
            for row in rows
        ],
    )


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    options = command.parser("compare_commits", __doc__)
    options.add_argument("--baseline", required=True, metavar="COMMIT", help="version to compare with")
    options.add_argument(
        "--rounds", type=command.at_least(2), help=f"rounds of both versions ({ROUNDS}; quick: {QUICK_ROUNDS})"
    )
    options.add_argument(
        "--only", nargs="+", choices=KINDS, metavar="KIND", help=f"kinds of turns: {', '.join(KINDS)} (all)"
    )
    options.add_argument("--fresh", action="store_true", help="repeat kept turns")
    arguments = command.parse(options, words)
    command.check_alone("compare_commits", by_torchrun, "it starts torchrun itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    kept = KeptRuns(STATE.resolve(), Turn, fresh=arguments.fresh)
    rows = summarize(compute(arguments, kept, console))
    save("compare_commits", rows, extra={"baseline": arguments.baseline, "cell": CELL}, folder=arguments.output)
    show(rows)
    if slow := missed(rows):
        raise RunError(f"the step must not have become slower; not so: {'; '.join(slow)}")


if __name__ == "__main__":
    command.run(main)
