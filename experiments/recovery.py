"""Time and samples that the loss of a rank costs, by what the others do: continue, restart, or continue by torchft.

    python -m experiments.recovery                            20 kills of each: recovery.csv
    python -m experiments.recovery --ways elastic restart     without torchft, which needs pip install torchft==0.2.0

Four ranks on this machine's loopback train an MLP for images of 8x8 on emulated accelerators, and one of them, but not
the first, gets a SIGKILL at a random moment. ``elastic`` runs below pipesgd.launch, and ``restart`` below torchrun with
one restart and a checkpoint every 50 iterations, both at width 2 with int8. ``torchft`` sums float32 over gloo in every
iteration, in replica groups of one rank, by its manager: its DistributedDataParallel ends in an AssertionError when a
sum fails over gloo. The seconds lost are those from the end of the last iteration before the kill to that of the 60th
after it, less 60 median iterations. The samples lost are computed again, or for nothing; with torchft those of the rank
that was killed are not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from torch import distributed as dist
from torch.nn.functional import cross_entropy

from experiments import accelerators, command
from experiments.bench_torchft import VERSION, check_torchft
from experiments.kept_runs import KeptRuns
from experiments.paired import median
from experiments.results import Row, save
from pipesgd.errors import RunError
from pipesgd.membership.store import poll
from pipesgd.ranks import Ranks

NAME = "recovery"
RANKS, BATCH, HIDDEN = 4, 8, 64
ACCELERATOR = "50ms"
WORDS = (
    f"--dataset digits --model experiments.accelerators:at_least={ACCELERATOR} --hidden-sizes {HIDDEN} --width 2 "
    f"--codec int8 --batch-size {BATCH} --iterations 100000 --recorder experiments.{NAME}:stamps"
)
CHECKPOINTS = 50
ELASTIC, RESTART, TORCHFT = "elastic", "restart", "torchft"
WAYS = (ELASTIC, RESTART, TORCHFT)
KILLS, QUICK_KILLS = 20, 1
BEFORE, BEHIND = 60, 60
"""Iterations before the kill, to which up to a checkpoint's interval is added by chance, and after it."""
PATIENCE = timedelta(seconds=5)
"""Time that torchft's collectives wait for other ranks, as in its example."""
DEADLINE_SECONDS = 90.0
STAMPS, LIGHTHOUSE = "PIPESGD_RECOVERY_STAMPS", "PIPESGD_RECOVERY_LIGHTHOUSE"
"""Environment variables: file in which the first rank writes down its iterations, and torchft's lighthouse."""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """Cost of one kill."""

    way: str
    rank: int
    iteration_s: float
    """Median iteration before the kill."""
    seconds_lost: float
    samples_lost: int


def stamps() -> Callable[..., None]:
    """Return a recorder that writes down when an iteration is done, and its number."""
    file = Path(os.environ[STAMPS]).open("a", buffering=1, encoding="ascii")  # noqa: SIM115 (until the process ends)
    return lambda iteration, values=None: print(time.monotonic(), iteration, file=file)


def train_by_torchft() -> None:
    """Train as one replica group of torchft's, until the process is killed."""
    from torchft import Manager, Optimizer, ProcessGroupGloo

    rank, record = int(os.environ["RANK"]), stamps()
    model = accelerators.make(
        ACCELERATOR, synthetic=False, sample_shape=(1, 8, 8), num_classes=10, hidden_sizes=(HIDDEN,), rank=rank
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=RANKS - 1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=os.environ[LIGHTHOUSE],
        replica_id=str(rank),
        hostname="127.0.0.1",
    )
    parameters = list(model.parameters())
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.05))
    images, labels = torch.randn(BATCH, 1, 8, 8), torch.randint(10, (BATCH,))
    while True:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        manager.allreduce(gradient).wait()
        for parameter, part in zip(parameters, gradient.split([one.numel() for one in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        if rank == 0:
            record(manager.current_step())


def commands(way: str, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands that start the ranks, each with its environment."""
    train = ["-m", "pipesgd.train", *WORDS.split(), "--output", str(folder / "run")]
    if way == ELASTIC:
        launch = f"-m pipesgd.launch --nproc-per-node {RANKS} --elastic".split()
        return [([sys.executable, *launch, *train, "--elastic", "2", "--transport", "tcp"], {})]
    if way == RESTART:
        kept = ["--checkpoint-iterations", str(CHECKPOINTS)]
        return [(command.torchrun(RANKS, "--max-restarts", "1", *train, *kept), {})]
    start = [sys.executable, "-c", f"from experiments.{NAME} import train_by_torchft; train_by_torchft()"]
    return [(start, {"RANK": str(rank)}) for rank in range(RANKS)]


def serve_lighthouse() -> None:
    """Be torchft's lighthouse: say at which port, and serve until the input ends."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=RANKS - 1)
    print(server.address().rpartition(":")[2], flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def lighthouse_of(way: str, log: IO[str]) -> Iterator[dict[str, str]]:
    """Give the environment variable that names torchft's lighthouse, which is started if there is to be one."""
    if way != TORCHFT:
        yield {}
        return
    words = [sys.executable, "-c", f"from experiments.{NAME} import serve_lighthouse; serve_lighthouse()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        yield {LIGHTHOUSE: f"http://127.0.0.1:{process.stdout.readline().strip()}"}


@contextlib.contextmanager
def started(way: str, folder: Path) -> Iterator[Path]:
    """Start the ranks; give the file of the first one's iterations. In the end, all processes are killed."""
    file = folder / "stamps"
    file.touch()
    processes = []
    with (folder / "log").open("w", encoding="utf-8") as log, lighthouse_of(way, log) as variables:
        try:
            for words, own in commands(way, folder):
                environment = {**os.environ, STAMPS: str(file), **variables, **own}
                processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
            yield file
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for pid in ranks_of(file).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def ranks_of(file: Path) -> dict[int, int]:
    """Return the process of each rank that writes, or has others write, to ``file``."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if f"{STAMPS}={file}".encode() in variables:
                numbers = [int(one[5:]) for one in variables if one.startswith(b"RANK=")]
                found |= {rank: min(int(folder.name), found.get(rank, 1 << 30)) for rank in numbers}
    return found


def read(file: Path) -> list[tuple[float, int]]:
    """Return when iterations were done, and their numbers."""
    lines = [line.split() for line in file.read_text(encoding="ascii").splitlines(keepends=True) if line[-1] == "\n"]
    return [(float(when), int(number)) for when, number in lines]


def wait_for(number: int, file: Path, log: Path) -> None:
    """Return once this iteration is done.

    Raises:
        RunError: it is not by the deadline.
    """
    if not poll(lambda: any(done >= number for _, done in read(file)), DEADLINE_SECONDS):
        text = log.read_text(encoding="utf-8", errors="replace")
        raise RunError(f"iteration {number} must be done within {DEADLINE_SECONDS:.0f} s; after\n{text[-3000:]}")


def cost(way: str, before: Sequence[tuple[float, int]], after: Sequence[tuple[float, int]], log: str) -> Row:
    """Return the median iteration, and the seconds and samples lost, from what was done before and after the kill."""
    usual = median([later - earlier for (earlier, _), (later, _) in itertools.pairwise(before)])
    newest = before[-1][1]
    end = next(when for when, number in after if number >= newest + BEHIND)
    if way == ELASTIC:
        lost = sum(int(samples) for samples in re.findall(r"\((\d+) samples\) (?:is|are) given out again", log))
    else:
        again = sum(number <= newest for when, number in after if when < end)
        lost = again * BATCH * (RANKS if way == RESTART else RANKS - 1)
    return {"iteration_s": usual, "seconds_lost": end - before[-1][0] - BEHIND * usual, "samples_lost": lost}


def kill(way: str, run: int) -> Recovered:
    """Start a run, kill one of its ranks, and see what it costs."""
    chance = random.Random(f"{way}/{run}")
    rank = chance.randrange(1, RANKS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(way, folder) as file:
            wait_for(BEFORE + chance.randrange(CHECKPOINTS), file, folder / "log")
            time.sleep(chance.uniform(0.0, 0.1))
            os.kill(ranks_of(file)[rank], signal.SIGKILL)
            when = time.monotonic()
            wait_for(read(file)[-1][1] + BEHIND + 1, file, folder / "log")
            done = read(file)
        log = (folder / "log").read_text(encoding="utf-8", errors="replace")
    before = [one for one in done[10:] if one[0] <= when]
    return Recovered(way=way, rank=rank, **cost(way, before, [one for one in done if one[0] > when], log))


def summarize(rows: Sequence[Recovered]) -> list[Mapping[str, str]]:
    """Return the lines of the table: medians, and the largest."""

    def of(way: str, name: str, form: str) -> str:
        values = [getattr(row, name) for row in rows if row.way == way]
        return f"{median(values):{form}} (most {max(values):{form}})"

    ways = dict.fromkeys(row.way for row in rows)
    return [
        {"": way, "seconds lost": of(way, "seconds_lost", ".2f"), "samples lost": of(way, "samples_lost", ".0f")}
        for way in ways
    ]


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser(NAME, __doc__)
    options.add_argument("--ways", nargs="+", metavar="WAY", default=WAYS, help=f"some of {', '.join(WAYS)} (all)")
    options.add_argument("--fresh", action="store_true", help="forget the finished kills in the output folder")
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    command.check_alone(NAME, ranks.by_torchrun, "it starts its ranks itself")
    command.check_each_once(arguments, {"ways": WAYS})
    if TORCHFT in arguments.ways:
        check_torchft()
    kept = KeptRuns(arguments.output / f"{NAME}.runs.json", Recovered, fresh=arguments.fresh)
    planned = [(way, run) for run in range(QUICK_KILLS if arguments.quick else KILLS) for way in arguments.ways]
    kept.complete({f"{way} {run}": (way, run) for way, run in planned}, lambda one: kill(*one), console, "kills")
    rows = sorted(kept.load().values(), key=lambda row: WAYS.index(row.way))
    found: list[dict[str, Any]] = [dataclasses.asdict(row) for row in rows]
    save(NAME, found, extra={"options": WORDS, "torchft": VERSION}, folder=arguments.output)
    title = f"the loss of one of {RANKS} ranks; median iteration {median([row.iteration_s for row in rows]):.3f} s"
    command.show(title, summarize(rows))


if __name__ == "__main__":
    command.run(main)
