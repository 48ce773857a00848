"""Sections of options that the API, the command, its TOML files and checkpoints share: Wire, Updates and Windows.

Each is frozen, and checks its own values; what depends on more than one of them is checked where they come together.
The docstring under a field is the help text of its option.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pipesgd.checks import check_above_zero, check_at_least, check_timeout, did_you_mean
from pipesgd.errors import UserInputError
from pipesgd.functions import OWN, check_function, kind
from pipesgd.options import check_values, option
from timing_model.buckets import Cut
from timing_model.schedules import ALL_REDUCES, MOST_WIDTH, SEGMENT_BYTES, Algorithm
from timing_model.units import parse_bandwidth

PIPELINED = {"strategy": ("pipelined",)}
ELASTIC_OR_PIPELINED = {"strategy": ("pipelined", "easgd-async")}
"""Strategies of the command with which an option has an effect (``read_by``)."""

PredictionName = Literal["eager", "local", "none"]
PredictionKind = PredictionName | type[Any]
"""A prediction by its name, or a class of predictions (``pipesgd.pipeline.prediction``)."""
OuterName = Literal["average", "nesterov", "elastic"]
OnNonfinite = Literal["stop", "skip"]

AUTO = "auto"
"""Value of an option that is chosen by itself."""
REDUCES = ("matrix", "rows", "factors")
PREDICTIONS: tuple[str, ...] = get_args(PredictionName)
OUTERS: tuple[str, ...] = get_args(OuterName)
ON_NONFINITE: tuple[str, ...] = get_args(OnNonfinite)

DEFAULT_TIMEOUT, DEFAULT_FAREWELL_SECONDS = 120.0, 20.0
"""Seconds that a rank waits for another one, and that all have to stop, unless they are told otherwise."""

MAX_CONNECTIONS = 16

MOST_SEGMENT_BYTES = 1 << 30

TRANSPORTS = ("gloo", "tcp", "tls")
"""Kinds of connections between the ranks."""

LEAST_RATE = 1e6 / 8
"""Smallest rate limit in bytes a second: at a lower one, messages would be mostly the headers of their packets."""

CENTRE_RATE = 0.9
"""Default of the number of ranks times the moving rate of elastic averaging, which is the paper's beta."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The way of gradients between the ranks.

    Raises:
        UserInputError: a value is out of range, or native, torch's own all-reduce, is given what it cannot do.
    """

    all_reduce: str | Algorithm = option("ring", choices=tuple(ALL_REDUCES), kind=kind, read_by=PIPELINED)
    """All-reduce algorithm: ring, halving-doubling, recursive-doubling, all-to-all, hierarchical (inside nodes, then
    between them), native (torch's own), or module:function (returns a schedule); auto chooses one (see --cluster)."""
    segment_bytes: int = option(SEGMENT_BYTES, at_least=1, read_by=PIPELINED)
    """Largest message in bytes; native splits messages as torch does; auto chooses a size (see --cluster)."""
    connections: int = option(1, at_least=1, read_by=PIPELINED)
    """Connections to each rank, used in turn: a single TCP stream may not fill a fast or long link."""
    transport: str | None = option(None, choices=TRANSPORTS, read_by=PIPELINED)
    """Transport of gradients: tcp, connections of pipesgd's own (Linux), whose waits end at once when a rank is lost;
    tls, the same with TLS 1.3, which needs a --secret-file with a certificate (pipesgd keys new --tls); or gloo. By
    default tcp; but gloo on other systems, on GPUs (where tcp has not been run), with --all-reduce native, which is
    torch's own, with more --connections than one, which tcp and tls do not have, and with --rate-limit, which they keep
    less exactly. With --elastic always tcp."""
    rate_limit: str | None = option(None, read_by=PIPELINED)
    """Most that each rank sends in a second, as 50mbit or 6.25MB/s, so that others can use its line, too; no limit by
    default. It counts the messages of all-reduces, without the headers of packets (about 5 %)."""
    buckets: int | str = option("1", read_by=PIPELINED)
    """Buckets in which gradients leave while the backward pass runs: a number of buckets of about equal size, or the
    largest size of one, such as 1MiB; auto chooses a number (see --cluster). 1 is the whole gradient, after the
    backward pass."""
    reduce: str | Mapping[str, str] = option("matrix", choices=(*REDUCES, "auto"), read_by=PIPELINED)
    """Exchange of gradients: matrix (whole, with --all-reduce and --codec), rows (of embeddings, all ranks gather the
    rows that are not zero), factors (for linear layers, all ranks gather inputs and output gradients, and multiply
    them: fewer bytes with large layers and small batches), or auto (for each embedding and linear layer, what sends
    fewer bytes by its shape and the batch; run.json has the choices). Rows and factors are exact and uncompressed.
    Everything else is exchanged whole, as are weights that an embedding or a linear layer shares with another kind
    of layer. With rows, torch.nn.Embedding may have sparse=True."""
    secret_file: str | None = option(None)
    """File with the secret of the job, made by pipesgd keys new FILE and copied to each machine: what ranks tell each
    other through the store of the job is sealed with it, and what others write there is ignored. By default the file
    that the variable PIPESGD_SECRET_FILE names, if any; a DistributedDataParallel program sets the variable."""
    timeout: float | None = option(None)
    """Seconds that a rank waits for another one, for any reason, before the run fails: from 0.1 to 1,000,000, by
    default 120 (in a DistributedDataParallel program, as long as its process group waits). Where all ranks meet, one
    that gives heartbeats while it computes, loads or writes may take ten times as long. At the start, ranks wait two
    minutes for each other until they have met, whatever this option says."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", str(self.buckets))  # one way to write a number, in every file
        name = self.all_reduce_name
        check_values(self)
        if self.connections > MAX_CONNECTIONS:
            raise UserInputError(
                f"connections must be at most {MAX_CONNECTIONS}, which each rank opens to every other; "
                f"got {self.connections}"
            )
        check_segment_bytes(self.segment_bytes)
        check_timeout(self.timeout)
        _ = self.rate, self.cut  # refused here, if there is no such rate or cut
        if self.transport in ("tcp", "tls"):
            if name == "native":
                raise UserInputError(
                    f"transport must be left out with --all-reduce native, torch's own; got {self.transport!r}"
                )
            if self.connections > 1:
                raise UserInputError(
                    f"connections must be left out with --transport {self.transport}, which has one to each rank; "
                    f"got {self.connections}"
                )
        if name != "native":
            return
        if (self.connections, self.segment_bytes) != (1, SEGMENT_BYTES):
            raise UserInputError("connections and segment-bytes must be left out with --all-reduce native, torch's own")
        if self.rate_limit is not None:
            raise UserInputError(
                "rate-limit must be left out with --all-reduce native, which torch sends unpaced; "
                f"got {self.rate_limit!r}"
            )

    @property
    def all_reduce_name(self) -> str:
        """Name of the all-reduce; that of a function is ``module:function``.

        Raises:
            UserInputError: it is neither a function, nor one of ``ALL_REDUCES``, nor written as ``module:function``.
        """
        return all_reduce_name(self.all_reduce)

    def transport_on(self, device: str) -> str:
        """Return the transport of gradients on a ``device``, "cpu" or "cuda"."""
        is_paced = self.rate_limit is not None
        return self.transport or default_transport(self.all_reduce, self.connections, device, is_paced=is_paced)

    @property
    def rate(self) -> float:
        """The rate limit in bytes a second; infinity if there is none.

        Raises:
            UserInputError: it has no unit, or is too low.
        """
        if self.rate_limit is None:
            return math.inf
        try:
            rate = parse_bandwidth("rate-limit", str(self.rate_limit))
        except ValueError as failure:
            raise UserInputError(str(failure)) from None
        if rate < LEAST_RATE:
            raise UserInputError(f"rate-limit must be at least 1mbit; got {self.rate_limit!r}")
        return rate

    @property
    def cut(self) -> Cut:
        """The cut of gradients into the buckets.

        Raises:
            UserInputError: there is no such cut.
        """
        return cut_of(self.buckets)


@dataclass(frozen=True, kw_only=True)
class Updates:
    """The update by gradients that arrive, and the prediction from those in flight.

    Raises:
        UserInputError: a value is out of range.
    """

    prediction: PredictionKind = option("eager", choices=PREDICTIONS, read_by=PIPELINED)
    """Weight prediction, which puts an estimate in place of the gradients in flight: local (this rank's own gradients),
    eager (the same, corrected by their past errors and extrapolated further the less they agree with the means), or
    none. Width 1 needs none."""
    synchronous_start: int | Literal["auto"] = option(AUTO, read_by=PIPELINED)
    """Iterations at the start of the run that use width 1: a number, or auto, as many as the learning rate rises in,
    to 0.85 of its maximum if that is known. A rate that rises once an epoch only needs a number. With --local-steps,
    auto is 0. A number is refused with --width 1, unless there are --local-steps."""
    guard: bool = option(False, read_by=PIPELINED)
    """Fall back to width 1 for a while when the gradient blows up, which is the sign of harmful staleness. Width 1
    needs none."""
    clip_norm: float | None = option(None, above_zero=True)
    """Largest norm of the averaged gradient; larger gradients are scaled down before they are applied. No limit by
    default."""
    clip_value: float | None = option(None, above_zero=True)
    """Largest magnitude of a value in the averaged gradient; no limit by default."""
    on_nonfinite: OnNonfinite = option("stop", choices=ON_NONFINITE)
    """Reaction to a NaN or an infinity in an averaged gradient: stop (the run) or skip (that update)."""

    def __post_init__(self) -> None:
        check_values(self)
        start = self.synchronous_start
        if isinstance(start, str) and start != AUTO:
            raise UserInputError(
                f"synchronous-start must be auto or a whole number; got {start!r}{did_you_mean(start, [AUTO])}"
            )
        if not isinstance(start, str):
            check_at_least("synchronous-start", start, 0)

    @property
    def start_in_windows(self) -> int:
        """Number of the first iterations that local steps exchange one by one: with auto none, as nobody asked."""
        return 0 if self.synchronous_start == AUTO else int(self.synchronous_start)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of local steps, and the outer optimizer that applies what the ranks have moved in them.

    Raises:
        UserInputError: a value is out of range, or belongs to another outer optimizer.
    """

    local_steps: int = option(1, at_least=1, read_by=ELASTIC_OR_PIPELINED)
    """Iterations that each rank trains by itself before the ranks exchange how far these have moved their weights.
    --width then counts windows of this many iterations, and each rank predicts with its own movement. With easgd-async,
    iterations between two exchanges of a rank with the servers."""
    outer: OuterName | None = option(None, choices=OUTERS, read_by=PIPELINED)
    """Outer optimizer of local steps, even of a single one: average (of ranks' weights, the default), nesterov (with
    momentum, as in DiLoCo) or elastic (ranks keep their own weights, and a common centre and they pull each other, as
    in EASGD)."""
    outer_lr: float | None = option(None, above_zero=True, read_by=PIPELINED)
    """Learning rate of --outer average (0.8 by default, 1 at width 1) or nesterov (0.7)."""
    outer_momentum: float | None = option(None, above_zero=True, read_by=PIPELINED)
    """Momentum of --outer nesterov; 0.9 by default."""
    moving_rate: float | None = option(None, above_zero=True, read_by=ELASTIC_OR_PIPELINED)
    """Share of its way to the centre that a rank is pulled after each window with --outer elastic or easgd-async; by
    default 0.9 divided by the number of ranks."""
    average_state: bool = option(False, read_by=PIPELINED)
    """Average the state of the ranks' optimizers (momentum) whenever their weights are averaged, at width 1 (AWAGD)."""
    fragments: int = option(1, at_least=1, read_by=PIPELINED)
    """Parts of the weights that are exchanged in turns, one at the end of each window (weight streaming): an exchange
    has fewer bytes, and between two exchanges of a weight are --local-steps times --fragments iterations. auto chooses
    the fewest of which each is exchanged while a window computes (see --cluster)."""

    def __post_init__(self) -> None:
        check_values(self)
        if self.outer_momentum is not None and self.outer_momentum >= 1:
            raise UserInputError(f"outer-momentum must be below 1; got {self.outer_momentum}")
        if self.moving_rate is not None:
            check_moving_rate(self.moving_rate)

    @property
    def asked(self) -> str:
        """The option of the command that asks for windows, such as "--local-steps"; empty if none does."""
        if self.local_steps > 1:
            return "--local-steps"
        if self.outer is not None:
            return "--outer"
        return "--fragments" if self.fragments > 1 else ""


def differing(section: Any, *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a ``section``, except those named in ``but``, that have another value than their default."""
    values = {item.name: (getattr(section, item.name), item.default) for item in dataclasses.fields(section)}
    return {name: value for name, (value, default) in values.items() if name not in but and value != default}


def check_segment_bytes(segment_bytes: int) -> None:
    """Raise ``UserInputError`` if messages may be longer than a frame can say."""
    if segment_bytes > MOST_SEGMENT_BYTES:
        raise UserInputError(f"segment-bytes must be at most {MOST_SEGMENT_BYTES:,}; got {segment_bytes:,}")


def default_transport(
    all_reduce: str | Algorithm, connections: int = 1, device: str = "cpu", *, is_paced: bool = False
) -> str:
    """Return the transport of gradients unless another one is asked for: gloo, for what tcp does not have.

    What a rank that is late has not taken waits in the kernel's buffers over tcp, and may then leave faster than a rate
    limit allows; gloo sends only what is asked for. On GPUs nobody has run tcp yet.
    """
    has_all = sys.platform == "linux" and all_reduce != "native" and connections == 1 and not is_paced
    return "tcp" if has_all and device == "cpu" else "gloo"


def all_reduce_name(all_reduce: str | Algorithm) -> str:
    """Return the name of an all-reduce; that of a function is ``module:function``.

    Raises:
        UserInputError: it is neither a function, nor one of ``ALL_REDUCES``, nor written as ``module:function``.
    """
    if isinstance(all_reduce, str):
        check_function("all-reduce", all_reduce, kind(all_reduce), (*ALL_REDUCES, OWN))
        return all_reduce
    if not callable(all_reduce):
        raise UserInputError(f"all-reduce must be a name or a function; got {type(all_reduce).__name__}")
    return f"{all_reduce.__module__}:{getattr(all_reduce, '__qualname__', type(all_reduce).__qualname__)}"


def cut_of(buckets: int | str) -> Cut:
    """Return the cut of gradients into these buckets. Raises ``UserInputError`` if they are none."""
    try:
        return Cut.parse(str(buckets))
    except ValueError as failure:
        raise UserInputError(str(failure)) from None


def check_width(width: int) -> None:
    """Raise ``UserInputError`` unless a pipeline can have this width."""
    check_at_least("width", width, 1)
    if width > MOST_WIDTH:
        raise UserInputError(
            f"width must be at most {MOST_WIDTH}, since every unit costs a copy of the gradient; got {width}"
        )


def moving_rate_for(moving_rate: float | None, ranks: int) -> float:
    """Return the moving rate of each of this many ``ranks``; None stands for the default."""
    return CENTRE_RATE / ranks if moving_rate is None else moving_rate


def check_moving_rate(moving_rate: float, ranks: int = 1) -> None:
    """Raise ``UserInputError`` unless ranks can be pulled to their centre at this rate, and it by ``ranks`` at once."""
    check_above_zero("moving-rate", moving_rate)
    if ranks * moving_rate > 1:
        among = "" if ranks == 1 else f"/{ranks} with {ranks} ranks, whose mean the centre would move beyond"
        raise UserInputError(f"moving-rate must be at most 1{among}; got {moving_rate}")


def check_parts(fragments: int, parameters: int) -> None:
    """Raise ``UserInputError`` unless there are ``parameters`` enough for the ``fragments``, which never split one."""
    if fragments > parameters:
        raise UserInputError(f"fragments must be at most {parameters}, the number of parameters; got {fragments}")
