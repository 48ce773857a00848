"""Kills at random moments on an emulated cluster: how soon do the other ranks say which process has ended?

    python -m experiments.kill_noticed       kill_noticed.csv; exit code 1 if one is not named, or too late

Sixty runs of pipesgd.train by torchrun on three emulated nodes, with the default --timeout. A random rank gets SIGKILL
at a random moment after the ranks have met: while the cluster is measured, loops are compiled, data are loaded, or
during training, evaluations and checkpoints, inside and outside of all-reduces; see JOBS. The kernel's end of the
process is when its pidfd says so; a line's time is when it arrives in a pipe. Each survivor's first error must name
the killed rank, within 3 s. Finished runs are kept in runs/kill_noticed.json, by a hash of the code: the same command
continues where it was stopped.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import select
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import command
from experiments.faults import stage as faults_stage
from experiments.faults.stage import Job, Stage
from experiments.kept_runs import KeptRuns
from experiments.results import save, sources
from experiments.testbed import Link, Testbed
from experiments.testbed_jobs import last_words
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.sections import DEFAULT_TIMEOUT

STATE = Path("runs/kill_noticed.json")
"""File of the kept runs, below the folder where the command is started, as with pipesgd.train."""
HARNESS = (Path(__file__), Path(faults_stage.__file__))
"""Files hashed in addition to the code that is measured: results of another harness do not count."""
NODES, RATE = 3, 200e6
"""Nodes of the testbed, a rank on each, and the rate of their links in bit/s."""
KILLS, QUICK_KILLS = 60, 3
NAMED_SECONDS = 3.0
"""Seconds after the kernel's end of the process within which every survivor must name its rank."""
START_SECONDS = 600.0
"""Seconds within which a run must begin to train; on a busy machine, compiling takes minutes."""
PATIENCE_SECONDS = 30.0
"""Seconds after which a line that has not come counts as missing."""

OFTEN = "--dataset digits --hidden-sizes 512 512 --checkpoint-iterations 5 --evaluate-iterations 5 --iterations 1000000"
JOBS = {
    "width 2": f"{OFTEN} --width 2",
    "loaders": f"{OFTEN} --width 2 --loader-workers 2",
    "new loops": f"{OFTEN} --width 2 --codec int4",
    "calibrating": f"{OFTEN} --width auto",
    "ddp": f"{OFTEN} --strategy ddp",
    "rare": "--dataset digits --hidden-sizes 2048 2048 --width 2 --iterations 1000000",
}
"""Options of each kind of run."""
START, TRAINING = "start", "training"
BEGINS = {START: "network: ranks at", TRAINING: " parameters) on "}
"""Parts of the lines that say that the ranks have met, and that they begin to train."""
MOMENTS = {START: 6.0, TRAINING: 6.0}
"""Seconds after these lines within which a rank is killed."""
ERROR = re.compile(r"error: rank (\d+): (.*)")
WHERE = re.compile(
    r"(?:stopped in )?([\w' -]+?)(?: through the store)?(?: with rank \d+)?(?: in iteration \d+)?(?: failed)?:"
)
IN_ALL_REDUCE = re.compile(r"(stopped in )?all-reduce|(receive|send) of (the header|chunk)")


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """Outcome of one kill."""

    run: int
    job: str
    """Name of the run's options, a key of ``JOBS``."""
    rank_killed: int
    after: str
    """Part of the run whose begin the moment was counted from, "start" or "training"."""
    killed_after_s: float
    """Seconds from its begin to the kill."""
    ended_after_ms: float
    """Milliseconds from the kill to the kernel's end of the process."""
    operation: str
    """Operation in which the first survivor to speak was."""
    in_all_reduce: bool
    """True if a survivor was in an all-reduce."""
    named_by: int
    """Number of survivors whose first error names the killed rank."""
    first_s: float | None
    """Seconds from the end of the process to the first line that names it; None if there is none."""
    last_s: float | None
    """Seconds from the end of the process to the last survivor's line that names it."""
    line: str
    """Line of the survivor that spoke last, or first did not name the rank."""

    @property
    def is_good(self) -> bool:
        """True if all survivors named the right rank in time."""
        return self.named_by == NODES - 1 and self.last_s is not None and self.last_s <= NAMED_SECONDS


def names(text: str, rank: int) -> bool:
    """Return True if a survivor's ``text`` says that ``rank`` is lost, and of no other rank that it is.

    >>> names("stopped in evaluation in iteration 4: rank 1 has failed: its process has ended without a word", 1)
    True
    >>> names("receive of the header with rank 2 in iteration 7 failed: Connection reset by peer", 1)
    False
    """
    found = re.findall(r"rank (\d+) has failed|with rank (\d+)|process of rank (\d+)", text)
    return bool(found) and {int(number) for one in found for number in one if number} == {rank}


def kill_of(run: int, seed: int) -> tuple[str, str, int, float]:
    """Return the job of a run, the part of it in which a rank is killed, the rank, and the seconds into that part.

    Jobs take turns, and each is killed at its start in every third of its runs; the rest is drawn from ``seed``.
    """
    chance = random.Random(f"{seed}/{run}")
    job, part = list(JOBS)[run % len(JOBS)], START if run // len(JOBS) % 3 == 0 else TRAINING
    return job, part, chance.randrange(NODES), chance.uniform(0.0, MOMENTS[part])


def killed(run: int, seed: int) -> Noticed:
    """Make one run, kill a rank of it, and watch what the others say.

    Raises:
        RunError: the run did not start, or the rank had ended before.
    """
    name, part, victim, moment = kill_of(run, seed)
    with (
        tempfile.TemporaryDirectory(prefix="kill-noticed-") as folder,
        Testbed(nodes=NODES, link=Link(rate=RATE)) as testbed,
    ):
        # Compiled loops are kept between runs, but for those of the job that is about compiling them.
        cache = {"NUMBA_CACHE_DIR": f"{folder}/loops"} if name == "new loops" else {}
        with Stage(Path(folder), DEFAULT_TIMEOUT, testbed) as stage:
            job = stage.start_on_testbed(JOBS[name], env=cache)
            if not job.until(lambda: BEGINS[part] in said(job), START_SECONDS):
                raise RunError(f"the run did not start; it said: {last_words(said(job))}")
            begin = next(at for at, text in list(job.lines) if BEGINS[part] in text)
            time.sleep(max(0.0, begin + moment - stage.clock()))
            pid = stage.rank(victim)
            handle = os.pidfd_open(pid)
            at = stage.clock()
            if errors(job) or select.select([handle], [], [], 0.0)[0]:
                raise RunError(f"the run failed before the kill; it said: {last_words(said(job))}")
            os.kill(pid, signal.SIGKILL)
            select.select([handle], [], [])
            ended = stage.clock()
            os.close(handle)
            job.until(lambda: len(errors(job)) == NODES - 1, PATIENCE_SECONDS)
            last = errors(job)
    spoken = sorted((when - ended, text) for when, text in last.values())
    named = [(when, text) for when, text in spoken if names(text, victim)]
    wrong = [text for _, text in spoken if not names(text, victim)]
    first = WHERE.match(spoken[0][1]) if spoken else None
    return Noticed(
        run=run,
        job=name,
        rank_killed=victim,
        after=part,
        killed_after_s=round(at - begin, 2),
        ended_after_ms=round(1e3 * (ended - at), 1),
        operation=first[1] if first else "",
        in_all_reduce=any(IN_ALL_REDUCE.match(text) for _, text in spoken),
        named_by=len(named),
        first_s=round(named[0][0], 3) if named else None,
        last_s=round(named[-1][0], 3) if named else None,
        line=(wrong or [text for _, text in spoken[-1:]] or [""])[0][:240],
    )


def errors(job: Job) -> dict[int, tuple[float, str]]:
    """Return the time and the text of the first error of each rank that has printed one."""
    found: dict[int, tuple[float, str]] = {}
    for at, line in list(job.lines):
        if (error := ERROR.search(line)) is not None:
            found.setdefault(int(error[1]), (at, error[2]))
    return found


def said(job: Job) -> str:
    """Return all that a job has printed."""
    return "\n".join(text for _, text in list(job.lines))


def show(rows: Sequence[Noticed]) -> None:
    """Print a line for every job."""
    lines = []
    for job in JOBS:
        own = [row for row in rows if row.job == job]
        late = [row.last_s for row in own if row.last_s is not None]
        lines.append(
            {
                "job": job,
                "kills": str(len(own)),
                "named in time": str(sum(row.is_good for row in own)),
                "latest, s": f"{max(late):.2f}" if late else "",
            }
        )
    command.show(
        f"{sum(row.is_good for row in rows)} of {len(rows)} kills named by all within {NAMED_SECONDS:g} s", lines
    )


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("kill_noticed", __doc__)
    command.add_kills(options, "number of runs", KILLS, QUICK_KILLS)
    arguments = command.parse(options, words)
    command.check_alone("kill_noticed", by_torchrun, "it starts torchrun itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    kept = KeptRuns(STATE.resolve(), Noticed, fresh=arguments.fresh)
    number = arguments.kills or (QUICK_KILLS if arguments.quick else KILLS)
    key = f"seed {arguments.seed}, code {sources(*HARNESS)[:16]}, run"
    planned = {f"{key} {run}": run for run in range(number)}
    done = kept.complete(
        planned, lambda run: killed(run, arguments.seed), console, "killed runs", named=lambda run: f"run {run}"
    )
    found = [done[words] for words in planned]
    rows: list[dict[str, Any]] = [dataclasses.asdict(one) for one in found]
    extra = {"nodes": NODES, "rate_bit_per_s": RATE, "timeout_s": DEFAULT_TIMEOUT, "options": JOBS}
    save("kill_noticed", rows, extra=extra, folder=arguments.output)
    show(found)
    if bad := [one.run for one in found if not one.is_good]:
        raise RunError(f"every survivor must name the killed rank within {NAMED_SECONDS:g} s; not so in runs: {bad}")


if __name__ == "__main__":
    command.run(main)
