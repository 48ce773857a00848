"""Random crops and mirror images, which depend on the seed, the epoch and the sample, not on the process or batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of training images."""

    crop: int = 0
    """Pixels added on each side, before a part of the original size is cut out of the image."""
    mirror: bool = False
    """True to mirror half of the images."""
    seed: int = 0

    def __call__(self, images: torch.Tensor, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        """Return ``images``, float32 (B, C, H, W), as they look in ``epoch``; their samples are ``indices`` (B,).

        What is added at the sides is 0, the mean of normalised images.
        """
        draws = split_mix(epoch_seed(self.seed, epoch), 3 * indices.numpy()[:, None] + np.arange(3))  # (B, 3)
        if self.crop:
            height, width = images.shape[2:]
            corners = (draws[:, :2] % np.uint64(2 * self.crop + 1)).tolist()
            padded = F.pad(images, [self.crop] * 4)
            images = torch.stack(
                [one[:, y : y + height, x : x + width] for one, (y, x) in zip(padded, corners, strict=True)]
            )
        if self.mirror:
            mirrored = torch.from_numpy(draws[:, 2] >> np.uint64(63) == 1).view(-1, 1, 1, 1)
            images = torch.where(mirrored, images.flip(3), images)
        return images


def epoch_seed(seed: int, epoch: int) -> int:
    """Return a seed for one epoch, from 0 to 2^64 - 1."""
    # Hashed, because seed + epoch would make run 1 repeat the epochs of run 0 one epoch late.
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0])


def batch_seed(seed: int, epoch: int, first: int) -> int:
    """Return a seed for the batch of one epoch whose first sample is ``first``, from 0 to 2^64 - 1."""
    # 1 more, because SeedSequence takes a 0 at the end as if it were not there.
    return int(np.random.SeedSequence((seed, epoch, first + 1)).generate_state(1, np.uint64)[0])


def split_mix(seed: int, places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the random numbers at ``places``, from 0, of the sequence that SplitMix64 makes from ``seed``.

    References:
        Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16.
    """
    mixed = np.uint64(seed) + (places.astype(np.uint64) + np.uint64(1)) * _STEP  # arrays wrap around at 2^64
    for shift, factor in _MIXING:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    numbers: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return numbers
