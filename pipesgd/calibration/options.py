"""Options of ``pipesgd.calibrate``: the measurements, and the time that they may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipesgd.checks import check_timeout
from pipesgd.codecs.options import DENSE_CODECS
from pipesgd.config import (
    DataConfig,
    ModelConfig,
    OptimizationConfig,
    TrainConfig,
    options_of,
    sections_of,
)
from pipesgd.errors import UserInputError
from pipesgd.options import check_options, option
from pipesgd.sections import DEFAULT_TIMEOUT, PREDICTIONS, PredictionName, Wire
from timing_model.schedules import ALL_REDUCES

SMALLEST_BYTES = 1 << 10
"""Bytes of the smallest gradient that is all-reduced."""
LEAST_LARGEST_BYTES = 64 << 10
"""Lower bound of ``largest_bytes``: with less, the cost of a byte would not show."""
RING = "ring"
MEASURED_ALL_REDUCES = tuple(name for name in ALL_REDUCES if name != "hierarchical")
DEFAULT_ALL_REDUCES = (RING, "native")
MEASURED_CODECS = (*DENSE_CODECS[1:], "topk")
"""fp32 has no work of its own except the sums; powersgd's depends on the model's matrices, and is always measured."""
UNCOMPRESSED, TYPICAL_CODEC = "fp32", "int8"
"""Codecs with which the model is trained; the second only if it is among those to measure."""


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Measurements of a calibration, and the files that it writes."""

    out: Path = Path("cluster.toml")
    """File for the results, to be read by timing-model; written by rank 0."""
    overwrite: bool = False
    """Replace --out if it exists."""
    plot: Path | None = None
    """File for a picture of the residuals, e.g. residuals.png; needs matplotlib."""
    seconds: float = option(40.0, above_zero=True)
    """Approximate measuring time in seconds; starting and connecting the ranks is extra."""
    largest_bytes: int = option(16 << 20, at_least=LEAST_LARGEST_BYTES)
    """Bytes of the largest gradient that is all-reduced; less on a link so slow that it would take too long."""
    codecs: tuple[str, ...] = option(MEASURED_CODECS, choices=MEASURED_CODECS)
    """Codecs to measure: truncate16, bf16, fp16, int8, int4, ternary, qsgd, sign, topk."""
    all_reduces: tuple[str, ...] = option(DEFAULT_ALL_REDUCES, choices=MEASURED_ALL_REDUCES)
    """All-reduces to measure, each with its own link: ring (required, and used for those not measured),
    halving-doubling, recursive-doubling, all-to-all, native."""
    servers: bool = False
    """Measure a parameter server, too."""
    audition: bool = False
    """Train with the best predicted configurations in turns, too, for about 6 s, and keep their times: for this number
    of ranks, plans then prefer what was measured."""
    prediction: PredictionName = option("eager", choices=PREDICTIONS)
    """Prediction from the gradients in flight, on which the late update's time depends: as in pipesgd.train."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds that a rank waits for another one, for any reason, before the calibration fails. Where ranks meet, one
    that sends heartbeats while it measures may take ten times as long."""

    def __post_init__(self) -> None:
        check_options(self)
        for option_name, names in (("codecs", self.codecs), ("all-reduces", self.all_reduces)):
            for name in names:
                if names.count(name) > 1:
                    raise UserInputError(f"{option_name} must name each once; got {name!r} twice")
        if RING not in self.all_reduces:
            raise UserInputError(
                f"all-reduces must have {RING}, whose link others have; got {' '.join(self.all_reduces)}"
            )
        check_timeout(self.timeout)
        if self.plot is not None and self.plot == self.out:
            raise UserInputError(f"plot must be another file than --out; got {self.plot}")


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Measure what this cluster and a model on it cost, for the timing model.

    Start it on every machine with torchrun, as a training run would be; on one machine with four ranks:
    torchrun --nproc-per-node 4 -m pipesgd.calibrate --out cluster.toml --model mlp --batch-size 512
    """

    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)

    def __post_init__(self) -> None:
        for name in ("epochs", "iterations"):
            if (value := getattr(self.optimization, name)) is not None:
                raise UserInputError(f"{name} must be left out of a calibration (see --seconds); got {value}")

    def options(self) -> dict[str, Any]:
        """Return every option by its name on the command line, as a JSON value."""
        return options_of(*sections_of(self))

    def training(self) -> TrainConfig:
        """Return the training whose computation is measured."""
        return TrainConfig(
            data=self.data,
            model=self.model,
            optimization=self.optimization,
            wire=Wire(timeout=self.calibration.timeout),
        )


FREE_BETWEEN_RANKS = frozenset({"data-dir", "out", "plot", "loader-workers"})
"""Options that may differ between ranks: folders differ between machines, and only rank 0 writes."""
