"""The bench on a GPU, as far as it is seen without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from experiments import bench_gpu
from experiments.bench_gpu import CASES, PIPELINES, Finished, check_gpu, cluster_of
from experiments.loops_on_links import ALONE, DDP, wire_seconds_of
from pipesgd.errors import UserInputError


def test_without_a_gpu_the_bench_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserInputError, match=r"^bench_gpu must run on a machine with a GPU; torch finds none$"):
        check_gpu()


def test_the_wires_time_is_that_of_the_encoded_gradient() -> None:
    found = wire_seconds_of(cluster_of("4x10gbit"), 8_000_000, PIPELINES)
    assert found[ALONE] == 0
    assert found[DDP] == pytest.approx(1.5 * 32e6 * 8 / 10e9, rel=0.06)  # headers
    assert found[DDP] / found["width 2, int4"] == pytest.approx(32 / 4, rel=0.05)  # and a scale for each block
    assert {name for case in CASES.values() for name in case.contenders} <= set(found)


def test_an_iteration_ends_when_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(bench_gpu.torch.cuda, "synchronize", lambda: calls.append("waited"))
    loop = SimpleNamespace(model=None, iterate=lambda images, labels: calls.append("iterated"))
    finished = Finished(loop)  # type: ignore[arg-type]
    finished.iterate(torch.zeros(1), torch.zeros(1))
    assert calls == ["iterated", "waited"]
