"""Images in one folder for each class, decoded when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from pipesgd.data.samples import Batch, BatchedDataset, PixelScale
from pipesgd.errors import DatasetError

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".webp"})


def class_names(split_dir: Path) -> list[str]:
    """Return the sorted names of the folders in ``split_dir`` except hidden ones.

    Raises ``DatasetError`` if there is none.
    """
    folders = split_dir.iterdir() if split_dir.is_dir() else ()
    names = sorted(folder.name for folder in folders if folder.is_dir() and not folder.name.startswith("."))
    if not names:
        raise DatasetError(f"{split_dir} must be a folder that holds one folder of images for each class; got none")
    return names


class ImageFolder(BatchedDataset):
    """The images ``split_dir/CLASS/*``, as RGB, resized and centre cropped to a square."""

    def __init__(self, split_dir: Path, classes: Sequence[str], *, image_size: int, scale: PixelScale) -> None:
        """Lists the files; a sample's label is the position of its folder's name in ``classes``.

        ``image_size`` is the side of the square in pixels. Raises ``DatasetError`` for a folder that is
        not among ``classes`` or holds no image.
        """
        self._folder = str(split_dir)
        self._paths: list[str] = []
        labels: list[int] = []
        for name in class_names(split_dir):
            if name not in classes:
                raise DatasetError(f"{split_dir / name} must be named as one of the training classes; got {name!r}")
            paths = sorted(str(p) for p in (split_dir / name).iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
            if not paths:
                raise DatasetError(
                    f"{split_dir / name} must hold images ({', '.join(sorted(IMAGE_SUFFIXES))}); got none"
                )
            self._paths += paths
            labels += [classes.index(name)] * len(paths)
        self._labels = torch.tensor(labels)
        self._image_size = image_size
        self._scale = scale

    def __len__(self) -> int:
        return len(self._paths)

    def names(self) -> list[str]:
        """Return CLASS/FILE of each image, in order."""
        return [path[len(self._folder) + 1 :] for path in self._paths]

    def __getitem__(self, indices: torch.Tensor) -> Batch:
        """Return a batch; raises ``DatasetError`` naming the file if one cannot be decoded."""
        squares = [_decode(self._paths[i], self._image_size) for i in indices.tolist()]
        pixels = torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)  # (B, 3, H, W)
        return self._scale(pixels), self._labels[indices]


def _decode(path: str, image_size: int) -> NDArray[np.uint8]:
    """Decode one file to RGB pixels, (image_size, image_size, 3)."""
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # Pillow would silently clip these to 255
                raise ValueError(f"pixels of more than 8 bits (mode {image.mode})")
            square = ImageOps.fit(image.convert("RGB"), (image_size, image_size), Image.Resampling.BILINEAR)
            return np.asarray(square)
    # Errors that Pillow's decoders raise for damaged files.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DatasetError(
            f"{path} must be an image that Pillow can decode; got {type(error).__name__}: {error}"
        ) from None
