"""Pipe-SGD in the Trainer of Hugging Face Transformers: ``trainer.add_callback(PipesgdCallback(trainer))``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipesgd.accelerate import attach
from pipesgd.ddp import AttachedPipeline
from pipesgd.errors import RunError, UserInputError
from pipesgd.run.checkpoint_files import save_atomically

try:
    from transformers import TrainerCallback
except ImportError as failure:
    raise UserInputError(
        f'transformers must be installed for pipesgd.transformers: pip install "pipesgd[transformers]"; got {failure}'
    ) from failure


class PipesgdCallback(TrainerCallback):  # type: ignore[misc]  # its class is known only when it is installed
    """Training of the Trainer's DistributedDataParallel model with late and compressed gradients.

    The Trainer does the rest: it clips gradients, accumulates them, evaluates and saves, with the true weights. Each
    rank saves its pipeline's state in the Trainer's folder of a checkpoint, and finds it there when it resumes.

    Args:
        trainer: the Trainer that it is added to.
        width: iterations in flight, K.
        codec: encoding of gradients, by name or as ``CodecOptions``.
        options: further options of ``pipesgd.ddp.attach``, but those that the Trainer has: ``clip_norm``
            (``max_grad_norm``) and ``scaler``.

    Raises:
        UserInputError: one of the Trainer's options is given here.
    """

    def __init__(self, trainer: Any, *, width: int = 2, codec: Any = "fp32", **options: Any):
        if "clip_norm" in options:
            raise UserInputError("clip_norm must be left out: the Trainer has max_grad_norm")
        self._trainer = trainer
        self._options = {"width": width, "codec": codec} | options
        self.pipeline: AttachedPipeline | None = None
        """The pipeline, while the Trainer trains."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **others: Any) -> None:
        """Attach the pipeline to the Trainer's model and optimizer; load its state if the Trainer resumes.

        Raises:
            UserInputError: the model is not in DistributedDataParallel, as on a single rank.
            RunError: the Trainer resumes from a checkpoint without this rank's pipeline.
        """
        accelerator = self._trainer.accelerator
        clip_norm = args.max_grad_norm or None
        self.pipeline = attach(
            accelerator, self._trainer.model_wrapped, optimizer, clip_norm=clip_norm, **self._options
        )
        if state.global_step:
            path = self._file(args, state)
            if not path.is_file():
                raise RunError(f"the checkpoint must have this rank's pipeline; {path} is missing")
            self.pipeline.load_state_dict(torch.load(path, weights_only=True))

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save this rank's pipeline in the folder of the checkpoint."""
        if self.pipeline is not None and not args.save_only_model:
            path = self._file(args, state)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_atomically(self.pipeline.state_dict(), path)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Apply the gradients in flight."""
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None

    def _file(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir, f"checkpoint-{state.global_step}", f"pipesgd-rank-{args.process_index}.pt")
