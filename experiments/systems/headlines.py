"""Headlines of the systems' authors, next to what the timing model says of the same systems on such a cluster.

    python -m experiments.systems.headlines        systems_headlines.csv

Nothing is measured here. A headline is a speed-up: over one rank alone, or over a parameter server. There are two kinds
of rows:

- On a cluster like that of the authors, with its number of ranks, its network and the size of their model. Where they
  published the time of a computation, ours is the speed-up with it. Where they did not, it is unknown how fast their
  GPUs were, so the row has the computation from which, or up to which, the speed-up is reached here.
- On the links of the table, with as many ranks as the authors had: the measured cells of experiments.systems in the
  output folder (systems.times.runs.json), scaled by their calibrations.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from rich.console import Console

from experiments import command
from experiments.kept_runs import KeptRuns
from experiments.results import Row, save
from experiments.systems.catalogue import NAME, all_names, keys_of, systems
from experiments.systems.times import KEPT, Cell, planned_cells
from experiments.systems.workloads import CORES, WORKLOADS
from experiments.validation_runs import job_of
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from timing_model.cluster_profile import Profile
from timing_model.collective_time import ring_all_reduce_bytes
from timing_model.measured import ComputeProfile, LinkProfile
from timing_model.options import NOTHING, computation_of
from timing_model.params import LinkParams
from timing_model.predict import Answer, predict
from timing_model.presets import MODELS
from timing_model.presets import NETWORKS as PRESETS
from timing_model.units import format_seconds

SERVER = "ps-sync"
LEAST_S, MOST_S, CLOSE = 1e-4, 1e3, 1.01
"""Computations between which an edge is looked for, in s, and how close to it, as a ratio."""
GPUS, IMAGES = 8, 5120
"""GPUs that Theano-MPI ran on, and images of which it published the times."""
NETWORKS = {
    "AlexNet, batch 128": (60_965_224, 128, {"AR": 2.01, "ASA": 0.75, "ASA16": 0.47}),
    "AlexNet, batch 32": (60_965_224, 32, {"AR": 8.03, "ASA": 2.94, "ASA16": 1.83}),
    "GoogLeNet, batch 32": (13_378_280, 32, {"AR": 2.07, "ASA": 1.96, "ASA16": 1.76}),
}
"""Number of parameters, batch size, and published seconds of communication for all images with each exchange: MPI's
all-reduce (AR), all-to-all and all-gather (ASA), and the same in half precision; table 3 of the paper of Theano-MPI,
without the network that ran on the GPUs of one node."""
PUBLISHED = {
    "AlexNet, batch 128": (3.90, {"AR": 5.3, "ASA": 6.7, "ASA16": 7.1}),
    "AlexNet, batch 32": (4.56, {"AR": 2.9, "ASA": 4.9, "ASA16": 5.7}),
    "GoogLeNet, batch 32": (16.82, {"AR": 7.1, "ASA": 7.2, "ASA16": 7.3}),
}
"""Seconds in which the GPUs compute all images, and speed-ups over one GPU with each exchange, from the same table."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A speed-up that authors reported, and the cluster on which systems of the table are compared with it."""

    name: str
    claim: str
    theirs: float
    """The speed-up."""
    ranks: int
    over: str | None = None
    """System that it is over; None for one rank alone."""
    network: str
    link: LinkParams
    model: str
    parameters: int
    compute_s: float | None = None
    """Seconds of the passes of an iteration; None if the authors did not publish them."""
    systems: tuple[str, ...]
    substituted: str


def per_exchange(seconds: float, batch: int) -> float:
    """Return the seconds of one iteration, given those of all images."""
    return seconds * GPUS * batch / IMAGES


def fit(exchange: str) -> float:
    """Return the seconds a byte of a link on which ``exchange`` takes as long as published, in the geometric mean.

    A ring and an all-to-all send the same bytes. What else an exchange took, such as sums, is in this number.
    """
    return geometric_mean(
        per_exchange(published[exchange], batch) / ring_all_reduce_bytes(4 * numel, GPUS)
        for numel, batch, published in NETWORKS.values()
    )


def _of_theano(network: str, exchange: str) -> Headline:
    seconds, speed_ups = PUBLISHED[network]
    numel, batch, _ = NETWORKS[network]
    fitted = "AR" if exchange == "AR" else "ASA"
    return Headline(
        name=f"Theano-MPI, {exchange}",
        claim=f"{network}: {speed_ups[exchange]:g} times as fast on {GPUS} GPUs as on one",
        theirs=speed_ups[exchange],
        ranks=GPUS,
        network=f"fitted to the times of {fitted}",
        link=LinkParams(alpha=0.0, beta=fit(fitted), gamma=0.0, sync=0.0),
        model=network,
        parameters=numel,
        compute_s=per_exchange(seconds, batch),
        systems=(f"theano-{exchange.lower()}", *(("pipesgd-int8",) if exchange == "ASA" else ())),
        substituted="seconds a byte, sums included, fitted to their exchanges; codecs on a core for those on GPUs",
    )


HEADLINES = (
    *(
        Headline(
            name="Pipe-SGD",
            claim="up to 5.4 times as fast as conventional approaches, on four nodes with GPUs",
            theirs=5.4,
            ranks=4,
            over=SERVER,
            network="10GbE",
            link=PRESETS["10GbE"],
            model=model,
            parameters=MODELS[model],
            systems=("pipe-sgd-q", "pipesgd-int4"),
            substituted="the preset of 10GbE and codecs on a core; any computation for that of their GPUs",
        )
        for model in ("alexnet", "resnet18")
    ),
    *(_of_theano(network, exchange) for network, (_, speed_ups) in PUBLISHED.items() for exchange in speed_ups),
    Headline(
        name="Poseidon",
        claim="VGG19-22K: 15.5 times as fast on 16 nodes with 10 GbE as on one",
        theirs=15.5,
        ranks=16,
        network="10GbE",
        link=PRESETS["10GbE"],
        model="VGG19-22K",
        parameters=229_000_000,
        systems=("pmls-wait-free", "pipesgd-int8", "pipesgd-int4"),
        substituted="a ring for servers and sufficient factors; layers of equal size; any computation for their GPUs'",
    ),
    Headline(
        name="cuda-convnet2, hybrid",
        claim="AlexNet: up to 6.25 times as fast on 8 GPUs as on one, as quoted by the authors of Theano-MPI",
        theirs=6.25,
        ranks=8,
        network="100GbE",
        link=PRESETS["100GbE"],
        model="alexnet",
        parameters=MODELS["alexnet"],
        systems=("cuda-convnet2-data", "pipesgd", "pipesgd-int8"),
        substituted="data parallelism alone; nodes on 100GbE for the GPUs of one machine; any computation",
    ),
)
"""Headlines. Parameters of VGG19-22K are those that Poseidon's documentation gives."""


def speed_up(headline: Headline, system: str, cluster: Profile) -> Callable[[ComputeProfile], float]:
    """Return the speed-up of a system on ``cluster`` as a function of the computation."""

    def answer(name: str, compute: ComputeProfile) -> Answer:
        return predict(dataclasses.replace(jobs[name], compute=compute), extrapolate=True)

    def over_one_rank(compute: ComputeProfile) -> float:
        return headline.ranks * answer(system, compute).efficiency

    def over_other(compute: ComputeProfile) -> float:
        assert headline.over is not None
        return answer(headline.over, compute).iteration.total / answer(system, compute).iteration.total

    any_computation, known = computation_of(headline.model, headline.parameters, 1.0), systems()
    jobs = {
        name: job_of(cluster, any_computation, headline.ranks, known[name].words)
        for name in (system, headline.over)
        if name is not None
    }
    return over_one_rank if headline.over is None else over_other


def reached(ratio: Callable[[float], float], theirs: float) -> tuple[float | None, float | None]:
    """Return from which computation on, and up to which one, a ratio is at least ``theirs``, in s.

    The ratio only rises, or only falls, with the computation. None means no limit; both are None if it is never
    reached, and the first is 0 if it always is.
    """
    low, high = LEAST_S, MOST_S
    first, last = ratio(low) >= theirs, ratio(high) >= theirs
    if first == last:
        return (0.0 if first else None), None
    while high / low > CLOSE:
        middle = math.sqrt(low * high)
        if (ratio(middle) >= theirs) == first:
            low = middle
        else:
            high = middle
    return (None, low) if first else (high, None)


def on_their_cluster(one: Headline, system: str) -> Row:
    """Return the row of a system on a cluster like that of the authors."""
    ratio = speed_up(one, system, Profile(calibrated=NOTHING, link=LinkProfile.exact(one.link)))

    def ours(seconds: float) -> float:
        return ratio(computation_of(one.model, one.parameters, seconds))

    begin, end = reached(ours, one.theirs) if one.compute_s is None else (None, None)
    return {
        **_described(one, system),
        "cell": "",
        "network": one.network,
        "model": one.model,
        "parameters": one.parameters,
        "compute_s": one.compute_s,
        "ours": None if one.compute_s is None else ours(one.compute_s),
        "reached_from_s": begin,
        "reached_up_to_s": end,
        "substituted": one.substituted,
    }


def on_our_links(one: Headline, system: str, cell: Cell) -> Row:
    """Return the row of a system on the links and the workload of a cell, with as many ranks as the authors had."""
    profile = _profile(cell)
    [compute] = profile.compute
    return {
        **_described(one, system),
        "cell": f"{cell.workload}, {cell.rate}",
        "network": f"{cell.rate}, emulated",
        "model": cell.workload,
        "parameters": compute.numel,
        "compute_s": compute.forward.value + compute.backward.value,
        "ours": speed_up(one, system, profile)(compute),
        "reached_from_s": None,
        "reached_up_to_s": None,
        "substituted": "the calibrated links, accelerators and model of a cell of four nodes",
    }


def _described(one: Headline, system: str) -> Row:
    return {
        "headline": one.name,
        "claim": one.claim,
        "theirs": one.theirs,
        "over": one.over or "one rank",
        "ranks": one.ranks,
        "system": system,
    }


def _profile(cell: Cell) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(cell.profile, encoding="utf-8")
        return Profile.load(path)


def ours_in_words(row: Row) -> str:
    """Return our part of a row, in words."""
    if row["ours"] is not None:
        return f"{row['ours']:.1f}"
    if row["reached_up_to_s"] is not None:
        return f"as many, if an iteration computes at most {format_seconds(row['reached_up_to_s'])}"
    if row["reached_from_s"] is None:
        return "fewer with any computation"
    if not row["reached_from_s"]:
        return "as many with any computation"
    return f"as many, if an iteration computes at least {format_seconds(row['reached_from_s'])}"


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    name = f"{NAME}.headlines"
    arguments = ranks.raise_together("options", lambda: command.parse(command.parser(name, __doc__), words))
    command.check_alone(name, ranks.by_torchrun, "it needs one process")
    planned = planned_cells(WORKLOADS, keys_of(all_names()), quick=False)
    kept = KeptRuns(arguments.output / KEPT, Cell).load()
    cells = [cell for text, cell in kept.items() if text in planned and cell.computes != CORES]
    rows = [on_their_cluster(one, system) for one in HEADLINES for system in one.systems]
    # Headlines that differ in the model are the same question where the model is that of a cell.
    questions = {(one.name, one.ranks): one for one in HEADLINES}.values()
    rows += [on_our_links(one, system, cell) for one in questions for cell in cells for system in one.systems]
    made_with = sorted({str(cell.commit) for cell in cells})
    path = save(f"{NAME}_headlines", rows, extra={"cells_made_with": made_with}, folder=arguments.output)
    command.show(
        "Speed-ups: theirs, and ours by the timing model",
        [
            {
                "headline": row["headline"],
                "ranks": str(row["ranks"]),
                "model": row["model"],
                "network": row["network"],
                "over": row["over"],
                "theirs": f"{row['theirs']:g}",
                "system": row["system"],
                "ours": ours_in_words(row),
            }
            for row in rows
        ],
    )
    say(console, f"{len(cells)} measured cells were scaled; wrote {path}")


if __name__ == "__main__":
    command.run(main)
