"""Options of the exchange of gradients between ranks, and the checks of their values, which the strategies share."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from pipesgd.checks import check_above_zero, check_at_least, check_one_of, refuse
from pipesgd.errors import UserInputError
from pipesgd.functions import kind
from pipesgd.options import check_options, dashed, option
from timing_model.buckets import WHOLE, Cut
from timing_model.schedules import ALL_REDUCES, SEGMENT_BYTES
from timing_model.units import parse_bandwidth

STRATEGIES = ("pipelined", "ddp", "ps-sync", "ps-async", "easgd-async", "local")
GRADIENT_SERVERS = ("ps-sync", "ps-async")
"""Strategies whose servers update their weights by gradients, each by a part of them."""
SERVER_STRATEGIES = (*GRADIENT_SERVERS, "easgd-async")
PREDICTIONS = ("eager", "local", "none")
OUTERS = ("average", "nesterov", "elastic")
REDUCES = ("matrix", "rows", "factors")
SERVER_PLACEMENTS = ("colocated", "dedicated")
DDP_HOOKS = ("none", "fp16", "bf16")
BUFFERS = ("average", "rank-0", "own")

PIPELINED = {"strategy": ("pipelined",)}
ELASTIC_OR_PIPELINED = {"strategy": ("pipelined", "easgd-async")}
WITH_SERVERS = {"strategy": SERVER_STRATEGIES}
"""Strategies with which an option has an effect (``read_by``)."""

OF_WINDOWS = ("outer_lr", "outer_momentum", "moving_rate", "average_state", "fragments")
"""Options of windows of local steps, besides the windows' length and the outer optimizer."""

MAX_WIDTH = 64
"""Largest width: each unit costs one copy of the gradient and one iteration of staleness."""

MAX_CONNECTIONS = 16

LEAST_RATE = 1e6 / 8
"""Smallest rate limit in bytes a second: at a lower one, messages would be mostly the headers of their packets."""

CENTRE_RATE = 0.9
"""Default of the number of ranks times the moving rate of elastic averaging, which is the paper's beta."""


def check_width(width: int, warmup_iterations: int) -> None:
    """Raise ``UserInputError`` unless a pipeline can have this width and warm-up."""
    check_at_least("width", width, 1)
    if width > MAX_WIDTH:
        raise UserInputError(
            f"width must be at most {MAX_WIDTH}, since every unit costs a copy of the gradient; got {width}"
        )
    check_at_least("warmup-iterations", warmup_iterations, 0)


def check_local_steps(
    local_steps: int,
    outer: str,
    *,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    moving_rate: float | None = None,
    average_state: bool = False,
    fragments: int = 1,
    width: int,
) -> None:
    """Raise ``UserInputError`` unless windows can have this length and be applied by this outer optimizer."""
    check_at_least("local-steps", local_steps, 1)
    check_one_of("outer", outer, OUTERS)
    for name, value, readers in (
        ("outer-lr", outer_lr, ("average", "nesterov")),
        ("outer-momentum", outer_momentum, ("nesterov",)),
        ("moving-rate", moving_rate, ("elastic",)),
    ):
        if value is not None:
            if outer not in readers:
                raise UserInputError(f"{name} must be left out with --outer {outer}; got {value}")
            check_above_zero(name, value)
    if outer_momentum is not None and outer_momentum >= 1:
        raise UserInputError(f"outer-momentum must be below 1; got {outer_momentum}")
    if moving_rate is not None:
        check_moving_rate(moving_rate)
    if average_state and outer == "elastic":
        raise UserInputError("average-state must be left out with --outer elastic, which averages no weights; got True")
    check_at_least("fragments", fragments, 1)
    if fragments > 1 and (outer != "average" or average_state):
        other = "--average-state" if outer == "average" else f"--outer {outer}"
        raise UserInputError(f"fragments must be 1 with {other}, which needs all weights at once; got {fragments}")
    if average_state and width > 1:
        raise UserInputError(f"width must be 1 with --average-state, whose averages are never late; got {width}")


def moving_rate_for(moving_rate: float | None, ranks: int) -> float:
    """Return the moving rate of each of this many ``ranks``; None stands for the default."""
    return CENTRE_RATE / ranks if moving_rate is None else moving_rate


def check_moving_rate(moving_rate: float, ranks: int = 1) -> None:
    """Raise ``UserInputError`` unless ranks can be pulled to their centre at this rate, and it by ``ranks`` at once."""
    check_above_zero("moving-rate", moving_rate)
    if ranks * moving_rate > 1:
        among = "" if ranks == 1 else f"/{ranks} with {ranks} ranks, whose mean the centre would move beyond"
        raise UserInputError(f"moving-rate must be at most 1{among}; got {moving_rate}")


def check_messages(all_reduce: str, segment_bytes: int, connections: int) -> None:
    """Raise ``UserInputError`` unless messages can be split and sent with these settings."""
    check_at_least("segment-bytes", segment_bytes, 1)
    check_at_least("connections", connections, 1)
    if connections > MAX_CONNECTIONS:
        raise UserInputError(
            f"connections must be at most {MAX_CONNECTIONS}, which each rank opens to every other; got {connections}"
        )
    if all_reduce == "native" and (connections, segment_bytes) != (1, SEGMENT_BYTES):
        raise UserInputError("connections and segment-bytes must be left out with --all-reduce native, torch's own")


def rate_of(rate_limit: str | None, all_reduce: str) -> float:
    """Return a rate limit such as "50mbit" in bytes a second, and infinity for None.

    Raises:
        UserInputError: it has no unit, is too low, or cannot be kept with this all-reduce.
    """
    if rate_limit is None:
        return math.inf
    try:
        rate = parse_bandwidth("rate-limit", str(rate_limit))
    except ValueError as failure:
        raise UserInputError(str(failure)) from None
    if rate < LEAST_RATE:
        raise UserInputError(f"rate-limit must be at least 1mbit; got {rate_limit!r}")
    if all_reduce == "native":
        raise UserInputError(
            f"rate-limit must be left out with --all-reduce native, which torch sends unpaced; got {rate_limit!r}"
        )
    return rate


def cut_of(buckets: str) -> Cut:
    """Return the cut of gradients into these buckets. Raises ``UserInputError`` if they are none."""
    try:
        return Cut.parse(buckets)
    except ValueError as failure:
        raise UserInputError(str(failure)) from None


def check_fragments(fragments: int, codec: str) -> None:
    """Raise ``UserInputError`` unless movements with this codec can be exchanged in this many parts."""
    if fragments > 1:
        check_divisible("fragments", fragments, codec, "movement")


def check_parts(fragments: int, parameters: int) -> None:
    """Raise ``UserInputError`` unless there are ``parameters`` enough for the ``fragments``, which never split one."""
    if fragments > parameters:
        raise UserInputError(f"fragments must be at most {parameters}, the number of parameters; got {fragments}")


def check_buckets(buckets: str, codec: str) -> None:
    """Raise ``UserInputError`` unless gradients with this codec can leave in these buckets."""
    if cut_of(buckets) != WHOLE:
        check_divisible("buckets", buckets, codec, "gradient")


def check_reduce(reduce: str, codec: str, all_reduce: str, device: str) -> None:
    """Raise ``UserInputError`` unless gradients on this device can be reduced so, with this codec and all-reduce.

    ``reduce`` is the option or, where parameters are named, a text about them.
    """
    if reduce == "matrix":
        return
    check_divisible("reduce", reduce, codec, "gradient", whole="matrix")
    if all_reduce == "native":
        raise UserInputError(
            f"reduce must be matrix with --all-reduce native, in which torch sums whole gradients; got {reduce}"
        )
    if device == "cuda":
        raise UserInputError(
            f"reduce must be matrix with device cuda, on which rows and factors have not been tested; got {reduce}"
        )


def check_divisible(name: str, value: int | str, codec: str, what: str, whole: int | str = 1) -> None:
    """Raise ``UserInputError`` if a codec compresses ``what`` as a whole, which the value of an option takes apart."""
    if codec in ("topk", "powersgd"):
        raise UserInputError(
            f"{name} must be {whole} with --codec {codec}, which compresses the {what} as a whole; got {value}"
        )


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Exchange of gradients between ranks."""

    strategy: str = option("pipelined", choices=STRATEGIES)
    """Training strategy: pipelined (width 1 is synchronous SGD), ddp (torch's own), ps-sync and ps-async (parameter
    servers), easgd-async (elastic averaging with a centre on parameter servers), or local (no communication: an upper
    bound on the speed of the others)."""
    width: int = option(2, read_by=PIPELINED)
    """Iterations in flight: the all-reduce of one runs while the next ones compute. 1 is synchronous; auto chooses from
    1 to 3 (see --cluster), and --buckets for width 1 unless they are given."""
    warmup_iterations: int = option(0, read_by=PIPELINED)
    """Iterations at the start of the run that use width 1; refused with --width 1, unless there are --local-steps."""
    prediction: str = option("eager", choices=PREDICTIONS, read_by=PIPELINED)
    """Weight prediction, which puts an estimate in place of the gradients in flight: local (this rank's own gradients),
    eager (the same, corrected by their past errors and extrapolated further the less they agree with the means), or
    none. Width 1 needs none."""
    local_steps: int = option(1, read_by=ELASTIC_OR_PIPELINED)
    """Iterations that each rank trains by itself before the ranks exchange how far these have moved their weights.
    --width then counts windows of this many iterations, and each rank predicts with its own movement. With easgd-async,
    iterations between two exchanges of a rank with the servers."""
    outer: str | None = option(None, choices=OUTERS, read_by=PIPELINED)
    """Outer optimizer of local steps, even of a single one: average (of ranks' weights, the default), nesterov (with
    momentum, as in DiLoCo) or elastic (ranks keep their own weights, and a common centre and they pull each other, as
    in EASGD)."""
    outer_lr: float | None = option(None, read_by=PIPELINED)
    """Learning rate of --outer average (0.8 by default, 1 at width 1) or nesterov (0.7)."""
    outer_momentum: float | None = option(None, read_by=PIPELINED)
    """Momentum of --outer nesterov; 0.9 by default."""
    moving_rate: float | None = option(None, read_by=ELASTIC_OR_PIPELINED)
    """Share of its way to the centre that a rank is pulled after each window with --outer elastic or easgd-async; by
    default 0.9 divided by the number of ranks."""
    average_state: bool = option(False, read_by=PIPELINED)
    """Average the state of the ranks' optimizers (momentum) whenever their weights are averaged, at width 1 (AWAGD)."""
    fragments: int = option(1, read_by=PIPELINED)
    """Parts of the weights that are exchanged in turns, one at the end of each window (weight streaming): an exchange
    has fewer bytes, and between two exchanges of a weight are --local-steps times --fragments iterations. auto chooses
    the fewest of which each is exchanged while a window computes (see --cluster)."""
    guard: bool = option(False, read_by=PIPELINED)
    """Fall back to width 1 for a while when the gradient blows up, which is the sign of harmful staleness. Width 1
    needs none."""
    buffers: str = option("average", choices=BUFFERS)
    """Buffers (batch norm's statistics) in evaluations and in the trained model: average (their mean over ranks),
    rank-0 (rank 0's), or own (each rank's). Between evaluations, every rank updates its own."""
    all_reduce: str = option("ring", choices=tuple(ALL_REDUCES), kind=kind, read_by=PIPELINED)
    """All-reduce algorithm: ring, halving-doubling, recursive-doubling, all-to-all, hierarchical (inside nodes, then
    between them), native (torch's own), or module:function (returns a schedule); auto chooses one (see --cluster)."""
    segment_bytes: int = option(SEGMENT_BYTES, read_by=PIPELINED)
    """Largest message in bytes; native splits messages as torch does; auto chooses a size (see --cluster)."""
    connections: int = option(1, read_by=PIPELINED)
    """Connections to each rank, used in turn: a single TCP stream may not fill a fast or long link."""
    rate_limit: str | None = option(None, read_by=PIPELINED)
    """Most that each rank sends in a second, as 50mbit or 6.25MB/s, so that others can use its line, too; no limit by
    default. It counts the messages of all-reduces, without the headers of packets (about 5 %)."""
    buckets: str = option("1", read_by=PIPELINED)
    """Buckets in which gradients leave while the backward pass runs: a number of buckets of about equal size, or the
    largest size of one, such as 1MiB; auto chooses a number (see --cluster). 1 is the whole gradient, after the
    backward pass."""
    reduce: str = option("matrix", choices=(*REDUCES, "auto"), read_by=PIPELINED)
    """Exchange of gradients: matrix (whole, with --all-reduce and --codec), rows (of embeddings, all ranks gather the
    rows that are not zero), factors (for linear layers, all ranks gather inputs and output gradients, and multiply
    them: fewer bytes with large layers and small batches), or auto (for each embedding and linear layer, what sends
    fewer bytes by its shape and the batch; run.json has the choices). Rows and factors are exact and uncompressed.
    Everything else is exchanged whole, as are weights that an embedding or a linear layer shares with another kind
    of layer. With rows, torch.nn.Embedding may have sparse=True."""
    ddp_hook: str = option("none", choices=DDP_HOOKS, read_by={"strategy": ("ddp",)})
    """Communication hook of --strategy ddp, which compresses gradients: none, or torch's fp16 or bf16."""
    servers: int = option(1, at_least=1, read_by=WITH_SERVERS)
    """Number of parameter servers, each with its share of the weights (ps-sync, ps-async, easgd-async)."""
    server_placement: str = option("colocated", choices=SERVER_PLACEMENTS, read_by=WITH_SERVERS)
    """Placement of the parameter servers: colocated (on the ranks of the first workers) or dedicated (on the last
    ranks, which do nothing else)."""
    staleness_bound: int | None = option(None, at_least=0, read_by={"strategy": ("ps-async",)})
    """Largest lead of the fastest worker over the slowest, in iterations (ps-async); no bound by default, 0 is
    ps-sync."""

    def __post_init__(self) -> None:
        check_width(self.width, self.warmup_iterations)
        check_messages(self.all_reduce, self.segment_bytes, self.connections)
        check_options(self)
        rate_of(self.rate_limit, self.all_reduce)
        cut_of(self.buckets)
        self._check_windows()

    def check_codec(self, codec: str, device: str) -> None:
        """Raise ``UserInputError`` unless this codec goes with these options, for a model on this device."""
        check_buckets(self.buckets, codec)
        check_fragments(self.fragments, codec)
        check_reduce(self.reduce, codec, self.all_reduce, device)

    @property
    def in_windows(self) -> bool:
        """True if ranks train in windows of local steps, of which an explicit outer optimizer may have one each."""
        windows = self.local_steps > 1 or self.outer is not None or self.fragments > 1
        return self.strategy == "pipelined" and windows

    def _check_windows(self) -> None:
        """Raise ``UserInputError`` for options of local steps without any, and for options that local steps refuse."""
        if self.strategy == "easgd-async":
            check_local_steps(self.local_steps, "elastic", moving_rate=self.moving_rate, width=1)
            return
        own = {name: getattr(self, name) for name in OF_WINDOWS}
        check_local_steps(self.local_steps, self.outer or "average", width=self.width, **own)
        if not self.in_windows:
            defaults = {item.name: item.default for item in dataclasses.fields(self)}
            for name, value in own.items():
                if value != defaults[name]:
                    raise UserInputError(
                        f"{dashed(name)} must be left out without --local-steps or --outer, to which it "
                        f"belongs; got {value}"
                    )
            return
        option = "--local-steps" if self.local_steps > 1 else "--outer" if self.outer is not None else "--fragments"
        refuse(
            (self.prediction != "eager",
             f"prediction must be left out with {option}, since each rank expects its own movement; "
             f"got {self.prediction!r}"),
            (self.guard, f"guard must be left out with {option}, since it judges averaged gradients; got True"),
            (self.reduce != "matrix",
             f"reduce must be left out with {option}, since a movement is that of a whole window, and no gradient; "
             f"got {self.reduce!r}"),
            (cut_of(self.buckets) != WHOLE,
             f"buckets must be left out with {option}, since a movement is complete only when its window ends; "
             f"got {self.buckets}"),
        )  # fmt: skip

    def describe(self) -> str:
        """Return a short description of what is done with the gradients."""
        if self.strategy == "pipelined":
            connections = f" on {self.connections} connections each" if self.connections > 1 else ""
            connections += "" if self.rate_limit is None else f", at most {self.rate_limit} each"
            if cut_of(self.buckets) != WHOLE:
                connections += f", buckets {self.buckets}"
            connections += _REDUCED[self.reduce]
            prediction = f", prediction {self.prediction}" if self.width > 1 else ""
            if self.in_windows:
                prediction = f", {self.local_steps} local steps, outer {self.outer or 'average'}"
                prediction += f", {self.fragments} fragments" if self.fragments > 1 else ""
            return f"pipelined width {self.width}{prediction}, {self.all_reduce} all-reduce{connections}"
        if self.strategy == "ddp":
            return f"ddp with {'no' if self.ddp_hook == 'none' else 'the ' + self.ddp_hook} hook"
        if self.strategy not in SERVER_STRATEGIES:
            return self.strategy
        bound = "" if self.staleness_bound is None else f", staleness bound {self.staleness_bound}"
        period = f" every {self.local_steps} iterations" if self.local_steps > 1 else ""
        servers = f"{self.servers} {self.server_placement} server{'s' if self.servers > 1 else ''}"
        return f"{self.strategy}{period}{bound}, {servers}"

    def workers(self, world_size: int) -> int:
        """Return the number of ranks that compute gradients, which are the first ones of ``world_size``.

        Raises:
            UserInputError: there are too few ranks for the servers, or too many for the moving rate.
        """
        if self.strategy not in SERVER_STRATEGIES:
            if self.moving_rate is not None:
                check_moving_rate(self.moving_rate, world_size)
            return world_size
        dedicated = self.server_placement == "dedicated"
        workers = world_size - self.servers if dedicated else world_size
        if workers < 1 or self.servers > world_size:
            raise UserInputError(
                f"servers must be at most {max(world_size - dedicated, 0)} on {world_size} "
                f"rank{'s' if world_size > 1 else ''} with --server-placement {self.server_placement}; "
                f"got {self.servers}"
            )
        return workers


_REDUCED = {
    "matrix": "",
    "rows": ", embeddings by rows",
    "factors": ", linear layers by factors",
    "auto": ", embeddings by rows and linear layers by factors where that sends less",
}
"""Words for the exchange of gradients, by ``reduce``."""
