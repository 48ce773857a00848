"""Refactoring does not change the losses and weights of short runs: they are those recorded in golden.json."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("_golden.py")


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13.0"), reason="recorded with torch 2.13.0")
def test_golden_trajectories() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
