"""Ranks of an elastic run on emulated machines, which are killed, stopped or cut off: do the others continue, how soon?

    python -m experiments.survivors_on_links     survivors_on_links.csv; exit code 1 if one ends otherwise than it must

Runs of 2 to 5 ranks, one on each machine, at 200 Mbit/s (int8, width 2, emulated accelerators; needs root). The kinds:

    kill        ranks are killed, one after another or two at once, until one or two remain
    stop        a process is stopped for a while
    cable       a machine's cable is pulled for a while
    one way     all packets that a machine sends are lost for a while, and none that it receives
    parts       the network falls into parts, such as 3|2, for a while or until the end
    first       the rank of the first of two machines is killed, each of which has a pipesgd.launch
    power       that machine loses its power: its cable is pulled, and its processes are killed

What must come is computed from the rules of membership alone before the fault: who continues, who is left behind, and
who waits in vain for a majority, keeps what it has aside, and ends with code 75, from where one rank then continues. If
nobody may continue and the network comes back, any part that may then continues. A run is right if just that came; if
all who completed an iteration have the same weights after it, but for the last one of a rank that was lost, which may
hold a mean that the others have summed without it; if each rank took the slices of samples that the generations say,
each of which was used once; and if the checkpoints that count, on the disk that all share, have those weights.

Seconds are from the end of a process, or from the begin of a silence, to the first iteration that needs a mean of those
who continue, at the slowest of them, less a median iteration. Finished runs are kept in runs/survivors_on_links.json,
by a hash of the code: the same command continues where it was stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments import accelerators, command, elastic_ranks, forked_ranks, ranks_on_links, survivors
from experiments.kept_runs import KeptRuns
from experiments.rank_notes import Iteration, Wrong, check_notes, check_summed, checksum
from experiments.ranks_on_links import RanksOnLinks
from experiments.results import save, sources
from experiments.survivors import lines_of
from experiments.testbed import Link, Testbed
from pipesgd.errors import RunError
from pipesgd.exit import EXIT_FAILED, EXIT_TRY_AGAIN
from pipesgd.ranks import Ranks
from pipesgd.run.checkpoint_folder import CheckpointFolder

STATE = Path("runs/survivors_on_links.json")
"""File of the kept runs, below the folder where the command is started."""
HARNESS = (
    *survivors.HARNESS,
    *(Path(str(one.__file__)) for one in (ranks_on_links, survivors, accelerators)),
)
RATE = 200e6
WIDTH = 2
WORDS = (
    "--dataset digits --model experiments.accelerators:at_least=40ms --hidden-sizes 500 500 --batch-size 8 "
    f"--width {WIDTH} --codec int8 --transport tcp --elastic 1 --timeout 120 --evaluate-iterations 30 "
    "--iterations 1000000"
)
SELDOM, OFTEN = 40, 3
"""Iterations between two checkpoints, and where a fault may fall into one in its first second."""
KILL, STOP, CABLE, ONE_WAY, PARTS = "kill", "stop", "cable", "one way", "parts"
FIRST, POWER = "first", "power"
SHAPES = ((3, 2), (2, 2), (1, 1), (2, 1, 1))
"""Numbers of ranks in the parts of a network."""
RUNS = {KILL: 44, STOP: 20, CABLE: 20, ONE_WAY: 20, PARTS: 160, FIRST: 40, POWER: 40}
"""Runs of each kind; those of kills have about three each, and those of silences four."""
SHORT_SECONDS = {STOP: (0.5, 2.4), CABLE: (0.5, 1.5), ONE_WAY: (0.5, 1.5)}
"""Silences of which nobody is lost. After a cut, TCP sends again after up to twice its time."""
MIDDLE_SECONDS, LONG_SECONDS, LONGEST_SECONDS = (2.5, 4.5), (5.0, 12.0), 60.0
"""Silences of which a rank may be lost or not, those of which one is, and that of each sixth run."""
PART_SECONDS = (5.0, 8.0)
WAIT_SECONDS, SHORT_WAIT_SECONDS = 90.0, 6.0
"""``--wait``, and where the network stays as it is."""
BEGIN_ITERATIONS = 6
BETWEEN_SECONDS, AFTER_SILENCE_SECONDS = (0.3, 1.2), (2.0, 3.0)
HIT_SECONDS = 0.5
"""Seconds after which no iteration ends any more that a fault keeps from being summed."""
MOST_WORD_SECONDS = 4.0
"""Seconds from a power cut to the words of the other rank."""
MOST_SECONDS = 30.0
"""Seconds in which anything must come after which a run counts as hung."""
MORE_SECONDS = 3.0
"""Seconds for which one rank continues, at least."""
FOR_EVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a run, and what must come of it."""

    kind: str
    ranks: tuple[int, ...]
    """Ranks that it hits."""
    seconds: float
    """Seconds that it lasts, or that lie between two kills; infinity if it stays."""
    parts: tuple[tuple[int, ...], ...] = ()
    """Parts of the members that reach each other meanwhile, where it hits a part rather than ranks."""
    loses: bool | None = True
    """True if some are lost if others may continue without them, False if nobody may be, None if either may be."""


@dataclass(frozen=True, kw_only=True)
class Survived:
    """Outcome of one run."""

    run: int
    kind: str
    shape: str
    """Number of ranks, or of those in each part."""
    faults: list[str]
    lost: int
    """Ranks that were killed, left behind, or without a majority."""
    right: bool
    problem: str
    """Description of what was wrong; empty if nothing was."""
    seconds: list[float]
    """Seconds of each change, as the module says."""
    deaths: list[int]
    """Number of ranks that were lost at once in it."""


# ---- What must come


def winners(members: Sequence[int], parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the part of ``members`` that may continue alone: more than half, or the half with the first member.

    >>> winners((0, 1, 2, 3), [(1, 2), (0,), (3,)]), winners((0, 1, 2, 3), [(1, 2), (0, 3)])
    ((), (0, 3))
    """
    for part in parts:
        if 2 * len(part) > len(members) or (2 * len(part) == len(members) and members[0] in part):
            return tuple(sorted(part))
    return ()


def who_continues(fault: Fault, members: Sequence[int]) -> list[int]:
    """Return the ``members`` that must continue without the others; none if nobody can, or must.

    >>> who_continues(Fault(kind="cable", ranks=(0,), seconds=9.0), [0, 1])
    [0]
    >>> who_continues(Fault(kind="stop", ranks=(0,), seconds=9.0), [0, 1])
    []
    """
    others = [one for one in members if one not in fault.ranks]
    if fault.kind in (KILL, FIRST):
        return others
    if fault.kind == POWER or not fault.loses:
        return []
    parts = [[one for one in part if one in members] for part in fault.parts or (others, fault.ranks)]
    left = winners(members, parts)
    if fault.kind in (STOP, ONE_WAY) and left == fault.ranks:  # of two, the first: it is stopped, or half cut off
        return []
    return list(left)


def faults_of(kind: str, chance: random.Random, shape: Sequence[int], run: int) -> list[Fault]:
    """Return the faults of a run, one after another, of as many ranks as ``shape`` has in all."""
    members = tuple(range(sum(shape)))
    if kind in (FIRST, POWER):
        return [Fault(kind=kind, ranks=(0,), seconds=FOR_EVER)]
    if kind == PARTS:
        order = chance.sample(members, len(members))
        ends = itertools.accumulate(shape)
        parts = tuple(tuple(sorted(order[end - size : end])) for end, size in zip(ends, shape, strict=True))
        seconds = FOR_EVER if chance.random() < 0.25 else chance.uniform(*PART_SECONDS)
        return [Fault(kind=kind, ranks=(), seconds=seconds, parts=parts)]
    if kind == KILL:
        return _kills(chance, members)
    faults = []
    lengths = ((SHORT_SECONDS[kind], False), (SHORT_SECONDS[kind], False), (LONG_SECONDS, True), (MIDDLE_SECONDS, None))
    for length, loses in lengths:
        seconds = LONGEST_SECONDS if loses and run % 6 == 0 else chance.uniform(*length)
        faults.append(Fault(kind=kind, ranks=(chance.choice(members),), seconds=seconds, loses=loses))
    return faults


def _kills(chance: random.Random, members: tuple[int, ...]) -> list[Fault]:
    faults = []
    end = chance.choice([1, 1, 2]) if len(members) > 2 else 1
    while len(members) > end:
        at_once = 2 if len(members) > 2 and chance.random() < 0.3 else 1
        hit = tuple(chance.sample(members, at_once))
        members = tuple(one for one in members if one not in hit)
        faults.append(Fault(kind=KILL, ranks=hit, seconds=chance.uniform(0.0, 0.05)))
    return faults


# ---- A run


class Faulty:
    """A run on a testbed, and what came of its faults."""

    def __init__(self, testbed: Testbed, ranks: RanksOnLinks, folder: Path):
        self.testbed, self.ranks, self._folder = testbed, ranks, folder
        self.members = [*range(testbed.nodes)]
        """Ranks that are not lost."""
        self.played: list[Fault] = []
        self.lost: set[int] = set()
        self.seconds: list[float] = []
        self.deaths: list[int] = []

    def play(self, faults: Sequence[Fault], chance: random.Random) -> None:
        """Play the faults, and end the run. Raises ``Wrong``."""
        ranks = self.ranks
        begun = ranks.wait(lambda: bool(ranks.codes) or ranks.have_done(self.members, BEGIN_ITERATIONS), MOST_SECONDS)
        if not begun or ranks.codes:
            raise Wrong(f"it did not begin; exit codes {ranks.codes}")
        for number, fault in enumerate(faults):
            pause = AFTER_SILENCE_SECONDS if number and fault.kind != KILL else BETWEEN_SECONDS
            ranks.wait(lambda: False, chance.uniform(*pause))
            if len(self.members) == 1:
                break  # the others were lost, as they could be
            if not set(fault.ranks) <= set(self.members):
                fault = dataclasses.replace(fault, ranks=(chance.choice(self.members),))
            self.played.append(fault)
            try:
                self._strike(fault)
            except Wrong as wrong:
                raise Wrong(f"{describe(fault)}: {wrong}") from None
        self._end()

    def _strike(self, fault: Fault) -> None:
        ranks, members = self.ranks, self.members
        begin = time.monotonic()
        self._begin(fault)
        hit = time.monotonic()
        left = who_continues(fault, members)
        if left:
            self._continue(left, fault, begin)
        if fault.seconds < FOR_EVER and fault.kind != KILL:
            ranks.wait(lambda: False, begin + fault.seconds - time.monotonic())
            since, until = hit + HIT_SECONDS, time.monotonic()
            done = [one for one in members if ranks.done_between(one, since, until)]
            if done and (fault.loses is False or (fault.kind == PARTS and not left)):
                raise Wrong(f"ranks {done} trained meanwhile")
            self._restore(fault)
        elif fault.seconds == FOR_EVER and not left and not ranks.wait(lambda: not ranks.pids, MOST_SECONDS):
            raise Wrong(f"without a majority, ranks {sorted(ranks.pids)} did not end")
        if not left and fault.seconds < FOR_EVER:
            left = self._settle(fault)
        self._check_lost([one for one in members if one not in left], fault)
        self.members = left
        if fault.kind == POWER and (ranks.said("no majority") or FOR_EVER) - begin > MOST_WORD_SECONDS:
            raise Wrong(f"no word of it within {MOST_WORD_SECONDS:g} s")

    def _begin(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                for number, rank in enumerate(fault.ranks):
                    time.sleep(fault.seconds if number else 0.0)
                    self.ranks.signal(rank, signal.SIGKILL)
            case "first":
                self.ranks.kill(fault.ranks[0])
            case "stop":
                self.ranks.signal(fault.ranks[0], signal.SIGSTOP)
            case "cable":
                self.testbed.cut(fault.ranks[0])
            case "one way":
                self.testbed.mute(fault.ranks[0])
            case "parts":
                self.testbed.split(fault.parts)
            case "power":
                self.testbed.cut(fault.ranks[0])
                self.ranks.signal(fault.ranks[0], signal.SIGKILL)
                self.ranks.kill(fault.ranks[0])

    def _restore(self, fault: Fault) -> None:
        if fault.kind == STOP:
            self.ranks.signal(fault.ranks[0], signal.SIGCONT)
        elif fault.kind == PARTS:
            self.testbed.join()
        else:
            self.testbed.restore(fault.ranks[0])

    def _continue(self, left: Sequence[int], fault: Fault, begin: float) -> None:
        """Wait until all of ``left`` have a mean of theirs alone, and note the seconds."""
        ranks = self.ranks
        gone = [one for one in self.members if one not in left]
        pace = statistics.median(
            b.time - a.time for rank in left for a, b in itertools.pairwise(ranks.notes[rank].iterations[-20:])
        )
        if fault.kind == KILL:
            if not ranks.wait(lambda: set(gone) <= ranks.ends.keys(), MOST_SECONDS):
                raise Wrong(f"ranks {gone} could not be killed")
            begin = max(ranks.ends[rank] for rank in gone)

        def first(rank: int) -> Iteration | None:
            """Return the first iteration that needs such a mean."""
            notes = ranks.notes[rank]
            settled = [one["iterations_done"] for one in notes.generations if set(one["members"]) == set(left)]
            needs = settled[0] + WIDTH - 1 if settled else FOR_EVER
            return next((one for one in notes.iterations if one.number >= needs and one.time > begin), None)

        is_silence = fault.kind != KILL and fault.seconds < FOR_EVER
        most = begin + fault.seconds - time.monotonic() if is_silence else MOST_SECONDS
        if not ranks.wait(lambda: all(first(rank) for rank in left), most):
            raise Wrong(f"ranks {list(left)} did not continue; exit codes {ranks.codes}")
        self.seconds.append(max(one.time for rank in left if (one := first(rank))) - begin - pace)
        self.deaths.append(len(gone))

    def _settle(self, fault: Fault) -> list[int]:
        """Return the ranks that train when the network is back, which must be able to do so."""
        ranks, restored = self.ranks, time.monotonic()

        def together() -> bool:
            living = [one for one in self.members if one in ranks.pids]
            generations = [ranks.notes[one].generations[-1:] for one in living]
            others = [one for found in generations for one in found if set(one["members"]) != set(living)]
            return bool(living) and not others and ranks.have_done(living, 3, restored)

        if not ranks.wait(together, MOST_SECONDS):
            raise Wrong(f"of ranks {self.members}, {sorted(ranks.pids)} did not continue; exit codes {ranks.codes}")
        left = [one for one in self.members if one in ranks.pids]
        if left != self.members and (fault.loses is False or not winners(self.members, [left])):
            raise Wrong(f"of ranks {self.members}, only {left} continued")
        return left

    def _check_lost(self, gone: Sequence[int], fault: Fault) -> None:
        """Check the ends of those who are lost, all of whom must end."""
        ranks = self.ranks
        self.lost.update(gone)
        if not ranks.wait(lambda: not set(gone) & set(ranks.pids), MOST_SECONDS):
            raise Wrong(f"of the lost ranks {list(gone)}, {sorted(set(gone) & set(ranks.pids))} did not end")
        for rank in gone:
            is_killed = fault.kind in (KILL, POWER) and rank in fault.ranks
            code = -signal.SIGKILL if is_killed else EXIT_TRY_AGAIN if fault.seconds == FOR_EVER else EXIT_FAILED
            if fault.kind == FIRST:
                code = 128 + signal.SIGKILL  # of its launcher
            if ranks.codes[rank] != code:
                raise Wrong(f"rank {rank} ended with code {ranks.codes[rank]}, not {code}")
            if code == EXIT_FAILED and ranks.said(f"rank {rank} was left behind") is None:
                raise Wrong(f"rank {rank} did not say that it was left behind")
            if code == EXIT_TRY_AGAIN:
                self._check_alone(rank)
        if fault.kind in (PARTS, POWER):
            self._check_checkpoints()

    def _check_alone(self, rank: int) -> None:
        """Check that what a rank without a majority had is there, unless the others have newer checkpoints alone."""
        done = self.ranks.notes[rank].iterations[-1].number + 1
        kept = [int(path.name.rpartition("-")[2]) for path in self._checkpoints.glob(f"alone-{rank}-of-iteration-*")]
        published = [iteration for iteration, _ in CheckpointFolder(self._checkpoints).published()]
        if not kept and min(published, default=0) > done:
            return
        if len(kept) != 1 or not done <= kept[0] <= done + 1:
            raise Wrong(f"rank {rank} kept the states of iterations {kept} after {done}")

    @property
    def _checkpoints(self) -> Path:
        return self._folder / "run" / "checkpoints"

    def _end(self) -> None:
        ranks, left = self.ranks, self.members
        for rank in left:
            ranks.signal(rank, signal.SIGTERM)
        if not ranks.wait(lambda: not ranks.pids, MOST_SECONDS):
            raise Wrong(f"ranks {sorted(ranks.pids)} did not end after SIGTERM")
        if wrong := {rank: ranks.codes[rank] for rank in left if ranks.codes[rank] != 128 + signal.SIGTERM}:
            raise Wrong(f"exit codes {wrong} after SIGTERM")
        ranks.look()
        if left and ranks.said("stopped by SIGTERM after iteration") is None:
            raise Wrong("those who were left did not end together")
        check_notes(ranks.notes, self.lost, WIDTH)
        if not left:
            return
        done = 1 + max(one.number for rank in left for one in ranks.notes[rank].iterations)
        check_summed(ranks.notes, done)
        newest, size = self._check_checkpoints()
        if newest != done or size != len(left):
            raise Wrong(f"the newest checkpoint is of iteration {newest} and {size} ranks")

    def _check_checkpoints(self) -> tuple[int, int]:
        """Check the weights of the checkpoints that count; return the newest one's iteration and number of ranks."""
        published = CheckpointFolder(self._checkpoints).published()
        self.ranks.look(0.0)
        weights, newest = check_notes(self.ranks.notes, self.lost, WIDTH), (0, 0)
        for iteration, path in published:
            with contextlib.suppress(FileNotFoundError):  # there are newer ones, and it was deleted
                found = torch.load(path / "shared.pt", weights_only=True)
                if checksum(found["state"]["parameters"].values()) != weights.get(iteration - 1):
                    raise Wrong(f"the checkpoint of iteration {iteration} has other weights")
                newest = max(newest, (iteration, found["world_size"]))
        return newest

    def resume_alone(self) -> None:
        """Let one rank continue from what the rank without a majority had. Raises ``Wrong``."""
        [kept] = self._checkpoints.glob("alone-*")
        done = int(kept.name.rpartition("-")[2])
        most = max(own.iterations[-1].number + 1 for own in self.ranks.notes.values())
        if most - done > 1:
            raise Wrong(f"{most} iterations were done, and {done} kept")
        place = kept.with_name(f"iteration-{done}")
        shutil.rmtree(place, ignore_errors=True)  # a checkpoint of both, as new
        kept.rename(place)
        notes = self._folder / "run" / "metrics.jsonl"
        before, asked = notes.stat().st_mtime, False

        def meanwhile(pids: Mapping[int, int]) -> None:
            """Ask the rank to stop, once, when it has trained."""
            nonlocal asked
            if not asked and notes.stat().st_mtime > before and time.monotonic() > begin + MORE_SECONDS:
                asked = True
                os.kill(pids[0], signal.SIGTERM)

        begin = time.monotonic()
        ended = elastic_ranks.run(f"{WORDS} --resume", 1, self._folder, meanwhile=meanwhile)
        after = max(iteration for iteration, _ in CheckpointFolder(self._checkpoints).published())
        if ended.codes != {0: 128 + signal.SIGTERM} or after <= done:
            raise Wrong(f"one rank did not continue after iteration {done}: exit codes {ended.codes}, {after} done")


def describe(fault: Fault) -> str:
    """Return a fault in a few words.

    >>> describe(Fault(kind="stop", ranks=(2,), seconds=2.25))
    'stop 2, 2.25 s'
    """
    parts = fault.parts if fault.kind == PARTS else [fault.ranks]
    return f"{fault.kind} {'|'.join(','.join(map(str, part)) for part in parts)}, {fault.seconds:.3g} s"


def survived(kind: str, run: int, seed: int, output: Path) -> Survived:
    """Make one run; keep its log in ``output`` if it ends wrongly."""
    chance = random.Random(f"{seed}/{kind}/{run}")
    launched = kind in (FIRST, POWER)
    shape = SHAPES[run % len(SHAPES)] if kind == PARTS else (2 if launched else chance.randint(2, 5),)
    faults = faults_of(kind, chance, shape, run)
    words = f"{WORDS} --checkpoint-iterations {OFTEN if launched or kind == PARTS else SELDOM}"
    wait = SHORT_WAIT_SECONDS if faults[-1].seconds == FOR_EVER else WAIT_SECONDS
    problem = ""
    with tempfile.TemporaryDirectory() as name, Testbed(nodes=sum(shape), link=Link(rate=RATE)) as testbed:
        folder = Path(name)
        with RanksOnLinks(testbed, f"{words} --wait {wait:g}", folder, launched=launched) as ranks:
            faulty = Faulty(testbed, ranks, folder)
            try:
                faulty.play(faults, chance)
                if kind == POWER:
                    faulty.resume_alone()
            except Wrong as wrong:
                problem = str(wrong)
                shutil.copy(folder / "log", output / f"survivors_on_links.{kind.replace(' ', '_')}-{run}.log")
    return Survived(
        run=run,
        kind=kind,
        shape="|".join(map(str, shape)),
        faults=[describe(fault) for fault in faulty.played],
        lost=len(faulty.lost),
        right=not problem,
        problem=problem,
        seconds=faulty.seconds,
        deaths=faulty.deaths,
    )


# ---- The command


def compute(
    planned: Sequence[tuple[str, int]], seed: int, kept: KeptRuns[Survived], output: Path, console: Console
) -> list[Survived]:
    """Return the planned runs; those that are not kept yet are made now."""
    forked_ranks.import_all()
    code = sources(Path(__file__), *HARNESS)[:16]
    return list(
        kept.complete(
            {f"seed {seed}, code {code}, {kind} {run}": (kind, run) for kind, run in planned},
            lambda one: survived(*one, seed, output),
            console,
            "runs",
            named=lambda one: f"{one[0]} {one[1]}:",
            told=lambda row: f"{row.lost} lost {row.problem}",
        ).values()
    )


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("survivors_on_links", __doc__)
    options.add_argument("--kinds", nargs="+", default=list(RUNS), choices=list(RUNS), help="kinds of faults (all)")
    options.add_argument("--runs", type=command.at_least(1), help="runs of each kind (quick: 1)")
    options.add_argument("--seed", type=command.at_least(0), default=0, help="seed of the faults (0)")
    options.add_argument("--fresh", action="store_true", help="repeat kept runs")
    arguments = command.parse(options, words)
    command.check_alone("survivors_on_links", by_torchrun, "it forks its ranks itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    kept = KeptRuns(STATE.resolve(), Survived, fresh=arguments.fresh)
    numbers = {kind: arguments.runs or (1 if arguments.quick else RUNS[kind]) for kind in arguments.kinds}
    planned = [(kind, run) for run in range(max(numbers.values())) for kind in numbers if run < numbers[kind]]
    found = compute(planned, arguments.seed, kept, arguments.output, console)
    rows = [
        {name: value for name, value in dataclasses.asdict(one).items() if name not in ("seconds", "deaths", "faults")}
        | {"faults": "; ".join(one.faults)}
        for one in found
    ]
    changes: list[dict[str, Any]] = [
        {"run": one.run, "kind": one.kind, "shape": one.shape, "lost": lost, "seconds": seconds}
        for one in found
        for lost, seconds in zip(one.deaths, one.seconds, strict=True)
    ]
    extra = {"options": WORDS, "rate_bit_per_s": RATE}
    save("survivors_on_links", rows, extra=extra, folder=arguments.output)
    if changes:
        save("survivors_on_links_changes", changes, extra=extra, folder=arguments.output)
    right = sum(one.right for one in found)
    command.show(
        f"{right} of {len(found)} runs on emulated machines ended rightly",
        [
            {"": kind, **line}
            for kind in arguments.kinds
            for line in lines_of([(row["lost"], row["seconds"]) for row in changes if row["kind"] == kind])
        ],
    )
    if wrong := [f"{one.kind} {one.run} ({one.problem})" for one in found if not one.right]:
        raise RunError(f"every run must end as the rules say; not so: {', '.join(wrong)}")


if __name__ == "__main__":
    command.run(main)
