"""Weights of elastic runs are, bit for bit, those that a few lines compute from what the runs say of their members."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from experiments import elastic_ranks, forked_ranks, integer_sums
from experiments.survivors import kills_of

pytestmark = pytest.mark.slow

ITERATIONS = 100


@pytest.mark.parametrize("seed", range(20))
def test_weights_are_those_of_a_replay(tmp_path: Path, seed: int) -> None:
    forked_ranks.import_all()
    chance = random.Random(seed)
    ranks, width = chance.randint(3, 6), 1 + seed % 3
    words = f"{integer_sums.OPTIONS} --iterations {ITERATIONS} --width {width} --transport tcp --elastic 1"
    ended = elastic_ranks.run(
        f"{words} --checkpoint-iterations 12 --evaluate-iterations 9", ranks, tmp_path, kills_of(chance, ranks)
    )
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert not ended.hung, log
    assert {code for rank, code in ended.codes.items() if rank not in ended.was_killed} == {0}, log
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert len(summary["generations"]) > 1, "nothing was killed"
    found = torch.load(tmp_path / "run" / "model.pt", weights_only=True)["values"]
    assert found.equal(integer_sums.replayed(summary, ITERATIONS))
