"""Accuracy and loss over all ranks are those of one process on the whole test set."""

from __future__ import annotations

import pytest
import torch
from _ranks import run_ranks
from torch.nn.functional import cross_entropy

from pipesgd.baselines.local import Local
from pipesgd.data import build_model
from pipesgd.data.samples import BatchedDataset, InMemoryImages, PixelScale
from pipesgd.data.text import TextWindows
from pipesgd.ranks import Ranks, join
from pipesgd.run.evaluation import Evaluation, evaluate


def images(samples: int) -> BatchedDataset:
    torch.manual_seed(1)
    pixels = torch.randint(256, (samples, 1, 4, 4), dtype=torch.uint8)
    return InMemoryImages(pixels, torch.randint(10, (samples,)), PixelScale(mean=(0.5,), std=(0.3,)))


DATASETS: dict[str, tuple[str, tuple[int, ...], int, BatchedDataset]] = {
    "images": ("mlp", (1, 4, 4), 10, images(1100)),  # more than one batch on a rank
    "text": ("transformer", (8,), 256, TextWindows(b"the ring sums what every rank has found " * 9, context=8)),
    "fewer samples than ranks": ("mlp", (1, 4, 4), 10, images(1)),
}


def model_for(name: str) -> torch.nn.Module:
    model, sample_shape, num_classes, _ = DATASETS[name]
    torch.manual_seed(0)
    return build_model(model, sample_shape=sample_shape, num_classes=num_classes, hidden_sizes=(20,), embedding=16)


@pytest.mark.parametrize(("batch_size", "largest"), [(4, 4), (300, 300), (2000, 512)])
def test_no_more_samples_are_evaluated_at_once_than_training_has_memory_for(batch_size: int, largest: int) -> None:
    model, sizes = model_for("images"), []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    strategy = Local(model, torch.optim.SGD(model.parameters(), lr=0.1))
    evaluate(model, strategy, DATASETS["images"][3], join(), torch.device("cpu"), batch_size=batch_size)
    assert (max(sizes), sum(sizes)) == (largest, 1100)


def _evaluate(ranks: Ranks, name: str) -> Evaluation:
    model = model_for(name)
    strategy = Local(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = evaluate(model, strategy, DATASETS[name][3], ranks, torch.device("cpu"))
    assert model.training
    return result


@pytest.mark.parametrize("name", DATASETS)
def test_the_ranks_parts_make_the_whole(name: str) -> None:
    results = run_ranks(2, _evaluate, name, process_group=False)
    dataset = DATASETS[name][3]
    inputs, labels = dataset[torch.arange(len(dataset))]
    with torch.no_grad():
        logits = model_for(name)(inputs)
    assert results[0] == results[1]
    assert results[0].accuracy == pytest.approx((logits.argmax(dim=-1) == labels).float().mean().item())
    assert results[0].loss == pytest.approx(cross_entropy(logits.movedim(-1, 1), labels).item(), rel=1e-5)
