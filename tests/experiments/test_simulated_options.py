"""Options of a simulated run: each changes what is trained as on real ranks, or is refused in one line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from _runs import succeed
from torch import Tensor, nn

from experiments.simulated_options import DATA_AND_MODEL, OF_CODECS, OF_GRADIENTS, OF_WINDOWS, OPTIMIZATION, OTHERS
from experiments.simulated_runs import simulate
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.run.evaluation import Evaluation

SMALL = "--hidden-sizes 16 --batch-size 8 --iterations 6"
OF_TEXT = "--model transformer --layers 1 --heads 1 --embedding 8 --context 8 --batch-size 8 --iterations 3"
WINDOWS = f"{SMALL} --local-steps 2 --outer nesterov"
FOLLOWED = {
    **{
        name: (SMALL, f"--{name} {value}")
        for name, value in {
            "optimizer": "adam", "lr": "0.1", "momentum": "0.5", "weight-decay": "0.1", "lr-scaling": "linear",
            "schedule": "cosine", "lr-warmup": "3", "betas": "0.5 0.9 --optimizer adam",
            "clip-norm": "0.1", "clip-value": "0.001", "accumulation": "2", "seed": "1",
            "width": "1", "synchronous-start": "3", "prediction": "none", "codec": "powersgd", "batch-size": "16",
            "iterations": "5", "model": "convnet", "hidden-sizes": "8", "evaluate-iterations": "2",
        }.items()
    },
    **{
        name: (OF_TEXT, f"--{name} {value}")
        for name, value in {
            "context": "16", "layers": "2", "heads": "2", "embedding": "16", "dataset": "text:{other}",
        }.items()
    },
    **{
        name: (WINDOWS, f"--{name} {value}")
        for name, value in {
            "local-steps": "3", "outer": "average", "outer-lr": "0.1", "outer-momentum": "0.1",
        }.items()
    },
    **{
        name: (f"{SMALL} --codec {codec}", f"--{name} {value}")
        for name, codec, value in (
            ("codec-block", "int4", "64"), ("rounding", "int8", "stochastic"), ("error-feedback", "int4", "off"),
            ("qsgd-levels", "qsgd", "3"), ("low-rank", "powersgd", "2"), ("rank-compression", "powersgd", "20"),
            ("factor-codec", "powersgd", "int8"), ("dense-start", "powersgd", "2"),
        )
    },
    "fragments": (f"{SMALL} --local-steps 2", "--fragments 2"),
    "moving-rate": (f"{SMALL} --local-steps 2 --outer elastic", "--moving-rate 0.01"),
}  # fmt: skip
"""Options that are followed: other arguments, and a value that trains something else."""
UNSEEN = ("data-dir", "image-size", "guard")
"""Options that are followed, but only with data that are not here, or when gradients blow up."""
REFUSED = {
    "random-crop": "1", "mirror": "", "loader-workers": "0", "loss": "os:getcwd", "precision": "bf16",
    "loss-scale": "2 --precision fp16", "epochs": "1", "strategy": "local", "average-state": "--local-steps 2",
    "buffers": "own", "all-reduce": "native", "segment-bytes": "100", "connections": "2", "transport": "tcp",
    "rate-limit": "50mbit", "buckets": "2", "reduce": "rows", "ddp-hook": "fp16 --strategy ddp",
    "servers": "2 --strategy ps-sync", "server-placement": "dedicated --strategy ps-sync",
    "staleness-bound": "1 --strategy ps-async",
    "density": "0.5 --codec topk", "density-warmup": "3 --codec topk", "momentum-correction": "0.5 --codec topk",
    "cluster": "cluster.toml", "output": "runs/other", "resume": "",
    "overwrite": "", "dry-run": "", "device": "cuda", "secret-file": "job.key",
    "timeout": "3", "stall-seconds": "3", "farewell-seconds": "3",
    "on-nonfinite": "skip", "check-replicas": "3", "checkpoint-seconds": "3", "checkpoint-iterations": "3",
    "keep-checkpoints": "5", "trace": "", "log-messages": "", "recorder": "os:getcwd", "elastic": "2", "wait": "3",
    "silence": "5",
}  # fmt: skip
"""Options that are refused, with a value and what it goes with."""


def result(words: str) -> tuple[Any, ...]:
    run = simulate(words, world_size=2)
    return run.train_loss, run.test_loss, run.points


def test_every_option_is_followed_or_refused() -> None:
    followed = {*DATA_AND_MODEL, *OPTIMIZATION, *OF_WINDOWS, *OF_GRADIENTS, *OF_CODECS, *OTHERS}
    assert {*FOLLOWED, *UNSEEN} == followed
    assert followed | {*REFUSED} == {*TrainConfig().options()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLLOWED)
def test_an_option_that_is_followed_trains_something_else(name: str, tmp_path: Path) -> None:
    for file, text in (("one", "one text and "), ("other", "and another ")):
        (tmp_path / file).write_text(text * 100)
    words, change = FOLLOWED[name]
    if words == OF_TEXT:
        words += f" --dataset text:{tmp_path / 'one'}"
    before = shlex.split(words)
    if f"--{name}" in before:
        at = before.index(f"--{name}")
        del before[at : at + 2]
    changed = f"{shlex.join(before)} {change.format(other=tmp_path / 'other')}"
    if name == "model":
        changed = changed.replace("--hidden-sizes 16 ", "")
    assert result(changed) != result(words)


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_option_is_refused_in_one_line(name: str) -> None:
    length = "" if name == "epochs" else "--iterations 3"
    with pytest.raises(UserInputError) as caught:
        simulate(f"{length} --{name} {REFUSED[name]}")
    assert "\n" not in str(caught.value)
    assert "must" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--iterations 3 --width auto", "width must be left out on simulated ranks, which do not follow it; got auto"),
        ("--iterations 3 --codec topk", "codec must be dense or powersgd on simulated ranks; got topk"),
        ("", "iterations must be given for simulated ranks; got none"),
        (
            "--iterations 4 --local-steps 2 --evaluate-iterations 3",
            "evaluate-iterations must be a multiple of --local-steps 2 here; got 3",
        ),
    ],
)
def test_what_is_not_simulated_is_said(words: str, message: str) -> None:
    with pytest.raises(UserInputError) as caught:
        simulate(words)
    assert str(caught.value) == message


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--clip-norm 0.1",
        "--clip-value 0.001 --width 1",
        "--clip-norm 0.1 --local-steps 2",
        "--lr-scaling linear",
        "--codec int4 --codec-block 64 --rounding stochastic --seed 1",
        "--codec powersgd --low-rank 2 --seed 1",
        "--codec powersgd --rank-compression 4 --factor-codec int8 --dense-start 2 --seed 1",
    ],
)
def test_a_simulated_run_leaves_the_weights_of_the_command_bit_for_bit(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping and the scaling of the learning rate used to have no effect on simulated ranks."""
    left: list[dict[str, Tensor]] = []

    def evaluated(model: nn.Module, data: Any) -> Evaluation:
        left.append(model.state_dict())
        return Evaluation(accuracy=0.0, loss=0.0)

    monkeypatch.setattr("experiments.simulated_runs.evaluated", evaluated)
    succeed(2, f"{SMALL} {words}", tmp_path)
    trained = torch.load(tmp_path / "model.pt", weights_only=True)
    simulate(f"{SMALL} {words}", world_size=2)
    for name, value in trained.items():
        assert torch.equal(value, left[0][name]), name
