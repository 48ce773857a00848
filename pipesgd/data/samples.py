"""Interface of every data set here: indices of a whole batch in, inputs of a model and labels out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.utils.data import Dataset

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Images, float32 (B, C, H, W), and their labels, int64 (B,); or bytes and the byte after each, both int64 (B, T)."""


class BatchedDataset(Dataset[Batch], ABC):
    """A map-style data set that is asked for a whole batch at once."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitem__(self, indices: torch.Tensor) -> Batch:
        """Return the samples at ``indices``, int64 (B,), in that order."""


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
        mean, std = (torch.tensor(m).mul(self.peak).view(-1, 1, 1) for m in (self.mean, self.std))
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
