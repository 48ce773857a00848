"""Options of ``experiments.compare`` and the plan that they make, checked before any testbed is made."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import command, contenders
from experiments.contenders import CONTENDERS, NEVER, THEANO_MPI, WORKLOADS, Contender
from experiments.limits import Cluster, wire_seconds
from experiments.testbed.links import Link, parse_latency, parse_loss, parse_rate, parse_slow_node
from experiments.testbed.wiring import MOST_NODES
from pipesgd.checks import check_one_of
from pipesgd.config import TrainConfig
from pipesgd.data import ShardedBatches, make_workload
from pipesgd.errors import UserInputError

NODES, ROUNDS, ITERATIONS, EPOCHS = 4, 3, 16, 10
QUICK_NODES, QUICK_ROUNDS, QUICK_ITERATIONS, QUICK_EPOCHS = 2, 1, 10, 2
EVALUATIONS = 24
"""Evaluations during a run whose accuracy is compared: the crossing of the target is interpolated between two."""
WIDEST_EVALUATED = 2
"""Largest width whose time is not distorted by evaluations (``cells.undisturbed``)."""
FEWEST_ROUNDS = 3
"""Least number of rounds; fewer would not show the spread."""
FEWEST_ITERATIONS = 4
"""Least number of iterations of a run; the first two are not timed."""
SMALL_LR = 0.01
"""Learning rate where only time is compared, so that nothing diverges."""
START_SECONDS = 60.0
"""Seconds for imports, connections and data on a machine with more ranks than cores."""
ITERATION_SECONDS = 5.0
"""Longest time of an iteration without its traffic, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of a comparison, and where their results are written."""

    cluster: Cluster
    workload: str
    """Name of the workload."""
    contenders: list[Contender]
    indices: range
    """Indices of the rounds, or the seeds where accuracy is compared."""
    length: dict[str, int]
    """Length of a run in iterations or epochs, by the name of the option."""
    target: float | None
    """Test accuracy to reach; None where iterations are timed."""
    gradient_bytes: int
    """Bytes of the whole gradient in fp32, uncompressed: 4 x parameters."""
    deadline: float
    """Seconds after which a cell counts as hung."""
    fresh: bool
    name: str
    """Name of the files in ``output``."""
    output: Path

    def seed(self, index: int) -> int:
        """Return the seed of the run with this index; all rounds have the same seed."""
        return 0 if self.target is None else index

    def key(self) -> dict[str, Any]:
        """Return what identifies the plan's cells; not the rounds' number nor the target, which may be raised later."""
        return {
            "cluster": dataclasses.asdict(self.cluster),
            "contenders": [[one.name, one.words] for one in self.contenders],
            "rounds_are_seeds": self.target is not None,
        }

    def describe(self) -> dict[str, Any]:
        """Return the plan for the manifest, without paths of this machine."""
        return {
            "workload": self.workload,
            "links_asked": dataclasses.asdict(self.cluster),
            "gradient_bytes": self.gradient_bytes,
            ("rounds" if self.target is None else "seeds"): len(self.indices),
            **self.length,
            "contenders": {one.name: re.sub(r"(^|[ =])/\S*/", r"\1", " ".join(one.words)) for one in self.contenders},
        }


@command.testbed_errors_as_ours()
def parse(words: Sequence[str], by_torchrun: bool, description: str | None = None) -> Plan:
    """Return the plan that ``words`` ask for.

    Raises:
        HelpRequested: ``--help`` is among ``words``.
        UserInputError: one of ``words`` is wrong, or the plan cannot be run.
    """
    arguments = command.parse(_options(description), words)
    command.check_alone("compare", by_torchrun, "it starts torchrun itself, on every node")
    timing = arguments.time_to_accuracy is None
    indices, length = _effort(arguments)
    cluster = _cluster(arguments)
    named = arguments.contenders or (
        None if timing else [name for name in CONTENDERS if not name.startswith("width 3")]
    )
    chosen = contenders.choose(named, arguments.contender)
    workload = _workload(arguments, SMALL_LR if timing else None)
    base = contenders.config("workload", workload)
    gradient_bytes, iterations_per_epoch = _measures(base, cluster)

    # A server's NIC carries the most: a run that takes far longer than that hangs.
    traffic = 2 * wire_seconds(cluster.ranks * gradient_bytes, min(cluster.rates))
    timeout = round(START_SECONDS + 10 * traffic)
    rules = [f"--{name} {value}" for name, value in length.items()]
    rules += [f"--timeout {timeout}", f"--checkpoint-iterations {NEVER}"]
    iterations = length.get("iterations") or length["epochs"] * iterations_per_epoch
    if not timing:
        rules.append(f"--evaluate-iterations {max(1, iterations // EVALUATIONS)}")
    made = contenders.make(chosen, workload, " ".join(rules))
    for one in made:
        _check_servers(one, cluster)
        width = one.config.pipeline.width
        if not timing and width > WIDEST_EVALUATED:
            raise UserInputError(
                f"contender {one.name}: width must be at most {WIDEST_EVALUATED} with --time-to-accuracy, since a "
                f"wider pipeline takes many iterations to fill again after an evaluation; got {width}"
            )
    name = arguments.workload or f"{base.data.dataset}-{base.model.model}"
    return Plan(
        cluster=cluster,
        workload=name,
        contenders=made,
        indices=indices,
        length=length,
        target=arguments.time_to_accuracy,
        gradient_bytes=gradient_bytes,
        deadline=2 * timeout + iterations * (ITERATION_SECONDS + 3 * traffic),
        fresh=arguments.fresh,
        name=arguments.name or f"{'compare' if timing else 'accuracy'}_{name}_{cluster.slug}",
        output=arguments.output,
    )


def _options(description: str | None) -> command.Parser:
    options = command.parser("compare", description)
    add, number = options.add_argument, command.at_least
    add("--nodes", type=number(2), help=f"nodes of the testbed ({NODES}; quick: {QUICK_NODES})")
    add("--rate", required=True, metavar="RATE", help="rate of every link, both ways, e.g. 200mbit")
    add("--latency", metavar="TIME", help="latency from node to node, one way, e.g. 5ms (none)")
    add("--loss", metavar="SHARE", help="share of packets that are lost, e.g. 0.1%% (none)")
    add(
        "--slow-node",
        action="append",
        default=[],
        metavar="NODE:RATE",
        help="node whose link has another rate, e.g. 3:100mbit",
    )
    add("--nproc-per-node", type=number(1), default=1, metavar="RANKS", help="ranks on every node (1)")
    add("--workload", help=f"one of {', '.join(WORKLOADS)} (mlp; quick: digits)")
    add("--train", metavar="WORDS", help="arguments of pipesgd.train, instead of --workload")
    known = f"{'; '.join(CONTENDERS)} (all), or {'; '.join(THEANO_MPI)}"
    add("--contenders", nargs="+", metavar="NAME", help=f"any of {known}")
    add(
        "--contender",
        action="append",
        default=[],
        metavar="NAME=WORDS",
        help='another contender, e.g. "width 4=--width 4"',
    )
    add("--rounds", type=number(1), help=f"rounds, at least {FEWEST_ROUNDS} ({ROUNDS}; quick: {QUICK_ROUNDS})")
    add(
        "--iterations",
        type=number(FEWEST_ITERATIONS),
        help=f"length of a run ({ITERATIONS}; quick: {QUICK_ITERATIONS})",
    )
    add("--time-to-accuracy", type=_share, metavar="TARGET", help="compare when a test accuracy is reached, e.g. 0.88")
    add(
        "--seeds",
        type=number(1),
        help=f"with --time-to-accuracy, instead of --rounds ({ROUNDS}; quick: {QUICK_ROUNDS})",
    )
    add("--epochs", type=number(1), help=f"with --time-to-accuracy, or --iterations ({EPOCHS}; quick: {QUICK_EPOCHS})")
    add("--name", help="name of the result files, without an ending")
    add("--fresh", action="store_true", help="repeat finished cells of this comparison")
    return options


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be a share of the test set above 0 and below 1; got {text!r}")
    return value


def _effort(arguments: argparse.Namespace) -> tuple[range, dict[str, int]]:
    """Return the rounds or seeds, and the length of a run by the name of its option."""
    timing, quick = arguments.time_to_accuracy is None, arguments.quick
    for name in ("seeds", "epochs") if timing else ("rounds",):
        if getattr(arguments, name) is not None:
            raise UserInputError(f"--{name} must be left out {'without' if timing else 'with'} --time-to-accuracy")
    if arguments.epochs is not None and arguments.iterations is not None:
        raise UserInputError("--epochs and --iterations must not both be given; leave one of them out")
    if arguments.name is not None and not re.fullmatch(r"[\w.-]+", arguments.name):
        raise UserInputError(f"--name must be the name of a file; got {arguments.name!r}")
    name = "rounds" if timing else "seeds"
    number = getattr(arguments, name) or (QUICK_ROUNDS if quick else ROUNDS)
    if timing and number < FEWEST_ROUNDS and not quick:
        raise UserInputError(f"--rounds must be at least {FEWEST_ROUNDS} without --quick; got {number}")
    if timing or arguments.iterations is not None:
        return range(number), {"iterations": arguments.iterations or (QUICK_ITERATIONS if quick else ITERATIONS)}
    return range(number), {"epochs": arguments.epochs or (QUICK_EPOCHS if quick else EPOCHS)}


def _cluster(arguments: argparse.Namespace) -> Cluster:
    nodes = arguments.nodes or (QUICK_NODES if arguments.quick else NODES)
    if nodes > MOST_NODES:
        raise UserInputError(f"--nodes must be at most {MOST_NODES}, the addresses of the testbed; got {nodes}")
    slow: dict[int, float] = {}
    for text in arguments.slow_node:
        node, rate = parse_slow_node(text)
        if node >= nodes or node in slow:
            raise UserInputError(f"--slow-node must name each of nodes 0 to {nodes - 1} once at most; got {text!r}")
        slow[node] = rate
    link = Link(
        rate=parse_rate(arguments.rate),
        latency=parse_latency(arguments.latency) if arguments.latency is not None else 0.0,
        loss=parse_loss(arguments.loss) if arguments.loss is not None else 0.0,
    )
    return Cluster(nodes=nodes, link=link, slow_nodes=slow, nproc_per_node=arguments.nproc_per_node)


def _workload(arguments: argparse.Namespace, lr: float | None) -> str:
    """Return the workload's arguments of ``pipesgd.train``; ``lr`` is for workloads that set none themselves."""
    if arguments.train is not None and arguments.workload is not None:
        raise UserInputError("--train and --workload must not both be given: both say what is trained")
    if arguments.train is None:
        arguments.workload = arguments.workload or ("digits" if arguments.quick else "mlp")
        check_one_of("workload", arguments.workload, list(WORKLOADS))
    words = str(arguments.train if arguments.train is not None else WORKLOADS[arguments.workload])
    has_own = "lr" in contenders.own_options("train", words)
    return words if lr is None or has_own else f"{words} --lr {lr}"


def _measures(config: TrainConfig, cluster: Cluster) -> tuple[int, int]:
    """Return the bytes of the gradient in fp32 and the iterations of an epoch."""
    data, model = make_workload(config)
    shards = ShardedBatches(
        data.train, batch_size=config.data.batch_size, rank=0, world_size=cluster.ranks, seed=0, loader_workers=0
    )
    return sum(4 * parameter.numel() for parameter in model.parameters()), shards.iterations_per_epoch


def _check_servers(contender: Contender, cluster: Cluster) -> None:
    try:
        contender.config.pipeline.workers(cluster.ranks)
    except UserInputError as failure:
        raise UserInputError(f"contender {contender.name}: {failure}") from None
