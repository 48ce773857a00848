"""Random crops and mirror images: which pixels they give, and that nothing but seed, epoch and sample matters."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pipesgd.cli import parse
from pipesgd.data import ShardedBatches, evaluation_batches, load_dataset
from pipesgd.data.augmentation import Augmentation, split_mix
from pipesgd.errors import UserInputError
from pipesgd.ranks import join
from pipesgd.run.workload import load

SAMPLES, SIDE, CROP = 40, 6, 2
IMAGES = torch.arange(1.0, SAMPLES * SIDE * SIDE + 1).view(SAMPLES, 1, SIDE, SIDE)
"""Images of which no two pixels are the same, and none is 0."""
EVERYTHING = torch.arange(SAMPLES)


def test_the_random_numbers_are_those_of_split_mix() -> None:
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of the reference code in C
    assert split_mix(1234567, np.array([2, 0, 1])).tolist() == [expected[2], expected[0], expected[1]]


def places(epoch: int = 0, seed: int = 0) -> list[tuple[int, int, bool]]:
    """Return where each image was cut out, and whether it is mirrored, from the pixels alone."""
    changed = Augmentation(crop=CROP, mirror=True, seed=seed)(IMAGES, epoch, EVERYTHING)
    padded = F.pad(IMAGES, [CROP] * 4)
    found = []
    for one, whole in zip(changed, padded, strict=True):
        [place] = [
            (y, x, mirrored)
            for y in range(2 * CROP + 1)
            for x in range(2 * CROP + 1)
            for mirrored in (False, True)
            if torch.equal(one.flip(2) if mirrored else one, whole[:, y : y + SIDE, x : x + SIDE])
        ]
        found.append(place)
    return found


def test_every_image_is_cut_out_somewhere_and_half_of_them_are_mirrored() -> None:
    found = [place for epoch in range(10) for place in places(epoch)]
    assert {y for y, _, _ in found} == {x for _, x, _ in found} == set(range(2 * CROP + 1))
    assert 0.4 < np.mean([mirrored for _, _, mirrored in found]) < 0.6
    assert {x for _, x, mirrored in found if mirrored} == {x for _, x, mirrored in found if not mirrored}


def test_every_epoch_and_every_seed_differs() -> None:
    assert len({tuple(places(epoch, seed)) for epoch in range(4) for seed in range(4)}) == 16


def test_what_is_not_asked_for_stays() -> None:
    assert torch.equal(Augmentation()(IMAGES, 0, EVERYTHING), IMAGES)
    mirrored = Augmentation(mirror=True)(IMAGES, 0, EVERYTHING)
    assert all(
        torch.equal(one, was) or torch.equal(one.flip(2), was) for one, was in zip(mirrored, IMAGES, strict=True)
    )
    assert not torch.equal(mirrored, IMAGES)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 40))
def test_the_pixels_of_a_sample_depend_on_no_batch_rank_or_start(batch_size: int, ranks: int, start: int) -> None:
    digits = load_dataset("digits", None, image_size=64).train
    augmentation = Augmentation(crop=CROP, mirror=True, seed=3)
    whole = ShardedBatches(
        *(digits,), batch_size=batch_size * ranks, rank=0, world_size=1, seed=3, augmentation=augmentation
    )
    expected = next(islice(whole.from_iteration(0), start, None))[0]
    shares = [
        next(
            ShardedBatches(
                *(digits,), batch_size=batch_size, rank=rank, world_size=ranks, seed=3, augmentation=augmentation
            ).from_iteration(start)
        )[0]
        for rank in range(ranks)
    ]
    assert torch.equal(torch.cat(shares), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left_to_collect")
def test_the_pixels_do_not_depend_on_the_process_and_those_for_testing_stay() -> None:
    digits = load_dataset("digits", None, image_size=64)

    def images(workers: int) -> list[torch.Tensor]:
        batches = ShardedBatches(
            *(digits.train,), batch_size=400, rank=0, world_size=1, seed=0, loader_workers=workers,
            augmentation=Augmentation(crop=CROP, mirror=True),
        )  # fmt: skip
        return [inputs for inputs, _ in islice(batches.from_iteration(0), 5)]  # into the second epoch

    for here, there in zip(images(0), images(2), strict=True):
        assert torch.equal(here, there)
    tested = torch.cat([inputs for inputs, _ in evaluation_batches(digits.test, batch_size=9, rank=0, world_size=1)])
    assert torch.equal(tested, digits.test[torch.arange(300)][0])


def test_a_run_that_asks_for_it_gets_other_images_for_training(tmp_path: Path) -> None:
    words = ["--dataset", "digits", "--batch-size", "50"]
    plain, augmented = (load(parse([*words, *more]), join())[1] for more in ([], ["--random-crop", "1", "--mirror"]))
    one, other = (next(batches.from_iteration(0)) for batches in (plain, augmented))
    assert torch.equal(one[1], other[1])
    assert not torch.equal(one[0], other[0])


NO_USE = "which has no use for it (it belongs to one of digits, mnist, fashion-mnist, cifar100, images)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--random-crop -1", "random-crop must be at least 0; got -1"),
        ("--random-crop 8", "random-crop must be below 8, the side of an image in pixels; got 8"),
        (
            "--dataset python-stdlib --model transformer --mirror",
            f"mirror must be left out with --dataset python-stdlib, {NO_USE}; got True",
        ),
        (
            "--dataset own:data --random-crop 4",
            f"random-crop must be left out with --dataset module:function, {NO_USE}; got 4",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words: str, message: str) -> None:
    with pytest.raises(UserInputError) as caught:
        load(parse(words.split()), join())
    assert str(caught.value) == message
