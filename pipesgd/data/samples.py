"""Interface of every data set here: indices of a whole batch in, inputs of a model and targets out."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import Dataset

from pipesgd.errors import DatasetError

Batch: TypeAlias = tuple[Any, Any]
"""Images, float32 (B, C, H, W), and their labels, int64 (B,); or bytes and the byte after each, both int64 (B, T). In a
data set of the user's own, inputs and targets are tensors (B, ...), or tuples or dicts of them."""


def on_tensors(function: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Return ``values``, a tensor or a tuple or dict of them at any depth, with ``function`` applied to each tensor.

    Named tuples stay what they are; lists become tuples, and other mappings dicts.
    """
    if isinstance(values, torch.Tensor):
        return function(values)
    if isinstance(values, Mapping):
        return {name: on_tensors(function, value) for name, value in values.items()}
    if isinstance(values, tuple | list):
        parts = tuple(on_tensors(function, value) for value in values)
        return type(values)(*parts) if hasattr(values, "_fields") else parts
    raise DatasetError(
        f"samples must consist of tensors, arrays and numbers, in tuples or dicts; got one of type "
        f"{type(values).__name__}"
    )


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return the tensors in ``values``."""
    found: list[torch.Tensor] = []
    on_tensors(found.append, values)
    return found


def micro_batches_of(batch: Batch, number: int) -> Iterator[Batch]:
    """Yield ``number`` consecutive parts of a batch, whose size is a multiple of it."""
    for part in range(number):

        def cut(tensor: torch.Tensor, part: int = part) -> torch.Tensor:
            size = len(tensor) // number
            return tensor[part * size : (part + 1) * size]

        inputs, targets = on_tensors(cut, batch)
        yield inputs, targets


def outputs_of(model: nn.Module, inputs: Any) -> Any:
    """Return what ``model`` makes of ``inputs``: a tensor, a tuple of arguments, or a dict of named arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


class BatchedDataset(Dataset[Batch], ABC):
    """A map-style data set that is asked for a whole batch at once."""

    in_order: bool = False
    """True if samples can only be read one after the other, so that their order is not shuffled."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitem__(self, indices: torch.Tensor) -> Batch:
        """Return the samples at ``indices``, int64 (B,), in that order."""


@dataclass(frozen=True, kw_only=True)
class DataSplits:
    """A data set: its splits for training and testing, and the shapes that a model for it takes and gives."""

    train: BatchedDataset
    test: BatchedDataset
    num_classes: int | None = None
    """Number of classes, where labels are 0 to ``num_classes - 1``; None if it is not known."""
    sample_shape: tuple[int, ...] | None = None
    """Channels, height and width of one image; or the bytes of one sample of text; in general, the shape of an input.
    None if inputs are not single tensors."""
    content: str = ""
    """Mark that tells the data set from others of the same size, where one is known: a checksum of text, of names or
    of samples."""
    sharded: bool = False
    """True if every rank has samples of its own, both for training and testing."""

    def describe(self, *, own: bool = False) -> str:
        """Return what must be the same on all ranks; with ``own``, what must stay the same on this rank."""
        alike = own or not self.sharded
        size = f"{len(self.train)} training samples and {len(self.test)} test samples"
        text = size if alike else "samples of each rank's own"
        text += "" if self.num_classes is None else f" of {self.num_classes} classes"
        text += "" if self.sample_shape is None else f", {'x'.join(map(str, self.sample_shape)) or 'scalar'}"
        return f"{text}, {self.content}" if alike and self.content else text


@dataclass(frozen=True, kw_only=True)
class PixelScale:
    """Mapping of stored pixels to the inputs of a model: ``(pixel / peak - mean) / std`` per channel."""

    mean: tuple[float, ...]
    """Means of the training split's pixels scaled to [0, 1], one a channel."""
    std: tuple[float, ...]
    """Standard deviations of the same pixels, one a channel."""
    peak: int = 255
    """Stored value of the brightest pixel."""

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return ``pixels``, uint8 (B, C, H, W), as contiguous float32 of the same shape."""
        mean, std = (torch.tensor(m, dtype=torch.float32).mul(self.peak).view(-1, 1, 1) for m in (self.mean, self.std))
        # Decoded images arrive channels last, which a plain cast would keep.
        return pixels.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std)


class InMemoryImages(BatchedDataset):
    """Images kept as uint8, a quarter of the float32 that each batch is converted to."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor, scale: PixelScale) -> None:
        """Takes ``pixels``, uint8 (N, C, H, W), and ``labels``, any integers (N,)."""
        assert len(pixels) == len(labels)
        self._pixels = pixels
        self._labels = labels.long()
        self._scale = scale

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, indices: torch.Tensor) -> Batch:
        return self._scale(self._pixels[indices]), self._labels[indices]


class ImagesOfFiles(InMemoryImages):
    """Images kept in memory that is mapped from files, which a process that this is sent to maps again."""

    def __init__(self, read: Callable[[], tuple[torch.Tensor, torch.Tensor]], scale: PixelScale) -> None:
        """Take a function that returns what ``InMemoryImages`` takes, and that can be sent to other processes."""
        super().__init__(*read(), scale)
        self._read = read

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._read, self._scale)


def content_of(*datasets: BatchedDataset) -> str:
    """Return a hash of the first, middle and last samples, in words; of data that are read in order, of the first only.

    Each sample is read twice, and what differs, as after a random augmentation, counts with its shape only.
    """
    digest = hashlib.sha256()
    for dataset in datasets:
        number = len(dataset)
        for index in [0] if dataset.in_order else [0, number // 2, number - 1]:
            one, again = (tensors_of(dataset[torch.tensor([index])]) for _ in range(2))
            for tensor, other in zip(one, again, strict=True):
                digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
                if torch.equal(tensor, other):
                    digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return f"samples with the SHA-256 {digest.hexdigest()[:16]}"
