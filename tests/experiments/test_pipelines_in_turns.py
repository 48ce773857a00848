"""Pipelines that train in turns: weights that differ, a job that fails, and short runs of what compares them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _ranks import run_module
from conftest import needs_root

from experiments.bench_transport_training import check_same_weights
from experiments.pipelines_in_turns import times_of
from experiments.results import load
from pipesgd.errors import RunError

pytestmark = pytest.mark.slow


def test_weights_that_differ_in_one_bit_are_told() -> None:
    linear = {name: SimpleNamespace(module=torch.nn.Linear(3, 2)) for name in ("gloo", "tcp")}
    linear["tcp"].module.load_state_dict(linear["gloo"].module.state_dict())
    check_same_weights(linear)
    with torch.no_grad():
        linear["tcp"].module.bias.view(torch.int32)[0] ^= 1
    with pytest.raises(RunError, match="weights over tcp must be those over gloo; they differ"):
        check_same_weights(linear)


def test_a_job_that_fails_is_told() -> None:
    with pytest.raises(RunError, match=r"the pipelines of experiments.elastic_cost must train; got .*60parsecs"):
        times_of("experiments.elastic_cost", ["60parsecs", "1", "1"], 2, None)


def test_elastic_ranks_next_to_others(tmp_path: Path) -> None:
    done = run_module("experiments.elastic_cost", "--quick", "--links", "loopback", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (row,) = load(tmp_path / "elastic_cost.csv")
    assert min(row["plain_median_s"], row["elastic_median_s"]) > 0


@needs_root
def test_transports_in_training(tmp_path: Path) -> None:
    done = run_module("experiments.bench_transport_training", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = load(tmp_path / "bench_transport_training.csv")
    assert [(row["codec"], row["transport"]) for row in rows] == [
        (codec, transport) for codec in ("int8", "int4") for transport in ("gloo", "tcp", "tls")
    ]
    assert all(row["median_s"] > 0.05 for row in rows)  # what the accelerator takes by itself
