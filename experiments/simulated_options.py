"""Options of ``pipesgd.train`` that simulated ranks follow; all others are refused, since they would have no effect."""

from __future__ import annotations

from experiments.simulated_sums import is_summed
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError

DATA_AND_MODEL = (
    *("dataset", "data-dir", "batch-size", "image-size", "context"),
    *("model", "hidden-sizes", "layers", "heads", "embedding"),
)
OPTIMIZATION = (
    *("optimizer", "lr", "momentum", "betas", "weight-decay", "lr-scaling", "schedule", "lr-warmup"),
    *("clip-norm", "clip-value", "accumulation", "iterations", "seed"),
)
OF_WINDOWS = ("width", "local-steps", "fragments", "outer", "outer-lr", "outer-momentum", "moving-rate")
OF_GRADIENTS = ("width", "synchronous-start", "prediction", "guard")
OF_CODECS = (
    "codec",
    "codec-block",
    "rounding",
    "error-feedback",
    "qsgd-levels",
    "low-rank",
    "rank-compression",
    "factor-codec",
    "dense-start",
)
OTHERS = ("evaluate-iterations",)


def check_simulated(config: TrainConfig) -> None:
    """Raise ``UserInputError`` for an option that simulated ranks do not follow."""
    used = {*DATA_AND_MODEL, *OPTIMIZATION, *OF_CODECS, *OTHERS, *(OF_WINDOWS if config.in_windows else OF_GRADIENTS)}
    defaults = TrainConfig().options()
    for name, value in config.options().items():
        if name in config.planning.auto or (value != defaults[name] and name not in used):
            raise UserInputError(f"{name} must be left out on simulated ranks, which do not follow it; got {value}")
    if config.optimization.iterations is None:
        raise UserInputError("iterations must be given for simulated ranks; got none")
    if not is_summed(config.compression.described):
        raise UserInputError(f"codec must be dense or powersgd on simulated ranks; got {config.compression.codec}")
    every, window = config.run.evaluate_iterations, config.windows.local_steps
    if every and every % window:
        raise UserInputError(f"evaluate-iterations must be a multiple of --local-steps {window} here; got {every}")
