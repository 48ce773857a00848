"""Fused loops of the codecs, for each kind of device."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

from pipesgd.errors import UserInputError
from pipesgd.process import is_first_of_machine, say

FOR_THIS_RUN = (
    "compiling the codec's kernels again in every run, since {folder} cannot be written (let TRITON_CACHE_DIR name a "
    "folder that can)"
)


def kernels_for(device: str) -> ModuleType:
    """Import the kernels for tensors on ``device``, "cpu" or "cuda": numba and Triton take a second each.

    Raises:
        UserInputError: they are for a GPU and need Triton, which is not installed. torch's builds for CUDA include it.
    """
    try:
        kernels = importlib.import_module(f"{__name__}.{device}")
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        raise UserInputError("codec must be fp32 on a GPU unless Triton is installed; got none") from missing
    if device == "cuda":
        _give_triton_a_folder()
    return kernels


def _give_triton_a_folder() -> None:
    """Let Triton, which compiles nothing in memory, use a folder of this process where its own cannot be written."""
    folder = Path(importlib.import_module("triton.knobs").cache.dir)
    try:
        if folder.parts[0] == "~":  # the user has no home: it would be made in this folder
            raise OSError
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        os.environ["TRITON_CACHE_DIR"] = own = tempfile.mkdtemp(prefix="pipesgd-triton-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        if is_first_of_machine():
            say(FOR_THIS_RUN.format(folder=folder))
