"""Runs with a codec and an all-reduce of the user's own: equal to built-in ones, resumed, and refused together."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _codec_cases import Half
from _ranks import run_ranks
from _runs import EXAMPLES, command_in, program_of, run_in, shown_programs, succeed_as_told, succeed_in, summary
from conftest import REPOSITORY
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pipesgd.backend
import pipesgd.ddp
from pipesgd import Pipelined
from pipesgd.ranks import Ranks
from pipesgd.sections import Wire
from timing_model.schedules import Schedule, ring

pytestmark = pytest.mark.slow

MODULE = '''
import os

import torch

from pipesgd.codecs.base import OwnCodec
from timing_model.schedules import Encode, Schedule, halving_doubling
from timing_model.schedules import ring as built_in


class Bf16(OwnCodec):
    def wire_bytes(self, numel):
        return 2 * numel

    def compress(self, values, wire, key):
        wire.view(torch.bfloat16).copy_(values)

    def decompress(self, wire, values):
        values.copy_(wire.view(torch.bfloat16))


class Coarse(Bf16):
    """Three bits fewer, and noise from the key."""

    gives_back = True

    def compress(self, values, wire, key):
        numbers = torch.Generator().manual_seed(key)
        noise = 1 + torch.rand(values.numel(), generator=numbers) / 16
        super().compress(values * noise, wire, key)


class Unlike(Bf16):
    def compress(self, values, wire, key):
        super().compress(values * (1 + int(os.environ["OWN_RANK"])), wire, key)


class Short(Bf16):
    def wire_bytes(self, numel):
        return 2 * numel + 2


def ring(rank, world_size):
    return built_in(rank, world_size)


def backwards(rank, world_size):
    """The ring in the other direction."""
    return Schedule(
        chunks=world_size,
        operations=tuple(
            one if isinstance(one, Encode) else type(one)(**{**fields(one), "peer": -one.peer % world_size})
            for one in built_in(-rank % world_size, world_size).operations
        ),
    )


def fields(one):
    return {name: getattr(one, name) for name in one.__slots__}


def unlike(rank, world_size):
    return [built_in, halving_doubling][int(os.environ["OWN_RANK"])](rank, world_size)


def half(rank, world_size):
    whole = built_in(rank, world_size)
    return Schedule(chunks=whole.chunks, operations=whole.operations[:3])


def fails(rank, world_size):
    return 1 / (rank - 1)
'''

SHORT = "--dataset digits --hidden-sizes 20 --batch-size 16 --iterations 11 --lr 0.05"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the module ``exchange``."""
    made = tmp_path_factory.mktemp("own")
    (made / "exchange.py").write_text(MODULE)
    return made


def test_own_and_built_in_ones_train_alike_bit_for_bit(tmp_path: Path, folder: Path) -> None:
    words = f"{SHORT} --error-feedback on"
    built_in = succeed_in(folder, 3, f"{words} --codec bf16", tmp_path / "built-in")
    own = f"{words} --codec exchange:Bf16 --all-reduce exchange:ring"
    found = succeed_in(folder, 3, own, tmp_path / "own")
    assert found["weights_sha256"] == built_in["weights_sha256"]
    assert found["final"] == built_in["final"]
    assert found["all_reduce"] == "exchange:ring"
    assert found["replicas_identical"]
    sent = [
        [json.loads(line)["wire_bytes"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("built-in", "own")
    ]
    assert sent[0] == sent[1]


def test_a_run_with_both_is_resumed_bit_for_bit(tmp_path: Path, folder: Path) -> None:
    own = "--codec exchange:Coarse --all-reduce exchange:backwards"
    words = f"{SHORT} {own} --checkpoint-iterations 5"
    whole = succeed_in(folder, 3, words, tmp_path / "whole")
    assert whole["options"]["codec"] == "exchange:Coarse"
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "iteration-11")
    results = run_in(folder, 3, f"{words} --resume", tmp_path / "cut")
    assert "exchange:backwards all-reduce, exchange:Coarse with error feedback" in results[0][1]
    assert "continuing after iteration 10 of 11" in results[0][1]
    resumed = summary(tmp_path / "cut")
    assert (resumed["weights_sha256"], resumed["final"]) == (whole["weights_sha256"], whole["final"])
    another = f"{words} --resume".replace("exchange:Coarse", "exchange:Bf16")
    for error, _, _ in run_in(folder, 3, another, tmp_path / "cut"):
        said = "codec must be that of the run to resume, 'exchange:Coarse'; got 'exchange:Bf16'"
        assert error == f"UserInputError: {said}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--codec exchange:bf16", "codec must be a function of exchange; got exchange:bf16, which it does not have"),
        (
            "--codec exchange:Short",
            "codec exchange:Short must decode 4 bytes to 1 values; got RuntimeError: output with shape [1] doesn",
        ),
        ("--codec exchange:Unlike", "what exchange:Unlike encodes some values to must be the same on all ranks; got "),
        (
            "--codec exchange:Bf16 --all-reduce native",
            "codec must be one of fp32, bf16, fp16, powersgd with --all-reduce native, in which torch sums",
        ),
        ("--codec exchange:Bf16 --width auto", "codec must be another one with --width auto, since its times are not "),
        (
            "--all-reduce exchange:half",
            "all-reduce exchange:half must have every rank encode every chunk once by",
        ),
        ("--all-reduce exchange:fails", "all-reduce must be made by exchange:fails without an error; got ZeroDivision"),
        ("--all-reduce exchange:unlike", "schedules of exchange:unlike must be the same on all ranks; got "),
        ("--all-reduce exchange:rings", "all-reduce must be a function of exchange; got exchange:rings, which it does"),
    ],
)
def test_what_does_not_work_is_refused_before_anything_is_written(
    tmp_path: Path, folder: Path, words: str, message: str
) -> None:
    for error, _, _ in run_in(folder, 2, f"{SHORT} {words}", tmp_path / "run"):
        assert error.partition(": ")[2].startswith(message)
        assert "\n" not in error
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- in programs


def my_ring(rank: int, world_size: int) -> Schedule:
    return ring(rank, world_size)


def _doors(ranks: Ranks, codec: Any, all_reduce: Any) -> list[Tensor]:
    """Return the weights or sums of four programs."""
    found = []
    for door in ("Pipelined", "attach", "compress"):
        torch.manual_seed(0)
        layers = nn.Linear(30, 7)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        inputs = torch.randn(4, 30, generator=torch.Generator().manual_seed(ranks.rank))
        model = layers if door == "Pipelined" else DistributedDataParallel(layers)
        if door == "Pipelined":
            pipeline: Any = Pipelined(model, optimizer, codec=codec, wire=Wire(all_reduce=all_reduce))
        elif door == "attach":
            pipeline = pipesgd.ddp.attach(model, optimizer, codec=codec, wire=Wire(all_reduce=all_reduce))
        else:
            pipeline = pipesgd.ddp.compress(model, codec, wire=Wire(all_reduce=all_reduce))
        with pipeline:
            for _ in range(4):
                optimizer.zero_grad() if door != "Pipelined" else None
                model(inputs).square().mean().backward()
                pipeline.step() if door == "Pipelined" else optimizer.step()
        found += [parameter.detach().clone() for parameter in layers.parameters()]
    options = pipesgd.backend.BackendOptions(codec=codec, all_reduce=all_reduce, least_bytes=8)
    group = dist.new_group(backend="pipesgd", pg_options=options)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(ranks.rank))
    dist.all_reduce(values, group=group)
    dist.destroy_process_group(group)
    return [*found, values]


def test_programs_take_a_codec_as_an_object_and_an_all_reduce_as_a_function() -> None:
    own, built_in = (run_ranks(3, _doors, *which) for which in ((Half(), my_ring), ("bf16", "ring")))
    for of_rank in (*own, *built_in):
        assert all(torch.equal(one, other) for one, other in zip(of_rank, own[0], strict=True))


def _differing(ranks: Ranks) -> str:
    model = nn.Linear(3, 1)
    all_reduce = [my_ring, lambda rank, world_size: ring(rank, world_size)][ranks.rank]
    with pytest.raises(pipesgd.DisagreementError) as caught:
        Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), wire=Wire(all_reduce=all_reduce))
    return str(caught.value)


def test_programs_that_pass_other_functions_are_refused() -> None:
    for found in run_ranks(2, _differing):
        assert re.match(r"all_reduce must be the same on all ranks; got '\S+:my_ring' on rank 0, '\S+<lambda>'", found)


# ---------------------------------------------------------------- examples


def test_the_programs_of_the_page_are_the_examples() -> None:
    page = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
    assert shown_programs(page) == [program_of("own_codec.py"), program_of("own_all_reduce.py")]


@pytest.mark.parametrize("name", ["own_codec.py", "own_all_reduce.py"])
def test_the_examples_learn(name: str, tmp_path: Path) -> None:
    program = (EXAMPLES / name).read_text(encoding="utf-8")
    assert " ".join(command_in(program)) in (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
    found = succeed_as_told(program, tmp_path / "run")
    assert found["final"]["test_accuracy"] > 0.9
    assert found["replicas_identical"]
