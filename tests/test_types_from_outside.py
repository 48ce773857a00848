"""The types that a type checker of somebody else's program sees in the installed package."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import pipesgd
import timing_model

pytestmark = pytest.mark.slow

PROGRAM = """
import torch
from torch.nn.parallel import DistributedDataParallel

import pipesgd
from pipesgd import CommunicationError, Int4, Pipelined, Ranks, StepReport, Updates, Wire
from pipesgd.backend import BackendOptions
from pipesgd.ddp import attach, compress


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ddp_model: DistributedDataParallel) -> StepReport:
    try:
        with Pipelined(model, optimizer, width=2, codec=Int4(block=256)) as pipeline:
            reveal_type(pipeline)  # pipesgd.pipeline.pipelined.Pipelined
            report = pipeline.step()
            reveal_type(report.applied)  # tuple[int, ...]
            reveal_type(report.gradient_norm)  # float | None
            reveal_type(report.hidden_share)  # float | None
            reveal_type(pipeline.state_dict())  # dict[str, Any]
    except CommunicationError as lost:
        reveal_type(lost.peer)  # int | None
        raise
    updates = Updates(prediction="local", on_nonfinite="skip")
    attached = attach(ddp_model, optimizer, codec="int8", wire=Wire(all_reduce="ring", buckets="1"), updates=updates)
    reveal_type(attached)  # pipesgd.ddp.attached.AttachedPipeline
    reveal_type(attached.report)  # pipesgd.strategy.StepReport
    reveal_type(compress(ddp_model))  # pipesgd.ddp.compressed.CompressedBuckets
    reveal_type(Int4().gives_back)  # bool
    reveal_type(BackendOptions(codec="int8"))  # pipesgd.backend.BackendOptions
    reveal_type(pipesgd.Ranks)  # def (rank: int, world_size: int
    return report
"""
"""A program that names each type it expects; what mypy reveals must begin with it."""

WRONG = """
import torch
from pipesgd import Int4, Pipelined, Pipelnied, Updates

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
Pipelined(model, optimizer, widht=2)
Pipelined(model, optimizer, width="2")
Int4(block="8")
Pipelined(model, optimizer).step().aplied
Updates(on_nonfinite="skp")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, list[str]]:
    """Return the lines of ``mypy --strict`` about each program, without the name of its file.

    mypy reads ``py.typed`` only where packages are installed: in a virtual environment with the tested packages and the
    other packages of this one. What it learns of torch is kept for the next time, as long as torch is the same.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for package in (pipesgd, timing_model):
        source = Path(str(package.__file__)).parent
        (packages / source.name).symlink_to(source)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    programs = {"program": PROGRAM, "wrong": WRONG}
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program, encoding="utf-8")
    words = ["-m", "mypy", "--strict", "--config-file=", "--python-executable", folder / "bin" / "python"]
    words += ["--cache-dir", pytestconfig.cache.mkdir("mypy"), "--no-error-summary"]
    command = [sys.executable, *words, *(f"{name}.py" for name in programs)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    lines: dict[str, list[str]] = {name: [] for name in programs}
    for line in done.stdout.splitlines():
        name, _, text = line.partition(".py:")
        lines[name].append(text)
    return lines


def test_a_program_in_strict_mode_sees_the_types_of_the_public_names(said: dict[str, list[str]]) -> None:
    wanted = [
        (str(number), expected)
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        for expected in re.findall(r"reveal_type\(.*#  ?(.+)", line)
    ]
    notes = [re.fullmatch(r'(\d+): note: Revealed type is "(.+)"', line) for line in said["program"]]
    revealed = [(line[1], line[2].replace("builtins.", "")) for line in notes if line is not None]
    assert None not in notes, "mypy reports an error"
    assert [number for number, _ in revealed] == [number for number, _ in wanted]
    assert [text[: len(expected)] for (_, text), (_, expected) in zip(revealed, wanted, strict=True)] == [
        expected for _, expected in wanted
    ]


def test_mistakes_in_a_program_are_found(said: dict[str, list[str]]) -> None:
    errors = [line for line in said["wrong"] if ": error: " in line]
    assert [error.partition(":")[0] for error in errors] == ["3", "7", "8", "9", "10", "11"]
