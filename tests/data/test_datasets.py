"""Data sets and their sharding: real files, good and bad, and each rank's share of the samples."""

from __future__ import annotations

import gzip
import shutil
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from _fashion_mnist import PART
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipesgd.config import DATASETS
from pipesgd.data import DataSplits, ShardedBatches, binary_files, evaluation_batches, load_dataset, mapped_files
from pipesgd.data.datasets import DEBIAN_FASHION_MNIST, IDX_FILES
from pipesgd.data.samples import Batch, BatchedDataset
from pipesgd.errors import DatasetError, UserInputError

# ---------------------------------------------------------------- files


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path) -> list[np.ndarray]:
    """Write good IDX files of 6 training and 4 test samples; return their arrays, ordered as IDX_FILES."""
    numbers = np.random.default_rng(0)
    arrays = []
    for samples in (6, 4):
        arrays += [numbers.integers(256, size=(samples, 28, 28)), numbers.integers(10, size=samples)]
    for file, array in zip(IDX_FILES, arrays, strict=True):
        (folder / file).write_bytes(idx_bytes(array))
    return arrays


needs_the_whole_fashion_mnist = pytest.mark.skipif(
    not DEBIAN_FASHION_MNIST.is_dir(),
    reason="the whole of Fashion-MNIST is not here: apt-get install dataset-fashion-mnist",
)


def everything(dataset: BatchedDataset) -> Batch:
    return dataset[torch.arange(len(dataset))]


def check_contract(splits: DataSplits) -> None:
    for split in (splits.train, splits.test):
        indices = torch.tensor([3, 0, 3])
        images, labels = split[indices]
        assert images.dtype == torch.float32
        assert images.is_contiguous()
        assert images.shape == (3, *splits.sample_shape)
        assert labels.dtype == torch.int64
        assert torch.equal(images, everything(split)[0][indices])
        assert torch.equal(labels, everything(split)[1][indices])
        assert everything(split)[1].min() >= 0
        assert everything(split)[1].max() < splits.num_classes


def check_normalised(dataset: BatchedDataset) -> None:
    images, _ = everything(dataset)
    assert images.mean().item() == pytest.approx(0, abs=2e-3)
    assert images.std().item() == pytest.approx(1, abs=2e-3)


def test_digits() -> None:
    splits = load_dataset("digits", None, image_size=64)
    check_contract(splits)
    check_normalised(splits.train)
    assert (len(splits.train), len(splits.test), splits.sample_shape) == (1497, 300, (1, 8, 8))
    # scikit-learn's first twelve digits are 0..9, 0, 1; every sixth, 0 and 6, is for testing.
    assert splits.train[torch.arange(10)][1].tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 0, 1]
    assert splits.test[torch.arange(2)][1].tolist() == [0, 6]


def test_digits_are_those_that_scikit_learn_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read without importing scikit-learn; if a version keeps it elsewhere, scikit-learn is asked."""
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    ours = load_dataset("digits", None, image_size=64)
    assert "sklearn.datasets" not in sys.modules
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    theirs = load_dataset("digits", None, image_size=64)
    assert "sklearn.datasets" in sys.modules
    for one, other in ((ours.train, theirs.train), (ours.test, theirs.test)):
        for mine, its in zip(everything(one), everything(other), strict=True):
            assert torch.equal(mine, its)
            assert mine.dtype == its.dtype


@needs_the_whole_fashion_mnist
def test_fashion_mnist_of_the_debian_package() -> None:
    splits = load_dataset("fashion-mnist", None, image_size=64)
    check_contract(splits)
    check_normalised(splits.train)
    assert (len(splits.train), len(splits.test), splits.num_classes) == (60_000, 10_000, 10)
    for split in (splits.train, splits.test):
        assert everything(split)[1].bincount().tolist() == [len(split) // 10] * 10


def test_the_part_of_fashion_mnist_that_tests_use() -> None:
    splits = load_dataset("fashion-mnist", PART, image_size=64)
    check_contract(splits)
    assert (len(splits.train), len(splits.test), splits.num_classes) == (2000, 400, 10)
    for split in (splits.train, splits.test):
        counts = everything(split)[1].bincount()
        assert len(counts) == 10
        assert counts.min() > 0.75 * len(split) / 10  # no class is rare


@needs_the_whole_fashion_mnist
def test_it_is_the_beginning_of_the_whole() -> None:
    part, whole = (load_dataset("fashion-mnist", folder, image_size=64) for folder in (PART, None))
    for few, all_of_them in ((part.train, whole.train), (part.test, whole.test)):
        for ours, first in zip(everything(few), all_of_them[torch.arange(len(few))], strict=True):
            assert torch.equal(ours, first)


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_gives_back_the_pixels_and_labels_of_its_files(tmp_path: Path, zipped: bool) -> None:
    arrays = write_mnist(tmp_path)
    if zipped:
        for file in IDX_FILES:
            (tmp_path / f"{file}.gz").write_bytes(gzip.compress((tmp_path / file).read_bytes()))
            (tmp_path / file).unlink()
    splits = load_dataset("mnist", tmp_path, image_size=64)
    check_contract(splits)
    for split, pixels, labels in ((splits.train, *arrays[:2]), (splits.test, *arrays[2:])):
        images, got_labels = everything(split)
        expected = (torch.from_numpy(pixels).unsqueeze(1) / 255 - 0.1307) / 0.3081
        torch.testing.assert_close(images, expected.float(), rtol=0, atol=1e-6)
        assert got_labels.tolist() == labels.tolist()


def test_the_mark_of_an_mnist_is_that_of_its_images_and_labels(tmp_path: Path) -> None:
    def mark() -> str:
        return load_dataset("mnist", tmp_path, image_size=64).describe()

    write_mnist(tmp_path)
    marks = {mark(), mark()}
    assert len(marks) == 1
    for file, offset in ((IDX_FILES[0], 16), (IDX_FILES[3], 8)):
        content = (tmp_path / file).read_bytes()
        overwrite(tmp_path / file, offset, (content[offset] + 1) % 10)
        marks.add(mark())
    assert len(marks) == 3


def overwrite(path: Path, offset: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] = value
    path.write_bytes(content)


def shorten(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def zip_badly(path: Path, damage: Callable[[bytes], bytes]) -> None:
    path.with_name(path.name + ".gz").write_bytes(damage(gzip.compress(path.read_bytes())))
    path.unlink()


BAD_IDX: list[tuple[str, Callable[[Path], object], str]] = [
    (IDX_FILES[0], lambda p: shorten(p, 15), "IDX header of 16 bytes; got 15 bytes in all$"),
    (IDX_FILES[0], lambda p: shorten(p, 0), "IDX header of 16 bytes; got 0 bytes in all$"),
    (IDX_FILES[0], lambda p: shorten(p, 4719), " 4720 bytes long, .*; got 4719 bytes$"),
    (IDX_FILES[0], lambda p: p.write_bytes(p.read_bytes() + b"\0"), "4720 bytes long, .*; got 4721 bytes$"),
    (IDX_FILES[0], lambda p: p.write_bytes(b"PNG " * 2000), r"0x00000803 .*; got 0x504e4720$"),
    (IDX_FILES[0], lambda p: overwrite(p, 2, 0x0D), r"\(uint8, 3 dimensions\); got 0x00000d03$"),
    (IDX_FILES[0], lambda p: overwrite(p, 7, 0), r"item of shape \(28, 28\); got 0 of \(28, 28\)$"),
    (IDX_FILES[2], lambda p: overwrite(p, 11, 14), r"item of shape \(28, 28\); got 4 of \(14, 28\)$"),
    (IDX_FILES[1], lambda p: p.write_bytes(idx_bytes(np.zeros((6, 1)))), "0x00000801 .*; got 0x00000802$"),
    (IDX_FILES[1], lambda p: overwrite(p, 12, 10), "hold labels 0 to 9; got 10$"),
    (IDX_FILES[3], lambda p: p.write_bytes(idx_bytes(np.zeros(5))), "of the 4 images of .*; got 5 labels$"),
    (IDX_FILES[0], lambda p: zip_badly(p, lambda z: z[:-1]), "readable and complete; got EOFError: .*"),
    (
        IDX_FILES[0],
        lambda p: zip_badly(p, lambda z: z[:10] + b"\xff" * 10 + z[20:]),
        "complete; got error: .*",
    ),
    (
        IDX_FILES[0],
        lambda p: zip_badly(p, lambda z: z[:-8] + bytes(8)),
        "got BadGzipFile: CRC check failed .*",
    ),
    (IDX_FILES[0], lambda p: zip_badly(p, gzip.decompress), "got BadGzipFile: Not a gzipped file .*"),
]


@pytest.mark.parametrize(("file", "damage", "message"), BAD_IDX)
def test_bad_idx_file_is_named(tmp_path: Path, file: str, damage: Callable[[Path], object], message: str) -> None:
    write_mnist(tmp_path)
    damage(tmp_path / file)
    with pytest.raises(DatasetError, match=f"^{tmp_path / file}(.gz)? must .*{message}") as caught:
        load_dataset("mnist", tmp_path, image_size=64)
    assert "\n" not in str(caught.value)


def cifar100_records(samples: int) -> np.ndarray:
    records = np.random.default_rng(1).integers(256, size=(samples, 3074), dtype=np.uint8)
    records[:, :2] %= np.array([20, 100], dtype=np.uint8)
    return records


@pytest.mark.parametrize("subfolder", ["", "cifar-100-binary"])
def test_cifar100_gives_back_pixels_and_fine_labels(tmp_path: Path, subfolder: str) -> None:
    folder = tmp_path / subfolder
    folder.mkdir(exist_ok=True)
    records = cifar100_records(5)
    for file in ("train.bin", "test.bin"):
        (folder / file).write_bytes(records.tobytes())
    splits = load_dataset("cifar100", tmp_path, image_size=64)
    check_contract(splits)
    assert (splits.num_classes, splits.sample_shape) == (100, (3, 32, 32))
    images, labels = everything(splits.test)
    assert labels.tolist() == records[:, 1].tolist()
    # As the format's documentation says: 1024 red, then 1024 green, then 1024 blue, each row by row.
    blue_row1_column2 = records[:, 2 + 2 * 1024 + 32 + 2] / 255
    expected = torch.from_numpy((blue_row1_column2 - 0.4409) / 0.2762).float()
    torch.testing.assert_close(images[:, 2, 1, 2], expected, rtol=0, atol=1e-5)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bomb unpacks from 64 kB to 64 MiB, though its header claims one item."""
    monkeypatch.setattr(mapped_files, "LARGEST_BYTES", 1 << 20)
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(struct.pack(">II", 0x801, 1) + bytes(64 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match=r"bomb.gz must hold at most 1,048,576 bytes, unpacked; got more"):
            binary_files.read_idx(bomb, item_shape=())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_bad_cifar100_file_is_named(tmp_path: Path) -> None:
    records = cifar100_records(5)
    (tmp_path / "train.bin").write_bytes(records.tobytes())
    for content in (b"", records.tobytes()[:-1]):
        (tmp_path / "test.bin").write_bytes(content)
        message = rf"^{tmp_path}/test.bin must be .* 3074 bytes each, .*; got {len(content)} bytes$"
        with pytest.raises(DatasetError, match=message):
            load_dataset("cifar100", tmp_path, image_size=64)
    records[4, 1] = 100
    (tmp_path / "test.bin").write_bytes(records.tobytes())
    with pytest.raises(DatasetError, match=r"test.bin must hold labels 0 to 99; got 100$"):
        load_dataset("cifar100", tmp_path, image_size=64)


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("mnist", None, "^mnist must be in the folder --data-dir as .*; got no --data-dir$"),
        ("mnist", "there", f"there as {', '.join(IDX_FILES)}, plain or .gz .*; got no {IDX_FILES[0]}$"),
        (
            "fashion-mnist",
            "there",
            r"apt-get install dataset-fashion-mnist on Debian and Ubuntu; .* got no train-images-idx3-ubyte$",
        ),
        ("cifar100", None, "^cifar100 must be in the folder --data-dir as .*; got no --data-dir$"),
        (
            "cifar100",
            "there",
            r"there or .*there/cifar-100-binary as train.bin, test.bin, .*; got no train.bin$",
        ),
        ("images", None, "^images must be in the folder --data-dir, .*; got no --data-dir$"),
        ("images", "there", "there/train must be a folder .*; got none$"),
    ],
)
def test_missing_data_says_where_it_must_be(tmp_path: Path, name: str, folder: str | None, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load_dataset(name, tmp_path / folder if folder else None, image_size=64)


# ---------------------------------------------------------------- image folders


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Write classes ant and bee, two images each in train, in several modes and formats, and only bee in test."""
    for split, classes in (("train", ("bee", "ant")), ("test", ("bee",))):
        for name in classes:
            (tmp_path / split / name).mkdir(parents=True)
    # In 40x20, the outer quarters are green, the centre is red above and blue below.
    wide = Image.new("RGB", (40, 20), "lime")
    wide.paste("red", (10, 0, 30, 10))
    wide.paste("blue", (10, 10, 30, 20))
    wide.save(tmp_path / "train/ant/0.PNG")
    Image.new("L", (9, 9), 255).save(tmp_path / "train/ant/1.jpg", quality=100)
    wide.quantize().save(tmp_path / "train/bee/2.gif")
    wide.convert("RGBA").save(tmp_path / "train/bee/3.webp", lossless=True)
    for i in range(4):
        Image.new("RGB", (8, 16 + i), "white").save(tmp_path / f"test/bee/{i}.jpeg", quality=100)
    (tmp_path / "train/ant/Thumbs.db").write_bytes(b"not an image")
    (tmp_path / "train/.cache").mkdir()
    return tmp_path


def test_image_folder(image_folder: Path) -> None:
    splits = load_dataset("images", image_folder, image_size=4)
    check_contract(splits)
    assert (splits.num_classes, splits.sample_shape) == (2, (3, 4, 4))
    images, labels = everything(splits.train)
    assert labels.tolist() == [0, 0, 1, 1]
    assert everything(splits.test)[1].tolist() == [1, 1, 1, 1]
    mean, std = (torch.tensor(m).view(3, 1, 1) for m in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    bytes_shown = (images * std + mean).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1)  # (B, H, W, 3)
    # The shorter side is resized to 4, then the middle 4 columns of 8 are cut out.
    wide = Image.open(image_folder / "train/ant/0.PNG").resize((8, 4), Image.Resampling.BILINEAR)
    expected = torch.from_numpy(np.array(wide.crop((2, 0, 6, 4))))
    assert expected[0].tolist() == [[224, 31, 0], [255, 0, 0], [255, 0, 0], [224, 31, 0]]
    assert torch.equal(bytes_shown[[0, 2, 3]], expected.expand(3, 4, 4, 3))
    assert (bytes_shown[1] == 255).all()


@pytest.mark.parametrize(("former", "name"), [("train/ant", "train/wasp"), ("test/bee/3.jpeg", "test/bee/4.jpeg")])
def test_the_mark_of_an_image_folder_is_that_of_its_names(image_folder: Path, former: str, name: str) -> None:
    def mark() -> str:
        return load_dataset("images", image_folder, image_size=4).describe()

    before = mark()
    (image_folder / former).rename(image_folder / name)
    assert mark() != before
    copy = shutil.copytree(image_folder, image_folder / "copy", ignore=shutil.ignore_patterns("copy"))
    assert load_dataset("images", copy, image_size=4).describe() == mark()


def test_bad_image_is_named(image_folder: Path) -> None:
    path = image_folder / "train/bee/2.gif"
    truncated = (image_folder / "train/ant/1.jpg").read_bytes()[:-100]
    sixteen_bits = np.full((8, 8), 40_000, dtype=np.uint16)
    for content, message in (
        (b"", "cannot identify image file"),
        (b"GIF89a but no more", ""),
        (truncated, "OSError: (?i:.*truncated)"),
    ):
        path.write_bytes(content)
        splits = load_dataset("images", image_folder, image_size=4)
        with pytest.raises(DatasetError, match=f"^{path} must be an image that .*; got .*{message}") as caught:
            everything(splits.train)
        assert "\n" not in str(caught.value)
    Image.fromarray(sixteen_bits).save(path.with_suffix(".png"))
    path.unlink()
    splits = load_dataset("images", image_folder, image_size=4)
    with pytest.raises(DatasetError, match=r"2.png must be .*; got .*more than 8 bits \(mode I;16\)$"):
        everything(splits.train)


def test_image_folders_must_hold_images_of_known_classes(image_folder: Path) -> None:
    (image_folder / "test/wasp").mkdir()
    with pytest.raises(DatasetError, match=r"test/wasp must be named as one of the training .*; got 'wasp'$"):
        load_dataset("images", image_folder, image_size=4)
    (image_folder / "train/wasp").mkdir()
    with pytest.raises(DatasetError, match=r"train/wasp must hold images \(.*.png.*\); got none$"):
        load_dataset("images", image_folder, image_size=4)


# ---------------------------------------------------------------- sharding


class Numbered(BatchedDataset):
    """A data set whose sample i is the number i, as image and as label."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, indices: torch.Tensor) -> Batch:
        return indices.float().view(-1, 1, 1, 1), indices


def sharded(samples: int, **options: int) -> ShardedBatches:
    return ShardedBatches(Numbered(samples), **{"rank": 0, "world_size": 1, "seed": 0, **options})


def labels_of(batches: Iterator[Batch], count: int) -> list[list[int]]:
    return [labels.tolist() for _, labels in islice(batches, count)]


@st.composite
def shardings(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw batch size per rank, world size, and samples for at least one iteration."""
    batch_size, world_size = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    return batch_size, world_size, draw(st.integers(batch_size * world_size, 120))


@given(shardings(), st.integers(0, 2**32))
def test_ranks_share_every_batch_of_one_process(sharding: tuple[int, int, int], seed: int) -> None:
    batch_size, world_size, samples = sharding
    whole = sharded(samples, batch_size=batch_size * world_size, seed=seed)
    ranks = [
        sharded(samples, batch_size=batch_size, rank=rank, world_size=world_size, seed=seed)
        for rank in range(world_size)
    ]
    per_epoch = samples // (batch_size * world_size)
    assert {r.iterations_per_epoch for r in [whole, *ranks]} == {per_epoch}
    count = 2 * per_epoch + 1
    expected = labels_of(whole.from_iteration(0), count)
    shares = [labels_of(r.from_iteration(0), count) for r in ranks]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == expected
    assert all(len(batch) == batch_size for share in shares for batch in share)
    for epoch in (0, 1):
        seen = list(chain(*expected[epoch * per_epoch : (epoch + 1) * per_epoch]))
        assert len(set(seen)) == len(seen) == per_epoch * batch_size * world_size
        assert set(seen) <= set(range(samples))


@given(shardings(), st.integers(0, 50))
def test_resuming_at_an_iteration_gives_the_batches_from_there(sharding: tuple[int, int, int], iteration: int) -> None:
    batch_size, world_size, samples = sharding
    batches = sharded(samples, batch_size=batch_size, rank=world_size - 1, world_size=world_size, seed=3)
    uninterrupted = labels_of(batches.from_iteration(0), iteration + 5)
    assert labels_of(batches.from_iteration(iteration), 5) == uninterrupted[iteration:]


def test_epochs_and_seeds_differ_and_no_seed_repeats_another_one_epoch_late() -> None:
    orders = {
        tuple(labels_of(sharded(50, batch_size=50, seed=seed).from_iteration(epoch), 1)[0])
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_a_batch_of_all_ranks_must_fit() -> None:
    message = "^--batch-size times --accumulation must be at most 12: 4 ranks share 50 samples; got 13$"
    with pytest.raises(DatasetError, match=message):
        sharded(50, batch_size=13, world_size=4)
    assert sharded(50, batch_size=12, world_size=4).iterations_per_epoch == 1


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 9))
def test_evaluation_takes_every_sample_once(samples: int, world_size: int, batch_size: int) -> None:
    shares = [
        [
            labels.tolist()
            for _, labels in evaluation_batches(
                Numbered(samples), batch_size=batch_size, rank=rank, world_size=world_size
            )
        ]
        for rank in range(world_size)
    ]
    assert sorted(label for share in shares for batch in share for label in batch) == list(range(samples))
    assert all(1 <= len(batch) <= batch_size for share in shares for batch in share)
    assert max(map(len, shares)) <= min(map(len, shares)) + 1  # no rank waits for another one's longer share


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left_to_collect")
def test_loader_workers_change_nothing_but_the_process(image_folder: Path) -> None:
    """The batches are the same, over epochs; so is the one-line error; the global generator is left alone."""
    splits = load_dataset("images", image_folder, image_size=4)
    before = torch.get_rng_state()

    def batches(loader_workers: int) -> Iterator[Batch]:
        return ShardedBatches(
            splits.train, batch_size=2, rank=0, world_size=1, seed=0, loader_workers=loader_workers
        ).from_iteration(1)

    in_workers = batches(2)
    for expected, got in zip(islice(batches(0), 5), in_workers, strict=False):
        assert isinstance(got, tuple)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])

    (image_folder / "train/bee/2.gif").write_bytes(b"GIF89a")
    with pytest.raises(DatasetError, match=r"^[^\n]*2.gif must be an image that Pillow can decode; got [^\n]*$"):
        for _ in islice(in_workers, 10):
            pass

    evaluation = evaluation_batches(splits.test, batch_size=3, rank=0, world_size=1, loader_workers=1)
    assert [len(labels) for _, labels in evaluation] == [3, 1]
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    message = rf"^dataset must be one of {', '.join(DATASETS)}; got 'fashin-mnist' \(did you mean fashion-mnist\?\)$"
    with pytest.raises(UserInputError, match=message):
        load_dataset("fashin-mnist", None, image_size=64)
