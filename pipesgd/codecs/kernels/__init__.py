"""Fused loops of the codecs, for each kind of device."""

from __future__ import annotations

import importlib
from types import ModuleType

from pipesgd.errors import UserInputError


def kernels_for(device: str) -> ModuleType:
    """Import the kernels for tensors on ``device``, "cpu" or "cuda": numba and Triton take a second each.

    Raises:
        UserInputError: they are for a GPU and need Triton, which is not installed. torch's builds for CUDA include it.
    """
    try:
        return importlib.import_module(f"{__name__}.{device}")
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        raise UserInputError("codec must be fp32 on a GPU unless Triton is installed; got none") from missing
