"""Strategy "pipesgd" of PyTorch Lightning: ``import pipesgd.lightning; Trainer(strategy="pipesgd")``.

It serves ``pytorch_lightning`` and ``lightning``, which have classes of their own: each one that is installed gets the
strategy, and ``PipesgdStrategy`` is that of the one imported first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pipesgd.ddp import AttachedPipeline, attach
from pipesgd.errors import RunError, UserInputError
from pipesgd.run.checkpoint_files import save_atomically

PACKAGES = {"pytorch_lightning": "pytorch-lightning", "lightning.pytorch": "lightning"}
"""Modules that have a Trainer, each with the name of its distribution."""
OLDEST = (2, 5)
REFUSED = ("2.6.2", "2.6.3")
"""Versions that were published with malware (GHSA-w37p-236h-pfx3)."""
MARK = "pipesgd"
"""Entry of a checkpoint whose pipeline is in files next to it."""


def check_version(distribution: str) -> None:
    """Refuse a version of Lightning that the strategy does not work with.

    Raises:
        UserInputError: it is too old, or one of those with malware.
    """
    version = importlib.metadata.version(distribution)
    if version in REFUSED:
        raise UserInputError(f"{distribution} must be another version than {version}, which was published with malware")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserInputError(f"{distribution} must be at least {oldest} for strategy pipesgd; got {version}")


def pipeline_file(checkpoint: str | Path, rank: int) -> Path:
    """Return the file next to ``checkpoint`` with the gradients in flight and residuals of ``rank``."""
    return Path(f"{checkpoint}.pipesgd-rank-{rank}")


def make_strategy(package: ModuleType) -> type[Any]:
    """Return the strategy for the Trainer of ``package``, and register it there under the name "pipesgd"."""
    strategies = importlib.import_module(f"{package.__name__}.strategies")
    base: Any = strategies.DDPStrategy

    class PipesgdStrategy(base):  # type: ignore[misc]  # Lightning's classes are known only when it is installed
        """Training with DistributedDataParallel whose gradients arrive late and compressed (``pipesgd.ddp.attach``).

        The Trainer does the rest: it clips gradients, accumulates them, scales losses, evaluates and saves. Validation
        and checkpoints use the true weights. Each rank saves its pipeline's state in a file next to the checkpoint.

        Args:
            width: iterations in flight, K.
            codec: encoding of gradients, by name or as ``CodecOptions``.
            pipeline_options: further options of ``pipesgd.ddp.attach``, but those that the Trainer has: ``clip_norm``,
                ``clip_value`` and ``scaler``.
            options: options of Lightning's DDPStrategy.
        """

        strategy_name = "pipesgd"

        def __init__(
            self,
            *args: Any,
            width: int = 2,
            codec: Any = "fp32",
            pipeline_options: dict[str, Any] | None = None,
            **options: Any,
        ):
            for name, instead in {
                "clip_norm": "gradient_clip_val",
                "clip_value": "gradient_clip_val",
                "scaler": "precision",
            }.items():
                if name in (pipeline_options or {}):
                    raise UserInputError(f"{name} must be left out of pipeline_options: the Trainer has {instead}")
            if options.get("ddp_comm_hook") is not None:
                raise UserInputError("ddp_comm_hook must be left out with strategy pipesgd, which has its own hook")
            super().__init__(*args, **options)
            self._pipeline_options = {"width": width, "codec": codec} | (pipeline_options or {})
            self._loaded_from: Path | None = None
            self.pipeline: AttachedPipeline | None = None
            """The pipeline, while the Trainer fits."""

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            if trainer.state.fn != "fit":
                return
            if not self.lightning_module.automatic_optimization:
                raise UserInputError("automatic_optimization must be True with strategy pipesgd")
            if len(self.optimizers) != 1:
                raise UserInputError(
                    f"configure_optimizers must return one optimizer with strategy pipesgd; got {len(self.optimizers)}"
                )
            clipped_by = "clip_value" if trainer.gradient_clip_algorithm == "value" else "clip_norm"
            clipping: dict[str, Any] = {clipped_by: trainer.gradient_clip_val or None}
            self.pipeline = attach(
                self.model,
                self.optimizers[0],
                scaler=getattr(self.precision_plugin, "scaler", None),
                **clipping | self._pipeline_options,
            )

        def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
            self._loaded_from = Path(checkpoint_path)
            return checkpoint

        def load_optimizer_state_dict(self, checkpoint: Any) -> None:
            super().load_optimizer_state_dict(checkpoint)
            if self.pipeline is None or MARK not in checkpoint or self._loaded_from is None:
                return
            if (number := checkpoint[MARK]["world_size"]) != self.world_size:
                raise UserInputError(
                    f"the number of ranks must be that of the checkpoint, {number}, to resume its pipeline; "
                    f"got {self.world_size}"
                )
            path = pipeline_file(self._loaded_from, self.global_rank)
            if not path.is_file():
                raise RunError(
                    f"the checkpoint {self._loaded_from} must have its pipeline next to it; {path} is missing"
                )
            self.pipeline.load_state_dict(torch.load(path, weights_only=True))

        def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            if self.pipeline is not None and "optimizer_states" in checkpoint:
                checkpoint[MARK] = {"world_size": self.world_size}
                path = pipeline_file(filepath, self.global_rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                save_atomically(self.pipeline.state_dict(), path)
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

        def remove_checkpoint(self, filepath: Any) -> None:
            super().remove_checkpoint(filepath)
            pipeline_file(filepath, self.global_rank).unlink(missing_ok=True)

        def on_train_end(self) -> None:
            super().on_train_end()
            if self.pipeline is not None:
                self.pipeline.flush()

        def on_exception(self, exception: BaseException) -> None:
            if self.pipeline is not None:
                self.pipeline.__exit__(type(exception), exception, None)
            super().on_exception(exception)

        def teardown(self) -> None:
            if self.pipeline is not None:
                self.pipeline.close()
                self.pipeline = None
            super().teardown()

    PipesgdStrategy.__module__ = __name__
    strategies.StrategyRegistry.register(
        "pipesgd", PipesgdStrategy, description="Pipe-SGD: late and compressed gradients", override=True
    )
    return PipesgdStrategy


def _make_all() -> dict[str, type[Any]]:
    """Return the strategy of each package, that imported first in front."""
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise UserInputError(
            'pytorch-lightning must be installed for pipesgd.lightning: pip install "pipesgd[lightning]"'
        )
    wanted = [name for name in installed if name in sys.modules] or installed[:1]
    for name in wanted:
        check_version(PACKAGES[name])
    return {name: make_strategy(importlib.import_module(name)) for name in wanted}


STRATEGIES = _make_all()
"""Strategy for the Trainer of each package that was imported before, or of the first that is installed."""
PipesgdStrategy = next(iter(STRATEGIES.values()))
