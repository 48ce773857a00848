"""Data sets of the user's own: a pair of map-style data sets, or of iterables with a length."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from pipesgd.data.samples import Batch, BatchedDataset, DataSplits, content_of
from pipesgd.errors import DatasetError
from pipesgd.functions import in_one_line


class MapStyle(BatchedDataset):
    """Samples that are read by their index, each a pair (input, target), collated as torch's DataLoader does it."""

    def __init__(self, samples: Any, what: str) -> None:
        """Take any object with a length and ``samples[index]``; errors call it ``what``."""
        self._samples = samples
        self._what = what

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, indices: torch.Tensor) -> Batch:
        """Return a batch; raises ``UserInputError`` if a sample cannot be read."""
        found = indices.tolist()
        if hasattr(self._samples, "__getitems__"):  # torch's convention for reading a batch at once
            with in_one_line(f"samples of the {self._what} must be readable"):
                return _collated(self._samples.__getitems__(found), self._what)
        return _collated([self._sample(index) for index in found], self._what)

    def _sample(self, index: int) -> Any:
        with in_one_line(f"sample {index} of the {self._what} must be readable"):
            return self._samples[index]


class InOrder(BatchedDataset):
    """Samples of an iterable with a length, each a pair (input, target), which keep their order in every epoch.

    Indices must ascend within an epoch. Samples between them are read and dropped; a smaller index than the last one
    begins again.
    """

    in_order = True

    def __init__(self, samples: Any, what: str) -> None:
        """Take any object with a length that can be iterated again and again; errors call it ``what``."""
        self._samples = samples
        self._what = what
        self._begin()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, indices: torch.Tensor) -> Batch:
        """Return a batch; raises ``UserInputError`` if a sample cannot be read."""
        return _collated([self._sample(index) for index in indices.tolist()], self._what)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs, which begins by itself: an iterator cannot be sent."""
        return {**self.__dict__, "_iterator": None, "_position": 0}

    def _begin(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._position = 0

    def _sample(self, index: int) -> Any:
        if index < self._position:
            self._begin()
        with in_one_line(f"sample {index} of the {self._what} must be readable"):
            if self._iterator is None:
                self._iterator = iter(self._samples)
            for sample in self._iterator:
                self._position += 1
                if self._position > index:
                    return sample
        raise DatasetError(
            f"{self._what} must give {len(self)} samples each time that it is iterated; got {self._position}"
        )


def own_splits(made: Any, name: str) -> DataSplits:
    """Return the data set that a function of the user's own, ``name``, has ``made``.

    ``made`` is a pair: samples for training, and for testing. Either is a map-style data set (with a length and
    ``[index]``), or an iterable with a length; its samples are pairs (input, target), of tensors or anything that
    torch's ``default_collate`` makes into tensors. The number of classes is an attribute ``num_classes`` of the
    training samples, or the length of their ``classes``; it is None if there is neither.

    Raises:
        DatasetError: ``made`` is something else.
        UserInputError: the first samples cannot be read.
    """
    if not (isinstance(made, tuple | list) and len(made) == 2):
        raise DatasetError(
            f"dataset must be made by a function that returns a pair (training set, test set); "
            f"got {_kind(made)} from {name}"
        )
    train, test = (_batched(samples, what) for samples, what in zip(made, ("training data", "test data"), strict=True))
    inputs = train[torch.tensor([0])][0]
    return DataSplits(
        train=train,
        test=test,
        num_classes=_num_classes(made[0]),
        sample_shape=tuple(inputs.shape[1:]) if isinstance(inputs, torch.Tensor) else None,
        content=content_of(train, test),
    )


def _batched(samples: Any, what: str) -> BatchedDataset:
    if isinstance(samples, BatchedDataset):
        return samples
    if not isinstance(samples, Sized):
        raise DatasetError(f"{what} must have a length; got {_kind(samples)}, which has none")
    with in_one_line(f"{what} must have a length"):
        if len(samples) < 1:
            raise DatasetError(f"{what} must hold at least one sample; got none")
    if hasattr(samples, "__getitem__") and not isinstance(samples, IterableDataset):
        return MapStyle(samples, what)
    if hasattr(samples, "__iter__"):
        return InOrder(samples, what)
    raise DatasetError(f"{what} must have samples by index or by iteration; got {_kind(samples)}, which has neither")


def _collated(samples: list[Any], what: str) -> Batch:
    for sample in samples:
        if not (isinstance(sample, tuple | list) and len(sample) == 2):
            raise DatasetError(f"every sample of the {what} must be a pair (input, target); got {_kind(sample)}")
    with in_one_line(f"samples of the {what} must go together"):
        inputs, targets = default_collate(samples)
    return inputs, targets


def _num_classes(samples: Any) -> int | None:
    found = getattr(samples, "num_classes", None)
    if found is None and isinstance(classes := getattr(samples, "classes", None), Sized):
        found = len(classes)
    if found is None or (type(found) is int and found >= 1):
        return found
    raise DatasetError(f"num_classes of the training data must be a whole number above 0; got {found!r}")


def _kind(value: Any) -> str:
    """Return the type of ``value`` in words."""
    return f"{len(value)} of type {type(value).__name__}" if isinstance(value, tuple | list) else type(value).__name__
