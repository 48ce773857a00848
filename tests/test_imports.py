"""The import rules of ARCHITECTURE.md, checked by a walk over the sources."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from _ranks import run_ranks
from conftest import REPOSITORY

import pipesgd
import timing_model
from pipesgd import errors
from pipesgd.guests import HOMES, guest
from pipesgd.ranks import Ranks

TESTBED = REPOSITORY / "experiments" / "testbed"

FLOORS = [
    {"errors", "checks", "process", "functions", "guests", "nested", "options", "toml_file"},
    {"sections"},
    {
        *("config", "rules", "pipeline_config", "codecs", "membership", "ranks", "comm", "data"),
        *("flat_buffer", "replicas", "shards"),
    },
    {"strategy", "reducers", "optim"},
    {"pipeline", "baselines"},
    {"systems"},
    {"strategies", "run", "calibration", "planning"},
    {"report"},
    {
        "cli",
        "exit",
        "keys",
        "train",
        "training",
        "elastic",
        "calibrate",
        "launch",
        "__main__",
        "ddp",
        "backend",
        "lightning",
        "accelerate",
        "transformers",
        "observe",
    },
]
"""Rooms of pipesgd/, from the lowest floor up: each imports from its own floor and those below, never in a circle."""

MAY_NAME_THE_TIMING_MODEL = {"calibration", "planning", "observe"}
"""Rooms that measure for the timing model, or leave decisions to it. The others import only ``ALL_MAY_NAME`` of it."""

_DEFINITIONS = ("schedules", "own_schedules", "buckets", "units")
ALL_MAY_NAME = {"timing_model", *(f"timing_model.{name}" for name in _DEFINITIONS)}
"""Modules that everybody may import: definitions of what the trainer does, and the notation of quantities."""

MAY_NAME_TORCH_DISTRIBUTED = {
    "elastic.units",
    "elastic.values",
    "launch",
    "membership.meeting",
    "membership.neighbours",
    "membership.sealed",
    "membership.session",
    "membership.store",
    "membership.watcher",
    "ranks",
    "comm.transport",
    "comm.native",
    "systems.layers.passes",
    "systems.layers.splitting",
    "baselines.ddp",
    "ddp.attached",
    "ddp.local_steps",
    "observe.program",
    "ddp.compressed",
    "ddp.hook",
    "backend",
}


@functools.cache
def modules(package: str) -> dict[str, Path]:
    root = REPOSITORY / package
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for path in sorted(root.rglob("*.py"))
        if path.name != "__init__.py"
    }


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of the file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the full names of everything that the file imports, anywhere in it."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(module: str) -> str:
    return module.partition(".")[0]


def floor(module: str) -> int:
    return next(index for index, rooms in enumerate(FLOORS) if room(module) in rooms)


def ours(module: str) -> set[str]:
    """Return the modules of pipesgd that this one imports."""
    names = {name.removeprefix("pipesgd.") for name in imported(modules("pipesgd")[module])}
    return names & modules("pipesgd").keys() - {module}


def test_a_module_imports_from_its_own_floor_and_below() -> None:
    for module, path in modules("pipesgd").items():
        assert {other for other in ours(module) if floor(other) > floor(module)} == set(), module
        names_torch_distributed = any(name.startswith("torch.distributed") for name in imported(path))
        assert not names_torch_distributed or module in MAY_NAME_TORCH_DISTRIBUTED, module


TORCHRUN_VARIABLES = re.compile(r"(?:LOCAL_|GROUP_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT)|TORCHELASTIC_[A-Z_]+")


def test_torchruns_variables_are_read_in_two_modules() -> None:
    for module, path in modules("pipesgd").items():
        texts = [node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        assert any(map(TORCHRUN_VARIABLES.fullmatch, texts)) == (module in ("process", "ranks")), module


def test_nothing_outside_of_the_systems_imports_one() -> None:
    files = [REPOSITORY / "pipesgd" / "__init__.py"]
    files += [path for module, path in modules("pipesgd").items() if room(module) != "systems"]
    for file in files:
        assert not {name for name in imported(file) if name.startswith("pipesgd.systems")}, file


def test_every_guest_is_there() -> None:
    for name in HOMES:
        assert callable(guest(name)), name


STAGES = ("import pipesgd", "import torch", "from pipesgd import *; import pipesgd.ddp, pipesgd.backend")
STAGES += ("import pipesgd.train",)
"""Imports of a new process, one after another."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Return the modules that each of ``STAGES`` loads after those before it."""
    program = ["import sys; had = set(sys.modules)"]
    program += [f"{stage}; print(*set(sys.modules) - had); had = set(sys.modules)" for stage in STAGES]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, timeout=60, check=True
    )
    return {stage: set(line.split()) for stage, line in zip(STAGES, done.stdout.splitlines(), strict=True)}


@pytest.mark.slow
def test_a_run_imports_no_system_that_it_does_not_name_and_no_report_before_its_end(
    loaded: dict[str, set[str]],
) -> None:
    assert "pipesgd.train" in loaded[STAGES[3]]
    rest = ("pipesgd.systems", "pipesgd.report", "pipesgd.run.attempts")
    assert not [name for of_stage in loaded.values() for name in of_stage if name.startswith(rest)]


WIRE_HALF = ("pipeline.flight", "pipeline.in_flight")
WEIGHT_HALF = ("pipeline.update", "pipeline.width", "pipeline.prediction")


@pytest.mark.parametrize("module", WIRE_HALF)
def test_the_wire_half_of_a_pipeline_knows_no_weights(module: str) -> None:
    assert not {other for other in ours(module) if room(other) == "optim" or other in WEIGHT_HALF}
    path = modules("pipesgd")[module]
    assert not {name for name in imported(path) if name.startswith(("torch.nn", "torch.optim"))}
    tree = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    assert not {node.attr for node in tree if isinstance(node, ast.Attribute)} & {"grad", "nn", "optim"}


@pytest.mark.parametrize("module", WEIGHT_HALF)
def test_the_weight_half_of_a_pipeline_knows_no_ranks(module: str) -> None:
    others = {room(other) for other in ours(module)} | (ours(module) & {*WIRE_HALF, "pipeline.islands"})
    assert not others & {"ranks", "comm", "membership", "replicas", *WIRE_HALF, "pipeline.islands"}


def test_neither_rooms_nor_modules_import_in_a_circle() -> None:
    graph = {module: ours(module) for module in modules("pipesgd")}
    rooms: dict[str, set[str]] = {room(module): set() for module in graph}
    for module, others in graph.items():
        rooms[room(module)] |= {room(other) for other in others} - {room(module)}
    for arrows in (graph, rooms):
        assert list(graphlib.TopologicalSorter(arrows).static_order())  # CycleError names a circle


def test_the_timing_model_knows_neither_torch_nor_the_trainer() -> None:
    for module, path in modules("timing_model").items():
        assert not {room(name) for name in imported(path)} & {"torch", "pipesgd", "experiments"}, module


def test_the_trainer_knows_no_experiments_and_the_timing_model_in_two_rooms() -> None:
    for module, path in modules("pipesgd").items():
        assert not {room(name) for name in imported(path)} & {"experiments", "tests"}, module
        of_the_model = {name for name in imported(path) if room(name) == "timing_model"}
        others = {name for name in of_the_model if ".".join(name.split(".")[:2]) not in ALL_MAY_NAME}
        assert not others or room(module) in MAY_NAME_THE_TIMING_MODEL, module


def test_the_testbed_imports_the_standard_library_and_itself_alone() -> None:
    for path in TESTBED.glob("*.py"):
        names = {alias.name for node in nodes(path) if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in nodes(path) if isinstance(node, ast.ImportFrom) and not node.level}
        assert {room(name) for name in names} <= sys.stdlib_module_names, path


@pytest.mark.slow
def test_a_copy_of_the_testbed_works_under_another_name(tmp_path: Path) -> None:
    shutil.copytree(TESTBED, tmp_path / "emulated")
    words = [sys.executable, "-S", "-m", "emulated", "--nodes", "1", "--rate", "1gbit", "--", "true"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: --nodes: must be a whole number of at least 2; got '1'\n")


@pytest.mark.parametrize("package", [pipesgd, timing_model])
def test_a_type_checker_reads_its_types(package: ModuleType) -> None:
    assert (Path(str(package.__file__)).parent / "py.typed").is_file()


@pytest.mark.skipif("CI" not in os.environ, reason="a developer may test an editable installation")
def test_ci_tests_the_installed_wheel() -> None:
    assert "site-packages" in Path(pipesgd.__file__).parts


def _where_from(ranks: Ranks) -> tuple[str, str]:
    return str(pipesgd.__file__), str(timing_model.__file__)


@pytest.mark.slow
def test_ranks_test_the_packages_that_this_process_does() -> None:
    """They used to have the sources, in which no file is missing that a wheel lacks."""
    assert run_ranks(1, _where_from, process_group=False) == [(pipesgd.__file__, timing_model.__file__)]


def test_every_public_name_is_there_and_documented() -> None:
    for name in pipesgd.__all__:
        assert getattr(pipesgd, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Piplined'"):
        _ = pipesgd.Piplined


def test_the_public_names_are_those_that_python_shows() -> None:
    starred: dict[str, object] = {}
    exec("from pipesgd import *", starred)
    assert [name for name in starred if name != "__builtins__"] == pipesgd.__all__ == dir(pipesgd)
    exceptions = {
        kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    assert exceptions <= set(pipesgd.__all__)


@pytest.mark.slow
def test_importing_pipesgd_imports_no_other_package(loaded: dict[str, set[str]]) -> None:
    """torch's compiler, tyro and numba take from a tenth of a second to more than one: they wait for a first use."""
    packages = {room(module) for module in loaded[STAGES[0]] | loaded[STAGES[2]]}
    packages -= {room(module) for module in loaded[STAGES[1]]}
    assert packages - sys.stdlib_module_names == {"pipesgd", "timing_model"}


@pytest.mark.slow
def test_importing_the_package_alone_does_not_import_torch(loaded: dict[str, set[str]]) -> None:
    assert "pipesgd" in loaded[STAGES[0]]
    assert "torch" not in loaded[STAGES[0]]
