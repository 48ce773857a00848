"""The comparison on a slow line: what it asks for, and what its rows say."""

from __future__ import annotations

import shlex

import pytest
import torch
from _ranks import run_ranks
from torch import nn

from experiments import bench_low_rank
from experiments.bench_low_rank import ALONE, ATTACH, CONFIGURATIONS, DDP, LOW_RANK, SETTINGS, Cell, Setting, rows_of
from experiments.systems.workloads import WORKLOADS
from pipesgd.cli import parse as parse_training
from pipesgd.ranks import Ranks


@pytest.mark.parametrize("words", CONFIGURATIONS.values())
def test_every_configuration_is_one_that_training_takes(words: str) -> None:
    for setting in SETTINGS.values():
        assert parse_training(shlex.split(f"{WORKLOADS[setting.workload].words} {words}"))


def test_ratios_are_of_times_of_the_same_rounds() -> None:
    cell = Cell(
        commit="c",
        seconds={ALONE: [0.1, 0.2], DDP: [4.0, 8.0], LOW_RANK: [0.2, 0.2]},
        communication={LOW_RANK: 0.15},
        wire_bytes={LOW_RANK: 1000.0},
    )
    alone, ddp, low_rank = rows_of(Setting(workload="mlp", nodes=5), cell)
    assert low_rank["times_as_fast_as_ddp_median"] == 30  # of 20 and 40
    assert (low_rank["times_as_long_as_alone_low"], low_rank["times_as_long_as_alone_high"]) == (1, 2)
    assert (low_rank["communication_s"], low_rank["wire_bytes_of_a_rank"], low_rank["by"]) == (0.15, 1000, "command")
    assert (alone["times_as_fast_as_ddp_median"], ddp["communication_s"]) == (40, None)


def _loops(ranks: Ranks) -> dict[str, list[bool]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))
    batch = torch.ones(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)
    moved = {}
    for name, loop in bench_low_rank.make_loops(model, ranks).items():
        for _ in range(3):
            loop.iterate(*batch)
        loop.flush()
        loop.close()
        moved[name] = [
            not one.equal(other) for one, other in zip(loop.model.parameters(), model.parameters(), strict=True)
        ]
    return moved


@pytest.mark.slow
def test_every_loop_with_attach_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_low_rank, "ACCELERATOR", "1ms")
    for moved in run_ranks(2, _loops):
        assert [name for name, of_loop in moved.items() if not all(of_loop)] == []
        assert len(moved) == 5


def test_attach_is_timed_where_the_command_is() -> None:
    for setting in SETTINGS.values():
        if setting.by == ATTACH:
            assert f"{setting.workload}, {setting.nodes} nodes, command" in SETTINGS
