"""Figures of the paper with their own measurements: the evaluation of a measurement, and the panels."""

from __future__ import annotations

from typing import Any

import pytest

from experiments import fig01_schedules, fig02_breakdown, fig07_layerwise
from experiments.limits import Cluster, ring_limit
from experiments.testbed import Link
from pipesgd.cli import parse as parse_training
from tests.experiments._panels import check_axes, labels, panels
from tests.experiments._traces import trace_of
from timing_model.trace import COMPUTATION, UPDATE

# fig01: schedules.


def test_a_rank_that_waits_between_two_updates_has_two() -> None:
    spans = fig01_schedules.as_timeline(trace_of(2, wait=1.5), "all-reduce")
    own = [one for one in spans if (one.who, one.iteration) == ("rank 1", 1)]
    assert [(one.what, one.end - one.start) for one in own] == [
        (COMPUTATION, pytest.approx(3.0)),
        (UPDATE, pytest.approx(0.5)),
        (UPDATE, pytest.approx(0.5)),
        ("all-reduce", pytest.approx(1.5)),
    ]


def test_simulated_and_traced_schedules_stand_above_each_other_on_one_axis() -> None:
    cluster = Cluster(nodes=2, link=Link(rate=200e6))
    nbytes = 4_000_000
    waits = dict(zip(fig01_schedules.SCHEDULES, (4.0, 2.0, 0.0), strict=True))
    iterations = fig01_schedules.ITERATIONS
    rows = fig01_schedules.tabulate({name: trace_of(iterations, wait) for name, wait in waits.items()}, cluster, nbytes)
    drawn = panels(fig01_schedules.FIGURE, rows)
    names = list(fig01_schedules.SCHEDULES)
    assert list(drawn) == [f"{name}, {kind}" for kind in ("simulated", "measured") for name in names]
    assert {axes.get_xlim() for axes in drawn.values()} == {(0.0, 2 * (1 + 2 + 1 + 4 + 0.25))}
    exchange = next(row for row in rows if row["panel"] == f"{names[1]}, simulated" and row["what"] == "all-reduce")
    assert exchange["end"] - exchange["start"] == pytest.approx(ring_limit(cluster, nbytes), abs=1e-5)
    computed = [row for row in rows if row["panel"].endswith("measured") and row["what"] == COMPUTATION]
    assert min(row["start"] for row in computed) == 0.0


# fig02: parts of an iteration.


def measured() -> fig02_breakdown.Measured:
    parts = {"forward": 1.0, "backward": 2.0, "update": 0.5, "waiting": 1.5, "other": 0.1, "communication": 3.0}
    predicted = {"total": 5.0, "compute": 3.5, "wire": 1.0, "codec": 0.4, "jitter": 0.1}
    return fig02_breakdown.Measured(
        commit="c0ffee", measured={"ddp": parts | {"iteration": 5.1}}, predicted={"ddp": predicted}
    )


def test_measured_bars_have_predicted_ones_beside_them() -> None:
    rows = fig02_breakdown.tabulate({"mlp": measured()})
    axes = panels(fig02_breakdown.FIGURE, rows)["mlp"]
    check_axes(axes)
    ends: dict[float, float] = {}
    for bar in axes.patches:
        place = round(bar.get_y() + bar.get_height() / 2, 2)  # type: ignore[attr-defined]
        ends[place] = max(ends.get(place, 0.0), bar.get_x() + bar.get_width())  # type: ignore[attr-defined]
    assert ends == {-0.2: pytest.approx(5.1), 0.2: pytest.approx(5.0)}
    assert {"forward", "waiting for communication", "predicted wait for the network"} <= labels(axes)


def test_every_method_of_the_breakdown_is_one_that_trains_and_that_can_be_predicted() -> None:
    from experiments.workloads import WORKLOADS

    for workload in fig02_breakdown.CHOSEN:
        for words in fig02_breakdown.METHODS.values():
            parse_training(f"{WORKLOADS[workload]} {words}".split())


# fig07: layer-wise.


def test_cutting_helps_under_the_backward_pass_and_only_costs_in_a_pipeline() -> None:
    times = [
        {"series": "computation", "parts": 1, "forward": 0.1, "backward": 0.2, "update": 0.0, "seconds": 0.3},
        *(
            {"series": series, "parts": parts, "seconds": seconds, "forward": None, "backward": None, "update": None}
            for series in fig07_layerwise.COLOURS
            for parts in (1, 4, 32)
            for seconds in (0.5, 0.6)
        ),
    ]
    rows = fig07_layerwise.tabulate(times, nodes=4, latency=5e-3)
    line: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["kind"] == "model":
            line.setdefault(row["series"], {})[row["parts"]] = row["seconds"]
    layerwise, after, pipelined = (line[series] for series in fig07_layerwise.COLOURS)
    assert layerwise[4] < layerwise[1]
    assert after[32] > after[4] > after[1]
    assert pipelined[32] > pipelined[1]
    axes = panels(fig07_layerwise.FIGURE, rows)["5 ms of latency"]
    check_axes(axes)
    assert labels(axes) == {*fig07_layerwise.COLOURS, "measured; lowest to highest"}


def test_an_all_reduce_in_parts_reduces_every_value_once() -> None:
    import torch

    class Doubling:
        calls = 0

        def __call__(self, flat: torch.Tensor, residual: Any = None, key: int = 0, finish: Any = None) -> None:
            self.calls += 1
            flat *= 2

        def wire_bytes(self, flat: torch.Tensor) -> int:
            return flat.numel()

    doubling, values = Doubling(), torch.arange(10.0)
    in_parts = fig07_layerwise.InParts(doubling, 4)
    in_parts(values)
    assert torch.equal(values, 2 * torch.arange(10.0))
    assert doubling.calls == 4
    assert in_parts.wire_bytes(values) == 10
