"""The benchmark of hooks: what its contenders differ in, and what its verdict says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from _ranks import run_ranks
from torch import nn
from torch.nn.utils import parameters_to_vector

from experiments.bench_hooks import HOOKED, LEAVING, ONE, UNHOOKED, Waiting, make_loops, summarize, verdict
from experiments.bench_pipelined import Workload
from pipesgd.ranks import Ranks

WORKLOAD = Workload(name="mlp 8, batch 4", model="mlp", hidden_sizes=(8,), batch_size=4)


def _trained(ranks: Ranks) -> tuple[dict[str, list[float]], dict[str, int], dict[str, int | None]]:
    """Return weights after two iterations, how often a bucket was asked to leave, and the bytes of an iteration."""
    torch.manual_seed(0)
    loops = make_loops(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), ranks)
    images, labels = torch.full((4, 3), 1.0 + ranks.rank), torch.tensor([0, 1, 1, 1])
    for loop in loops.values():
        for _ in range(2):
            loop.iterate(images, labels)
        loop.close()
    weights = {name: parameters_to_vector(loop.model.parameters()).tolist() for name, loop in loops.items()}
    asked = {name: loop.asked for name, loop in loops.items() if isinstance(loop, Waiting)}
    return weights, asked, {name: loop.wire_bytes for name, loop in loops.items()}


@pytest.mark.slow
def test_all_train_alike_and_hooks_are_called_where_they_should_be() -> None:
    (weights, asked, sent), (others, _, _) = run_ranks(2, _trained)
    assert weights == others
    for name in (LEAVING, HOOKED, UNHOOKED):
        np.testing.assert_allclose(weights[name], weights[ONE], rtol=1e-6)
        assert sent[name] == sent[ONE]
    assert asked[UNHOOKED] == 0
    assert asked[HOOKED] >= 2 * 3, "after the first of four buckets, each of the next ones asks again"


def test_a_verdict_needs_the_whole_interval_on_one_side() -> None:
    def hooked(*ratios: float) -> str:
        seconds = {name: np.ones(len(ratios)) for name in (ONE, LEAVING, HOOKED, UNHOOKED)}
        rows = summarize(WORKLOAD, seconds | {HOOKED: np.array(ratios)})
        assert [row["against"] for row in rows] == [None, ONE, UNHOOKED, None]
        assert [verdict(row) for row in rows if row["contender"] != HOOKED] == ["", "", ""]
        return verdict(rows[2])

    assert hooked(1.01, 1.01, 1.015) == "met"
    assert hooked(1.03, 1.03, 1.05) == "MISSED"
    assert hooked(1.0, 1.01, 1.05) == "open"
