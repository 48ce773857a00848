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
from pipesgd import CodecOptions, CommunicationError, Pipelined, Ranks, StepReport
from pipesgd.backend import BackendOptions
from pipesgd.ddp import attach, compress


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ddp_model: DistributedDataParallel) -> StepReport:
    try:
        with Pipelined(model, optimizer, width=2, codec=CodecOptions(codec="int4", codec_block=256)) as pipeline:
            reveal_type(pipeline)  # pipesgd.pipeline.pipelined.Pipelined
            report = pipeline.step()
            reveal_type(report.applied)  # tuple[int, ...]
            reveal_type(report.gradient_norm)  # float | None
            reveal_type(report.hidden_share)  # float | None
            reveal_type(pipeline.state_dict())  # dict[str, Any]
    except CommunicationError as lost:
        reveal_type(lost.peer)  # int | None
        raise
    attached = attach(ddp_model, optimizer, codec="int8")
    reveal_type(attached)  # pipesgd.ddp.attached.AttachedPipeline
    reveal_type(attached.report)  # pipesgd.strategy.StepReport
    reveal_type(compress(ddp_model))  # pipesgd.ddp.compressed.CompressedBuckets
    reveal_type(CodecOptions(codec="sign").gives_back)  # bool
    reveal_type(BackendOptions(codec="int8"))  # pipesgd.backend.BackendOptions
    reveal_type(pipesgd.Ranks)  # def (rank: int, world_size: int
    return report
"""
"""A program that names each type it expects; what mypy reveals must begin with it."""

WRONG = """
import torch
from pipesgd import CodecOptions, Pipelined, Pipelnied

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
Pipelined(model, optimizer, widht=2)
Pipelined(model, optimizer, width="2")
CodecOptions(codec=8)
Pipelined(model, optimizer).step().aplied
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with the tested packages, and the other packages of this one.

    mypy reads ``py.typed`` only where packages are installed.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for package in (pipesgd, timing_model):
        source = Path(str(package.__file__)).parent
        (packages / source.name).symlink_to(source)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def check(program: str, environment: Path) -> list[str]:
    """Return the lines of ``mypy --strict`` about ``program``, without the name of its file."""
    file = environment / "program.py"
    file.write_text(program, encoding="utf-8")
    words = ["-m", "mypy", "--strict", "--config-file=", "--python-executable", environment / "bin" / "python"]
    command = [sys.executable, *words, "--cache-dir", environment / "cache", "--no-error-summary", file.name]
    done = subprocess.run(command, cwd=environment, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return [line.partition(":")[2] for line in done.stdout.splitlines()]


def test_a_program_in_strict_mode_sees_the_types_of_the_public_names(environment: Path) -> None:
    wanted = [
        (str(number), expected)
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        for expected in re.findall(r"reveal_type\(.*#  ?(.+)", line)
    ]
    said = [re.fullmatch(r'(\d+): note: Revealed type is "(.+)"', line) for line in check(PROGRAM, environment)]
    revealed = [(line[1], line[2].replace("builtins.", "")) for line in said if line is not None]
    assert None not in said, "mypy reports an error"
    assert [number for number, _ in revealed] == [number for number, _ in wanted]
    assert [text[: len(expected)] for (_, text), (_, expected) in zip(revealed, wanted, strict=True)] == [
        expected for _, expected in wanted
    ]


def test_mistakes_in_a_program_are_found(environment: Path) -> None:
    errors = [line for line in check(WRONG, environment) if ": error: " in line]
    assert [error.partition(":")[0] for error in errors] == ["3", "7", "8", "9", "10"]
