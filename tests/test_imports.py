"""Who may import whom: the picture in ARCHITECTURE.md, held by a walk over the sources."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import ModuleType

import pytest
from conftest import REPOSITORY

import pipesgd
import timing_model

LAYERS = [
    {"errors", "process"},
    {"checks"},
    {"codecs.options"},
    {"clipping"},
    {"config", "muon", "store", "farewell"},
    {"heartbeat"},
    {"watcher"},
    {"command_line", "collectives.schedule", "workloads", "launch", "codecs.kernels"},
    {"gradients", "hyperparameters", "loss_scale", "guard", "agreement", "replicas"},
    {"optimizer_copy"},
    {"prediction", "same_bits"},
    {
        *("collectives.base", "collectives.transport", "codecs.base", "codecs.keys"),
        *("collectives.ring", "collectives.halving_doubling", "collectives.recursive_doubling"),
        *("collectives.all_to_all", "collectives.hierarchical"),
    },
    {"codecs"},
    {"collectives.scheduled", "collectives.native", "collectives.pinned", "collectives.worker", "collectives.headers"},
    {"collectives.make", "strategies.base", "strategies.staleness"},
    {"exchanges"},
    {"strategies.replication", "strategies.sameness"},
    {"strategies.meetings", "strategies.server_messages", "strategies.shard_layout"},
    {"strategies.shard_state"},
    {"strategies.shard", "strategies.late_updates"},
    {"strategies.server"},
    {"strategies.server_stubs"},
    {"strategies.pipelined", "strategies.ddp", "strategies.local", "strategies.parameter_server"},
    {"strategies.make"},
    {"files"},
    {"checkpoint_files", "checkpoint_folder", "event_file", "folder_lock"},
    {"checkpoint", "metrics", "trace", "evaluation", "optimization", "state", "output"},
    {"progress", "computation", "swap"},
    {"calibration"},
    {"decision"},
    {"planning", "drift"},
    {"ending", "summary"},
    {"train", "calibrate", "__main__"},
]
"""From the bottom up: a module imports from layers below its own, or from its own package."""

MAY_NAME_THE_TIMING_MODEL = {"calibration.profile", "decision"}
"""What the trainer knows of the timing model: what it measures for it, and what it leaves to it."""

MAY_NAME_TORCH_DISTRIBUTED = {
    "store",
    "watcher",
    "launch",
    "collectives.transport",
    "collectives.native",
    "strategies.ddp",
}


def modules(package: str) -> dict[str, Path]:
    root = REPOSITORY / package
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for path in sorted(root.rglob("*.py"))
        if path.name != "__init__.py"
    }


def imported(path: Path) -> set[str]:
    """Full names of everything that the file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer(module: str) -> int:
    parts = module.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]  # the nearest package counts
    return next(index for name in prefixes for index, names in enumerate(LAYERS) if name in names)


@pytest.mark.parametrize("module", modules("pipesgd"))
def test_a_module_imports_from_below_only(module: str) -> None:
    path = modules("pipesgd")[module]
    ours = {name.removeprefix("pipesgd.") for name in imported(path) if name.startswith("pipesgd.")}
    for other in ours & modules("pipesgd").keys():
        same_package = other.split(".")[0] == module.split(".")[0] and "." in module
        assert layer(other) < layer(module) or (same_package and layer(other) == layer(module)), other
    names_torch_distributed = any(name.startswith("torch.distributed") for name in imported(path))
    assert not names_torch_distributed or module in MAY_NAME_TORCH_DISTRIBUTED


def test_every_module_has_its_layer() -> None:
    for module in modules("pipesgd"):
        layer(module)


@pytest.mark.parametrize("module", modules("timing_model"))
def test_the_timing_model_knows_neither_torch_nor_the_trainer(module: str) -> None:
    for name in imported(modules("timing_model")[module]):
        assert name.split(".")[0] not in {"torch", "pipesgd", "experiments"}


@pytest.mark.parametrize("module", modules("pipesgd"))
def test_the_trainer_knows_no_experiments_and_the_timing_model_in_one_place(module: str) -> None:
    names = {name.split(".")[0] for name in imported(modules("pipesgd")[module])}
    assert not names & {"experiments", "tests"}
    assert ("timing_model" in names) == (module in MAY_NAME_THE_TIMING_MODEL)


@pytest.mark.parametrize("package", [pipesgd, timing_model])
def test_a_type_checker_reads_its_types(package: ModuleType) -> None:
    assert (Path(str(package.__file__)).parent / "py.typed").is_file()


@pytest.mark.skipif("CI" not in os.environ, reason="a developer may test an editable installation")
def test_ci_tests_the_installed_wheel() -> None:
    assert "site-packages" in Path(pipesgd.__file__).parts


def test_every_public_name_is_there_and_documented() -> None:
    for name in pipesgd.__all__:
        assert getattr(pipesgd, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Piplined'"):
        _ = pipesgd.Piplined
