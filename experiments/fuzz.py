"""Thousands of wrong inputs: each must be accepted or refused in one line, in time, and nothing absurd accepted.

    python -m experiments.fuzz                                     fuzz.csv; exit code 1 if a case fails
    python -m experiments.fuzz --only "TOML options" --output DIR  some kinds of input
    python -m experiments.fuzz --show "TOML options" 17            one case and its outcome

A case fails if an error comes out that no user should see (a traceback), if there is no answer within 30 s, if an error
has several lines, or if something absurd is accepted: NaN, infinity, a negative or astronomical number, a foreign file.
Cases are drawn from the seed, each by itself. Finished cases are kept in runs/fuzz-SEED.jsonl: the same command resumes
where it was stopped, unless the code has changed.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import timing_model
from experiments import command
from experiments.fuzzing import files, messages, words
from experiments.fuzzing.cases import FAILURES, OUTCOMES, Target, draw, judge
from experiments.results import Row, save, sources
from pipesgd.checks import check_one_of
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

TARGETS = {target.name: target for target in (*words.TARGETS, *files.TARGETS, *messages.TARGETS)}
QUICK_SHARE = 50
"""Cases of a full run for each case of a quick run."""
RUNS = Path("runs")
"""Folder of the finished cases, relative to the folder that the command is started in (as in pipesgd.train)."""
HARNESS = (Path(__file__), Path(words.__file__).parent, Path(timing_model.__file__).parent)
"""Paths hashed besides pipesgd, so that cases of another harness or for another timing model do not count."""
MOST_SHOWN = 20
SHOWN_CHARACTERS = 300

Outcome = dict[str, Any]
"""Target, index, outcome, why, and seconds of a case."""


def kept(path: Path) -> list[Outcome]:
    """Return what an earlier run of the same code found; if there is none, start the file again."""
    state = sources(*HARNESS)[:16]
    try:
        first, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if json.loads(first) == {"code": state}:
            whole = [json.loads(line) for line in rest if line.endswith("\n")]
            path.write_text(first + "".join(json.dumps(one) + "\n" for one in whole), encoding="utf-8")
            return whole
    except (OSError, ValueError):
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"code": state}) + "\n", encoding="utf-8")
    return []


def compute(counts: dict[str, int], seed: int, path: Path, console: Console) -> list[Outcome]:
    """Return the outcomes of ``counts`` cases of each target; those that ``path`` holds are not tried again."""
    outcomes = kept(path)
    done = {(one["target"], one["index"]) for one in outcomes}
    missing = [(name, index) for name, number in counts.items() for index in range(number) if (name, index) not in done]
    if len(missing) < sum(counts.values()):
        say(console, f"{sum(counts.values()) - len(missing)} of {sum(counts.values())} cases are done")
    with (
        path.open("a", encoding="utf-8") as file,
        tempfile.TemporaryDirectory() as folder,
        command.progress(console, "fuzz", len(missing)) as advance,
    ):
        for name, index in missing:
            outcome = try_case(TARGETS[name], seed, index, Path(folder))
            outcomes.append(outcome)
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            failed = sum(one["outcome"] in FAILURES for one in outcomes)
            advance(1, f"{name}, {failed} failed")
    return [one for one in outcomes if one["index"] < counts.get(one["target"], 0)]


def try_case(target: Target, seed: int, index: int, folder: Path) -> Outcome:
    """Draw the case and try it."""
    own = folder / target.name.replace(" ", "-")
    own.mkdir(exist_ok=True)
    verdict = judge(target, draw(target, seed, index, own), own)
    return {
        "target": target.name,
        "index": index,
        "outcome": verdict.outcome,
        "why": verdict.why[:SHOWN_CHARACTERS],
        "seconds": round(verdict.seconds, 4),
    }


def summarize(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each target, and one for all."""
    rows: list[Row] = []
    for name in [*dict.fromkeys(one["target"] for one in outcomes), "all"]:
        own = [one for one in outcomes if name in (one["target"], "all")]
        counts = Counter(one["outcome"] for one in own)
        slowest = max(one["seconds"] for one in own)
        rows.append(
            {"input": name, "cases": len(own), **{kind: counts[kind] for kind in OUTCOMES}, "slowest_s": slowest}
        )
    return rows


def show_case(name: str, seed: int, index: int, console: Console) -> None:
    """Print a case and its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        case = draw(TARGETS[name], seed, index, Path(folder))
        say(console, repr(case))
        if isinstance(case, Path) and case.is_file():
            say(console, repr(case.read_bytes()[:5000]))
        verdict = judge(TARGETS[name], case, Path(folder))
        say(console, f"{verdict.outcome} after {verdict.seconds:.2f} s: {verdict.why}")


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    options = command.parser("fuzz", __doc__)
    options.add_argument(
        "--only", nargs="+", metavar="INPUT", help=f"inputs to fuzz: {', '.join(TARGETS)}; needs --output"
    )
    options.add_argument("--show", nargs=2, metavar=("INPUT", "CASE"), help="print one case and its outcome")
    options.add_argument("--seed", type=command.at_least(0), default=0, help="seed of the cases (0)")
    options.add_argument("--fresh", action="store_true", help="repeat finished inputs")
    arguments = command.parse(options, words)
    command.check_alone("fuzz", by_torchrun, "it needs one process")
    command.check_each_once(arguments, {"only": TARGETS})
    if arguments.show:
        name, case = arguments.show
        check_one_of("--show", name, list(TARGETS))
        if not (case.isascii() and case.isdecimal()):
            raise UserInputError(f"--show must name a case by its number; got {case!r}")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    torch.set_num_threads(1)
    if arguments.show:
        show_case(arguments.show[0], arguments.seed, int(arguments.show[1]), console)
        return
    share = QUICK_SHARE if arguments.quick else 1
    counts = {name: TARGETS[name].cases // share for name in arguments.only or TARGETS}
    path = RUNS / f"fuzz-{arguments.seed}.jsonl"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    outcomes = compute(counts, arguments.seed, path, console)
    failures = [one for one in outcomes if one["outcome"] in FAILURES]
    rows = summarize(outcomes)
    save("fuzz", rows, extra={"seed": arguments.seed, "failures": failures[:MOST_SHOWN]}, folder=arguments.output)
    command.show("Wrong input", [{name: str(value) for name, value in row.items()} for row in rows])
    for one in failures[:MOST_SHOWN]:
        say(console, f"{one['target']} {one['index']}: {one['outcome']}: {one['why']}")
    if failures:
        raise RunError(f"every case must be accepted or refused in one line; {len(failures)} were not")


if __name__ == "__main__":
    command.run(main)
