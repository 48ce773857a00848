"""Whole runs of the command: what they leave, every strategy, and other data when they resume."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from _fashion_mnist import FASHION_MNIST
from _runs import SHORT, evaluations, lose_the_last_checkpoint, run, succeed, summary

from pipesgd.run.metrics import read_metrics

pytestmark = pytest.mark.slow


def test_the_main_job_leaves_what_it_promises(tmp_path: Path) -> None:
    words = "--dataset fashion-mnist --width 2 --batch-size 64 --iterations 80 --lr 0.02 --trace --check-replicas 25"
    results = run(4, f"{words} --data-dir {shlex.quote(str(FASHION_MNIST))}", tmp_path)
    assert [error for error, _, _ in results] == [""] * 4
    result = summary(tmp_path)
    assert result["world_size"] == 4
    assert (result["strategy"], result["width"], result["codec"]) == ("pipelined", 2, "fp32")
    assert (result["all_reduce"], result["prediction"], result["iterations"]) == ("ring", "eager", 80)
    assert result["replicas_identical"] is True
    assert len(result["loading_share_of_ranks"]) == 4
    assert all(0 < share < 1 for share in result["loading_share_of_ranks"])
    assert result["final"]["test_accuracy"] > 0.75
    assert 0 < result["final"]["train_loss"] < 1.5
    assert 0 < result["final"]["test_loss"] < 1
    seconds = result["seconds"]
    assert set(seconds) == {"iteration", "loading", "compute", "communication", "exposed", "update"}
    assert all(set(values) == {"median", "mean", "p95"} for values in seconds.values())
    parts = sum(seconds[name]["mean"] for name in ("loading", "compute", "exposed", "update"))
    assert parts == pytest.approx(seconds["iteration"]["mean"])
    # 784-500-500-10 has 648,010 parameters: 2 * 3/4 of 4 bytes each, up to the rounding of chunks.
    assert result["wire_bytes_per_iteration"] == pytest.approx(648_010 * 4 * 1.5, abs=16)
    assert result["versions"]["torch"] == torch.__version__

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(80))
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sum(value.numel() for value in weights.values()) == 648_010
    assert evaluations(tmp_path)[-1] == (80, pytest.approx(result["final"]["test_accuracy"]))
    screen = results[0][1]
    assert "80 iterations on 4 ranks" in screen
    assert "bit-identical" in screen
    assert f"wrote {tmp_path / 'summary.json'}" in screen
    assert [out for _, out, _ in results[1:]] == [""] * 3, "only rank 0 speaks"

    # In the trace, an all-reduce is between the backward that made its gradient and the update that applies it,
    # on a row of its own. How many of them are over the next iteration depends on what else the machine does.
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(4):
        spans = {(e["name"], e["args"]["iteration"]): e for e in events if e["ph"] == "X" and e["pid"] == rank}
        over_the_next = []
        for iteration in range(79):
            reduction, following = spans["communication", iteration], spans["backward", iteration + 1]
            assert reduction["tid"] != following["tid"]
            assert end(spans["backward", iteration]) < reduction["ts"]
            assert end(reduction) < spans["update", iteration]["ts"]
            over_the_next.append(
                reduction["ts"] < end(following) and end(reduction) > spans["data", iteration + 1]["ts"]
            )
        assert any(over_the_next)


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


@pytest.mark.parametrize(
    ("words", "workers", "identical"),
    [
        ("--strategy ddp --ddp-hook fp16", 3, True),
        ("--strategy ps-sync --servers 2 --check-replicas 4", 3, True),
        ("--strategy ps-sync --server-placement dedicated", 2, True),
        ("--strategy ps-async --schedule one-cycle", 3, True),
        ("--strategy easgd-async --local-steps 2 --schedule one-cycle", 3, True),
        ("--strategy easgd-async --server-placement dedicated --clip-norm 1 --optimizer muon", 2, True),
        (
            "--strategy ps-async --staleness-bound 1 --servers 2 --server-placement dedicated --schedule one-cycle",
            1,
            True,
        ),
        ("--strategy local", 3, False),
    ],
)
def test_every_strategy_runs_in_the_same_loop(tmp_path: Path, words: str, workers: int, identical: bool) -> None:
    strategy = words.split()[1]
    words = f"{SHORT} {words} --iterations 30 --checkpoint-iterations 10 --trace".replace("--iterations 12", "")
    result = succeed(3, words, tmp_path)
    assert (result["strategy"], result["world_size"], result["workers"]) == (strategy, 3, workers)
    assert (result["width"], result["replicas_identical"]) == (None, identical)
    assert len(result["iteration_seconds_of_ranks"]) == workers
    assert result["final"]["test_accuracy"] > 0.5
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 30
    if strategy == "easgd-async":
        del lines[0]  # elastic averaging has no answer to wait for in its first iteration
    assert all(line["seconds"]["exposed"] > 0 for line in lines) == ("local" not in words)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"iteration-{i}" for i in (10, 20, 30)
    ]
    resumed = succeed(3, f"{words} --resume", tmp_path)
    assert resumed["final"]["test_accuracy"] > 0.5


def pictures_in(folder: Path) -> str:
    """Write 40 pictures to train with and 40 to test with into ``folder``; return the options that name them."""
    from PIL import Image

    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (path := folder / split / name).mkdir(parents=True)
            for i in range(20):
                Image.new("RGB", (8, 8), (i, i, i)).save(path / f"{i}.png")
    return f"--dataset images --image-size 8 --data-dir {folder} --loader-workers 0"


@pytest.mark.parametrize("schedule", ["one-cycle", "cosine"])
def test_a_run_that_resumes_with_more_or_less_data_ends_where_it_was_to_end(tmp_path: Path, schedule: str) -> None:
    """With 40 samples, 4 epochs are 20 iterations of 8. Rates of another length of the schedule would be others."""
    words = f"--hidden-sizes 20 --batch-size 4 --epochs 4 --schedule {schedule} {pictures_in(tmp_path / 'data')}"
    words, output = f"{words} --checkpoint-iterations 5", tmp_path / "run"
    succeed(2, words, output)
    rates = [line["lr"] for line in read_metrics(output / "metrics.jsonl")]
    for iterations_per_epoch in (10, 1):
        for path in (tmp_path / "data" / "train").iterdir():
            for i in range(20):
                shutil.copy(path / "0.png", path / f"{20 + i}.png")
            for picture in sorted(path.iterdir())[4 * iterations_per_epoch :]:
                picture.unlink()
        for _ in range(2):
            lose_the_last_checkpoint(output)
        [(error, said, _), _] = run(2, f"{words} --resume", output)
        assert error == ""
        assert f"; got {8 * iterations_per_epoch} training samples" in said
        assert "the run continues with them up to iteration 20, as it began" in said
        assert "continuing after iteration 10 of 20" in said
        assert summary(output)["iterations"] == 20
        assert [line["lr"] for line in read_metrics(output / "metrics.jsonl")] == rates


def test_a_run_that_resumes_with_other_data_says_so(tmp_path: Path) -> None:
    words = f"{SHORT} {pictures_in(tmp_path / 'data')} --resume"
    succeed(2, words, tmp_path / "run")
    assert "warning" not in run(2, words, tmp_path / "run")[0][1]
    for split in ("train", "test"):
        (tmp_path / "data" / split / "dog").rename(tmp_path / "data" / split / "wolf")
    (error, said, _), (_, nothing, _) = run(2, words, tmp_path / "run")
    assert (error, nothing) == ("", "")
    assert said.count("warning: the data are not those of the checkpoint, 40 training samples and 40 test samples") == 1
