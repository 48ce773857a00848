"""The pipelined benchmark: its loops train alike, a real run of two ranks gives rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from _ranks import run_ranks
from rich.console import Console
from torch import nn
from torch.nn.utils import parameters_to_vector

from experiments.bench_pipelined import Effort, Workload, compute, make_loops, summarize, verdict
from experiments.results import Row
from pipesgd.data import load_dataset
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

WORKLOAD = Workload(name="mlp 8, batch 4", model="mlp", hidden_sizes=(8,), batch_size=4)
CONTENDERS = [
    "ddp",
    "pipelined width 2, ring",
    "pipelined width 2, native",
    "synchronous (width 1), ring",
    "local (no communication)",
]


def _compute(ranks: Ranks) -> list[Row]:
    data = load_dataset("digits", None, image_size=64)
    return compute(ranks, Effort(workloads=(WORKLOAD,), block=2, rounds=2), data, Console())


def test_all_ranks_get_the_same_row_for_every_contender() -> None:
    first, second = run_ranks(2, _compute)
    assert first == second
    assert [row["contender"] for row in first] == CONTENDERS
    assert first[0]["ratio_to_ddp_median"] == 1.0


def _trained(ranks: Ranks) -> dict[str, list[float]]:
    """Return each loop's weights after one iteration, whose update is the same for all loops that communicate."""
    torch.manual_seed(0)
    loops = make_loops(nn.Linear(3, 2), ranks)
    images, labels = torch.full((4, 3), 1.0 + ranks.rank), torch.tensor([0, 1, 1, 1])
    for loop in loops.values():
        loop.iterate(images, labels)
        loop.flush()
        loop.close()
    weights = {name: parameters_to_vector(loop.model.parameters()) for name, loop in loops.items()}
    return {name: flat.tolist() for name, flat in weights.items()}


def test_every_loop_that_communicates_makes_the_same_update() -> None:
    first, second = run_ranks(2, _trained)
    for name in CONTENDERS[:-1]:
        np.testing.assert_allclose(first[name], first["ddp"], rtol=1e-6)
        assert first[name] == second[name]
    assert first[CONTENDERS[-1]] != second[CONTENDERS[-1]]


def rows() -> list[Row]:
    seconds = {name: np.full(5, 0.1 * (index + 1)) for index, name in enumerate(CONTENDERS)}
    return summarize(WORKLOAD, seconds)


def test_ratios_are_to_ddp() -> None:
    assert [row["ratio_to_ddp_median"] for row in rows()] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])
    assert [verdict(row) for row in rows()] == ["", "MISSED", "MISSED", "", ""]
