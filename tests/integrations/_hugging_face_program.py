"""A program for torchrun: ``_hugging_face_program.py SCENARIO FOLDER`` trains and writes what it found."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipesgd import Pipelined, UserInputError
from pipesgd.replicas import weights_sha256

warnings.filterwarnings("ignore")

SCENARIO, FOLDER = sys.argv[1], Path(sys.argv[2])
OPTIONS: dict[str, Any] = {"width": 2, "codec": "int4"}


# ---- Accelerate


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 1))


def batches() -> DataLoader[Any]:
    inputs = torch.randn(192, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :1] * 2), batch_size=8)


def accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    import pipesgd.accelerate

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    found = {}
    try:
        pipesgd.accelerate.attach(accelerator, model, optimizer)
    except UserInputError as error:
        found["refused"] = str(error)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    pipeline = pipesgd.accelerate.attach(accelerator, model, optimizer, clip_norm=0.3, **OPTIONS)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - targets).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    with pipeline.true_weights():
        found["saved is true"] = all(
            torch.equal(value, saved[name]) for name, value in accelerator.unwrap_model(model).named_parameters()
        )
    pipeline.close()
    found["found"] = weights_sha256(accelerator.unwrap_model(model))

    model = make_model()
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), clip_norm=0.3, **OPTIONS) as own:
        for number, (inputs, targets) in enumerate(accelerator.prepare(batches())):
            ((model(inputs) - targets).square().mean() / 2).backward()
            if number % 2:
                own.step()
    found["expected"] = weights_sha256(model)
    return found


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
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            **arguments,
        ),
        train_dataset=data,
        eval_dataset=data[:32],
    )
    if options is not None:
        trainer.add_callback(pipesgd.transformers.PipesgdCallback(trainer, **options))
    return trainer


def parameters_of(trainer: Any) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])


def transformers() -> dict[str, Any]:
    from transformers import GPT2LMHeadModel

    import pipesgd.transformers

    plain, synchronous = make_trainer(FOLDER / "a"), make_trainer(FOLDER / "b", options={"width": 1})
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
    saved = GPT2LMHeadModel.from_pretrained(FOLDER / "saved")
    found: dict[str, Any] = {
        "difference to DDP": float((parameters_of(plain) - parameters_of(synchronous)).abs().max()),
        "largest weight": float(parameters_of(plain).abs().max()),
        "late": weights_sha256(late.model),
        "saved": weights_sha256(saved),
        "evaluations with true weights": seen,
    }
    try:
        pipesgd.transformers.PipesgdCallback(late, clip_norm=1.0)
    except UserInputError as error:
        found["refused"] = str(error)
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


def main() -> None:
    found = globals()[SCENARIO]()
    torch.save(copy.deepcopy(found), FOLDER / f"rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
