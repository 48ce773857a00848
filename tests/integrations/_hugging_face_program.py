"""A program for torchrun: ``_hugging_face_program.py SCENARIO FOLDER`` trains and writes what it found."""

from __future__ import annotations

import contextlib
import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _scenario import DEVICE, FOLDER, ON_GPU, SCENARIO
from _sections import sections
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipesgd import LocalSteps, Pipelined, RunError, UserInputError
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Updates

warnings.filterwarnings("ignore")

LOCAL: dict[str, Any] = {"local_steps": 3} if SCENARIO.endswith(" local steps") else {}
OPTIONS: dict[str, Any] = {"width": 2, "codec": "int4"} | LOCAL
SILENT: dict[str, Any] = {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False} if LOCAL else {}
"""Options of the Trainer with which DistributedDataParallel itself sends nothing."""


def own_pipeline(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """Return the pipeline of a loop written by hand that trains as a door does."""
    kind: Any = LocalSteps if LOCAL else Pipelined
    return kind(model, optimizer, **sections(**OPTIONS, **options))


# ---- Accelerate


def make_accelerator(**options: Any) -> Any:
    from accelerate import Accelerator, InitProcessGroupKwargs

    if not ON_GPU:
        return Accelerator(cpu=True, **options)
    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **options)  # nccl refuses to share


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 1))


def batches() -> DataLoader[Any]:
    inputs = torch.randn(192, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :1] * 2), batch_size=8)


def accelerate() -> dict[str, Any]:
    import pipesgd.accelerate

    accelerator = make_accelerator()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    refused = ""
    try:
        pipesgd.accelerate.attach(accelerator, model, optimizer)
    except UserInputError as error:
        refused = str(error)
    found: dict[str, Any] = {"refused": refused, "found": accelerate_loop(stop=7)}
    found["resumed"] = accelerate_loop(resume=True)

    model = make_model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with own_pipeline(model, optimizer, clip_norm=0.3) as own:
        for number, (inputs, targets) in enumerate(accelerator.prepare(batches())):
            ((model(inputs) - targets).square().mean() / 2).backward()
            if number % 2:
                own.step()
    return found | {"expected": weights_sha256(model)}


def accelerate_loop(*, stop: int | None = None, resume: bool = False) -> str:
    """Train with accumulation and clipping; save after batch ``stop``, or resume there. Return the weights' hash."""
    import pipesgd.accelerate

    accelerator = make_accelerator(gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    pipeline = pipesgd.accelerate.attach(
        accelerator, model, optimizer, **sections(**OPTIONS | ({} if LOCAL else {"clip_norm": 0.3}))
    )
    if resume:
        accelerator.load_state(str(FOLDER / "state"))
        loader = accelerator.skip_first_batches(loader, 8)
    for number, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - targets).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        if number == stop:
            accelerator.save_state(str(FOLDER / "state"))
            saved = accelerator.get_state_dict(model)
            with pipeline.true_weights():
                true = {name: value.clone() for name, value in model.module.named_parameters()}
            assert all(torch.equal(value, saved[name]) for name, value in true.items())
            assert any(not torch.equal(value, true[name]) for name, value in model.module.named_parameters())
    pipeline.close()
    accelerator.save_state(str(FOLDER / "end"))
    accelerator.wait_for_everyone()  # it is rank 0 that writes the model, and the others do not wait for it
    if stop is not None:  # the weights of a state from before may be evaluated now
        accelerator.load_state(str(FOLDER / "state"))
        assert all(torch.equal(value, true[name]) for name, value in model.module.named_parameters())
    accelerator.load_state(str(FOLDER / "end"))
    return weights_sha256(accelerator.unwrap_model(model))


def one_after_the_other() -> dict[str, Any]:
    """Train two models by one Accelerator, and load the state of the second there and in another program.

    That one then saves a state on the main process alone.
    """
    import pipesgd.accelerate

    def attached(accelerator: Any) -> tuple[Any, Any, Any, Any]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
        return model, optimizer, loader, pipesgd.accelerate.attach(accelerator, model, optimizer, **sections(**OPTIONS))

    accelerator = make_accelerator()

    def train(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        accelerator.backward((model(inputs) - targets).square().mean())
        optimizer.step()

    for number in range(2):
        model, optimizer, loader, pipeline = attached(accelerator)

        for batch in loader:
            train(model, optimizer, *batch)
        folder = str(FOLDER / f"model-{number}")
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        train(model, optimizer, *batch)
        accelerator.load_state(folder)  # takes the last iteration back
        iterations = [pipeline.iteration]
        pipeline.close()
        accelerator.free_memory()
    other = make_accelerator()
    *_, pipeline = attached(other)
    other.load_state(folder)
    iterations.append(pipeline.iteration)
    alone = str(FOLDER / "alone")
    if other.is_main_process:
        other.save_state(alone)
    other.wait_for_everyone()
    refused = ""
    try:
        other.load_state(alone)
    except RunError as error:
        refused = str(error)
    pipeline.close()
    return {"iterations": iterations, "batches": len(loader), "refused": refused}


def accelerates_own() -> dict[str, Any]:
    """Run Accelerate's own check that distributed training equals that of one process, with each model attached."""
    from accelerate import Accelerator
    from accelerate.test_utils.scripts import test_script

    import pipesgd.accelerate

    pipelines = []

    class Attaching(Accelerator):
        def prepare(self, *objects: Any, **options: Any) -> Any:
            prepared = super().prepare(*objects, **options)
            loader, model, optimizer = prepared
            pipelines.append(pipesgd.accelerate.attach(self, model, optimizer, width=1))
            return loader, model, optimizer

    Accelerator(cpu=True)
    test_script.Accelerator = Attaching
    test_script.training_check()
    return {"iterations": [pipeline.iteration for pipeline in pipelines]}


# ---- Transformers


def make_trainer(folder: Path, steps: int = 12, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Return a Trainer of a small language model, made from its configuration; ``options`` None is plain DDP."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import pipesgd.transformers

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    tokens = torch.randint(64, (256, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            str(folder),
            use_cpu=not ON_GPU,
            ddp_backend="gloo" if ON_GPU else None,  # nccl refuses ranks that share a GPU
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            **{"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
            | SILENT
            | arguments,
        ),
        train_dataset=data,
        eval_dataset=data[:32],
    )
    if options is not None:
        trainer.add_callback(pipesgd.transformers.PipesgdCallback(trainer, **sections(**options)))
    return trainer


def saved_model(folder: Path) -> nn.Module:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder)  # type: ignore[no-any-return]


def parameters_of(trainer: Any) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])


class ScheduleFree(torch.optim.SGD):
    """An optimizer with the methods by which the Trainer tells a schedule-free one."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def transformers() -> dict[str, Any]:
    import pipesgd.transformers

    plain, synchronous = make_trainer(FOLDER / "a"), make_trainer(FOLDER / "b", options={"width": 1, "codec": "fp32"})
    plain.train()
    synchronous.train()
    late = make_trainer(FOLDER / "c", options=OPTIONS, eval_strategy="steps", eval_steps=5)
    seen: list[bool] = []

    def look(model: nn.Module, inputs: Any, outputs: Any) -> None:
        [callback] = [one for one in late.callback_handler.callbacks if hasattr(one, "pipeline")]
        if not model.training and callback.pipeline is not None:
            with callback.pipeline.true_weights():
                true = weights_sha256(model)
            seen.append(true == weights_sha256(model))

    late.model.register_forward_hook(look)
    late.train()
    late.save_model(str(FOLDER / "saved"))
    dist.barrier()
    saved = saved_model(FOLDER / "saved")
    found: dict[str, Any] = {
        "difference to DDP": float((parameters_of(plain) - parameters_of(synchronous)).abs().max()),
        "largest weight": float(parameters_of(plain).abs().max()),
        "late": weights_sha256(late.model),
        "saved": weights_sha256(saved),
        "evaluations with true weights": seen,
    }
    try:
        pipesgd.transformers.PipesgdCallback(late, updates=Updates(clip_norm=1.0))
    except UserInputError as error:
        found["refused"] = str(error)
    try:
        pipesgd.transformers.PipesgdCallback(late, codec="int7")
    except UserInputError as error:
        found["refused codec"] = str(error)
    twice = make_trainer(FOLDER / "f", options=OPTIONS)
    twice.add_callback(pipesgd.transformers.PipesgdCallback(twice))
    try:
        twice.train()
    except UserInputError as error:
        found["refused twice"] = str(error)
    modal = make_trainer(FOLDER / "e", options=OPTIONS)
    modal.optimizer = ScheduleFree(modal.model.parameters(), lr=1e-3)
    try:
        modal.train()
    except UserInputError as error:
        found["refused optimizer"] = str(error)
    if LOCAL:
        try:
            make_trainer(FOLDER / "d", options=OPTIONS, ddp_find_unused_parameters=True).train()
        except UserInputError as error:
            found["refused with local steps"] = str(error)
    return found


def resumed() -> dict[str, Any]:
    whole = make_trainer(FOLDER / "whole", options=OPTIONS)
    whole.train()
    # A run that ends early has another learning-rate schedule, so this one saves on its way and is resumed there.
    first = make_trainer(FOLDER / "parts", options=OPTIONS)
    first.args.save_strategy, first.args.save_steps = "steps", 5
    first.state.save_steps = 5
    first.train()
    again = make_trainer(FOLDER / "parts", options=OPTIONS)
    again.train(resume_from_checkpoint=str(FOLDER / "parts" / "checkpoint-5"))
    return {"whole": weights_sha256(whole.model), "resumed": weights_sha256(again.model)}


def equal() -> dict[str, Any]:
    """Train by the Trainer, and by a loop on what it makes."""
    found = {}
    for clip_norm in (0.0, 0.5):
        arguments: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": clip_norm}
        trainer = make_trainer(FOLDER / "a", options=OPTIONS, **arguments)
        other = make_trainer(FOLDER / "b", **arguments)
        if clip_norm:
            # The Trainer sums the norm in the order of the model, and Pipelined in that of the optimizer, where the
            # Trainer's own has the parameters in two groups.
            for one in (trainer, other):
                one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-3)
        trainer.train()

        other.create_optimizer_and_scheduler(12)
        model, loader = other.model, iter(other.get_train_dataloader())
        with own_pipeline(model, other.optimizer, clip_norm=clip_norm or None) as pipeline:
            for _ in range(12):
                micro_batches, items = other.get_batch_samples(loader, 2, DEVICE)
                for batch in micro_batches:
                    other.training_step(model, batch, items)  # its loss counts the tokens of all micro-batches
                pipeline.step()
                other.lr_scheduler.step()
        found[f"clipped at {clip_norm}"] = (weights_sha256(trainer.model), weights_sha256(model))
    return found


def best() -> dict[str, Any]:
    """Train until the evaluations get worse; the Trainer then loads the best model."""
    trainer = make_trainer(
        FOLDER / "best",
        options=OPTIONS,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the best one is not the last
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    return {"step": best.name, "found": weights_sha256(trainer.model), "best": weights_sha256(saved_model(best))}


def repeated() -> dict[str, Any]:
    """Train three times by one Trainer, the second time until Ctrl-C."""
    from transformers import TrainerCallback

    class Interrupting(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 5:
                raise KeyboardInterrupt

    trainer = make_trainer(FOLDER / "repeated", options=OPTIONS)
    found = []
    for callback in (None, Interrupting, None):
        if callback is not None:
            trainer.add_callback(callback)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        if callback is not None:
            trainer.remove_callback(callback)
        found.append(weights_sha256(trainer.model))
    return {"weights": found, "steps": trainer.state.global_step}


def cut_short() -> dict[str, Any]:
    """Train until all ranks fail before they have saved their pipelines of step 6, and resume from what is left."""
    found: dict[str, Any] = {}
    for limit in (1, 2):
        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": limit}
        folder = FOLDER / f"limit {limit}"
        whole, cut, again = (make_trainer(folder / name, 6, OPTIONS, **options) for name in ("whole", "cut", "cut"))
        [callback] = [one for one in cut.callback_handler.callbacks if hasattr(one, "pipeline")]
        save = callback.on_save

        def fail_at_the_end(args: Any, state: Any, *others: Any, save: Any = save, **named: Any) -> None:
            if state.global_step == 6:
                raise RunError("the disk is full")
            save(args, state, *others, **named)

        callback.on_save = fail_at_the_end
        whole.train()
        try:
            cut.train()
        except RunError as error:
            callback.pipeline.__exit__(RunError, error, None)
        dist.barrier()
        left = sorted(path.name for path in (folder / "cut").iterdir())
        try:
            again.train(resume_from_checkpoint=str(folder / "cut" / left[0]))
            end = weights_sha256(again.model) == weights_sha256(whole.model)
        except RunError as error:
            end = str(error).partition(";")[0]
        found[f"limit {limit}"] = (left, end)
        dist.barrier()
    return found


# ---- The backend "pipesgd"


def backend() -> dict[str, Any]:
    """Train on a group of this backend that was made before; then ask for the backend by its name."""
    from accelerate import InitProcessGroupKwargs
    from accelerate.state import AcceleratorState
    from transformers import HfArgumentParser, TrainingArguments

    from pipesgd.backend import BackendOptions

    dist.init_process_group("pipesgd", pg_options=BackendOptions(codec="int8", least_bytes=1024))
    group: Any = dist.group.WORLD
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    accelerator = make_accelerator()
    ddp_model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward((ddp_model(inputs) - targets).square().mean())
        optimizer.step()
    sums = [group._sums[DEVICE.type]._number]
    trainer = make_trainer(FOLDER / "trainer")
    trainer.train()
    sums.append(group._sums[DEVICE.type]._number)
    refused = []
    for ask in (
        lambda: make_accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="pipesgd")]),
        lambda: TrainingArguments(str(FOLDER), use_cpu=True, ddp_backend="pipesgd").device,
        lambda: HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--ddp_backend", "pipesgd"]),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            ask()
        except (ValueError, SystemExit) as error:
            refused.append(str(error))
    weights = [weights_sha256(model), weights_sha256(trainer.model)]
    return {"backend": dist.get_backend(), "weights": weights, "sums": sums, "refused": refused}


def main() -> None:
    found = globals()[SCENARIO.removesuffix(" local steps")]()
    torch.save(copy.deepcopy(found), FOLDER / f"rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
