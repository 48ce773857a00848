"""The examples in the docstrings say what happens."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "pipesgd.collectives.schedule",
        "pipesgd.strategies.pipelined",
        "timing_model.all_reduce",
        "timing_model.collectives",
        "timing_model.iteration",
        "timing_model.jitter",
        "timing_model.messages",
        "timing_model.native",
        "timing_model.params",
        "timing_model.servers",
        "timing_model.simulate",
        "timing_model.spans",
        "timing_model.tables",
        "timing_model.units",
    ],
)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
