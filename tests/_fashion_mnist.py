"""The Fashion-MNIST files that tests read: the whole data set where it is installed, else the part in tests/data."""

from __future__ import annotations

from pathlib import Path

from pipesgd.data.datasets import DEBIAN_FASHION_MNIST

PART = Path(__file__).resolve().parent / "data" / "fashion-mnist"
FASHION_MNIST = DEBIAN_FASHION_MNIST if DEBIAN_FASHION_MNIST.is_dir() else PART
