"""Loops timed on a testbed: what the ranks write, and what the rows say."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from _ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from experiments import cpu_time, loops_on_links
from experiments.cpu_time import CpuTime, Used
from experiments.loops import Loop, Piped, Plain
from experiments.loops_on_links import Effort, Workload, make_blocks, measure, summarize
from experiments.results import Row
from pipesgd.data import load_dataset
from pipesgd.ranks import Ranks, alone

FOUND = {
    "alone": {"seconds": [0.1, 0.2, 0.1], "cpu_share": 0.5},
    "DDP": {"seconds": [0.2, 0.4, 0.3], "cpu_share": 0.7},
}


def rows() -> list[Row]:
    return summarize(FOUND, "4 nodes", "DDP")


def test_ratios_are_those_of_rounds() -> None:
    alone_, ddp = rows()
    assert (alone_["median_s"], alone_["times_as_fast_as_ddp"], alone_["cpu_share"]) == (0.1, 2.0, 0.5)
    assert (ddp["times_as_fast_as_ddp"], ddp["rounds"], ddp["title"]) == (1.0, 3, "4 nodes")


class Recorded:
    """A loop that writes down what it is asked to do."""

    model = nn.Identity()

    def __init__(self) -> None:
        self.calls: list[str] = []

    def iterate(self, images: Tensor, labels: Tensor) -> None:
        self.calls.append(f"iterate {int(images)}")

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_pipelines_are_full_at_both_ends_of_what_is_timed_and_empty_after_a_block() -> None:
    loop = Recorded()
    batches = [(torch.tensor(number), torch.tensor(0)) for number in range(4)]
    [block] = make_blocks({"one": loop}, batches, 1).values()
    assert block() > 0
    assert loop.calls == ["iterate 0", "iterate 1", "iterate 2", "iterate 3", "flush"]


def test_cpu_time_is_that_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(1.0, 10.0), (1.5, 12.0), (4.5, 16.0)])
    monkeypatch.setattr(cpu_time, "_now", lambda: next(times))
    monkeypatch.setattr(cpu_time.os, "sched_getaffinity", lambda _: {0, 1})
    cpu = CpuTime()
    assert cpu.used(alone()) == (0.5, 0.5 / 2 / 2)
    assert cpu.used(alone()) == (3.0, 3 / 4 / 2)


def _computing(ranks: Ranks) -> Used:
    cpu, end = CpuTime(), time.process_time() + (0.1 if ranks.rank else 0.0)
    while time.process_time() < end:
        pass
    return cpu.used(ranks)


def _written(ranks: Ranks, folder: str) -> None:
    loops_on_links.load_dataset = lambda *_, **__: load_dataset("digits", None, image_size=8)  # type: ignore[attr-defined]
    workload = Workload(name="mlp", model="mlp", hidden_sizes=(4,), batch_size=2)

    def loops(model: nn.Module, _: Ranks) -> dict[str, Loop]:
        return {"one": Plain(model), "two": Plain(model)}

    measure(workload, loops, ranks, Effort(block=2, rounds=3), Path(folder))


def _by_windows(ranks: Ranks) -> dict[str, list[float]]:
    """Return the weights after a window of two iterations, and those of a rank by itself."""
    found = {}
    for name in ("window", "alone"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        loop: Loop = Piped(model, ranks, local_steps=2, width=1) if name == "window" else Plain(model)
        for _ in range(2):
            loop.iterate(torch.full((4, 3), 1.0 + ranks.rank), torch.tensor([0, 1, 1, 1]))
        loop.flush()
        loop.close()
        found[name] = parameters_to_vector(model.parameters()).tolist()
    return found


@pytest.mark.slow
def test_a_loop_with_local_steps_averages_the_weights_of_ranks() -> None:
    first, second = run_ranks(2, _by_windows)
    assert first["window"] == second["window"]
    assert first["alone"] != second["alone"]
    mean = [(one + other) / 2 for one, other in zip(first["alone"], second["alone"], strict=True)]
    assert first["window"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.slow
def test_all_ranks_cpu_time_is_added_up() -> None:
    first, second = run_ranks(2, _computing)
    assert first == second
    assert first.seconds >= 0.1


@pytest.mark.slow
def test_rank_0_writes_the_times_of_every_round(tmp_path: Path) -> None:
    run_ranks(2, _written, str(tmp_path), process_group=False)
    found = json.loads((tmp_path / "times.json").read_text())
    assert list(found) == ["one", "two"]
    assert all(len(one["seconds"]) == 3 and min(one["seconds"]) > 0 for one in found.values())
    assert all(one["cpu_share"] > 0 for one in found.values())
