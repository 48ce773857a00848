"""Accuracy and loss over all ranks are those of one process on the whole test set."""

from __future__ import annotations

import math

import pytest
import torch
from _ranks import run_ranks
from torch.nn.functional import cross_entropy

from pipesgd.baselines.local import Local
from pipesgd.data import CROSS_ENTROPY, build_model
from pipesgd.data.samples import BatchedDataset, InMemoryImages, PixelScale
from pipesgd.data.text import TextWindows
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks, join
from pipesgd.run.evaluation import Evaluation, evaluate, mean, sums


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


@pytest.mark.slow
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


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (8, 6, 5) and labels (8, 6), of which -100 does not count: all of the last three samples'."""
    logits = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(2))
    labels = torch.full((8, 6), -100)
    for sample, length in enumerate([6, 1, 4, 2, 3]):
        labels[sample, :length] = torch.arange(length) % 5
    return logits, labels


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_labels_that_do_not_count_are_in_neither_accuracy_nor_loss(batch_size: int) -> None:
    logits, labels = padded()
    batches = list(zip(logits.split(batch_size), labels.split(batch_size), strict=True))
    found = mean(sums(torch.nn.Identity(), [batch], torch.device("cpu")) for batch in batches)
    counts = labels >= 0
    assert found.accuracy == pytest.approx((logits.argmax(dim=-1) == labels)[counts].float().mean().item())
    assert found.loss == pytest.approx(cross_entropy(logits[counts], labels[counts]).item(), rel=1e-6)


def test_an_evaluation_without_labels_that_count_says_nothing() -> None:
    logits, labels = padded()
    found = mean([sums(torch.nn.Identity(), [(logits[5:], labels[5:])], torch.device("cpu"))])
    assert found.accuracy is None
    assert math.isnan(found.loss)


@pytest.mark.parametrize("label", [-1, -101, 5])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    logits, labels = padded()
    labels[2, 3] = label
    with pytest.raises(UserInputError, match=f"^labels must be 0 to 4, or -100 for .*; got {label}$"):
        CROSS_ENTROPY(logits, labels)


def test_logits_in_torchs_layout_are_refused_and_dimensions_of_one_do_not_matter() -> None:
    logits, labels = torch.randn(2, 3, 4, 3), torch.randint(3, (2, 4, 3))
    for use in (CROSS_ENTROPY, CROSS_ENTROPY.correct):
        with pytest.raises(UserInputError, match=r"^labels must have the shape .*, \(2, 3, 4\); got \(2, 4, 3\)$"):
            use(logits, labels)
    labels = labels.view(2, 1, 3, 4)
    assert torch.equal(CROSS_ENTROPY(logits, labels), cross_entropy(logits.view(24, 3), labels.view(24)))
