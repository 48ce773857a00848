"""Strategy "pipesgd" of PyTorch Lightning: ``import pipesgd.lightning; Trainer(strategy="pipesgd")``.

Lightning Fabric has it, too: ``Fabric(strategy="pipesgd")``. It serves ``pytorch_lightning`` and ``lightning``, which
have classes of their own: each one that was imported before gets the strategy, or the first that is installed.
``PipesgdStrategy`` and ``PipesgdFabricStrategy`` are those of the first one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from pipesgd.checks import check_left_out, check_version
from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.ddp.attached import Attached, attach, with_clipping
from pipesgd.errors import UserInputError
from pipesgd.run.pipeline_file import SAVE_DIGITS, PipelineFile
from pipesgd.sections import Updates, Windows, Wire

PACKAGES = {
    "pytorch_lightning": ("pytorch-lightning", "lightning_fabric"),
    "lightning.pytorch": ("lightning", "lightning.fabric"),
}
"""Modules that have a Trainer, each with the name of its distribution and the module that has its Fabric."""
OLDEST = "2.5"
REFUSED = ("2.6.2", "2.6.3")
"""Versions that were published with malware (GHSA-w37p-236h-pfx3)."""
AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")
"""Callbacks that read weights which differ between ranks, and write an average into the model before its last update.
Some versions have only one of them."""
MARK = "pipesgd"
"""Entry of a checkpoint whose pipelines are in files next to it."""


def check_lightning(distribution: str) -> None:
    """Refuse a version of Lightning that the strategy does not work with.

    Raises:
        UserInputError: it is too old, or one of those with malware.
    """
    version = importlib.metadata.version(distribution)
    if version in REFUSED:
        raise UserInputError(f"{distribution} must be another version than {version}, which was published with malware")
    check_version(distribution, OLDEST, "strategy pipesgd")


def is_address(checkpoint: Any) -> bool:
    """Return True if ``checkpoint`` is not in a folder of this machine, but at an address such as ``s3://``."""
    return "://" in str(checkpoint)


def pipeline_file(checkpoint: str | Path, strategy: Any, of_save: str | None = None) -> PipelineFile:
    """Return the file next to ``checkpoint`` with the pipeline of this rank of ``strategy``.

    Raises:
        UserInputError: the checkpoint is not in a folder of this machine.
    """
    if is_address(checkpoint):
        raise UserInputError(
            "a checkpoint must be in a folder that all ranks can write to, where their pipelines are written next to "
            f"it; got {checkpoint}"
        )
    return PipelineFile(Path(f"{checkpoint}.pipesgd-rank-"), strategy.global_rank, strategy.world_size, of_save)


@contextlib.contextmanager
def pipeline_saved(checkpoint: str | Path, strategy: Any, pipeline: Attached) -> Iterator[dict[str, Any]]:
    """Write the pipeline of this rank, and yield the entry of the ``checkpoint``, which is to be written meanwhile.

    All ranks call this together. They wait for each other: rank 0 replaces a checkpoint of the same name, so the new
    pipelines must be there before, and the old ones until then.
    """
    mark = {"iteration": pipeline.iteration, "save": strategy.broadcast(secrets.token_hex(SAVE_DIGITS // 2))}
    file = pipeline_file(checkpoint, strategy, mark["save"])
    file.save(pipeline)
    strategy.barrier()
    yield mark
    strategy.barrier()
    file.remove_others()


def load_pipeline(checkpoint: str | Path, strategy: Any, pipeline: Attached, mark: dict[str, Any]) -> None:
    """Let ``pipeline`` continue from the file next to ``checkpoint`` whose entry is ``mark``."""
    path = Path(checkpoint).resolve()  # ModelCheckpoint may have made a link to the newest
    pipeline_file(path, strategy, mark["save"]).load(pipeline, mark["iteration"])


def make_strategy(module: str) -> type[Any]:
    """Return the strategy for the Trainer of ``module``, and register it there under the name "pipesgd"."""
    strategies, callbacks = (importlib.import_module(f"{module}.{part}") for part in ("strategies", "callbacks"))
    base: Any = strategies.DDPStrategy
    averages = tuple(getattr(callbacks, name) for name in AVERAGES if hasattr(callbacks, name))

    class PipesgdStrategy(base):  # type: ignore[misc]  # Lightning's classes are known only when it is installed
        """Training with DistributedDataParallel whose gradients arrive late and compressed (``pipesgd.ddp.attach``).

        The Trainer does the rest: it clips gradients, accumulates them, scales losses, evaluates and saves. Validation
        and checkpoints use the true weights. Each rank saves its pipeline's state in a file next to the checkpoint.

        Args:
            width: iterations in flight, K.
            codec: encoding of gradients, by name or as ``CodecOptions``.
            windows: windows of local steps, as in ``pipesgd.ddp.attach``.
            wire: how gradients travel, as in ``pipesgd.ddp.attach``.
            updates: how they are applied, as in ``pipesgd.ddp.attach``.
            ddp_options: options of Lightning's DDPStrategy.
        """

        strategy_name = "pipesgd"

        def __init__(
            self,
            *args: Any,
            width: int = 2,
            codec: str | CodecOptions | OwnCodec = "int8",
            windows: Windows | None = None,
            wire: Wire | None = None,
            updates: Updates | None = None,
            **ddp_options: Any,
        ):
            check_left_out(ddp_options, {"scaler": "the Trainer has precision"})
            if ddp_options.get("ddp_comm_hook") is not None:
                raise UserInputError("ddp_comm_hook must be left out with strategy pipesgd, which has its own hook")
            super().__init__(*args, **ddp_options)
            self._width, self._codec = width, codec
            self._windows, self._wire, self._updates = windows, wire, updates
            self._loaded_from: Path | None = None
            self.pipeline: Attached | None = None
            """The pipeline, while the Trainer fits."""

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            if trainer.state.fn != "fit":
                return
            if not self.lightning_module.automatic_optimization:
                raise UserInputError("automatic_optimization must be True with strategy pipesgd")
            late = self._width != 1 or self._windows is not None
            refused = [type(one).__name__ for one in trainer.callbacks if late and isinstance(one, averages)]
            if refused:
                raise UserInputError(
                    "callbacks must not average weights with strategy pipesgd, except at width=1 without local steps; "
                    f"got {refused[0]}"
                )
            [optimizer] = self.optimizers  # Lightning refuses several, unless optimization is manual
            updates = self._updates
            if trainer.gradient_clip_val:
                clips = {} if updates is None else {"clip_norm": updates.clip_norm, "clip_value": updates.clip_value}
                check_left_out(clips, dict.fromkeys(clips, "the Trainer has gradient_clip_val"))
                clipped_by = "clip_value" if trainer.gradient_clip_algorithm == "value" else "clip_norm"
                updates = with_clipping(updates, self._windows, {clipped_by: trainer.gradient_clip_val})
            self.pipeline = attach(
                self.model,
                optimizer,
                width=self._width,
                codec=self._codec,
                windows=self._windows,
                wire=self._wire,
                updates=updates,
                scaler=getattr(self.precision_plugin, "scaler", None),
            )

        def training_step(self, *args: Any, **named: Any) -> Any:
            output = super().training_step(*args, **named)
            pipeline, every = self.pipeline, self.lightning_module.trainer.log_every_n_steps
            if pipeline is not None and every and (pipeline.iteration + 1) % every == 0:
                self.lightning_module.log_dict(pipeline.totals().as_metrics())
            return output

        def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
            self._loaded_from = Path(checkpoint_path)
            return checkpoint

        def load_optimizer_state_dict(self, checkpoint: Any) -> None:
            super().load_optimizer_state_dict(checkpoint)
            if self.pipeline is None or MARK not in checkpoint or self._loaded_from is None:
                return
            load_pipeline(self._loaded_from, self, self.pipeline, checkpoint[MARK])

        def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            if self.pipeline is None or "optimizer_states" not in checkpoint:
                super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
                return
            with pipeline_saved(filepath, self, self.pipeline) as checkpoint[MARK]:
                super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

        def remove_checkpoint(self, filepath: Any) -> None:
            super().remove_checkpoint(filepath)
            if not is_address(filepath):  # those have weights alone
                pipeline_file(filepath, self).remove()

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


def make_fabric_strategy(module: str) -> type[Any]:
    """Return the strategy for the Fabric of ``module``, and register it there under the name "pipesgd"."""
    strategies = importlib.import_module(f"{module}.strategies")
    base: Any = strategies.DDPStrategy

    class PipesgdFabricStrategy(base):  # type: ignore[misc]  # Lightning's classes are known only when it is installed
        """Training by Fabric with DistributedDataParallel whose gradients arrive late and compressed.

        ``fabric.setup(model, optimizer)`` attaches the pipeline (``pipesgd.ddp.attach``); the loop stays as it is.
        ``fabric.save`` with the optimizer in its state also writes each rank's pipeline to a file next to the
        checkpoint, and ``fabric.load`` continues from it. Call ``fabric.strategy.pipeline.close()`` after the loop.

        Args:
            width: iterations in flight, K.
            codec: encoding of gradients, by name or as ``CodecOptions``.
            windows: windows of local steps, as in ``pipesgd.ddp.attach``.
            wire: how gradients travel, as in ``pipesgd.ddp.attach``.
            updates: how they are applied, as in ``pipesgd.ddp.attach``.
            ddp_options: options of Lightning's DDPStrategy.
        """

        def __init__(
            self,
            *args: Any,
            width: int = 2,
            codec: str | CodecOptions | OwnCodec = "int8",
            windows: Windows | None = None,
            wire: Wire | None = None,
            updates: Updates | None = None,
            **ddp_options: Any,
        ):
            check_left_out(ddp_options, {"scaler": "Fabric has precision"})
            super().__init__(*args, **ddp_options)
            self._width, self._codec = width, codec
            self._windows, self._wire, self._updates = windows, wire, updates
            self.pipeline: Attached | None = None
            """The pipeline, from ``fabric.setup`` on."""

        def setup_module_and_optimizers(self, module: Any, optimizers: list[Any], *others: Any) -> tuple[Any, ...]:
            if len(optimizers) != 1 or self.pipeline is not None:
                raise UserInputError(
                    "fabric.setup must be called once, with one optimizer, with strategy pipesgd; "
                    f"got {len(optimizers)} optimizers{' in another call' if self.pipeline is not None else ''}"
                )
            module = super().setup_module(module)
            self.pipeline = attach(
                module,
                optimizers[0],
                width=self._width,
                codec=self._codec,
                windows=self._windows,
                wire=self._wire,
                updates=self._updates,
                scaler=getattr(self.precision, "scaler", None),
            )
            return module, optimizers, *others

        def setup_optimizer(self, optimizer: Any) -> Any:
            raise UserInputError("an optimizer must be set up with its model with strategy pipesgd: fabric.setup")

        def setup_module(self, module: Any) -> Any:
            wrapped = super().setup_module(module)
            wrapped.register_forward_pre_hook(_refuse_to_train)  # which DistributedDataParallel alone would do
            return wrapped

        def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **options: Any) -> None:
            if self.pipeline is None or self.pipeline.closed or not _has_optimizer(state):
                super().save_checkpoint(path, state, *args, **options)
                return
            with pipeline_saved(path, self, self.pipeline) as mark:
                super().save_checkpoint(path, state | {MARK: mark}, *args, **options)

        def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **options: Any) -> dict[str, Any]:
            rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **options)
            mark = rest.pop(MARK, None) if _has_optimizer(state) else None
            if mark is not None and self.pipeline is not None and not self.pipeline.closed:
                load_pipeline(path, self, self.pipeline, mark)
            return rest

    PipesgdFabricStrategy.__module__ = __name__
    strategies.STRATEGY_REGISTRY.register(
        "pipesgd", PipesgdFabricStrategy, description="Pipe-SGD: late and compressed gradients", override=True
    )
    return PipesgdFabricStrategy


def _refuse_to_train(module: Module, inputs: Any) -> None:
    if module.training and torch.is_grad_enabled():
        raise UserInputError(
            "fabric.setup must be called with a model and its optimizer to train it with strategy pipesgd; got a model "
            "that was set up alone (call its eval() to evaluate it)"
        )


def _has_optimizer(state: Any) -> bool:
    return isinstance(state, dict) and any(isinstance(value, Optimizer) for value in state.values())


def _served() -> list[str]:
    """Return the packages that are to get the strategy, that imported first in front."""
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise UserInputError(
            "pytorch-lightning must be installed for pipesgd.lightning: "
            'pip install "pytorch-lightning>=2.5,!=2.6.2,!=2.6.3"'
        )
    served = [name for name in sys.modules if name in installed] or installed[:1]
    for name in served:
        check_lightning(PACKAGES[name][0])
    return served


STRATEGIES = {name: (make_strategy(name), make_fabric_strategy(PACKAGES[name][1])) for name in _served()}
"""Strategies for the Trainer and the Fabric of each package that is served."""
PipesgdStrategy, PipesgdFabricStrategy = next(iter(STRATEGIES.values()))
