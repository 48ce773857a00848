"""Run all experiments again, one after the other, and draw all figures; this takes many hours.

    python -m experiments                          those that are not done yet
    python -m experiments --list                   what there is, and how long each takes
    python -m experiments --only bench_codecs      some of them, done or not
    python -m experiments --fresh                  all, from the beginning

Finished experiments are recorded in runs/experiments.json: the same command resumes where it was stopped. Long
experiments also keep their own finished runs, which are forgotten when an experiment starts, not when it resumes. A
failed experiment does not keep the others from running; the command then exits with 1, and the next call tries the
failed one again. Experiments on emulated links need root or namespaces, and bench_gpu a GPU as well.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import command
from experiments.results import REPOSITORY, code_state, write_json
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

STATE = Path("runs/experiments.json")
"""Record of finished experiments, relative to the folder that the command is started in (as in pipesgd.train)."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A command and its approximate duration."""

    name: str
    words: str
    """Module in ``experiments`` and its options."""
    minutes: float
    """Approximate duration on two cores, in minutes."""
    ranks: int = 0
    """Number of ranks that torchrun starts; 0 for a command that starts its own."""

    def arguments(self, *, fresh: bool) -> list[str]:
        """Return the arguments that start the process; with ``fresh``, kept runs are made again."""
        module, *options = shlex.split(self.words)
        if fresh and module in KEEP_RUNS:
            options.append("--fresh")
        if self.ranks:
            return command.torchrun(self.ranks, "-m", f"experiments.{module}", *options)
        return [sys.executable, "-m", f"experiments.{module}", *options]


KEEP_RUNS = (
    "accuracy",
    "bench_low_rank",
    "explore_membership",
    "faults",
    "fig02_breakdown",
    "kill_anywhere",
    "named_ranks",
    "recovery",
    "soak",
    "survivors",
    "survivors_on_links",
    "halves",
    "local_steps_accuracy",
    "systems",
    "time_to_target",
    "validate_timing_model",
)
"""Modules that have ``--fresh``."""
EXPERIMENTS = (
    Experiment(name="bench_gpu", words="bench_gpu", minutes=8),
    Experiment(name="bench_torchft", words="bench_torchft", minutes=7),
    Experiment(name="bench_low_rank", words="bench_low_rank", minutes=130),
    Experiment(name="one_weird_trick", words="one_weird_trick", minutes=40, ranks=4),
    Experiment(name="faults", words="faults", minutes=20),
    Experiment(name="explore_membership", words="explore_membership", minutes=25),
    Experiment(name="kill_anywhere", words="kill_anywhere", minutes=5),
    Experiment(name="survivors", words="survivors", minutes=20),
    Experiment(name="survivors_on_links", words="survivors_on_links", minutes=110),
    Experiment(name="changing_ranks", words="changing_ranks", minutes=10),
    Experiment(name="churn", words="churn", minutes=25),
    Experiment(name="recovery", words="recovery", minutes=30),
    Experiment(name="kill_testbed", words="kill_testbed", minutes=3),
    Experiment(name="ddp_calculated", words="ddp_calculated", minutes=10),
    Experiment(name="ddp_examples", words="ddp_calculated --examples", minutes=3),
    Experiment(name="screens", words="screens", minutes=2),
    Experiment(name="named_ranks", words="named_ranks", minutes=25),
    Experiment(name="soak", words="soak", minutes=92),
    Experiment(name="strangers", words="strangers", minutes=10),
    Experiment(name="control_connections", words="control_connections", minutes=3),
    Experiment(name="elastic_cost", words="elastic_cost", minutes=8),
    Experiment(name="encrypted_network", words="encrypted_network", minutes=5),
    Experiment(name="bench_all_reduce_100mbit", words="bench_all_reduce --rate 100mbit", minutes=20),
    Experiment(name="bench_all_reduce_200mbit", words="bench_all_reduce --rate 200mbit", minutes=15),
    Experiment(
        name="bench_all_reduce_matrix",
        words="bench_all_reduce --rate 200mbit --name bench_all_reduce_matrix --world-sizes 3 4 5 "
        "--sizes 4000 64000 1000000 16000000 100000000 --codecs fp32 int8 int4 --seconds 25",
        minutes=40,
    ),
    Experiment(name="bench_transport_loopback", words="bench_transport", minutes=15),
    Experiment(name="bench_transport_1gbit", words="bench_transport --rate 1gbit", minutes=15),
    Experiment(name="bench_transport_200mbit", words="bench_transport --rate 200mbit", minutes=25),
    Experiment(
        name="bench_transport_200mbit_10ms",
        words="bench_transport --rate 200mbit --latency 10ms --sizes 10000000 40000000",
        minutes=20,
    ),
    Experiment(
        name="bench_transport_200mbit_10ms_lossy",
        words="bench_transport --rate 200mbit --latency 10ms --loss 0.1% --sizes 10000000 40000000",
        minutes=25,
    ),
    Experiment(name="bench_transport_training", words="bench_transport_training", minutes=9),
    Experiment(name="bench_codecs", words="bench_codecs", minutes=15),
    Experiment(name="accuracy", words="accuracy", minutes=7 * 60),
    Experiment(name="halves", words="halves", minutes=12),
    Experiment(name="time_to_target", words="time_to_target", minutes=25),
    Experiment(name="local_steps_accuracy", words="local_steps_accuracy", minutes=190),
    Experiment(name="systems", words="systems", minutes=8 * 60),
    Experiment(name="validate_timing_model", words="validate_timing_model", minutes=90),
    Experiment(name="validate_local_steps", words="validate_local_steps", minutes=27),
    Experiment(name="tutorial", words="tutorial", minutes=6),
    # Experiments that read the results of others come after them.
    Experiment(name="first_screen", words="first_screen", minutes=0.1),
    Experiment(name="fig06_all_reduces", words="fig06_all_reduces", minutes=0.2),
    Experiment(name="fig01_schedules", words="fig01_schedules", minutes=3.0),
    Experiment(name="fig02_breakdown", words="fig02_breakdown", minutes=60.0),
    Experiment(name="fig05_timing_model", words="fig05_timing_model", minutes=0.3),
    Experiment(name="fig07_layerwise", words="fig07_layerwise", minutes=15.0),
    Experiment(name="fig08_codecs", words="fig08_codecs", minutes=0.5),
    Experiment(name="gallery", words="gallery", minutes=1.0),
)


def run_all(
    chosen: Sequence[Experiment],
    state: Path,
    console: Console,
    run: Callable[[Experiment, bool], int],
    *,
    again: bool = False,
) -> list[str]:
    """Run the experiments that are not done yet, or all if ``again``; return the names of those that failed.

    ``run`` gets an experiment, and True if it starts from the beginning or False if it resumes.
    """
    done: dict[str, dict[str, Any]] = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
    missing = [one for one in chosen if again or "minutes" not in done.get(one.name, {})]
    say(console, f"{len(chosen) - len(missing)} of {len(chosen)} experiments are done; --fresh runs them again")
    failed = []
    for number, one in enumerate(missing):
        left = timedelta(minutes=round(sum(other.minutes for other in missing[number:])))
        say(console, f"[{number + 1}/{len(missing)}] {one.name}, about {one.minutes:g} min; {left} h left in all")
        goes_on = "begun" in done.get(one.name, {})
        done[one.name] = {"begun": code_state()}
        write_json(state, done)
        begin = time.monotonic()
        code = run(one, not goes_on)
        if code != 0:
            failed.append(one.name)
            say(console, f"{one.name} failed with exit code {code}")
            continue
        done[one.name] = {"minutes": (time.monotonic() - begin) / 60}
        write_json(state, done)
    return failed


def start(experiment: Experiment, fresh: bool) -> int:
    """Run ``experiment`` to its end and return its exit code."""
    return subprocess.run(experiment.arguments(fresh=fresh), cwd=REPOSITORY).returncode


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.bare_parser("python -m experiments", __doc__)
    one_of = options.add_mutually_exclusive_group()
    one_of.add_argument("--list", action="store_true", help="list the experiments")
    one_of.add_argument("--only", nargs="+", metavar="NAME", help="run these, done or not")
    one_of.add_argument("--fresh", action="store_true", help="repeat finished experiments")
    arguments = ranks.raise_together("options", lambda: options.parse_args(words))
    command.check_alone("experiments", ranks.by_torchrun, "it starts torchrun itself")
    by_name = {one.name: one for one in EXPERIMENTS}
    command.check_each_once(arguments, {"only": by_name})
    if arguments.list:
        command.show(
            "Experiments",
            [{"name": one.name, "min": f"{one.minutes:g}", "command": one.words[:70]} for one in EXPERIMENTS],
        )
        return
    if arguments.fresh:
        STATE.unlink(missing_ok=True)
    chosen = [by_name[name] for name in arguments.only] if arguments.only else list(EXPERIMENTS)
    failed = run_all(chosen, STATE.resolve(), console, start, again=bool(arguments.only))
    if failed:
        raise RunError(f"all experiments must get through; failed: {', '.join(failed)}")


if __name__ == "__main__":
    command.run(main)
