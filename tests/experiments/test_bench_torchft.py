"""The comparison with torchft: what it asks for, and its blocks. tests/integrations has torchft itself."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from rich.console import Console

from experiments import bench_torchft
from experiments.bench_torchft import DELAYS, FULL, QUICK, STEPS, VERSION, WINDOW
from pipesgd.errors import UserInputError
from pipesgd.ranks import alone


@pytest.mark.parametrize("installed", ["none", "0.1.0"])
def test_another_version_than_the_compared_one_is_refused_in_one_line(
    installed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def version(name: str) -> str:
        if installed == "none":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserInputError) as error:
        bench_torchft.main(["--quick", "--output", str(tmp_path)], alone(), Console(quiet=True))
    assert str(error.value) == (
        f"torchft must be installed in version {VERSION} (pip install torchft=={VERSION}); got {installed}"
    )


def test_blocks_are_of_whole_windows() -> None:
    for effort in (FULL, QUICK):
        assert effort.block % WINDOW == effort.untimed % WINDOW == 0
        assert all(WINDOW % steps == 0 for steps in STEPS.values())
    # Width 2 is full after two windows.
    assert FULL.untimed >= 2 * max(STEPS.values())
    assert all(delay < WINDOW for delay in DELAYS.values())
