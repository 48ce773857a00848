"""Checkpoints of islands, continued by more and by fewer islands."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _ranks import run_ranks
from _reference import pipe_sgd
from _sections import sections
from _small_problem import Batch, assert_same_weights, regress, small_problem
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipesgd import Pipelined, RunError
from pipesgd.codecs.options import codec_named
from pipesgd.ranks import Ranks
from pipesgd.run.shard_file import ShardFile

pytestmark = pytest.mark.slow

LR = 0.02
ISLANDS = [2, 2, 2, 1, 1, 1, 2, 2]
"""Number of islands in each iteration."""


def problem() -> tuple[nn.Module, list[list[Batch]]]:
    """Return a model, and batches[iteration][island]."""
    model, batches = small_problem(0, [4, 6, 4, 3], len(ISLANDS), 2)
    return model, [of[:islands] for of, islands in zip(batches, ISLANDS, strict=True)]


def make_optimizer(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)


class Member:
    """A rank of one of ``islands``, with a model that is split in two of its three layers."""

    def __init__(self, ranks: Ranks, islands: int, momentum: float = 0.9, **options: Any):
        members = ranks.world_size // islands
        mesh = init_device_mesh("cpu", (islands, members), mesh_dim_names=("islands", "inside"))
        self.island = ranks.rank // members
        self.model, self.batches = problem()
        parallelize_module(self.model, mesh["inside"], {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()})
        self.optimizer = make_optimizer(self.model, momentum)
        self.pipeline = Pipelined(self.model, self.optimizer, mesh=mesh, **sections(**options))

    def train(self, iterations: range) -> None:
        for number in iterations:
            regress(self.model, self.batches[number][self.island]).backward()
            self.pipeline.step()

    def file(self, folder: Path) -> ShardFile:
        return ShardFile(folder, self.pipeline, self.optimizer)

    def parts(self) -> list[Tensor]:
        """Return copies of this rank's parts of the weights."""
        own = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return [part.detach().clone() for part in own]

    def whole(self) -> dict[str, Tensor]:
        """Return the whole weights, after the end of the pipeline."""
        self.pipeline.close()
        state = self.model.state_dict()
        return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in state.items()}


RESIDUALS = codec_named("int8", error_feedback=True)
IN_FLIGHT: dict[str, Any] = {"width": 2, "prediction": "none"}


def _begin(ranks: Ranks, folder: Path) -> None:
    """Train two islands; save them with a gradient in flight, and with residuals."""
    exact = Member(ranks, 2, **IN_FLIGHT)
    exact.optimizer.param_groups[0]["lr"] = np.float64(LR)  # as a schedule that computes with NumPy leaves it
    exact.train(range(3))
    exact.file(folder / "two").save()
    coarse = Member(ranks, 2, momentum=0.0, width=1, codec=RESIDUALS)
    coarse.train(range(3))
    coarse.file(folder / "coarse").save()
    for member in (exact, coarse):
        member.pipeline.close()


def _continue_with_fewer(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Continue with one island of two; try to with two of one, and without all files."""
    exact = Member(ranks, 1, **IN_FLIGHT)
    exact.file(folder / "two").load()
    exact.train(range(3, 6))
    exact.file(folder / "one").save()

    coarse = Member(ranks, 1, momentum=0.0, width=1, codec=RESIDUALS)
    coarse.file(folder / "coarse").load()
    coarse.file(folder / "carried").save()
    coarse.file(folder / "carried").load()  # before the step that adds what is carried
    before = coarse.parts()
    (0 * regress(coarse.model, coarse.batches[3][0])).backward()
    coarse.pipeline.step()
    moved = [one - other for one, other in zip(before, coarse.parts(), strict=True)]

    said = []
    others = Member(ranks, 2, **IN_FLIGHT)
    if ranks.rank == 0:
        (folder / "two" / "part-1-0.pt").unlink()
    ranks.all_gather_object("one file less", None)
    for member in (exact, others):
        with pytest.raises(RunError) as caught:
            member.file(folder / "two").load()
        said.append(str(caught.value).replace(f"{folder}/", ""))
        member.pipeline.close()
    coarse.pipeline.close()
    return {"moved": math.sqrt(sum(float(part.square().sum()) for part in moved)), "said": said}


def _continue_with_more(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    member = Member(ranks, 2, **IN_FLIGHT)
    member.file(folder / "one").load()
    member.train(range(6, 8))
    return member.whole()


def test_other_numbers_of_islands_continue_as_one_process_does_and_lose_nothing(tmp_path: Path) -> None:
    """Gradients in flight are applied first, in float64; residuals come with the next gradient."""
    run_ranks(4, _begin, tmp_path)
    fewer = run_ranks(2, _continue_with_fewer, tmp_path)
    for member, of_rank in enumerate(fewer):
        files = [torch.load(tmp_path / "coarse" / f"part-{island}-{member}.pt", weights_only=True) for island in (0, 1)]
        residuals = zip(*(file["pipeline"]["reducer"]["residuals"] for file in files), strict=True)
        sums = [one + other for one, other in residuals]
        expected = LR * math.sqrt(sum(float(one.square().sum()) for one in sums))
        assert expected > 0
        assert of_rank["moved"] == pytest.approx(expected, rel=1e-5)
        assert of_rank["said"] == [
            "a checkpoint must have the part of each rank; two/part-1-0.pt is not whole (part-1-0.pt is missing)",
            "a checkpoint must have the part of each rank; two/part-0-0.pt is of a mesh of 2 x 2 ranks, not 2 x 1",
        ]
    model, batches = problem()
    optimizer = make_optimizer(model, 0.9)
    for iterations in (range(3), range(3, 6), range(6, 8)):
        pipe_sgd(model, optimizer, regress, [batches[number] for number in iterations], width=2)
    for weights in run_ranks(4, _continue_with_more, tmp_path):
        assert_same_weights(weights, model.state_dict(), rtol=1e-9)
