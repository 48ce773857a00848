"""What every data set is here: indices of a whole batch in, inputs of a model and labels out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.utils.data import Dataset

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Images, float32 (B, C, H, W), and their labels, int64 (B,); or bytes and the next ones, both int64 (B, T)."""


class BatchedDataset(Dataset[Batch], ABC):
    """A map-style data set that is asked for a whole batch at once."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def __getitem__(self, indices: torch.Tensor) -> Batch:
        """The samples at ``indices``, int64 (B,), in that order."""


@dataclass(frozen=True, kw_only=True)
class PixelScale:
    """Maps stored pixels to the inputs of a model: ``(pixel / peak - mean) / std`` per channel."""

    mean: tuple[float, ...]
    """Of the training split's pixels scaled to [0, 1]; one number a channel."""
    std: tuple[float, ...]
    """Likewise."""
    peak: int = 255
    """The stored value of the brightest pixel."""

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """``pixels``, uint8 (B, C, H, W), as contiguous float32 of the same shape."""
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
