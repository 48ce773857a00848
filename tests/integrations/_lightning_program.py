"""A program for torchrun: ``_lightning_program.py SCENARIO FOLDER`` trains by Lightning and writes what it found."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipesgd import Pipelined, UserInputError
from pipesgd.replicas import weights_sha256

warnings.filterwarnings("ignore")  # Lightning's hints about workers and loggers

SCENARIO, FOLDER = sys.argv[1], Path(sys.argv[2])
pl = importlib.import_module(SCENARIO if SCENARIO == "lightning.pytorch" else "pytorch_lightning")
pipesgd_lightning = importlib.import_module("pipesgd.lightning")  # after the package that it is to serve

SAMPLES, BATCH, EPOCHS = 192, 8, 2
OPTIONS: dict[str, Any] = {"width": 2, "codec": "int4"}
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
}


class Regression(pl.LightningModule):
    """A network that is evaluated by a part of it, with what a user writes and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 1))
        self.validated: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.net(batch[0])
        if index == 0:
            self.validated.append(weights_sha256(self.net))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :1] * 2)


def loader() -> DataLoader[Any]:
    """Return this rank's batches, the same for Lightning and for the loop written by hand."""
    rank = int(os.environ["RANK"])
    return DataLoader(data(), batch_size=BATCH, sampler=range(rank, SAMPLES, 2))


def fit(trainer_options: dict[str, Any], model: Regression | None = None, **fit_options: Any) -> Regression:
    strategy = pipesgd_lightning.PipesgdStrategy(**OPTIONS)
    trainer = pl.Trainer(**QUIET | {"devices": 2, "max_epochs": EPOCHS, "strategy": strategy} | trainer_options)
    model = model or Regression()
    trainer.fit(model, loader(), loader(), **fit_options)
    return model


def by_pipelined(accumulate: int = 1, **options: Any) -> Regression:
    """Train as ``fit`` does."""
    model = Regression()
    made = model.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    with Pipelined(model, optimizer, **OPTIONS, **options) as pipeline:
        for _ in range(EPOCHS):
            for index, batch in enumerate(loader()):
                (model.training_step(batch, 0) / accumulate).backward()
                if (index + 1) % accumulate == 0:
                    pipeline.step()
                    schedule.step()
            with pipeline.true_weights():
                model.validated.append(weights_sha256(model.net))
    return model


def equal(scenario: str) -> dict[str, Any]:
    trainer_options: dict[str, dict[str, Any]] = {
        "clip": {"gradient_clip_val": 0.3},
        "clip value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        "accumulate": {"accumulate_grad_batches": 3},
    }
    pipeline_options: dict[str, dict[str, Any]] = {
        "clip": {"clip_norm": 0.3},
        "clip value": {"clip_value": 0.05},
        "accumulate": {"accumulate": 3},
    }
    found = fit(trainer_options.get(scenario, {}) | {"enable_checkpointing": False})
    expected = by_pipelined(**pipeline_options.get(scenario, {}))
    return {
        "found": weights_sha256(found.net),
        "expected": weights_sha256(expected.net),
        "validated": found.validated,
        "expected to be validated": expected.validated,
    }


def resumed() -> dict[str, Any]:
    whole = fit({"enable_checkpointing": False, "max_epochs": 3})
    # At the end of an epoch: Lightning does not skip the samples that were used of one that has begun.
    checkpoints = pl.callbacks.ModelCheckpoint(dirpath=FOLDER / "checkpoints", save_on_train_epoch_end=True)
    fit({"max_epochs": 1, "callbacks": [checkpoints]})
    newest = max((FOLDER / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    continued = fit({"max_epochs": 3, "enable_checkpointing": False}, ckpt_path=newest)
    saved = Regression()
    saved.load_state_dict(torch.load(newest, weights_only=False)["state_dict"])
    return {
        "whole": weights_sha256(whole.net),
        "continued": weights_sha256(continued.net),
        "saved": weights_sha256(saved.net),
        "files": sorted(path.name for path in (FOLDER / "checkpoints").iterdir()),
    }


def refused() -> dict[str, str]:
    class Manual(Regression):
        automatic_optimization = False

    class Two(Regression):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[index].parameters(), lr=0.1) for index in (0, 2)]

    found = {}
    for name, make in {
        "clip_norm": lambda: pipesgd_lightning.PipesgdStrategy(pipeline_options={"clip_norm": 1.0}),
        "hook": lambda: pipesgd_lightning.PipesgdStrategy(ddp_comm_hook=print),
        "manual": lambda: fit({"enable_checkpointing": False}, Manual()),
    }.items():
        try:
            make()
        except UserInputError as error:
            found[name] = str(error)
    return found


def boring() -> dict[str, Any]:
    from pytorch_lightning.demos.boring_classes import BoringModel

    model = BoringModel()
    options = QUIET | {"use_distributed_sampler": True, "default_root_dir": FOLDER}
    trainer = pl.Trainer(**options, strategy="pipesgd", devices=2, max_epochs=1)
    trainer.fit(model)
    trainer.test(model, verbose=False)
    return {"steps": trainer.global_step, "weights": weights_sha256(model)}


def main() -> None:
    found = globals()[SCENARIO]() if SCENARIO in ("resumed", "refused", "boring") else equal(SCENARIO)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(found, FOLDER / f"rank-{rank}.pt")


if __name__ == "__main__":
    main()
