"""Readers of the two binary formats of the paper's data sets: IDX (MNIST) and CIFAR-100's records.

Both readers check everything that the format allows to be checked, and raise ``DatasetError`` naming
the file, what it must be and what it is.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from pipesgd.data.mapped_files import read_mapped
from pipesgd.errors import DatasetError

CIFAR100_RECORD_BYTES = 1 + 1 + 3 * 32 * 32  # coarse label, fine label, pixels
_IDX_UINT8 = 0x0800  # an IDX magic number is the element type in this byte, the number of dimensions below it


def read_idx(path: Path, *, item_shape: tuple[int, ...]) -> torch.Tensor:
    """Read the uint8 elements of an IDX file, plain or ``.gz``: (N, *item_shape), N at least 1.

    Raises ``DatasetError`` if the file is unreadable, of another type or shape, or of another length
    than its header says.
    """
    content = read_mapped(path)
    dimensions = 1 + len(item_shape)
    header_bytes = 4 + 4 * dimensions
    if len(content) < header_bytes:
        raise DatasetError(
            f"{path} must begin with an IDX header of {header_bytes} bytes; got {len(content)} bytes in all"
        )
    magic, *shape = (int(field) for field in np.frombuffer(content, ">u4", count=1 + dimensions))
    if magic != _IDX_UINT8 + dimensions:
        raise DatasetError(
            f"{path} must begin with the IDX magic number {_IDX_UINT8 + dimensions:#010x} "
            f"(uint8, {dimensions} dimensions); got {magic:#010x}"
        )
    if shape[0] == 0 or tuple(shape[1:]) != item_shape:
        raise DatasetError(
            f"{path} must hold at least one item of shape {item_shape}; got {shape[0]} of {tuple(shape[1:])}"
        )
    expected_bytes = header_bytes + math.prod(shape)
    if len(content) != expected_bytes:
        raise DatasetError(f"{path} must be {expected_bytes} bytes long, as its header says; got {len(content)} bytes")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header_bytes).view(shape)


def read_labelled_idx(images: Path, labels: Path, *, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read pixels, uint8 (N, 1, 28, 28), and labels, uint8 (N,), of one split of an MNIST-like data set.

    Raises ``DatasetError`` as :func:`read_idx` does, if the two files differ in N, or for a label that
    is not below ``num_classes``.
    """
    pixels = read_idx(images, item_shape=(28, 28))
    classes = read_idx(labels, item_shape=())
    if len(classes) != len(pixels):
        raise DatasetError(
            f"{labels} must hold one label for each of the {len(pixels)} images of {images.name}; "
            f"got {len(classes)} labels"
        )
    _check_labels(labels, classes, num_classes)
    return pixels.unsqueeze(1), classes


def read_cifar100(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read pixels, uint8 (N, 3, 32, 32), and fine labels, uint8 (N,), of one file of CIFAR-100's binary version.

    Raises ``DatasetError`` if the file is unreadable, not a whole number of records, or has a label
    above 99.
    """
    content = read_mapped(path)
    if not len(content) or len(content) % CIFAR100_RECORD_BYTES:
        raise DatasetError(
            f"{path} must be a whole number of CIFAR-100 records, {CIFAR100_RECORD_BYTES} bytes each, and at "
            f"least one; got {len(content)} bytes"
        )
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, CIFAR100_RECORD_BYTES)
    labels = records[:, 1]
    _check_labels(path, labels, 100)
    return records[:, 2:].view(-1, 3, 32, 32), labels


def _check_labels(path: Path, labels: torch.Tensor, num_classes: int) -> None:
    if (highest := int(labels.max())) >= num_classes:
        raise DatasetError(f"{path} must hold labels 0 to {num_classes - 1}; got {highest}")
