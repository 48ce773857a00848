"""Configuration of a run: frozen dataclasses, each a section of options.

Values are checked in ``__post_init__`` here; checks that need data or other ranks are made where these become
known. The docstring under a field is the help text of its option.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pipesgd.checks import check_above_zero, check_one_of
from pipesgd.codecs.flat import CompressionConfig
from pipesgd.errors import UserInputError
from pipesgd.functions import OWN, kind
from pipesgd.options import check_options, check_read, dashed, option
from pipesgd.pipeline_config import SERVER_STRATEGIES, PipelineConfig
from pipesgd.rules import (
    CODEC,
    ELASTIC,
    GRADIENTS,
    LATE,
    NO_WINDOWS,
    OUTER,
    PARTS,
    PLANNING,
    REDUCE,
    TRAINING,
    WINDOWS,
    check_rules,
    options_of_sections,
)
from pipesgd.sections import AUTO, DEFAULT_FAREWELL_SECONDS, DEFAULT_TIMEOUT, Updates, Windows, Wire, check_moving_rate
from timing_model.buckets import WHOLE

TEXTS = ("python-stdlib", "text:PATH")
IMAGE_DATASETS = ("digits", "mnist", "fashion-mnist", "cifar100", "images")
DATASETS = (*IMAGE_DATASETS, *TEXTS, OWN)
IMAGE_MODELS = ("mlp", "convnet", "resnet18", "alexnet")
TEXT_MODELS = ("transformer",)
MODELS = (*IMAGE_MODELS, *TEXT_MODELS, OWN)
LOSSES = ("cross-entropy", OWN)
OptimizerName = Literal["sgd", "nesterov", "adam", "adamw", "adagrad", "muon"]
LrScaling = Literal["none", "linear"]
ScheduleName = Literal["constant", "cosine", "one-cycle"]
DeviceName = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
LR_SCALINGS: tuple[str, ...] = get_args(LrScaling)
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
DEVICES: tuple[str, ...] = get_args(DeviceName)
PRECISIONS: tuple[str, ...] = get_args(Precision)

AUTO_OPTIONS = ("width", "codec", "all-reduce", "segment-bytes", "buckets", "fragments")
"""Options that can be left to the timing model with the value ``AUTO``."""

MAX_LOSS_SCALE = 2.0**127
"""Largest loss scale: the largest power of two in float32."""

DEFAULT_STALL_SECONDS = 30.0


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
    data_dir: Path | None = option(None, read_by={"dataset": (*IMAGE_DATASETS[1:], OWN)})
    """Folder of the data files; not needed for digits and text, nor for fashion-mnist from Debian's package."""
    batch_size: int = option(32, at_least=1)
    """Samples per rank and iteration; with --accumulation, per micro-batch. Evaluations take as many at once, up to
    512."""
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

    optimizer: OptimizerName = option("sgd", choices=OPTIMIZERS)
    """Optimizer: sgd, nesterov, adam, adamw, adagrad or muon (for hidden matrices, with adamw for the rest)."""
    lr: float = option(0.02, above_zero=True)
    """Learning rate; the peak, if --schedule varies it."""
    momentum: float = option(0.9, at_least=0, read_by={"optimizer": ("sgd", "nesterov")})
    """Momentum of sgd and nesterov."""
    betas: tuple[float, float] = option((0.9, 0.999), at_least=0, read_by={"optimizer": ("adam", "adamw")})
    """Decay of the running means of gradients and of their squares, of adam and adamw; each is below 1."""
    weight_decay: float = option(0.0, at_least=0)
    """Weight decay."""
    lr_scaling: LrScaling = option("none", choices=LR_SCALINGS)
    """Scaling of --lr with the number of ranks that compute: none, or linear (--lr is that of a single rank, and is
    multiplied by their number)."""
    schedule: ScheduleName = option("constant", choices=SCHEDULES)
    """Learning-rate schedule: constant, cosine (decays to zero) or one-cycle (rises, then decays to zero)."""
    lr_warmup: int = option(0, at_least=0, read_by={"schedule": ("constant", "cosine")})
    """Iterations at the start of the run in which the learning rate rises linearly to --lr."""
    accumulation: int = option(1, at_least=1)
    """Micro-batches of --batch-size samples whose gradients each rank accumulates before they are exchanged."""
    precision: Precision = option("fp32", choices=PRECISIONS)
    """Precision of forward and backward passes where torch.autocast lowers it: fp32, bf16, or fp16 with a loss scale.
    Weights, gradients and evaluations stay float32."""
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
        if self.momentum >= 1:
            raise UserInputError(f"momentum must be below 1; got {self.momentum}")
        if max(self.betas) >= 1:
            raise UserInputError(f"betas must be below 1; got {max(self.betas)}")
        if self.optimizer == "nesterov" and self.momentum == 0:
            raise UserInputError("momentum must be above 0 with --optimizer nesterov; got 0")
        if self.epochs is not None and self.iterations is not None:
            raise UserInputError("epochs and iterations must not both be given; leave one of them out")

    def for_ranks(self, ranks: int) -> OptimizationConfig:
        """Return these options with the learning rate that this many ``ranks`` train with."""
        scale = ranks if self.lr_scaling == "linear" else 1
        return dataclasses.replace(self, lr=scale * self.lr, lr_scaling="none")


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
    device: DeviceName = option("cpu", choices=DEVICES)
    """Device of the model: cpu or cuda, which needs a GPU for each rank of a machine."""
    stall_seconds: float = option(DEFAULT_STALL_SECONDS, at_least=1)
    """Seconds of waiting after which rank 0 reports the ranks it waits for, and the interval between reports: at
    least 1."""
    farewell_seconds: float = option(DEFAULT_FAREWELL_SECONDS, at_least=0)
    """Seconds that the ranks have to write a last checkpoint after Ctrl-C, SIGTERM, SIGHUP or SIGQUIT; 0 ends them
    at once."""
    elastic: int | None = option(None, at_least=1)
    """Least number of ranks with which training continues when others are lost: those who remain sum again what is
    missing, and take over the samples. --transport must not be gloo, and torchrun's place is taken by pipesgd.launch
    --elastic, since torchrun ends all ranks when one is lost. By default the loss of a rank ends the run."""
    wait: float | None = option(None, at_least=0)
    """Seconds that ranks without a majority wait for the others before they end with exit code 75, by default 60; with
    --elastic."""
    silence: float | None = option(None, at_least=3)
    """Seconds without a sign of life after which the others continue without a rank, by default 3, with --elastic: more
    for a line that drops now and then."""
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
    recorder: str | None = option(None, kind=kind)
    """A function of yours for a tracker, as module:function: rank 0 calls it without arguments before training, and
    what it returns after every iteration, as record(iteration, values)."""
    trace: bool = False
    """Write a Chrome/Perfetto trace of computation and communication, with one process row per rank."""
    log_messages: bool = False
    """Log every message between ranks that is not torch's own to stderr, one line each."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.resume and self.overwrite:
            raise UserInputError("resume and overwrite must not both be given: one keeps what the other deletes")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a model on several machines, decentralized and pipelined.

    Start it on every machine with torchrun; on one machine with four ranks:
    torchrun --nproc-per-node 4 -m pipesgd.train --dataset digits --width 2
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    wire: Wire = field(default_factory=Wire)
    updates: Updates = field(default_factory=Updates)
    windows: Windows = field(default_factory=Windows)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        pipeline, windows = self.pipeline, self.windows
        check_read(pipeline, self.wire, self.updates, windows)
        options = self._options()
        if pipeline.strategy == "easgd-async":
            check_rules(options_of_sections(windows, outer="elastic", width=1), WINDOWS)
        else:
            check_rules(options, WINDOWS, GRADIENTS if self.in_windows else NO_WINDOWS)
        if pipeline.strategy == "pipelined":
            check_rules(options, CODEC, OUTER, PARTS, REDUCE)
            if pipeline.width == 1 and "width" not in (*self.planning.auto, *self.planning.chosen):
                check_rules(options, LATE)
        elif self.compression != CompressionConfig():
            raise UserInputError(
                f"codec and its options must be left out with --strategy {pipeline.strategy}, which has no use for "
                f"them (they belong to pipelined); got --codec {self.compression.codec}"
            )
        if self.planning.wanted:
            self._check_planning(options)
        check_rules(options, TRAINING)
        if self.run.elastic is not None:
            check_rules(options, ELASTIC)

    def _options(self) -> Any:
        """Return all options as the attributes of one object, and what rules between them ask besides."""
        codec = self.compression.described
        auto = self.planning.auto
        others = {name: section for name, section in vars(self).items() if name != "compression"}
        return options_of_sections(
            *others.values(),
            **codec.facts(),
            all_reduce_name=self.wire.all_reduce_name,
            transport_name=self.transport,
            reduce=str(self.wire.reduce),
            outer=self.windows.outer or "average",
            asked_outer=self.windows.outer,
            asked=self.windows.asked,
            corrects=codec.own_momentum > 0 and not self.in_windows,  # which have an outer optimizer's momentum
            planned=f"{auto[0]} auto" if auto else "cluster",
            searched=[name for name in auto if name != "fragments"],
        )

    @property
    def transport(self) -> str:
        """Transport of gradients."""
        if self.run.elastic is not None:
            return self.wire.transport or "tcp"
        return self.wire.transport_on(self.run.device)

    @property
    def in_windows(self) -> bool:
        """True if ranks train in windows of local steps, of which an explicit outer optimizer may have one each."""
        return self.pipeline.strategy == "pipelined" and bool(self.windows.asked)

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for another one."""
        return DEFAULT_TIMEOUT if self.wire.timeout is None else self.wire.timeout

    def _check_planning(self, options: Any) -> None:
        """Raise ``UserInputError`` if the timing model is asked for something it does not cover."""
        check_rules(options, PLANNING)
        if "fragments" in self.planning.auto:
            options.fragments = AUTO
            check_rules(options, PARTS)
            in_parts = dataclasses.replace(self.windows, fragments=2)
            dataclasses.replace(self, windows=in_parts, planning=PlanningConfig())  # refuses what goes with no parts

    def options(self) -> dict[str, Any]:
        """Return every option by its name on the command line, as a JSON value."""
        options = options_of(*sections_of(self))
        auto = options.pop(AUTO)
        del options["chosen"]
        return options | dict.fromkeys(auto, AUTO)

    def with_choices(self, choices: dict[str, Any]) -> TrainConfig:
        """Return the configuration with ``choices`` for ``AUTO_OPTIONS`` and nothing left to be chosen."""
        planning = dataclasses.replace(self.planning, auto=(), chosen=(*self.planning.chosen, *self.planning.auto))
        return dataclasses.replace(self.with_options(**choices), planning=planning)

    def with_choices_of(self, plan: dict[str, Any]) -> TrainConfig:
        """Return ``with_choices`` of a ``plan``, which may also name options that were not to be chosen."""
        return self.with_choices({name: plan[name] for name in self.planning.auto})

    def with_options(self, **values: Any) -> TrainConfig:
        """Return the configuration with other ``values`` of options, whatever sections they are in."""
        fields = {name.replace("-", "_"): value for name, value in values.items()}
        changed: dict[str, Any] = {}
        for section in dataclasses.fields(self):
            options = getattr(self, section.name)
            own = {item.name: fields.pop(item.name) for item in dataclasses.fields(options) if item.name in fields}
            if own:
                changed[section.name] = dataclasses.replace(options, **own)
        if fields:
            raise TypeError(f"options must be those of a training; got {', '.join(fields)}")
        return dataclasses.replace(self, **changed)

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
        if self.pipeline.strategy == "pipelined":
            connections = f" on {self.wire.connections} connections each" if self.wire.connections > 1 else ""
            is_usual = self.wire.all_reduce_name == "native" or self.transport == "tcp"
            connections += "" if is_usual else f" over {self.transport}"
            connections += "" if self.wire.rate_limit is None else f", at most {self.wire.rate_limit} each"
            if self.wire.cut != WHOLE:
                connections += f", buckets {self.wire.buckets}"
            connections += _REDUCED[str(self.wire.reduce)]
            prediction = f", prediction {self.updates.prediction}" if self.pipeline.width > 1 else ""
            if self.in_windows:
                prediction = f", {self.windows.local_steps} local steps, outer {self.windows.outer or 'average'}"
                prediction += f", {self.windows.fragments} fragments" if self.windows.fragments > 1 else ""
            how = f"{self.wire.all_reduce_name} all-reduce{connections}, {self.compression.chosen().describe()}"
            return f"pipelined width {self.pipeline.width}{prediction}, {how}"
        pipeline = self.pipeline
        if pipeline.strategy == "ddp":
            return f"ddp with {'no' if pipeline.ddp_hook == 'none' else 'the ' + pipeline.ddp_hook} hook"
        if pipeline.strategy not in SERVER_STRATEGIES:
            return pipeline.strategy
        bound = "" if pipeline.staleness_bound is None else f", staleness bound {pipeline.staleness_bound}"
        period = f" every {self.windows.local_steps} iterations" if self.windows.local_steps > 1 else ""
        servers = f"{pipeline.servers} {pipeline.server_placement} server{'s' if pipeline.servers > 1 else ''}"
        return f"{pipeline.strategy}{period}{bound}, {servers}"

    def workers(self, world_size: int) -> int:
        """Return the number of ranks that compute gradients, which are the first ones of ``world_size``.

        Raises:
            UserInputError: there are too few ranks for the servers, or too many for the moving rate.
        """
        if self.windows.moving_rate is not None and self.pipeline.strategy not in SERVER_STRATEGIES:
            check_moving_rate(self.windows.moving_rate, world_size)
        return self.pipeline.workers(world_size)


_REDUCED = {
    "matrix": "",
    "rows": ", embeddings by rows",
    "factors": ", linear layers by factors",
    "auto": ", embeddings by rows and linear layers by factors where that sends less",
}
"""Words for the exchange of gradients, by ``reduce``."""


def sections_of(config: Any) -> list[Any]:
    """Return the dataclasses of options that are the fields of the dataclass ``config``."""
    return [getattr(config, section.name) for section in dataclasses.fields(config)]


def options_of(*sections: Any) -> dict[str, Any]:
    """Return every option of these dataclasses by its name on the command line, as a JSON value."""
    return {
        dashed(item.name): _as_json(getattr(section, item.name))
        for section in sections
        for item in dataclasses.fields(section)
    }


FREE_BETWEEN_RANKS = frozenset({
    "data-dir", "output", "loader-workers", "log-messages", "resume", "cluster", "secret-file",
})  # fmt: skip
"""Options that may differ between ranks: folders differ between machines, any rank may ask to resume since all agree on
what to resume from, and only rank 0's cluster counts."""

FREE_ON_RESUME = FREE_BETWEEN_RANKS | {
    "overwrite", "dry-run", "timeout", "stall-seconds", "farewell-seconds", "on-nonfinite", "check-replicas",
    "checkpoint-seconds", "checkpoint-iterations", "keep-checkpoints", "trace", "recorder", "transport",
    "elastic", "wait", "silence",
}  # fmt: skip
"""Options that may change when a run is resumed, since no weight depends on them; but where samples that are
read by iteration draw random numbers, weights depend on --loader-workers, and such a run is not promised the same bits.
"""


def differing_options(one: dict[str, Any], other: dict[str, Any], *, free: frozenset[str]) -> list[str]:
    """Return the names of options, except those in ``free``, whose values differ between two ``options()``."""
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in free and one.get(name) != other.get(name)]


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
