"""The time of DDP that ``attach`` calculates from its own exchanges, next to DDP itself: two models on three links.

    python -m experiments.ddp_calculated                four nodes at 50, 200 Mbit/s and 1 Gbit/s: ddp_calculated.csv
    python -m experiments.ddp_calculated --examples     examples/ddp.py and both doors at 200 Mbit/s: ddp_examples.csv

Every rank has an emulated accelerator, since ranks that compute on the cores of one machine would slow one another
down. In each case, a job trains with ``attach`` and its defaults, and then with DDP alone. The interval is
read from the line that ``close`` prints.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from experiments import accelerators, command
from experiments.results import REPOSITORY, Row, save
from experiments.testbed import Link, Testbed, rate_name
from experiments.testbed_jobs import run_job
from pipesgd.config import ModelConfig
from pipesgd.ddp import attach
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from timing_model.units import parse_seconds

NODES = 4
RATES = (50e6, 200e6, 1e9)
ACCELERATORS = {"mlp": "75ms", "convnet": "75ms,model=convnet"}
"""Emulated accelerators, by the name of the model."""
HIDDEN = (1000, 1000)
EXCHANGES, QUICK_EXCHANGES = 205, 30
ITERATIONS, QUICK_ITERATIONS = 20, 10
"""Iterations with ``attach`` and with DDP."""
UNTIMED = 3
JOB_SECONDS = 400.0
LEAST_INSIDE = 5
"""Number of cases, of six, in which the median iteration of DDP must lie inside the interval."""
EPOCH = re.compile(r"epoch \d+: (\S+) s")
SENTENCE = re.compile(r"DDP would take about (\S+ \S+) to (\S+ \S+), calculated")


def train(model: str, exchanges: int, iterations: int, file: Path) -> None:
    """Train on this rank with ``attach``, then with DDP alone; rank 0 writes the times of iterations to ``file``."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
    times: dict[str, list[float]] = {}
    for door, number in (("attach", exchanges), ("ddp", iterations)):
        torch.manual_seed(0)
        layers = accelerators.synthetic(
            ACCELERATORS[model],
            sample_shape=(1, 28, 28),
            num_classes=10,
            hidden_sizes=HIDDEN if model == "mlp" else ModelConfig.hidden_sizes,
            rank=rank,
            world_size=world_size,
        )
        ddp_model = DistributedDataParallel(layers)
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01, momentum=0.9)
        pipeline = attach(ddp_model, optimizer) if door == "attach" else None
        ends = []
        for _ in range(number):
            optimizer.zero_grad()
            cross_entropy(ddp_model(inputs), targets).backward()
            optimizer.step()
            ends.append(time.perf_counter())
        if pipeline is not None:
            pipeline.close()
        times[door] = [after - before for before, after in itertools.pairwise(ends)][UNTIMED:]
        dist.barrier()
    if rank == 0:
        file.write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def compare(testbed: Testbed, rate: float, model: str, exchanges: int, iterations: int) -> Row:
    """Return what ``attach`` calculates for DDP, and what DDP takes in the same job.

    Raises:
        RunError: the job failed.
    """
    with tempfile.TemporaryDirectory() as name:
        file, log = Path(name) / "times.json", Path(name) / "log"
        words = ["-m", "experiments.ddp_calculated", "--job", model, str(exchanges), str(iterations), str(file)]
        failure = run_job(testbed, words, log, deadline=JOB_SECONDS)
        if not file.exists():  # torchrun's agents may fail while they leave, when the ranks are done
            raise RunError(f"{model} must train at {rate_name(rate)}; got {failure}")
        times, said = json.loads(file.read_text()), log.read_text(errors="replace")
    found = SENTENCE.search(said)
    low, high = (parse_seconds("time", text.replace(" ", "")) for text in found.groups()) if found else (None, None)
    median = statistics.median(times["ddp"])
    return {
        "rate": rate_name(rate),
        "model": model,
        "exchanges": exchanges,
        "attach_median_s": round(statistics.median(times["attach"]), 4),
        "calculated_low_s": low,
        "calculated_high_s": high,
        "ddp_median_s": round(median, 4),
        "inside": low is not None and high is not None and low <= median <= high,
    }


def examples(links: Link) -> list[Row]:
    """Return what examples/ddp.py says on two nodes, and the same program with each of the doors.

    Raises:
        RunError: one of them failed.
    """
    folder, attached = REPOSITORY / "examples", 'attach(model, optimizer, width=2, codec="int8")'
    with_attach = (folder / "ddp_pipesgd.py").read_text(encoding="utf-8")
    assert attached in with_attach
    programs = {
        "DDP": (folder / "ddp.py").read_text(encoding="utf-8"),
        "compress": with_attach.replace(attached, "compress(model)"),
        "attach": with_attach,
    }
    rows: list[Row] = []
    for door, text in programs.items():
        with tempfile.TemporaryDirectory() as name, contextlib.chdir(name), Testbed(nodes=2, link=links) as testbed:
            program, log = Path(name) / "program.py", Path(name) / "log"
            program.write_text(text, encoding="utf-8")
            failure = run_job(testbed, [str(program)], log, deadline=JOB_SECONDS)
            said = log.read_text(errors="replace")
            seconds = [float(found) for found in EPOCH.findall(said)]
            if len(seconds) < 2:
                raise RunError(f"examples/ddp.py with {door} must train; got {failure}")
            begin, end = ([*re.findall(r"^(?:\[\w+\]:)?(pipesgd: .*)$", said, re.MULTILINE), "", ""])[:2]
            rows.append({"door": door, "epoch_s": statistics.median(seconds[1:]), "begin": begin, "end": end})
    return rows


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("ddp_calculated", __doc__)
    options.add_argument("--only", nargs="*", default=[], help="cases, such as 200mbit-mlp; by default all")
    options.add_argument("--examples", action="store_true", help="examples/ddp.py with each of the doors instead")
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    if arguments.examples:
        save("ddp_examples", found := examples(Link(rate=200e6)), folder=arguments.output)
        command.show("examples/ddp.py", [{name: str(value) for name, value in row.items()} for row in found])
        return
    exchanges, iterations = (QUICK_EXCHANGES, QUICK_ITERATIONS) if arguments.quick else (EXCHANGES, ITERATIONS)
    cases = [
        (rate, model)
        for rate, model in itertools.product(RATES, ACCELERATORS)
        if not arguments.only or f"{rate_name(rate)}-{model}" in arguments.only
    ]
    rows: list[Row] = []
    with command.progress(console, "cases", len(cases)) as advance:
        for rate, model in cases:
            with Testbed(nodes=NODES, link=Link(rate=rate)) as testbed:
                rows.append(compare(testbed, rate, model, exchanges, iterations))
            advance(1, ", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    save("ddp_calculated", rows, extra={"nodes": NODES, "accelerators": ACCELERATORS}, folder=arguments.output)
    command.show("DDP, calculated and timed", [{name: str(value) for name, value in row.items()} for row in rows])
    said, inside = (sum(bool(row[name]) for row in rows) for name in ("calculated_low_s", "inside"))
    say(console, f"{said} of {len(rows)} cases calculate a time for DDP; {inside} have DDP's median in it")
    if len(rows) == len(RATES) * len(ACCELERATORS) and (said < len(rows) or inside < LEAST_INSIDE):
        raise RunError(f"all cases must have an interval, and {LEAST_INSIDE} DDP's median in it; got {said}, {inside}")


if __name__ == "__main__":
    import sys

    if sys.argv[1:2] == ["--job"]:
        train(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        command.run(main)
