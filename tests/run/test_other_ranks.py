"""Runs that another number of ranks resumes, and what only the ranks that began a run can resume."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from _runs import SHORT, contents, run, run_in

from pipesgd.cli import parse
from pipesgd.data.augmentation import epoch_seed
from pipesgd.errors import CheckpointError
from pipesgd.run.output import check_other_ranks

pytestmark = pytest.mark.slow

SAMPLES, BATCH, EPOCHS = 60, 2, 3
LINEAR = f"""
import torch
from torch import nn

def rows():
    samples = list(zip(torch.eye({SAMPLES}), torch.zeros({SAMPLES})))
    return samples, samples

def model():
    layer = nn.Linear({SAMPLES}, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer

def mean(outputs, targets):
    return outputs.mean()
"""
"""A model with a weight for each sample, whose gradient is the share that the sample has in a batch."""

PARTS = [(2, 0, 7), (3, 7, 14), (1, 14, 21), (2, 21, 45)]
"""Ranks, first iteration and end of each part of the run."""


def interrupt(output: Path, iteration: int) -> None:
    """Let the run in ``output`` be as if it had been killed after the checkpoint of ``iteration``."""
    for folder in (output / "checkpoints").glob("iteration-*"):
        if int(folder.name.partition("-")[2]) > iteration:
            shutil.rmtree(folder)
    for name in ("summary.json", "model.pt"):
        (output / name).unlink()


def expected_updates() -> tuple[torch.Tensor, list[int]]:
    """Return the sum of the updates of each sample's weight, and the epoch in which each iteration begins."""
    per_epoch = SAMPLES // (2 * BATCH) * 2  # slices, of the two ranks that begin
    updates, epochs, given = torch.zeros(SAMPLES, dtype=torch.float64), [], 0
    orders = [
        torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch_seed(0, epoch)))
        for epoch in range(EPOCHS + 1)
    ]
    for ranks, first, end in PARTS:
        for _ in range(first, end):
            rate = (1 + math.cos(math.pi * given / (EPOCHS * per_epoch))) / 2
            epochs.append(given // per_epoch)
            for _ in range(ranks):
                epoch, number = divmod(given, per_epoch)
                updates[orders[epoch][number * BATCH :][:BATCH]] += rate / (ranks * BATCH)
                given += 1
    assert given == EPOCHS * per_epoch, "the parts end where the epochs do"
    return updates, epochs


@pytest.mark.parametrize("options", ["--width 2", "--width 3 --buckets 1"])
def test_each_sample_is_seen_once_in_each_epoch_at_the_rate_that_is_due_then(tmp_path: Path, options: str) -> None:
    (tmp_path / "linear.py").write_text(LINEAR)
    words = (
        "--dataset linear:rows --model linear:model --loss linear:mean --optimizer sgd --momentum 0 --lr 1 "
        f"--schedule cosine --batch-size {BATCH} --epochs {EPOCHS} --checkpoint-iterations 7 --keep-checkpoints 20 "
        f"{options}"
    )
    output = tmp_path / "run"
    for ranks, first, end in PARTS:
        resumed = " --resume" if first else ""
        results = run_in(tmp_path, ranks, words + resumed, output)
        assert [error for error, _, _ in results] == [""] * ranks
        if first:
            assert f"{ranks} continue: gradients in flight are applied" in results[0][1]
        if (ranks, first, end) != PARTS[-1]:
            interrupt(output, end)
    updates, epochs = expected_updates()
    applied = -torch.load(output / "model.pt", weights_only=True)["weight"][0].double()
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == epochs
    assert [line["iteration"] for line in lines] == list(range(PARTS[-1][2]))
    torch.testing.assert_close(applied, updates, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "sharded", "reason"),
    [
        ("--strategy ddp", False, "strategy ddp"),
        ("--strategy ps-sync", False, "strategy ps-sync"),
        ("--local-steps 2 --outer elastic", False, "outer elastic"),
        ("--codec topk", False, "codec topk"),
        ("", True, "samples of each rank's own"),
    ],
)
def test_what_other_ranks_cannot_resume_is_refused(words: str, sharded: bool, reason: str) -> None:
    config, earlier = parse(words.split()), {"world_size": 2}
    for same in (None, earlier):
        check_other_ranks(config, same, 2, sharded=sharded)
    with pytest.raises(CheckpointError) as caught:
        check_other_ranks(config, earlier, 3, sharded=sharded)
    assert str(caught.value) == f"world size must be that of the run to resume with {reason}, 2; got 3"


def test_a_run_that_other_ranks_cannot_resume_is_not_touched(tmp_path: Path) -> None:
    words = f"{SHORT} --strategy local"
    assert [error for error, _, _ in run(2, words, tmp_path)] == ["", ""]
    before = contents(tmp_path)
    message = "world size must be that of the run to resume with strategy local, 2; got 1"
    assert run(1, f"{words} --resume", tmp_path)[0][0].partition(": ")[2] == message
    assert contents(tmp_path) == before
