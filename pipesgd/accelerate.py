"""Pipe-SGD in a loop of Hugging Face Accelerate, after ``accelerator.prepare``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipesgd import ddp
from pipesgd.checks import check_several, check_version
from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.ddp.attached import Attached
from pipesgd.errors import UserInputError
from pipesgd.pipeline.true_weights_hooks import unwrapped
from pipesgd.run.pipeline_file import PipelineFile
from pipesgd.sections import Updates, Windows, Wire


def attach(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    *,
    width: int = 2,
    codec: str | CodecOptions | OwnCodec = "int8",
    windows: Windows | None = None,
    wire: Wire | None = None,
    updates: Updates | None = None,
) -> Attached:
    """Let the loop of an Accelerator be Pipe-SGD; the loop stays as it is. See ``pipesgd.ddp.attach``.

    ``accelerator.accumulate``, ``clip_grad_norm_`` and ``unwrap_model`` work as always. ``save_state`` also writes
    each rank's pipeline into its folder, and ``load_state`` continues from it. For a tracker, call
    ``accelerator.log(pipeline.totals().as_metrics(), step=...)``.

    Args:
        accelerator: the loop's Accelerator.
        model: the model that ``accelerator.prepare`` returned, which wraps it in DistributedDataParallel.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        width: iterations in flight, K.
        codec: encoding of gradients, by name or as ``CodecOptions``.
        windows: windows of local steps, as in ``pipesgd.ddp.attach``.
        wire: how gradients travel, as in ``pipesgd.ddp.attach``.
        updates: how they are applied, as in ``pipesgd.ddp.attach``.

    Raises:
        UserInputError: the optimizer was not prepared, the model is not wrapped, Accelerate is too old, or a value is
            out of range.
    """
    check_version("accelerate", "1.15", "pipesgd.accelerate")
    if not hasattr(optimizer, "optimizer"):
        raise UserInputError(
            f"optimizer must be what accelerator.prepare(model, optimizer) returned; got {type(optimizer).__name__}"
        )
    check_several(accelerator.num_processes, "Accelerate")
    pipeline = ddp.attach(
        model,
        optimizer.optimizer,
        width=width,
        codec=codec,
        windows=windows,
        wire=wire,
        updates=updates,
        scaler=accelerator.scaler,
    )
    for earlier in [one for one in accelerator._custom_objects if isinstance(one, _SavedPipeline)]:
        earlier.leave_if_closed()
    accelerator.register_for_checkpointing(_SavedPipeline(accelerator, model, pipeline))
    return pipeline


class _SavedPipeline:
    """A pipeline in the folders of an Accelerator's ``save_state``.

    Accelerate calls a hook with the folder on all ranks; afterwards it saves rank 0's ``state_dict`` alone, and loads
    that on all ranks when model and optimizer are loaded.
    """

    def __init__(self, accelerator: Any, model: Any, pipeline: Attached):
        self._accelerator = accelerator
        self._model = model
        self._pipeline = pipeline
        self._file: PipelineFile | None = None
        self._hooks = [
            accelerator.register_save_state_pre_hook(self.begin_saving),
            accelerator.register_load_state_pre_hook(self.begin_loading),
        ]

    def leave_if_closed(self) -> None:
        """Be no part of further states if the pipeline is closed: a program that resumes from one has no such part.

        Accelerate refuses to load a state with another number of parts than the program has.
        """
        if self._pipeline.closed:
            for hook in self._hooks:
                hook.remove()
            self._accelerator._custom_objects.remove(self)  # which Accelerate itself never does

    def begin_saving(self, models: list[Any], weights: list[Any], folder: str) -> None:
        if not self._pipeline.closed:
            self._file_in(folder, models).save(self._pipeline)

    def begin_loading(self, models: list[Any], folder: str) -> None:
        if not self._pipeline.closed:  # else the Accelerator may have another model by now
            self._file = self._file_in(folder, models)

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": None if self._pipeline.closed else self._pipeline.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # If it had been closed, nothing was in flight; if it is closed now, nothing is trained any more.
        if state["iteration"] is not None and not self._pipeline.closed:
            assert self._file is not None
            self._file.load(self._pipeline, state["iteration"])

    def _file_in(self, folder: str, models: list[Any]) -> PipelineFile:
        number = [unwrapped(model) for model in models].index(unwrapped(self._model))
        rank, world_size = self._accelerator.process_index, self._accelerator.num_processes
        return PipelineFile(Path(folder, f"pipesgd-{number}-rank-"), rank, world_size, ending=".pt")
