"""The loop of experiments.bench_torchft with the real torchft: ``make test-integrations``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _runs import run_scenario

from experiments.results import REPOSITORY

pytestmark = pytest.mark.slow


def test_torchft_without_a_delay_is_our_diloco_and_every_window_is_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))  # where the program finds the experiment
    answers = run_scenario(Path(__file__).with_name("_torchft_program.py"), "diloco", tmp_path)
    for found in answers:
        at_once, delayed, expected = (found[name] for name in ("delay 0", "delay 4", "expected"))
        torch.testing.assert_close(at_once["weights"], expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(delayed["weights"], expected, rtol=1e-3)
        assert torch.equal(delayed["weights"], answers[0]["delay 4"]["weights"])
        for one in (at_once, delayed):
            assert one["refused"] == "torchft must exchange 2.125 windows; got 2"
