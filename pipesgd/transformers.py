"""Pipe-SGD in the Trainer of Hugging Face Transformers: ``trainer.add_callback(PipesgdCallback(trainer))``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipesgd.checks import check_at_least, check_several, check_version
from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.codecs.own import codec_options
from pipesgd.ddp.attached import Attached, attach, with_clipping
from pipesgd.errors import RunError, UserInputError
from pipesgd.process import launched_ranks
from pipesgd.run.pipeline_file import PipelineFile
from pipesgd.sections import Updates, Windows, Wire

try:
    from transformers import TrainerCallback
    from transformers.training_args import ParallelMode
except ImportError as failure:
    raise UserInputError(
        "transformers must be installed for pipesgd.transformers: "
        f'pip install "transformers>=5.24" "accelerate>=1.15"; got {failure}'
    ) from failure
check_version("transformers", "5.24", "pipesgd.transformers")


class PipesgdCallback(TrainerCallback):  # type: ignore[misc]  # its class is known only when it is installed
    """Training of the Trainer's DistributedDataParallel model with late and compressed gradients.

    The Trainer does the rest: it clips gradients, accumulates them, evaluates and saves, with the true weights. Each
    rank saves its pipeline's state in the Trainer's folder of a checkpoint, and finds it there when it resumes.

    Args:
        trainer: the Trainer that it is added to.
        width: iterations in flight, K.
        codec: encoding of gradients, by name or as ``CodecOptions``.
        windows: windows of local steps, as in ``pipesgd.ddp.attach``.
        wire: how gradients travel, as in ``pipesgd.ddp.attach``.
        updates: how they are applied, as in ``pipesgd.ddp.attach``, without ``clip_norm``: the Trainer has
            ``max_grad_norm``.

    Raises:
        UserInputError: one of the Trainer's options is given here.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        width: int = 2,
        codec: str | CodecOptions | OwnCodec = "int8",
        windows: Windows | None = None,
        wire: Wire | None = None,
        updates: Updates | None = None,
    ):
        if updates is not None and updates.clip_norm is not None:
            raise UserInputError(
                f"clip_norm must be left out, since the Trainer has max_grad_norm; got {updates.clip_norm}"
            )
        check_at_least("width", width, 1)
        codec_options(codec)  # which is refused here, and not after the Trainer's set-up
        self._trainer = trainer
        self._width, self._codec = width, codec
        self._windows, self._wire, self._updates = windows, wire, updates
        self.pipeline: Attached | None = None
        """The pipeline, while the Trainer trains."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **others: Any) -> None:
        """Attach the pipeline to the Trainer's model and optimizer; load its state if the Trainer resumes.

        Raises:
            UserInputError: the model is not in DistributedDataParallel, as on a single rank, or the optimizer is
                schedule-free.
            RunError: the checkpoint has no usable pipeline of this rank.
        """
        callbacks = self._trainer.callback_handler.callbacks
        if (number := sum(isinstance(one, PipesgdCallback) for one in callbacks)) > 1:
            raise UserInputError(f"PipesgdCallback must be added to the Trainer once; got {number} of them")
        if args.parallel_mode != ParallelMode.DISTRIBUTED and launched_ranks() > 1 and args.device.type == "cpu":
            raise UserInputError(
                "TrainingArguments must have use_cpu=True on a machine without a GPU, since else the Trainer does not "
                f"wrap its model in DistributedDataParallel; got use_cpu={args.use_cpu}"
            )
        check_several(args.world_size, "the Trainer")
        if self.pipeline is not None:  # an error or Ctrl-C ended the last training
            interrupted = RunError("the training before this one was interrupted")
            self.pipeline.__exit__(RunError, interrupted, None)
        self.pipeline = attach(
            self._trainer.model_wrapped,
            optimizer.optimizer,
            width=self._width,
            codec=self._codec,
            windows=self._windows,
            wire=self._wire,
            updates=with_clipping(self._updates, self._windows, {"clip_norm": args.max_grad_norm or None}),
            scaler=self._trainer.accelerator.scaler,
        )
        if state.global_step:
            file = self._file(args, state)
            if not file.stem.parent.exists():
                raise RunError(
                    "resume_from_checkpoint must be a checkpoint in output_dir, where each rank's pipeline is; "
                    f"{file.stem.parent} is missing"
                )
            file.load(self.pipeline, state.global_step)
        callbacks.remove(self)
        callbacks.insert(0, self)  # before those that write to trackers what on_log adds

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **others: Any) -> None:
        """Add the pipeline's totals to what the Trainer logs, as "pipesgd/hidden_share"."""
        if self.pipeline is not None:
            logs |= self.pipeline.totals().as_metrics()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save this rank's pipeline in the folder of the checkpoint."""
        if self.pipeline is not None and not args.save_only_model:
            self._file(args, state).save(self.pipeline)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Apply the gradients in flight, unless the model holds the best weights by now, which stay."""
        if self.pipeline is None:
            return
        has_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        best = {name: value.clone() for name, value in model.state_dict().items()} if has_best else None
        self.pipeline.close()
        self.pipeline = None
        if best is not None:
            model.load_state_dict(best)

    def _file(self, args: Any, state: Any) -> PipelineFile:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        return PipelineFile(folder / "pipesgd-rank-", args.process_index, args.world_size, ending=".pt")
