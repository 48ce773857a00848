"""The workload that a configuration names is the one that its options make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from pipesgd.cli import parse
from pipesgd.data import build_model, load_dataset, make_workload


@pytest.mark.parametrize(
    ("words", "dataset", "model"),
    [
        ("--dataset digits --model mlp --hidden-sizes 7 5", {}, {"hidden_sizes": (7, 5)}),
        (
            "--dataset python-stdlib --context 16 --model transformer --layers 3 --heads 2 --embedding 8",
            {"context": 16},
            {"layers": 3, "heads": 2, "embedding": 8},
        ),
    ],
)
def test_options_of_data_and_model_count(words: str, dataset: dict[str, int], model: dict[str, int]) -> None:
    config = parse(words.split())
    torch.manual_seed(3)
    data, made = make_workload(config)
    expected = load_dataset(config.data.dataset, None, image_size=28, **dataset)
    torch.manual_seed(3)
    same = build_model(
        config.model.model, sample_shape=expected.sample_shape, num_classes=expected.num_classes, **model
    )
    assert (len(data.train), data.sample_shape) == (len(expected.train), expected.sample_shape)
    inputs, _ = data.train[torch.arange(4)]
    assert torch.equal(made(inputs), same(inputs))


def test_images_come_from_the_folder_and_in_the_size_asked_for(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("ants", "bees"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (20, 10)).save(tmp_path / split / name / "0.png")
    words = ["--dataset", "images", "--data-dir", str(tmp_path), "--image-size", "12", "--model", "convnet"]
    data, model = make_workload(parse(words))
    inputs, _ = data.train[torch.arange(2)]
    assert (inputs.shape, model(inputs).shape) == ((2, 3, 12, 12), (2, 2))
