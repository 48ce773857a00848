"""The examples in the docstrings give the results that they show."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "timing_model.schedules",
        "pipesgd.nested",
        "pipesgd.pipeline.pipelined",
        "pipesgd.systems.servers.waiting",
        "timing_model.all_reduce",
        "timing_model.collective_time",
        "timing_model.iteration",
        "timing_model.jitter",
        "timing_model.simulate_messages",
        "timing_model.gloo",
        "timing_model.params",
        "timing_model.parameter_server",
        "timing_model.mesh",
        "timing_model.inside",
        "timing_model.memory",
        "timing_model.simulate",
        "timing_model.trace",
        "timing_model.toml_io",
        "timing_model.units",
    ],
)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
