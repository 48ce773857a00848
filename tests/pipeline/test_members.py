"""Training that another number of ranks continues: nothing is lost, and nothing is applied twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _reference import pipe_sgd
from _sections import sections
from _small_problem import assert_same_weights, regress, small_problem
from torch import Tensor

from pipesgd import Pipelined
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

RANKS = [2, 3, 2, 1, 2]
"""Number of ranks in each part of a training; each continues from the files of the part before."""
BATCHES = 4
"""Iterations of each part."""


def _states(folder: Path, part: int) -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"{part}-*.pt"))
    return [torch.load(file, weights_only=True) for file in files]


def _train_a_part(ranks: Ranks, folder: Path, part: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model, batches = small_problem(0, [4, 6, 3], BATCHES * len(RANKS), max(RANKS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Pipelined(model, optimizer, ranks=ranks, **sections(**options)) as pipeline:
        if part:
            states = _states(folder, part - 1)
            model.load_state_dict(states[0]["model"])
            optimizer.load_state_dict(states[0]["optimizer"])
            pipeline.load_members([state["pipeline"] for state in states])
        for iteration in range(BATCHES * part, BATCHES * (part + 1)):
            regress(model, batches[iteration][ranks.rank]).backward()
            pipeline.step()
        state = {"pipeline": pipeline.state_dict(), "optimizer": optimizer.state_dict(), "model": model.state_dict()}
        torch.save(state, folder / f"{part}-{ranks.rank}.pt")
    return model.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"width": 2, "prediction": "none"},
        {"width": 1},
        {"width": 3, "prediction": "none", "buckets": "2"},
    ],
    ids=str,
)
def test_exact_training_is_that_of_one_process_that_applies_what_is_in_flight_at_each_change(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    for part, world_size in enumerate(RANKS):
        weights = run_ranks(world_size, _train_a_part, tmp_path, part, options)
    model, batches = small_problem(0, [4, 6, 3], BATCHES * len(RANKS), max(RANKS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for part, world_size in enumerate(RANKS):
        own = [of_ranks[:world_size] for of_ranks in batches[BATCHES * part : BATCHES * (part + 1)]]
        prediction = options.get("prediction", "none")
        pipe_sgd(model, optimizer, regress, own, width=options["width"], prediction=prediction)
    for of_rank in weights:
        assert_same_weights(of_rank, model.state_dict(), rtol=1e-9)
