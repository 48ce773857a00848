"""Data sets by name, each of which imports what it reads its files with.

Nothing is downloaded here: errors name what is missing, and where to get it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pipesgd.config import DATASETS, dataset_kind
from pipesgd.data.samples import DataSplits, ImagesOfFiles, InMemoryImages, PixelScale, content_of
from pipesgd.errors import DatasetError
from pipesgd.functions import Function, call, check_function, function_of

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR100_FILES = ("train.bin", "test.bin")

_SCALES = {
    "digits": PixelScale(mean=(0.3055,), std=(0.3762,), peak=16),
    "mnist": PixelScale(mean=(0.1307,), std=(0.3081,)),
    "fashion-mnist": PixelScale(mean=(0.2860,), std=(0.3530,)),
    "cifar100": PixelScale(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
    "images": PixelScale(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),  # ImageNet's
}


def load_dataset(
    name: str,
    data_dir: Path | None,
    *,
    image_size: int,
    context: int = 64,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> DataSplits:
    """Load the data set ``name``, one of ``DATASETS``.

    Args:
        name: ``digits`` (1797 images of 8x8, every 6th for testing), ``mnist``, ``fashion-mnist``,
            ``cifar100``, or ``images`` (any RGB images, ``data_dir/{train,test}/CLASS/FILE``); or, for text,
            ``python-stdlib`` (source of the Python that runs) or ``text:`` and a file or a folder of files; or
            ``module:function``, a function that returns ``DataSplits`` or a pair (training set, test set), see
            ``own_splits``. Its parameters are among ``data_dir`` and those below.
        data_dir: folder of its files. ``digits`` comes with scikit-learn and takes none;
            ``fashion-mnist`` defaults to the folder of Debian's package; the other images need one.
        image_size: side in pixels to which ``images`` are resized; the others have a fixed size.
        context: bytes in a sample of text.
        seed: seed of the training.
        rank: number of this rank.
        world_size: number of ranks.

    Raises:
        UserInputError: the name is unknown, or the function cannot be found or called, or fails.
        DatasetError: files are missing, truncated or not what they should be.
    """
    check_function("dataset", name, dataset_kind(name), DATASETS)
    function = dataset_function(name)
    options = {"data_dir": data_dir, "image_size": image_size, "context": context}
    made = call("dataset", name, function, {**options, "seed": seed, "rank": rank, "world_size": world_size})
    if not isinstance(made, DataSplits):
        from pipesgd.data.own import own_splits

        made = own_splits(made, name)
    return dataclasses.replace(made, sharded=made.sharded or bool(getattr(function, "sharded", False)))


def dataset_function(name: str) -> Function:
    """Return the function that loads the data set ``name``.

    Raises:
        UserInputError: it cannot be imported.
    """
    if name.startswith("text:"):
        return functools.partial(_text, name)
    return function_of("dataset", name, BUILT_IN)


def _digits() -> DataSplits:
    package = importlib.util.find_spec("sklearn")
    assert package is not None, "scikit-learn is a dependency"
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if path.is_file():
        table = np.loadtxt(path, delimiter=",", dtype=np.int64)  # (1797, 65): 64 pixels and the label
    else:  # a version that keeps the file elsewhere; this import takes each rank a second
        from sklearn.datasets import load_digits

        digits = load_digits()
        table = np.column_stack([digits.data, digits.target]).astype(np.int64)
    pixels = torch.from_numpy(table[:, :64]).to(torch.uint8).view(-1, 1, 8, 8)  # 0..16
    labels = torch.from_numpy(table[:, 64])
    is_test = torch.arange(len(labels)) % 6 == 0
    train, test = (InMemoryImages(pixels[s], labels[s], _SCALES["digits"]) for s in (~is_test, is_test))
    return DataSplits(train=train, test=test, num_classes=10, sample_shape=(1, 8, 8), content=content_of(train, test))


def _mnist_like(name: str, data_dir: Path | None = None) -> DataSplits:
    from pipesgd.data.binary_files import read_labelled_idx

    how = "--data-dir names the folder"
    if name == "fashion-mnist":
        data_dir = data_dir or DEBIAN_FASHION_MNIST
        how = (
            "apt-get install dataset-fashion-mnist on Debian and Ubuntu; elsewhere "
            "git clone https://github.com/zalandoresearch/fashion-mnist, and --data-dir fashion-mnist/data/fashion"
        )
    paths = _locate(name, [data_dir] if data_dir else [], IDX_FILES, how)
    train, test = (
        ImagesOfFiles(functools.partial(read_labelled_idx, images, labels, num_classes=10), _SCALES[name])
        for images, labels in (paths[:2], paths[2:])
    )
    return DataSplits(train=train, test=test, num_classes=10, sample_shape=(1, 28, 28), content=content_of(train, test))


def _cifar100(data_dir: Path | None = None) -> DataSplits:
    from pipesgd.data.binary_files import read_cifar100

    folders = [data_dir, data_dir / "cifar-100-binary"] if data_dir else []
    how = "the binary version, cifar-100-binary.tar.gz unpacked; --data-dir names the folder"
    paths = _locate("cifar100", folders, CIFAR100_FILES, how)
    train, test = (ImagesOfFiles(functools.partial(read_cifar100, path), _SCALES["cifar100"]) for path in paths)
    return DataSplits(
        train=train, test=test, num_classes=100, sample_shape=(3, 32, 32), content=content_of(train, test)
    )


def _images(image_size: int, data_dir: Path | None = None) -> DataSplits:
    if data_dir is None:
        raise DatasetError("images must be in the folder --data-dir, as train/CLASS and test/CLASS; got no --data-dir")
    from pipesgd.data.image_folder import ImageFolder, class_names

    classes = class_names(data_dir / "train")
    train, test = (
        ImageFolder(data_dir / split, classes, image_size=image_size, scale=_SCALES["images"])
        for split in ("train", "test")
    )
    # Names, and not pixels: two versions of a decoder may differ in some bits.
    names = "\0\0".join("\0".join(split.names()) for split in (train, test))
    return DataSplits(
        train=train,
        test=test,
        num_classes=len(classes),
        sample_shape=(3, image_size, image_size),
        content=f"classes and files whose names have the SHA-256 {hashlib.sha256(os.fsencode(names)).hexdigest()[:16]}",
    )


def _text(name: str, context: int) -> DataSplits:
    from pipesgd.data.text import TextWindows, read_text

    train, test = read_text(name)
    if min(len(train), len(test)) <= context:
        raise DatasetError(
            f"{name} must hold a sample of {context + 1} bytes to train on and one to test on; "
            f"got {len(train)} bytes and {len(test)} bytes"
        )
    digest = hashlib.sha256(train + b"\0" + test).hexdigest()[:16]
    return DataSplits(
        train=TextWindows(train, context=context),
        test=TextWindows(test, context=context),
        num_classes=256,
        sample_shape=(context,),
        content=f"{len(train)} and {len(test)} bytes of text with the SHA-256 {digest}",
    )


def _locate(name: str, folders: Sequence[Path], files: Sequence[str], how: str) -> list[Path]:
    """Find each of ``files``, plain or ``.gz``, in the first of ``folders`` that has it."""
    found = []
    for file in files:
        candidates = (folder / (file + suffix) for folder in folders for suffix in ("", ".gz"))
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            where = " or ".join(map(str, folders)) or "the folder --data-dir"
            got = f"no {file}" if folders else "no --data-dir"
            raise DatasetError(f"{name} must be in {where} as {', '.join(files)}, plain or .gz ({how}); got {got}")
        found.append(path)
    return found


BUILT_IN: dict[str, Function] = {
    "digits": _digits,
    "mnist": functools.partial(_mnist_like, "mnist"),
    "fashion-mnist": functools.partial(_mnist_like, "fashion-mnist"),
    "cifar100": _cifar100,
    "images": _images,
    "python-stdlib": functools.partial(_text, "python-stdlib"),
}
"""Functions that load a data set, by name; text in the user's files has its path in the name."""
