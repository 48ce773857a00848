"""Whole runs with models, data and losses of the user's own: equal to built-in ones, resumed, and refused together."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _ranks import run_ranks
from _runs import command_in, program_of, run_in, run_words, shown_programs, succeed_as_told, succeed_in, summary
from conftest import REPOSITORY

from pipesgd.calibrate import calibrate
from pipesgd.ranks import Ranks
from pipesgd.run.console import screen
from timing_model.cluster_profile import Profile

pytestmark = pytest.mark.slow

MODULE = '''
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from pipesgd.data import build_model, load_dataset


class Digits(torch.utils.data.Dataset):
    """The built-in digits, one sample at a time."""

    num_classes = 10

    def __init__(self, split, named=False):
        self.split, self.named = split, named

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        pixels, label = (one[0] for one in self.split[torch.tensor([index])])
        return ({"top": pixels[:, :4], "bottom": pixels[:, 4:]} if self.named else pixels), int(label)


class Stream(IterableDataset):
    """The same, one after the other."""

    num_classes = 10

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


def digits():
    torch.rand(3)  # must not change the model's weights
    data = load_dataset("digits", None, image_size=8)
    return Digits(data.train), Digits(data.test)


def named():
    data = load_dataset("digits", None, image_size=8)
    return Digits(data.train, named=True), Digits(data.test, named=True)


def stream():
    return tuple(Stream(split) for split in digits())


def mlp(sample_shape, num_classes, hidden_sizes):
    return build_model("mlp", sample_shape=sample_shape, num_classes=num_classes, hidden_sizes=hidden_sizes)


class Halves(nn.Module):
    """A model of two named inputs, with buffers and dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 10)
        )

    def forward(self, top, bottom):
        return self.layers(torch.cat([top, bottom], dim=2))


def cross_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def squares(outputs, targets):
    return (outputs - nn.functional.one_hot(targets, 10)).square().mean()


def own_points(rank):
    """Different numbers of samples, whose inputs say which rank's they are."""
    numbers = [40, 25][rank]
    samples = TensorDataset(torch.full((numbers, 1), 1.0 + rank), torch.full((numbers, 1), 2.0 + 2 * rank))
    return samples, samples


own_points.sharded = True


def counted(path, rank):
    """As many samples as the file says for each rank."""
    with open(path) as file:
        number = int(file.read().split()[rank])
    return (TensorDataset(torch.ones(number, 1), torch.ones(number, 1)),) * 2


counted.sharded = True


class Scaled(nn.Module):
    """One number times the input."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs):
        return self.factor * inputs


def few(outputs, targets):
    assert len(outputs) <= 16, f"{len(outputs)} samples at once"
    return cross_entropy(outputs, targets)


def unlike_lengths(rank):
    return [(torch.zeros(1), 0)] * (8 + rank), [(torch.zeros(1), 0)] * 8


def unlike_samples(rank):
    return [(torch.full((1,), float(rank)), 0)] * 8, [(torch.zeros(1), 0)] * 8


def unlike_models():
    import os
    return nn.Linear(1, [1, 10][int(os.environ["OWN_RANK"])])


def fails_on_one(rank):
    if rank:
        raise OSError("no disk here")
    return unlike_lengths(0)


def ones():
    return unlike_lengths(0)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the module ``own_workload``."""
    made = tmp_path_factory.mktemp("own")
    (made / "own_workload.py").write_text(MODULE)
    return made


def run(world_size: int, words: str, output: Path, folder: Path) -> list[tuple[str, str, str]]:
    return run_in(folder, world_size, words.replace("own:", "own_workload:"), output)


def succeed(world_size: int, words: str, output: Path, folder: Path) -> dict[str, Any]:
    return succeed_in(folder, world_size, words.replace("own:", "own_workload:"), output)


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


SHORT = "--hidden-sizes 20 --batch-size 16 --iterations 12 --lr 0.05"


@pytest.mark.parametrize("words", ["--width 2", "--strategy ddp --accumulation 2"])
def test_own_and_built_in_workloads_are_trained_alike(tmp_path: Path, folder: Path, words: str) -> None:
    built_in = succeed(2, f"{SHORT} {words} --dataset digits --model mlp", tmp_path / "built-in", folder)
    own = "--dataset own:digits --model own:mlp --loss own:cross_entropy"
    found = succeed(2, f"{SHORT} {words} {own}", tmp_path / "own", folder)
    assert found["weights_sha256"] == built_in["weights_sha256"]
    assert found["final"] == built_in["final"] | {"test_accuracy": None}
    assert [line["loss"] for line in lines_of(tmp_path / "own")] == [
        line["loss"] for line in lines_of(tmp_path / "built-in")
    ]


@pytest.mark.parametrize(
    "words",
    [
        "--dataset own:named --model own:Halves --accumulation 2",
        "--dataset own:stream --model mlp --hidden-sizes 20 --batch-size 150 --loss own:squares",
    ],
)
def test_a_run_of_ones_own_is_resumed_bit_for_bit(tmp_path: Path, folder: Path, words: str) -> None:
    """The iterable's epochs have four iterations, so that the run is resumed in the middle of one."""
    words = f"--batch-size 16 {words}" if "--batch-size" not in words else words
    words += " --iterations 11 --lr 0.05 --checkpoint-iterations 5"
    whole = succeed(2, words, tmp_path / "whole", folder)
    assert succeed(2, words, tmp_path / "cut", folder)["weights_sha256"] == whole["weights_sha256"]
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "iteration-11")
    results = run(2, f"{words} --resume", tmp_path / "cut", folder)
    assert "continuing after iteration 10 of 11" in results[0][1]
    resumed = summary(tmp_path / "cut")
    assert (resumed["weights_sha256"], resumed["final"]) == (whole["weights_sha256"], whole["final"])
    assert resumed["options"]["dataset"].startswith("own_workload:")


def test_evaluations_take_no_more_samples_at_once_than_training(tmp_path: Path, folder: Path) -> None:
    succeed(1, f"{SHORT} --dataset digits --loss own:few --evaluate-iterations 4", tmp_path, folder)


def test_a_loss_without_accuracy_is_shown_without_one(tmp_path: Path, folder: Path) -> None:
    words = f"{SHORT} --dataset digits --loss own:squares --evaluate-iterations 4"
    results = run(2, words, tmp_path, folder)
    final = summary(tmp_path)["final"]
    assert final["test_accuracy"] is None
    assert 0 < final["test_loss"] < 1
    lines = lines_of(tmp_path)
    assert [line["iteration"] for line in lines if line["test_loss"] is not None] == [3, 7]
    assert {line["test_accuracy"] for line in lines} == {None}
    assert "test loss" in results[0][1]
    assert "test accuracy" not in results[0][1]


def test_every_rank_has_samples_of_its_own(tmp_path: Path, folder: Path) -> None:
    """Both ranks' targets are twice their inputs; an epoch has as many iterations as the smaller one has batches."""
    words = "--dataset own:own_points --model own:Scaled --loss torch.nn.functional:mse_loss --batch-size 8 --epochs 2"
    result = succeed(2, f"{words} --lr 0.01 --momentum 0 --width 1", tmp_path, folder)
    assert result["iterations"] == 2 * (25 // 8)
    assert [line["epoch"] for line in lines_of(tmp_path)] == [0, 0, 0, 1, 1, 1]
    factor = 1.0
    for line in lines_of(tmp_path):  # rank 0's loss is (factor - 2)^2, rank 1's four times that
        assert line["loss"] == pytest.approx((factor - 2) ** 2, rel=1e-5)
        factor -= 0.01 * (2 + 8) / 2 * (factor - 2)
    error = (factor - 2) ** 2  # every rank's test samples count once
    assert result["final"]["test_loss"] == pytest.approx((40 * error + 25 * 4 * error) / 65, rel=1e-5)


def test_a_run_that_resumes_with_other_samples_of_one_rank_says_so(tmp_path: Path, folder: Path) -> None:
    (numbers := tmp_path / "numbers").write_text("40 25")
    words = f"--dataset own:counted={numbers} --model own:Scaled --loss torch.nn.functional:mse_loss --batch-size 8"
    words += " --iterations 4 --resume"
    succeed(2, words, tmp_path / "run", folder)
    assert "warning" not in run(2, words, tmp_path / "run", folder)[0][1]
    numbers.write_text("40 26")
    (error, said, _), (_, nothing, _) = run(2, words, tmp_path / "run", folder)
    assert (error, nothing) == ("", "")
    (warning,) = re.findall("warning: .*", " ".join(said.split()))
    assert warning.startswith(
        "warning: the data of rank 1 are not those of the checkpoint, 25 training samples and 25 test samples"
    )
    assert "; got 26 training samples and 26 test samples" in warning


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--dataset own:unlike_lengths --model own:Scaled",
            "DisagreementError: data must be the same on all ranks; got 8 training samples and 8 test samples, 1 "
            "on rank 0, 9 training samples and 8 test samples, 1 on rank 1 "
            "(sharded = True on own:unlike_lengths lets them differ)",
        ),
        (
            "--dataset own:unlike_samples --model own:Scaled",
            "DisagreementError: data must be the same on all ranks; got 8 training samples and 8 test samples, 1 "
            "on rank 0, 8 training samples and 8 test samples, 1 on rank 1 "
            "(sharded = True on own:unlike_samples lets them differ)",
        ),
        (
            "--dataset own:ones --model own:unlike_models",
            "DisagreementError: parameters (number 0) must be the same on all ranks; got 'weight 1x1 float32' on "
            "rank 0, 'weight 10x1 float32' on rank 1",
        ),
        (
            "--dataset own:fails_on_one --model own:Scaled",
            "UserInputError: rank 1: dataset must be made by own:fails_on_one without an error; "
            "got OSError: no disk here (FILE)",
        ),
    ],
)
def test_ranks_that_differ_are_refused_before_anything_is_written(
    tmp_path: Path, folder: Path, words: str, message: str
) -> None:
    words += " --batch-size 2 --loss own:squares"
    for error, _, _ in run(2, words, tmp_path / "run", folder):
        error = re.sub(r", samples with the SHA-256 \w+", "", error.replace("own_workload:", "own:"))
        assert re.sub(r"\(/.*:\d+\)", "(FILE)", error) == message
    assert not (tmp_path / "run").exists()


def _calibrate(ranks: Ranks, folder: str, words: list[str]) -> str:
    sys.path.insert(0, folder)
    out = io.StringIO()
    calibrate(words, ranks, screen(ranks, out))
    return out.getvalue()


def test_a_workload_of_ones_own_is_calibrated_and_planned(tmp_path: Path, folder: Path) -> None:
    own = "--batch-size 16 --dataset own:digits --model own:mlp --hidden-sizes 150 --loss own:cross_entropy"
    words = f"{own} --seconds 1 --largest-bytes 65536 --codecs int8 --out {tmp_path / 'cluster.toml'}"
    said, _ = run_ranks(2, _calibrate, str(folder), words.replace("own:", "own_workload:").split(), process_group=False)
    assert "--model own_workload:mlp" in said
    (computation,) = Profile.load(tmp_path / "cluster.toml").compute
    assert (computation.model, computation.batch_size, computation.samples) == ("own_workload:mlp", 16, 1497)
    assert computation.tensors == (64 * 150, 150, 1500, 10)
    words = f"{own} --iterations 5 --cluster {tmp_path / 'cluster.toml'} --width auto"
    assert set(succeed(2, words, tmp_path / "run", folder)["planned"]["asked"]) == {"width", "buckets"}


# ---------------------------------------------------------------- examples


def test_the_program_of_the_page_is_the_example_and_runs(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "own_model.md").read_text(encoding="utf-8")
    program = (REPOSITORY / "examples" / "own_model.py").read_text(encoding="utf-8")
    assert shown_programs(page) == [program_of("own_model.py")]
    assert command_in(page) == command_in(program)
    final = succeed_as_told(page, tmp_path / "run")["final"]
    assert final["test_accuracy"] > 0.95
    assert final["test_loss"] < 0.1


def test_a_hugging_face_data_set_on_a_disk_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    program = REPOSITORY / "examples" / "hf_dataset.py"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    folder = tmp_path / "digits"
    subprocess.run([sys.executable, program, folder], env={**os.environ, **offline}, check=True)
    words = [str(folder) if word == "DIGITS" else word for word in command_in(program.read_text(encoding="utf-8"))]
    rest = ["--lr", "0.05", "--epochs", "2", "--output", str(tmp_path / "run")]
    run_words([*words, *rest], **offline)
    assert summary(tmp_path / "run")["final"]["test_accuracy"] > 0.6
