"""Transports next to each other: the ring over gloo, tcp and tls, with codecs, interleaved, on one kind of link.

    python -m experiments.bench_transport --rate 200mbit                  bench_transport_200mbit.csv
    python -m experiments.bench_transport                                 bench_transport_loopback.csv
    python -m experiments.bench_transport --rate 200mbit --latency 10ms --sizes 10000000 40000000

With a rate each node of the testbed has one rank; without one all ranks share loopback. A round times every transport
with every codec once, in rotated order, each after a barrier and on the same values. The time of a call is that of the
slowest rank; its CPU seconds (user and system, of the whole process) are those of all ranks together. Ratios are to
gloo with the same codec, paired by rounds. The sums of all transports must have the same bits.
"""

from __future__ import annotations

import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from experiments import command, paired
from experiments.bench_all_reduce import Contender, Effort, Timed, input_values, readable
from experiments.paired import Seconds, median, paired_ratio, ratio_columns
from experiments.results import REPOSITORY, Row, load, save
from experiments.testbed import Link, Testbed, parse_latency, parse_loss, parse_rate, rate_name
from pipesgd import keys
from pipesgd.codecs.options import DENSE_CODECS, codec_named
from pipesgd.comm.connections import Connections
from pipesgd.errors import RunError
from pipesgd.membership.secret import job_secret
from pipesgd.ranks import Ranks
from pipesgd.sections import DEFAULT_TIMEOUT, TRANSPORTS

DEFAULT_CODECS = ("fp32", "int8", "int4")
SIZES = (1_000_000, 10_000_000, 40_000_000)
FULL = Effort(sizes=SIZES, seconds_per_size=60.0, least_rounds=7, most_rounds=60)
QUICK = Effort(sizes=(4_000, 400_000), seconds_per_size=0.2, least_rounds=2, most_rounds=3)
MOST_TIME = {"tcp": 1.00, "tls": 1.03}
"""Targets (at most) for the median over the cells of a link of the ratio to gloo's time; on loopback only tcp's."""
MOST_LOW = 1.05
"""Target (at most) for the lower end of the interval of each cell of tcp."""
WARM_UP_ROUNDS = 1


def make_contenders(ranks: Ranks, codecs: Sequence[str]) -> dict[str, Contender]:
    """Return every transport with every codec, by "tcp, int8". Collective."""
    contenders = {}
    for transport in TRANSPORTS:
        connections = Connections("ring", ranks, timeout=DEFAULT_TIMEOUT, transport=transport)
        for codec in codecs:
            options = codec_named(codec)
            all_reduce = connections.all_reduce(options.make())
            contenders[f"{transport}, {codec}"] = Contender(
                algorithm="ring", codec=options, all_reduce=all_reduce, connections=connections
            )
    return contenders


def compute(
    ranks: Ranks, contenders: Mapping[str, Contender], sizes: Sequence[int], effort: Effort, console: Console
) -> list[Row]:
    """Return a row for every size, transport and codec, the same on all ranks.

    Raises:
        RunError: a transport gives other sums than gloo.
    """
    rows: list[Row] = []
    for nbytes in sizes:
        values = input_values(ranks.rank, nbytes)
        check_same_sums(contenders, values)
        timed = {name: Timed(one, values, torch.empty_like(values)) for name, one in contenders.items()}
        rounds = effort.rounds(paired.round_seconds(timed))
        label = f"p = {ranks.world_size}, {readable(nbytes)}"
        with command.progress(console, label, rounds + WARM_UP_ROUNDS, show=ranks.rank == 0) as advance:
            after_round = partial(advance, 1, "rounds")
            times = paired.interleave(timed, rounds, warm_up=WARM_UP_ROUNDS, after_round=after_round)
        for name in contenders:
            cpu = of_all_ranks(timed[name].cpu_seconds[-rounds:])
            sent = of_all_ranks([contenders[name].all_reduce.wire_bytes(values)])
            rows.append(summarize(name, ranks.world_size, nbytes, times, cpu, float(sent[0])))
    return rows


def check_same_sums(contenders: Mapping[str, Contender], values: torch.Tensor) -> None:
    """Raise ``RunError`` unless every transport gives the bits that gloo gives. Collective."""
    sums: dict[str, torch.Tensor] = {}
    for name, one in contenders.items():
        flat = values.clone()
        one.all_reduce(flat, None, 1)
        expected = sums.setdefault(one.codec.codec, flat)
        if not torch.equal(flat, expected):
            raise RunError(
                f"{name} must give the sums of {next(iter(contenders))}; they differ for {flat.nbytes} bytes"
            )


def of_all_ranks(values: Sequence[float]) -> Seconds:
    """Return the sums of the ranks' values, the same on all ranks. Collective."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.numpy()


def summarize(name: str, world_size: int, nbytes: int, times: Mapping[str, Seconds], cpu: Seconds, sent: float) -> Row:
    """Return one line of the table; ``sent`` are the bytes that all ranks send in one call."""
    transport, codec = name.split(", ")
    own, gloo = times[name], times[f"gloo, {codec}"]
    return {
        "p": world_size,
        "nbytes": nbytes,
        "codec": codec,
        "transport": transport,
        "median_s": median(own),
        "rounds": len(own),
        **ratio_columns("to_gloo", None if transport == "gloo" else paired_ratio(own, gloo)),
        "cpu_s_per_mib": median(cpu) / (sent / (1 << 20)),
    }


def medians(rows: Sequence[Row]) -> dict[str, float]:
    """Return, by transport, the median over the cells of the ratio of its time to gloo's."""
    return {
        name: median([row["to_gloo_median"] for row in rows if row["transport"] == name])
        for name in TRANSPORTS
        if name != "gloo"
    }


def publish(name: str, rows: list[Row], link: dict[str, Any], folder: Path) -> None:
    """Save the rows and print them."""
    found = medians(rows)
    slow = [row for row in rows if row["transport"] == "tcp" and row["to_gloo_low"] > MOST_LOW]
    save(
        name,
        rows,
        extra={"target": {**MOST_TIME, "low of each cell": MOST_LOW}, "medians": found, **link},
        folder=folder,
    )
    table = [
        {
            "p": str(row["p"]),
            "size": readable(row["nbytes"]),
            "codec": row["codec"],
            "transport": row["transport"],
            "ms": f"{row['median_s'] * 1e3:.2f}",
            "of gloo's": ""
            if row["to_gloo_median"] is None
            else f"{row['to_gloo_median']:.2f} [{row['to_gloo_low']:.2f}, {row['to_gloo_high']:.2f}]",
            "CPU ms/MiB": f"{row['cpu_s_per_mib'] * 1e3:.2f}",
        }
        for row in rows
    ]
    words = ", ".join(f"{one} {ratio:.3f} (target {MOST_TIME[one]:.2f})" for one, ratio in found.items())
    command.show(f"Transports; median over cells: {words}; tcp's cells wholly above {MOST_LOW}: {len(slow)}", table)


def run_all(arguments: Namespace) -> list[Row]:
    """Run a job for each p, one after the other; return all rows.

    Raises:
        RunError: a job has failed.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "job.key")
        keys.make(secret, certificate=True)
        words = ["-m", "experiments.bench_transport", "--output", folder, "--secret-file", str(secret)]
        words += ["--sizes", *map(str, arguments.sizes), "--codecs", *arguments.codecs, *["--quick"] * arguments.quick]
        for p in arguments.world_sizes:
            if arguments.rate is None:
                codes = [subprocess.run(command.torchrun(p, *words), cwd=REPOSITORY, check=False).returncode]
            else:
                link = Link(rate=arguments.rate, latency=arguments.latency, loss=arguments.loss)
                with Testbed(nodes=p, link=link) as testbed:
                    codes = testbed.torchrun(words, cwd=REPOSITORY).wait()
            if any(codes):
                raise RunError(f"the run with p = {p} has failed")
            rows += load(Path(folder, f"p{p}.csv"))
    return rows


@command.testbed_errors_as_ours()
def parse(words: Sequence[str]) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    options = command.parser("bench_transport", __doc__)
    add, number = options.add_argument, command.at_least
    add("--rate", help="rate of every link, e.g. 200mbit; without it ranks share loopback")
    add("--latency", default="0ms", help="time that a packet takes in one direction, e.g. 10ms (0ms)")
    add("--loss", default="0%", help="share of packets that is lost, e.g. 0.1%% (0%%)")
    add("--world-sizes", type=number(2), nargs="+", default=[2, 4], metavar="P", help="numbers of ranks (2 4)")
    add("--sizes", type=number(4), nargs="+", metavar="BYTES", help=f"buffer sizes ({' '.join(map(str, SIZES))})")
    add("--codecs", nargs="+", metavar="NAME", default=list(DEFAULT_CODECS), help=f"({' '.join(DEFAULT_CODECS)})")
    add("--secret-file", help="secret and certificate of the job, in a rank of it")
    arguments = command.parse(options, words)
    arguments.rate = None if arguments.rate is None else parse_rate(arguments.rate)
    arguments.latency, arguments.loss = parse_latency(arguments.latency), parse_loss(arguments.loss)
    arguments.sizes = arguments.sizes or list((QUICK if arguments.quick else FULL).sizes)
    command.check_each_once(arguments, {"codecs": DENSE_CODECS, "world_sizes": None, "sizes": None})
    return arguments


def name_of(arguments: Namespace) -> str:
    """Return the name of the result files: that of the link."""
    name = "bench_transport_" + ("loopback" if arguments.rate is None else rate_name(arguments.rate))
    name += f"_{arguments.latency * 1e3:g}ms" if arguments.latency else ""
    return name + ("_lossy" if arguments.loss else "")


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command, or one rank of its job if torchrun started this process."""
    arguments = ranks.raise_together("options", lambda: parse(words))
    if not ranks.by_torchrun:
        link = {"rate": arguments.rate, "latency": arguments.latency, "loss": arguments.loss}
        publish(name_of(arguments), run_all(arguments), link, arguments.output)
        return
    ranks.secret = job_secret(arguments.secret_file)
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    contenders = make_contenders(ranks, arguments.codecs)
    rows = compute(ranks, contenders, arguments.sizes, QUICK if arguments.quick else FULL, console)
    if ranks.rank == 0:
        save(f"p{ranks.world_size}", rows, folder=arguments.output)
    for connections in {id(one.connections): one.connections for one in contenders.values()}.values():
        connections.wait_for_all()
        connections.close()


if __name__ == "__main__":
    command.run(main)
