"""Fused loops of the codecs, for each kind of device."""

from __future__ import annotations

import importlib
from types import ModuleType


def kernels_for(device: str) -> ModuleType:
    """The kernels for tensors on ``device``, "cpu" or "cuda". Imported here: numba and Triton take a second each."""
    return importlib.import_module(f"{__name__}.{device}")
