"""Kills inside training, checkpoints, resuming and evaluation: does every run end in exactly the same weights?

    python -m experiments.kill_anywhere      kill_anywhere.csv; exit code 1 if any run ends differently

A hundred runs of a second or two, half of them with DDP. Their ranks are forked from this process instead of started by
torchrun, whose own restarts tests/test_torchrun.py tries. A kill is at a random moment of a random call in its phase;
"resume" is a kill in training and another one while the checkpoint is being loaded. Half of the kills hit all ranks at
once. The weights and every logged loss must equal those of the run that was left alone. Finished runs are kept in
runs/kill_anywhere.json, by a hash of the code: the same command continues where it was stopped.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import command, forked_ranks
from experiments.forked_ranks import DURATIONS_FILE, PHASES, TRAINING, Kill
from experiments.kept_runs import KeptRuns
from experiments.results import save, sources
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.metrics import read_metrics
from pipesgd.run.output import METRICS_FILE, SUMMARY_FILE

STATE = Path("runs/kill_anywhere.json")
"""File of the kept runs, below the folder where the command is started, as with pipesgd.train."""
HARNESS = (Path(__file__), Path(forked_ranks.__file__))
"""Files hashed in addition to the code that is measured: results of another harness do not count."""
WORLD_SIZE = 3
WORDS = (
    "--dataset digits --model mlp --hidden-sizes 32 --batch-size 64 --iterations 40 --momentum 0.9 "
    "--checkpoint-iterations 5 --timeout 60"
)
STRATEGIES = "--width 2", "--strategy ddp"
"""Options added to ``WORDS``, one of them in each run."""
KILLS, QUICK_KILLS = 100, 4
RESUMED = re.compile(r"continuing after iteration (\d+)")


@dataclass(frozen=True, kw_only=True)
class Killed:
    """Outcome of one run."""

    run: int
    strategy: str
    """Its options, of ``STRATEGIES``."""
    phase: str
    rank_killed: int
    all_ranks: bool
    call: int
    """Index of the call of the phase's function, from 0."""
    seconds_into_call: float
    resumed_after_iteration: int | None
    """Iteration after which the last restart resumed; None if it began from scratch, or if there was no restart."""
    identical: bool
    """True if weights and losses are those of the undisturbed run."""
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The part of a run's outcome that must not depend on kills."""

    weights: str
    losses: tuple[tuple[int, float], ...]
    """Iteration and loss of every line of the metrics."""


def trained(folder: Path) -> Trained:
    """Return the outcome of the run in ``folder``."""
    summary = json.loads((folder / "run" / SUMMARY_FILE).read_text(encoding="utf-8"))
    lines = read_metrics(folder / "run" / METRICS_FILE)
    return Trained(weights=summary["weights_sha256"], losses=tuple((line["iteration"], line["loss"]) for line in lines))


def strategy_of(run: int) -> str:
    """Return the options, of ``STRATEGIES``, of a run: they take turns from run to run, and in each phase."""
    return STRATEGIES[(run + run // len(PHASES)) % len(STRATEGIES)]


def undisturbed(strategy: str) -> tuple[Trained, dict[str, list[float]]]:
    """Return the outcome without a kill, and the seconds of each call, by phase; a resumed run gives those of loading.

    Raises:
        RunError: an undisturbed run fails.
    """
    found, durations = [], []
    for kills in ([], [Kill(phase=TRAINING, rank=0, call=25, seconds=0.0, all_ranks=True)]):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if forked_ranks.run(f"{WORDS} {strategy}", WORLD_SIZE, folder, kills) != len(kills):
                raise RunError(f"a run that is left alone must succeed; it said:\n{log_of(folder)}")
            found.append(trained(folder))
            durations.append(json.loads((folder / DURATIONS_FILE).read_text(encoding="utf-8")))
    if found[0] != found[1]:
        raise RunError("a run that was killed in iteration 25 must end as the undisturbed one does; it did not")
    return found[0], durations[0] | {"resume": durations[1]["resume"]}


def kills_of(run: int, seed: int, durations: Mapping[str, Sequence[float]]) -> list[Kill]:
    """Return the kills of one run: phases take turns, and ``seed`` and the run's number determine the rest."""
    chance = random.Random(f"{seed}/{run}")
    phase = list(PHASES)[run % len(PHASES)]

    def kill(phase: str) -> Kill:
        # A run that is killed in training in order to be resumed must have written something by then.
        calls = range(1, len(durations[phase])) if len(durations[phase]) > 1 else range(1)
        return Kill(
            phase=phase,
            rank=chance.randrange(WORLD_SIZE),
            call=chance.choice(calls),
            seconds=chance.uniform(0.0, max(durations[phase])),
            all_ranks=chance.random() < 0.5,
        )

    return [kill(TRAINING), kill(phase)] if phase == "resume" else [kill(phase)]


def killed(run: int, kills: Sequence[Kill], expected: Trained, output: Path) -> Killed | None:
    """Make one run; keep its log in ``output`` if the run ends differently. Return None if a kill came too late."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hits = forked_ranks.run(f"{WORDS} {strategy_of(run)}", WORLD_SIZE, folder, kills)
        if hits is not None and hits < len(kills):
            return None
        identical = hits is not None and trained(folder) == expected
        resumed = RESUMED.findall(log_of(folder))
        if not identical:
            shutil.copy(folder / "log", output / f"kill_anywhere.run-{run}.log")
    last = kills[-1]
    return Killed(
        run=run,
        strategy=strategy_of(run),
        phase=last.phase,
        rank_killed=last.rank,
        all_ranks=last.all_ranks,
        call=last.call,
        seconds_into_call=last.seconds,
        resumed_after_iteration=int(resumed[-1]) if resumed else None,
        identical=identical,
        wall_s=time.perf_counter() - begin,
    )


def log_of(folder: Path) -> str:
    """Return what the run in ``folder`` printed."""
    path = folder / "log"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def compute(number: int, seed: int, kept: KeptRuns[Killed], output: Path, console: Console) -> list[Killed]:
    """Return ``number`` runs with kills that hit; those that are not kept yet are made now."""
    rows: list[Killed] = []
    key = f"seed {seed}, code {sources(*HARNESS)[:16]}, run"
    done = kept.load()
    missing = max(0, number - sum(words.startswith(key) for words in done))
    command.say_kept(console, number, missing)
    forked_ranks.import_all()
    alone = {strategy: undisturbed(strategy) for strategy in STRATEGIES}
    run = 0
    with command.progress(console, "killed runs", max(1, missing)) as advance:
        while len(rows) < number:
            words = f"{key} {run}"
            row = done.get(words)
            if row is None:
                expected, durations = alone[strategy_of(run)]
                row = killed(run, kills_of(run, seed, durations), expected, output)
                if row is not None:
                    kept.add(words, row)
                    advance(1, f"{len(rows) + 1} of {number}")
            if row is not None:
                rows.append(row)
            run += 1
    return rows


def show(rows: Sequence[Killed]) -> None:
    """Print a line for every phase of every strategy."""
    lines = []
    for strategy, phase in itertools.product(STRATEGIES, PHASES):
        own = [row for row in rows if (row.strategy, row.phase) == (strategy, phase)]
        same = sum(row.identical for row in own)
        lines.append({"options": strategy, "killed in": phase, "runs": str(len(own)), "identical": str(same)})
    command.show(f"{sum(row.identical for row in rows)} of {len(rows)} runs ended in the same weights", lines)


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("kill_anywhere", __doc__)
    options.add_argument("--kills", type=command.at_least(1), help=f"runs with a kill ({KILLS}; quick: {QUICK_KILLS})")
    options.add_argument("--seed", type=command.at_least(0), default=0, help="seed of the ranks and moments (0)")
    options.add_argument("--fresh", action="store_true", help="repeat kept runs")
    arguments = command.parse(options, words)
    command.check_alone("kill_anywhere", by_torchrun, "it forks its ranks itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    kept = KeptRuns(STATE.resolve(), Killed, fresh=arguments.fresh)
    number = arguments.kills or (QUICK_KILLS if arguments.quick else KILLS)
    found = compute(number, arguments.seed, kept, arguments.output, console)
    rows: list[dict[str, Any]] = [dataclasses.asdict(one) for one in found]
    save("kill_anywhere", rows, extra={"options": WORDS, "strategies": STRATEGIES}, folder=arguments.output)
    show(found)
    if different := [one.run for one in found if not one.identical]:
        raise RunError(f"every run must end in the weights of the undisturbed one; not so: {different}")


if __name__ == "__main__":
    command.run(main)
