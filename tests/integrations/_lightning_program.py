"""A program for torchrun: ``_lightning_program.py SCENARIO FOLDER`` trains by Lightning and writes what it found."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import torch
from _scenario import DEVICE, FOLDER, ON_GPU, SCENARIO
from _sections import sections
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipesgd import LocalSteps, Pipelined, Updates, UserInputError, Windows
from pipesgd.replicas import weights_sha256

warnings.filterwarnings("ignore")  # Lightning's hints about workers and loggers

pl = importlib.import_module(SCENARIO if SCENARIO == "lightning.pytorch" else "pytorch_lightning")
pipesgd_lightning = importlib.import_module("pipesgd.lightning")  # after the package that it is to serve

SAMPLES, BATCH, EPOCHS = 192, 8, 2
OPTIONS: dict[str, Any] = {"width": 2, "codec": "int4"}
LOCAL: dict[str, Any] = {}
"""Options of local steps, if the scenario is about them. Its checkpoints are then in the middle of a window."""
if SCENARIO.endswith("local steps"):
    LOCAL["local_steps"] = 3 if SCENARIO.startswith("fabric") else 5
RANKS: dict[str, Any] = (
    {"accelerator": "gpu", "devices": 1, "num_nodes": 2} if ON_GPU else {"accelerator": "cpu", "devices": 2}
)
"""Options by which a Trainer or a Fabric finds the ranks."""
GROUP: dict[str, Any] = {"process_group_backend": "gloo"} if ON_GPU else {}
"""Options of a strategy: nccl refuses ranks that share a GPU."""
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
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

    def forward(self, inputs: Tensor) -> Any:
        if not self.training:
            self.validated.append(weights_sha256(self.net))
        return self.net(inputs)

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.net(batch[0])
        if index == 0:
            self.validated.append(weights_sha256(self.net))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Clipping(Regression):
    """The network, which clips gradients itself."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.3)


def data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :1] * 2)


def loader() -> DataLoader[Any]:
    """Return this rank's batches, the same for Lightning and for the loop written by hand."""
    rank = int(os.environ["RANK"])
    return DataLoader(data(), batch_size=BATCH, sampler=range(rank, SAMPLES, 2))


def on_device(batch: list[Tensor]) -> list[Tensor]:
    return [one.to(DEVICE) for one in batch]


def fit(trainer_options: dict[str, Any], model: Regression | None = None, **fit_options: Any) -> Regression:
    strategy = pipesgd_lightning.PipesgdStrategy(**sections(**OPTIONS, **GROUP, **LOCAL))
    trainer = pl.Trainer(**QUIET | RANKS | {"max_epochs": EPOCHS, "strategy": strategy} | trainer_options)
    model = model or Regression()
    trainer.fit(model, loader(), loader(), **fit_options)
    return model


def by_pipelined(
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> Regression:
    """Train as ``fit`` does."""
    model = Regression().to(DEVICE)
    made = model.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    scale = scaler.scale if scaler is not None else lambda loss: loss
    kind: Any = LocalSteps if LOCAL else Pipelined
    with kind(model, optimizer, scaler=scaler, **sections(**OPTIONS, **LOCAL, **options)) as pipeline:
        for _ in range(EPOCHS):
            for index, batch in enumerate(loader()):
                with torch.autocast(DEVICE.type, autocast, enabled=autocast is not None, cache_enabled=False):
                    loss = model.training_step(on_device(batch), 0) / accumulate
                scale(loss).backward()  # type: ignore[no-untyped-call]
                if (index + 1) % accumulate == 0:
                    pipeline.step()
                    schedule.step()
            with pipeline.true_weights():
                model.validated.append(weights_sha256(model.net))
    return model


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)


def equal(scenario: str) -> dict[str, Any]:
    half = pl.plugins.precision.MixedPrecision("16-mixed", device=DEVICE.type, scaler=make_scaler())
    trainer_options: dict[str, dict[str, Any]] = {
        "clip": {"gradient_clip_val": 0.3},
        "clip value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        "accumulate": {"accumulate_grad_batches": 3},
        "local steps": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
        "bf16-mixed": {"precision": "bf16-mixed"},
        "16-mixed": {"plugins": [half], "gradient_clip_val": 0.3},  # a Trainer of precision="16-mixed" wants a GPU
    }
    expected_options: dict[str, dict[str, Any]] = {
        "clip": {"clip_norm": 0.3},
        "clip itself": {"clip_norm": 0.3},
        "clip value": {"clip_value": 0.05},
        "accumulate": {"accumulate": 3},
        "local steps": {"clip_norm": 0.3, "accumulate": 2},
        "bf16-mixed": {"autocast": torch.bfloat16},
        "16-mixed": {"autocast": torch.float16, "scaler": make_scaler(), "clip_norm": 0.3},
    }
    itself = None
    if scenario == "clip itself":
        itself = Clipping()
        own = pipesgd_lightning.PipesgdStrategy(**sections(**OPTIONS, clip_norm=0.3))
        trainer_options[scenario] = {"strategy": own}
    found = fit(trainer_options.get(scenario, {}) | {"enable_checkpointing": False}, itself)
    expected = by_pipelined(**expected_options.get(scenario, {}))
    return {
        "found": weights_sha256(found.net),
        "expected": weights_sha256(expected.net),
        "validated": found.validated,
        "expected to be validated": expected.validated,
    }


def resumed() -> dict[str, Any]:
    whole = fit({"enable_checkpointing": False, "max_epochs": 3})
    # At the end of an epoch: Lightning does not skip the samples that were used of one that has begun.
    folder = FOLDER / "checkpoints"
    checkpoints = pl.callbacks.ModelCheckpoint(dirpath=folder, save_on_train_epoch_end=True, save_last="link")
    fit({"max_epochs": 1, "callbacks": [checkpoints]})
    torch.distributed.barrier()
    newest = folder / "last.ckpt"
    assert newest.is_symlink()
    continued = fit({"max_epochs": 3, "enable_checkpointing": False}, ckpt_path=newest)
    saved = Regression()
    saved.load_state_dict(torch.load(newest, weights_only=False)["state_dict"])
    return {
        "whole": weights_sha256(whole.net),
        "continued": weights_sha256(continued.net),
        "saved": weights_sha256(saved.net),
        "files": sorted(path.name for path in (FOLDER / "checkpoints").iterdir()),
    }


def removed() -> dict[str, Any]:
    """Save two checkpoints, of which the Trainer keeps the second; and the same of weights alone at an address."""
    checkpoints = pl.callbacks.ModelCheckpoint(dirpath=FOLDER / "checkpoints", save_on_train_epoch_end=True)
    fit({"callbacks": [checkpoints]})
    torch.distributed.barrier()
    name = Path(checkpoints.best_model_path).name
    save = torch.load(checkpoints.best_model_path, weights_only=False)["pipesgd"]["save"]
    of_ranks = [f"{name}.pipesgd-rank-{rank}.{save}" for rank in range(2)]
    weights = pl.callbacks.ModelCheckpoint("memory://run", save_on_train_epoch_end=True, save_weights_only=True)
    fit({"callbacks": [weights]})
    return {
        "files at an address": len(fsspec.filesystem("memory").find("/run")),
        "files": sorted(path.name for path in (FOLDER / "checkpoints").iterdir()),
        "expected": sorted([name, *of_ranks, *(f"{one}.sha256" for one in of_ranks)]),
    }


def refused() -> dict[str, str]:
    class Manual(Regression):
        automatic_optimization = False

    class Two(Regression):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[index].parameters(), lr=0.1) for index in (0, 2)]

    class Without(Regression):
        def configure_optimizers(self) -> Any:
            return None

    class Normalized(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net.append(nn.BatchNorm1d(1))

    windows = pipesgd_lightning.PipesgdStrategy(windows=Windows(local_steps=2))
    clipping = pipesgd_lightning.PipesgdStrategy(updates=Updates(clip_norm=1.0))
    synchronous_windows = pipesgd_lightning.PipesgdStrategy(width=1, windows=Windows(local_steps=2))

    def averaged(**trainer_options: Any) -> Regression:
        class Derived(pl.callbacks.EMAWeightAveraging):  # type: ignore[misc]
            pass

        return fit({"enable_checkpointing": False, "callbacks": [Derived()]} | trainer_options)

    found = {}
    for name, make in {
        "clip_norm": lambda: fit({"enable_checkpointing": False, "gradient_clip_val": 0.3, "strategy": clipping}),
        "address": lambda: pipesgd_lightning.pipeline_file("memory://run/a.ckpt", windows),
        "hook": lambda: pipesgd_lightning.PipesgdStrategy(ddp_comm_hook=print),
        "manual": lambda: fit({"enable_checkpointing": False}, Manual()),
        "two": lambda: fit({"enable_checkpointing": False}, Two()),
        "none": lambda: fit({"enable_checkpointing": False}, Without()),
        "buffers": lambda: fit({"enable_checkpointing": False, "strategy": windows}, Normalized()),
        "average": averaged,
        "average of windows": lambda: averaged(strategy=synchronous_windows),
        "average of the last epochs": lambda: averaged(callbacks=[pl.callbacks.StochasticWeightAveraging(0.01)]),
        "fabric's scaler": lambda: pipesgd_lightning.PipesgdFabricStrategy(scaler=torch.amp.GradScaler("cpu")),
        "fabric's two": lambda: fabric_loop(optimizers=2),
        "fabric's optimizer alone": lambda: make_fabric().setup_optimizers(
            Regression().configure_optimizers()["optimizer"]
        ),
        "fabric's model alone": fabric_without_optimizer,
    }.items():
        try:
            make()
        except (UserInputError, RuntimeError) as error:
            found[name] = str(error)
    return found


# ---- Fabric


def fabric_package() -> Any:
    return importlib.import_module(pipesgd_lightning.PACKAGES[pl.__name__][1])


def make_fabric() -> Any:
    options = LOCAL or {"clip_norm": 0.3}
    strategy = pipesgd_lightning.PipesgdFabricStrategy(**sections(**OPTIONS, **GROUP, **options))
    fabric = fabric_package().Fabric(**RANKS, strategy=strategy)
    fabric.launch()
    return fabric


def fabric_without_optimizer() -> None:
    model = make_fabric().setup(Regression())
    inputs = torch.ones(8, 6, device=DEVICE)
    model.eval()(inputs)
    with torch.no_grad():
        model.train()(inputs)
    model(inputs)


class Killed(BaseException):
    """The job was killed."""


def fabric_loop(optimizers: int = 1, stop: int | None = None, resume: bool = False, reload: bool = False) -> Regression:
    """Train with accumulation and clipping, as a loop of Fabric does; save after iteration ``stop``, or resume.

    The same file is written before, and again after, when the job is killed before Fabric replaces the file.
    """
    fabric = make_fabric()
    model = Regression()
    made = model.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    wrapped, optimizer, *_ = fabric.setup(model, *[optimizer] * optimizers)
    wrapped.mark_forward_method("training_step")
    state = {"model": wrapped, "optimizer": optimizer, "schedule": schedule, "iteration": 0}
    if resume:
        fabric.load(FOLDER / "fabric.ckpt", state)
    for _ in range(EPOCHS):
        for index, batch in enumerate(loader()):
            if resume and index // 2 < state["iteration"]:
                continue
            accumulating = index % 2 == 0
            with fabric.no_backward_sync(wrapped, enabled=accumulating):
                loss = wrapped.training_step(on_device(batch), index) / 2
                if index % 4 < 2:
                    fabric.backward(loss)
                else:
                    loss.backward()  # which Fabric allows where it has nothing to do itself
            if accumulating:
                continue
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.3)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            done = index // 2 + 1
            if stop is None or done not in (stop - 1, stop, stop + 1):
                continue
            state["iteration"] = done
            if done <= stop:
                fabric.save(FOLDER / "fabric.ckpt", state)
                continue
            with (
                mock.patch.object(type(fabric.strategy).__base__, "save_checkpoint", side_effect=Killed),
                contextlib.suppress(Killed),
            ):
                fabric.save(FOLDER / "fabric.ckpt", state)
            stop = None
        resume = False
        wrapped.eval()
        with torch.no_grad():
            wrapped(torch.zeros(1, 6, device=DEVICE))
        wrapped.train()
    fabric.strategy.pipeline.close()
    if reload:  # as to evaluate the best
        fabric.load(FOLDER / "fabric.ckpt", state)
    return model


def saved_by_fabric() -> Regression:
    model = Regression()
    model.load_state_dict(torch.load(FOLDER / "fabric.ckpt", weights_only=False)["model"])
    return model


def fabric() -> dict[str, Any]:
    found, expected = fabric_loop(stop=5), by_pipelined(accumulate=2, clip_norm=0.3)
    return {
        "found": weights_sha256(found.net),
        "expected": weights_sha256(expected.net),
        "validated": found.validated,
        "expected to be validated": expected.validated,
        "resumed": weights_sha256(fabric_loop(resume=True).net),
        "reloaded": weights_sha256(fabric_loop(resume=True, reload=True).net),
        "saved": weights_sha256(saved_by_fabric().net),
        "files": len(list(FOLDER.glob(f"fabric.ckpt.pipesgd-rank-{torch.distributed.get_rank()}*"))),
        "by name": type(fabric_package().Fabric(**RANKS, strategy="pipesgd").strategy).__name__,
    }


def averaged() -> dict[str, Any]:
    """Train at width 1 with an average, which is in the model at the end."""
    average = pl.callbacks.EMAWeightAveraging(decay=0.5)
    strategy = pipesgd_lightning.PipesgdStrategy(width=1)
    model = fit({"enable_checkpointing": False, "callbacks": [average], "strategy": strategy})
    return {"found": weights_sha256(model.net), "average": weights_sha256(average._average_model.module.net)}


def boring() -> dict[str, Any]:
    from pytorch_lightning.demos.boring_classes import BoringModel

    model = BoringModel()
    options = QUIET | {"use_distributed_sampler": True, "default_root_dir": FOLDER}
    trainer = pl.Trainer(**options | RANKS, strategy="pipesgd", max_epochs=1)
    trainer.fit(model)
    trainer.test(model, verbose=False)
    return {"steps": trainer.global_step, "weights": weights_sha256(model)}


SCENARIOS = {one.__name__: one for one in (resumed, removed, refused, averaged, boring, fabric)}


def main() -> None:
    scenario = SCENARIOS.get(SCENARIO.removesuffix(" local steps"))
    found = scenario() if scenario is not None else equal(SCENARIO)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(found, FOLDER / f"rank-{rank}.pt")


if __name__ == "__main__":
    main()
