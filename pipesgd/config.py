"""Configuration of a run: frozen dataclasses, each a section of options.

Values are checked in ``__post_init__`` here; checks that need data or other ranks are made where these become
known. The docstring under a field is the help text of its option.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipesgd.checks import check_above_zero, check_at_least, check_one_of, check_timeout, refuse
from pipesgd.codecs.options import CodecOptions
from pipesgd.errors import UserInputError
from pipesgd.functions import OWN, kind
from pipesgd.options import check_options, dashed, option
from timing_model.buckets import WHOLE, Cut
from timing_model.schedules import ALL_REDUCES, SEGMENT_BYTES
from timing_model.units import parse_bandwidth

TEXTS = ("python-stdlib", "text:PATH")
IMAGE_DATASETS = ("digits", "mnist", "fashion-mnist", "cifar100", "images")
DATASETS = (*IMAGE_DATASETS, *TEXTS, OWN)
IMAGE_MODELS = ("mlp", "convnet", "resnet18", "alexnet")
TEXT_MODELS = ("transformer",)
MODELS = (*IMAGE_MODELS, *TEXT_MODELS, OWN)
LOSSES = ("cross-entropy", OWN)
STRATEGIES = ("pipelined", "ddp", "ps-sync", "ps-async", "easgd-async", "local")
GRADIENT_SERVERS = ("ps-sync", "ps-async")
"""Strategies whose servers update their weights by gradients, each by a part of them."""
SERVER_STRATEGIES = (*GRADIENT_SERVERS, "easgd-async")
PREDICTIONS = ("eager", "local", "none")
OUTERS = ("average", "nesterov", "elastic")
REDUCES = ("matrix", "rows", "factors", "auto")
SERVER_PLACEMENTS = ("colocated", "dedicated")
DDP_HOOKS = ("none", "fp16", "bf16")
OPTIMIZERS = ("sgd", "nesterov", "adam", "adamw", "adagrad", "muon")
LR_SCALINGS = ("none", "linear")
SCHEDULES = ("constant", "cosine", "one-cycle")
DEVICES = ("cpu", "cuda")
ON_NONFINITE = ("stop", "skip")
PRECISIONS = ("fp32", "bf16", "fp16")
BUFFERS = ("average", "rank-0", "own")

AUTO = "auto"
AUTO_OPTIONS = ("width", "codec", "all-reduce", "segment-bytes", "buckets", "fragments")
"""Options that can be left to the timing model with the value ``AUTO``."""

FORMER_NAMES = {"streams": "connections"}
FORMER_VALUES = {("server-placement", "beside"): "colocated", ("server-placement", "own"): "dedicated"}
"""Names and values of options in the previous version, which this one still accepts, and what they are called now."""

PIPELINED = {"strategy": ("pipelined",)}
ELASTIC_OR_PIPELINED = {"strategy": ("pipelined", "easgd-async")}
WITH_SERVERS = {"strategy": SERVER_STRATEGIES}
"""Strategies with which an option has an effect (``read_by``)."""

MAX_WIDTH = 64
"""Largest width: each unit costs one copy of the gradient and one iteration of staleness."""

MAX_CONNECTIONS = 16

LEAST_RATE = 1e6 / 8
"""Smallest rate limit in bytes a second: at a lower one, messages would be mostly the headers of their packets."""

MAX_LOSS_SCALE = 2.0**127
"""Largest loss scale: the largest power of two in float32."""

DEFAULT_TIMEOUT = 120.0
DEFAULT_STALL_SECONDS = 30.0
DEFAULT_FAREWELL_SECONDS = 20.0
CENTRE_RATE = 0.9
"""Default of the number of ranks times the moving rate of elastic averaging, which is the paper's beta."""


def check_clipping(norm: float | None, value: float | None) -> None:
    """Raise ``UserInputError`` unless gradients can be clipped to these bounds."""
    for name, bound in (("clip-norm", norm), ("clip-value", value)):
        if bound is not None:
            check_above_zero(name, bound)


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
    """Raise ``UserInputError`` unless movements with this codec can be exchanged in so many parts."""
    if fragments > 1:
        _check_divisible("fragments", fragments, codec, "movement")


def check_parts(fragments: int, parameters: int) -> None:
    """Raise ``UserInputError`` unless there are ``parameters`` enough for the ``fragments``, which never split one."""
    if fragments > parameters:
        raise UserInputError(f"fragments must be at most {parameters}, the number of parameters; got {fragments}")


def check_buckets(buckets: str, codec: str) -> None:
    """Raise ``UserInputError`` unless gradients with this codec can leave in these buckets."""
    if cut_of(buckets) != WHOLE:
        _check_divisible("buckets", buckets, codec, "gradient")


def check_reduce(reduce: str, codec: str, all_reduce: str, device: str) -> None:
    """Raise ``UserInputError`` unless gradients on this device can be reduced so, with this codec and all-reduce."""
    check_one_of("reduce", reduce, REDUCES)
    if reduce == "matrix":
        return
    _check_divisible("reduce", reduce, codec, "gradient", whole="matrix")
    if all_reduce == "native":
        raise UserInputError(
            f"reduce must be matrix with --all-reduce native, in which torch sums whole gradients; got {reduce}"
        )
    if device == "cuda":
        raise UserInputError(
            "reduce must be matrix with device cuda, where pinned memory would grow with each new number of rows; "
            f"got {reduce}"
        )


def _check_divisible(name: str, value: int | str, codec: str, what: str, whole: int | str = 1) -> None:
    if codec in ("topk", "powersgd"):
        raise UserInputError(
            f"{name} must be {whole} with --codec {codec}, which compresses the {what} as a whole; got {value}"
        )


def dataset_kind(name: str) -> str:
    """Return the entry of ``DATASETS`` that ``name`` stands for: text:PATH for any path, otherwise its ``kind``."""
    if name.startswith("text:"):
        return "text:PATH" if name != "text:" else name
    return kind(name)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    dataset: str = option("digits", choices=DATASETS[:-1], kind=dataset_kind)  # --help has no room for the last
    """Data set: digits (embedded), mnist, fashion-mnist, cifar100, images (a folder per class), python-stdlib (source
    text of the running Python), text:PATH (a text file, or all files in a folder), or module:function (returns a
    training and a test set)."""
    data_dir: Path | None = option(None, read_by={"dataset": (*IMAGE_DATASETS[1:], OWN)})  # noqa: RUF009 (a field)
    """Folder of the data files; not needed for digits and text, nor for fashion-mnist from Debian's package."""
    batch_size: int = option(32, at_least=1)
    """Samples per rank and iteration; with --accumulation, per micro-batch."""
    image_size: int = option(64, at_least=1, read_by={"dataset": ("images", OWN)})
    """Side length in pixels to which the pictures of --dataset images are scaled and cropped."""
    random_crop: int = option(0, at_least=0, read_by={"dataset": IMAGE_DATASETS})
    """Pixels added on each side of every training image, before a random part of its former size is cut out of it."""
    mirror: bool = option(False, read_by={"dataset": IMAGE_DATASETS})
    """Mirror every second training image, chosen at random."""
    context: int = option(64, at_least=1, read_by={"dataset": (*TEXTS, OWN)})
    """Length of a text sample in bytes."""
    loader_workers: int | None = option(None, at_least=0)
    """Processes per rank that load and decode data during computation; by default 2 for --dataset images, else 0."""

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def workers(self) -> int:
        """Return ``loader_workers`` or its default: only pictures take long enough to load to be worth a process."""
        if self.loader_workers is None:
            return 2 if self.dataset == "images" else 0
        return self.loader_workers


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model and loss."""

    model: str = option("mlp", choices=MODELS, kind=kind)
    """Model: mlp, convnet, resnet18 or alexnet for images; transformer for text; or module:function (returns a
    torch.nn.Module)."""
    loss: str = option("cross-entropy", choices=LOSSES, kind=kind)
    """Loss: cross-entropy, whose evaluations also measure the accuracy; or module:function (called with the model's
    outputs and the targets, returns their mean loss)."""
    hidden_sizes: tuple[int, ...] = option((500, 500), at_least=1, read_by={"model": ("mlp", OWN)})
    """Widths of the hidden layers of --model mlp."""
    layers: int = option(2, at_least=1, read_by={"model": (*TEXT_MODELS, OWN)})
    """Blocks of --model transformer."""
    heads: int = option(4, at_least=1, read_by={"model": (*TEXT_MODELS, OWN)})
    """Attention heads in each block of --model transformer."""
    embedding: int = option(128, at_least=1, read_by={"model": (*TEXT_MODELS, OWN)})
    """Embedding size of a byte in --model transformer; a multiple of --heads."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.embedding % self.heads:
            raise UserInputError(f"embedding must be a multiple of --heads {self.heads}; got {self.embedding}")


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """Weight updates: optimizer, precision and length of the training."""

    optimizer: str = option("sgd", choices=OPTIMIZERS)
    """Optimizer: sgd, nesterov, adam, adamw, adagrad or muon (for hidden matrices, with adamw for the rest)."""
    lr: float = option(0.02, above_zero=True)
    """Learning rate; the peak, if --schedule varies it."""
    momentum: float = option(0.9, at_least=0, read_by={"optimizer": ("sgd", "nesterov")})
    """Momentum of sgd and nesterov."""
    weight_decay: float = option(0.0, at_least=0)
    """Weight decay."""
    lr_scaling: str = option("none", choices=LR_SCALINGS)
    """Scaling of --lr with the number of ranks that compute: none, or linear (--lr is that of a single rank, and is
    multiplied by their number)."""
    schedule: str = option("constant", choices=SCHEDULES)
    """Learning-rate schedule: constant, cosine (decays to zero) or one-cycle (rises, then decays to zero)."""
    accumulation: int = option(1, at_least=1)
    """Micro-batches of --batch-size samples whose gradients each rank accumulates before they are exchanged."""
    clip_norm: float | None = None
    """Largest norm of the averaged gradient; larger gradients are scaled down before they are applied. No limit by
    default."""
    clip_value: float | None = None
    """Largest magnitude of a value in the averaged gradient; no limit by default."""
    precision: str = option("fp32", choices=PRECISIONS)
    """Precision of forward and backward passes where torch.autocast lowers it: fp32, bf16, or fp16 with a loss scale.
    Weights and gradients stay float32."""
    loss_scale: float = option(65536.0, read_by={"precision": ("fp16",)})
    """Initial loss scale of --precision fp16; torch's GradScaler adapts it."""
    epochs: int | None = option(None, at_least=1)
    """Passes over the training set; 3 by default, unless --iterations is given."""
    iterations: int | None = option(None, at_least=1)
    """Weight updates to run, instead of --epochs."""
    seed: int = option(0, at_least=0)
    """Seed of the initial weights and the sample order."""

    def __post_init__(self) -> None:
        check_above_zero("loss-scale", self.loss_scale, MAX_LOSS_SCALE)
        check_options(self)
        check_clipping(self.clip_norm, self.clip_value)
        if self.momentum >= 1:
            raise UserInputError(f"momentum must be below 1; got {self.momentum}")
        if self.optimizer == "nesterov" and self.momentum == 0:
            raise UserInputError("momentum must be above 0 with --optimizer nesterov; got 0")
        if self.epochs is not None and self.iterations is not None:
            raise UserInputError("epochs and iterations must not both be given; leave one of them out")

    def for_ranks(self, ranks: int) -> OptimizationConfig:
        """Return these options with the learning rate that this many ``ranks`` train with."""
        scale = ranks if self.lr_scaling == "linear" else 1
        return dataclasses.replace(self, lr=scale * self.lr, lr_scaling="none")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Exchange of gradients between ranks."""

    strategy: str = option("pipelined", choices=STRATEGIES)
    """Training strategy: pipelined (width 1 is synchronous SGD), ddp (torch's own), ps-sync and ps-async (parameter
    servers), easgd-async (elastic averaging with a centre on parameter servers), or local (no communication: an upper
    bound on the speed of the others)."""
    width: int = option(2, read_by=PIPELINED)
    """Iterations in flight: the all-reduce of one runs while the next ones compute. 1 is synchronous; auto chooses from
    1 to 3 (see --cluster)."""
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
    allow_drift: bool = option(False, read_by=PIPELINED)
    """Train on processors that compute different bits, such as ARM with x86, which is refused by default: replicas
    drift apart by rounding errors, and get rank 0's weights at every evaluation and checkpoint."""
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
    reduce: str = option("matrix", choices=REDUCES, read_by=PIPELINED)
    """Exchange of gradients: matrix (whole, with --all-reduce and --codec), rows (of embeddings, all ranks gather the
    rows that are not zero), factors (for linear layers, all ranks gather inputs and output gradients, and multiply
    them: fewer bytes with large layers and small batches), or auto (for each embedding and linear layer, what sends
    fewer bytes of the first gradients; run.json has the choices). Rows and factors are exact and uncompressed.
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
        own = {name: getattr(self, name) for name in _OF_WINDOWS}
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


_OF_WINDOWS = ("outer_lr", "outer_momentum", "moving_rate", "average_state", "fragments")
"""Options of windows of local steps that have no effect without them."""

_REDUCED = {
    "matrix": "",
    "rows": ", embeddings by rows",
    "factors": ", linear layers by factors",
    "auto": ", embeddings by rows and linear layers by factors where that sends less",
}
"""Words for the exchange of gradients, by ``reduce``."""


@dataclass(frozen=True, kw_only=True)
class PlanningConfig:
    """Choices of the timing model, and its calibration of the cluster."""

    cluster: Path | None = None
    """File that pipesgd.calibrate wrote for this cluster and model, used to predict the time of an iteration and to
    choose options set to auto. Rank 0's file counts. Without one, a run with auto first calibrates for some seconds. A
    run with auto then compares the best candidates in its first iterations."""
    auto: tuple[str, ...] = ()
    """Options from ``AUTO_OPTIONS`` still to be chosen, whose own fields hold defaults until then. This is not an
    option itself: on the command line, each of them has the value auto."""
    chosen: tuple[str, ...] = field(default=(), compare=False)
    """Options from ``AUTO_OPTIONS`` that were left to be chosen and have been. This is not an option itself, either."""

    def __post_init__(self) -> None:
        for name in self.auto:
            check_one_of("auto", name, AUTO_OPTIONS)

    @property
    def wanted(self) -> bool:
        """True if the timing model is asked for anything."""
        return bool(self.auto) or self.cluster is not None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Output files, checkpoints, and behaviour when something goes wrong."""

    output: Path = Path("runs/latest")
    """Folder for summary.json, metrics.jsonl, TensorBoard events, checkpoints and the trained weights."""
    resume: bool = False
    """Continue from the newest checkpoint in --output, or from the beginning if there is none yet."""
    overwrite: bool = False
    """Delete the run in --output and start from the beginning."""
    dry_run: bool = False
    """Print the resolved configuration as a file for --config, without dry-run, overwrite and resume, and exit."""
    device: str = option("cpu", choices=DEVICES)
    """Device of the model: cpu or cuda."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds that a rank waits for another one, for any reason, before the run fails: from 0.1 to 1,000,000. Where
    all ranks meet, one that gives heartbeats while it computes, loads or writes may take ten times as long."""
    stall_seconds: float = option(DEFAULT_STALL_SECONDS, at_least=1)
    """Seconds of waiting after which rank 0 reports the ranks it waits for, and the interval between reports: at
    least 1."""
    farewell_seconds: float = option(DEFAULT_FAREWELL_SECONDS, at_least=0)
    """Seconds that the ranks have to write a last checkpoint after Ctrl-C or SIGTERM; 0 ends them at once."""
    on_nonfinite: str = option("stop", choices=ON_NONFINITE)
    """Reaction to a NaN or an infinity in an averaged gradient: stop (the run) or skip (that update)."""
    check_replicas: int | None = option(None, at_least=1)
    """Iterations between comparisons of a hash of all ranks' weights; by default only at the end."""
    evaluate_iterations: int | None = option(None, at_least=1)
    """Iterations between two evaluations on the test set; by default one at the end of every epoch. Gradients in flight
    arrive meanwhile, so frequent evaluations make the reported iterations look shorter."""
    checkpoint_seconds: float = option(60.0, above_zero=True)
    """Approximate seconds between checkpoints."""
    checkpoint_iterations: int | None = option(None, at_least=1)
    """Exact number of iterations between checkpoints, instead of --checkpoint-seconds."""
    keep_checkpoints: int = option(3, at_least=1)
    """Number of newest checkpoints to keep."""
    trace: bool = False
    """Write a Chrome/Perfetto trace of computation and communication, with one process row per rank."""
    log_messages: bool = False
    """Log every message between ranks that is not torch's own to stderr, one line each."""

    def __post_init__(self) -> None:
        check_options(self)
        check_timeout(self.timeout)
        if self.resume and self.overwrite:
            raise UserInputError("resume and overwrite must not both be given: one keeps what the other deletes")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a model on several machines, decentralized and pipelined.

    Start it on every machine with torchrun, for instance on one machine with four ranks:
    torchrun --nproc-per-node 4 -m pipesgd.train --dataset digits --width 2
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    compression: CodecOptions = field(default_factory=CodecOptions)
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        optimization, pipeline, compression = self.optimization, self.pipeline, self.compression
        strategy, correction, replicas = pipeline.strategy, compression.momentum_correction, self.run.check_replicas
        by_sgd, on_servers = optimization.optimizer == "sgd", strategy in GRADIENT_SERVERS
        if strategy == "pipelined":
            compression.check_all_reduce(pipeline.all_reduce)
            compression.check_outer(pipeline.outer or "average")
            check_buckets(pipeline.buckets, compression.codec)
            check_fragments(pipeline.fragments, compression.codec)
            check_reduce(pipeline.reduce, compression.codec, pipeline.all_reduce, self.run.device)
            self._check_late()
        elif compression != CodecOptions():
            raise UserInputError(
                f"codec and its options must be left out with --strategy {strategy}, which has no use for them (they "
                f"belong to pipelined); got --codec {compression.codec}"
            )
        if self.planning.wanted:
            self._check_planning()
        in_parts = f" must be left out with --strategy {strategy}, whose servers see parts of a gradient; got "
        refuse(
            (pipeline.local_steps > 1 and optimization.accumulation > 1,
             "accumulation must be 1 with --local-steps, the other way to exchange less often; "
             f"got {optimization.accumulation}"),
            (correction > 0 and optimization.optimizer == "nesterov",
             "optimizer must be sgd with --momentum-correction, which replaces its momentum; got nesterov"),
            (correction > 0 and by_sgd and optimization.momentum > 0,
             f"momentum must be 0 with --momentum-correction, which replaces it; got {optimization.momentum}"),
            (pipeline.average_state and by_sgd and optimization.momentum == 0,
             "momentum must be above 0 with --average-state and --optimizer sgd, which keeps no state without; got 0"),
            (optimization.optimizer == "muon" and on_servers,
             f"optimizer must update each element on its own with --strategy {strategy}, whose servers may cut "
             "parameters anywhere; got muon, which needs whole matrices"),
            (optimization.clip_norm is not None and on_servers, f"clip-norm{in_parts}{optimization.clip_norm}"),
            (optimization.clip_value is not None and on_servers, f"clip-value{in_parts}{optimization.clip_value}"),
            (optimization.precision == "fp16" and on_servers, f"precision{in_parts}fp16"),
            (self.run.device == "cuda" and strategy in SERVER_STRATEGIES,
             f"device must be cpu with --strategy {strategy}, whose servers are on CPUs; got cuda"),
            (replicas is not None and strategy in ("local", "ps-async", "easgd-async"),
             f"check-replicas must be left out with --strategy {strategy}, whose replicas differ while they train; "
             f"got {replicas}"),
            (replicas is not None and pipeline.allow_drift,
             f"check-replicas must be left out with --allow-drift, which lets replicas differ; got {replicas}"),
        )  # fmt: skip

    def _check_late(self) -> None:
        """Raise ``UserInputError`` for options about late gradients where the user has asked for width 1."""
        pipeline = self.pipeline
        if pipeline.width > 1 or "width" in (*self.planning.auto, *self.planning.chosen):
            return
        idle: dict[str, int] = {"guard": pipeline.guard}
        if pipeline.local_steps == 1:  # else these are windows of one iteration
            idle["warmup-iterations"] = pipeline.warmup_iterations
        for name, value in idle.items():
            if value:
                raise UserInputError(
                    f"{name} must be left out with --width 1, at which no gradient is late; got {value}"
                )

    def _check_planning(self) -> None:
        """Raise ``UserInputError`` if the timing model is asked for something it does not cover."""
        pipeline, codec, auto = self.pipeline, self.compression.codec, self.planning.auto
        option = f"{auto[0]} auto" if auto else "cluster"
        searched = [name for name in auto if name != "fragments"]
        uncovered = f" must be left out with --{option}, since the timing model does not cover it; got "
        kept = " must be given with --reduce auto, which chooses by it and keeps its choices; got auto"
        refuse(
            (pipeline.strategy != "pipelined",
             f"strategy must be pipelined with --{option}; got {pipeline.strategy}"),
            (searched and pipeline.local_steps > 1,
             f"local-steps must be 1 with --{option}, which is chosen for an exchange in every iteration; "
             f"got {pipeline.local_steps}"),
            (pipeline.rate_limit is not None and self.planning.cluster is None,
             f"cluster must be given with --{option} and --rate-limit, since a calibration before the run would use "
             "the whole line; got none"),
            (pipeline.outer is not None and (searched or pipeline.outer != "average"),
             f"outer{uncovered}{pipeline.outer!r}"),
            (pipeline.average_state, f"average-state{uncovered}True"),
            (searched and pipeline.fragments > 1,
             f"fragments must be 1 with --{option}, which is chosen for an exchange of all weights; "
             f"got {pipeline.fragments}"),
            (pipeline.reduce == AUTO and "codec" in auto, f"codec{kept}"),
            (pipeline.reduce == AUTO and "buckets" in auto, f"buckets{kept}"),
            (self.run.device != "cpu",
             f"device must be cpu with --{option}, since calibrations are those of CPUs; got {self.run.device}"),
            (kind(codec) in ("powersgd", OWN),
             f"codec must be another one with --{option}, since its times are not calibrated; got {codec}"),
            (pipeline.all_reduce == "hierarchical",
             f"all-reduce must be another one with --{option}, since links inside nodes are not calibrated; "
             "got hierarchical"),
        )  # fmt: skip
        if "fragments" not in auto:
            return
        if searched:
            raise UserInputError(f"{searched[0]} must be given with --fragments auto, which depends on it; got auto")
        if pipeline.width == 1:
            raise UserInputError("width must be at least 2 with --fragments auto, as width 1 hides no exchange; got 1")
        _check_divisible("fragments", AUTO, codec, "movement")
        dataclasses.replace(pipeline, fragments=2)  # refuses options that do not go with more than one

    def options(self) -> dict[str, Any]:
        """Return every option by its name on the command line, as a JSON value."""
        sections = (self.data, self.model, self.optimization, self.pipeline, self.compression, self.planning, self.run)
        options = options_of(*sections)
        auto = options.pop(AUTO)
        del options["chosen"]
        return options | dict.fromkeys(auto, AUTO)

    def with_choices(self, choices: dict[str, Any]) -> TrainConfig:
        """Return the configuration with ``choices`` for ``AUTO_OPTIONS`` and nothing left to be chosen."""
        fields = {name.replace("-", "_"): value for name, value in choices.items()}
        codec = {"codec": fields.pop("codec")} if "codec" in fields else {}
        return dataclasses.replace(
            self,
            pipeline=dataclasses.replace(self.pipeline, **fields),
            compression=dataclasses.replace(self.compression, **codec),
            planning=dataclasses.replace(self.planning, auto=(), chosen=(*self.planning.chosen, *self.planning.auto)),
        )

    @property
    def samples_per_rank(self) -> int:
        """Samples per rank in one iteration."""
        return self.data.batch_size * self.optimization.accumulation

    def samples(self) -> str:
        """Return the samples per rank and iteration as a short text."""
        accumulation = self.optimization.accumulation
        return f"{accumulation} x {self.data.batch_size}" if accumulation > 1 else f"{self.data.batch_size}"

    def describe(self) -> str:
        """Return a short description of what is done with the gradients."""
        if self.pipeline.strategy != "pipelined":
            return self.pipeline.describe()
        from pipesgd.codecs.own import codec_options  # imports torch, which takes seconds

        return f"{self.pipeline.describe()}, {codec_options(self.compression).describe()}"


def options_of(*sections: Any) -> dict[str, Any]:
    """Return every option of these dataclasses by its name on the command line, as a JSON value."""
    return {
        dashed(item.name): _as_json(getattr(section, item.name))
        for section in sections
        for item in dataclasses.fields(section)
    }


FREE_BETWEEN_RANKS = frozenset({"data-dir", "output", "loader-workers", "log-messages", "resume", "cluster"})
"""Options that may differ between ranks: folders differ between machines, any rank may ask to resume since all agree on
what to resume from, and only rank 0's cluster counts."""

FREE_ON_RESUME = FREE_BETWEEN_RANKS | {
    "overwrite", "dry-run", "timeout", "stall-seconds", "farewell-seconds", "on-nonfinite", "check-replicas",
    "checkpoint-seconds", "checkpoint-iterations", "keep-checkpoints", "trace",
}  # fmt: skip
"""Options that may change when a run is resumed, since no weight depends on them."""


def current_names(options: dict[str, Any]) -> dict[str, Any]:
    """Return the ``options`` of a run that the previous version may have recorded, under their current names."""
    renamed = {FORMER_NAMES.get(name, name): value for name, value in options.items()}
    current = {
        name: FORMER_VALUES.get((name, value), value) if isinstance(value, str) else value
        for name, value in renamed.items()
    }
    if "buckets" not in current and current.get("outer") == "average":
        current["outer"] = None  # "average" was the default before there were buckets
    return current


def differing_options(one: dict[str, Any], other: dict[str, Any], *, free: frozenset[str]) -> list[str]:
    """Return the names of options, except those in ``free``, whose values differ between two ``options()``."""
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in free and one.get(name) != other.get(name)]


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
