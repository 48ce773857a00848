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
    shown = [row for row in rows if fig01_schedules.FIGURE.has(row)]
    assert {row["panel"] for row in shown} == {f"{name}, measured" for name in names}
    begun = {row["iteration"] for row in shown if (row["panel"], row["who"]) == (f"{names[0]}, measured", "rank 0")}
    assert fig01_schedules.begun(shown, f"{names[0]}, measured") == len(begun) == 2
    assert "begins 2 iterations with a parameter server" in fig01_schedules.message(shown)
    computed = [row for row in rows if row["panel"].endswith("measured") and row["what"] == COMPUTATION]
    assert min(row["start"] for row in computed) == 0.0


# fig02: parts of an iteration.


def measured() -> fig02_breakdown.Measured:
    parts = {"forward": 1.0, "backward": 2.0, "update": 0.5, "waiting": 1.5, "other": 0.1, "communication": 3.0}
    predicted = {"total": 5.0, "compute": 3.5, "wire": 1.0, "codec": 0.4, "jitter": 0.1}
    return fig02_breakdown.Measured(
        commit="c0ffee", measured={"ddp": parts | {"iteration": 5.1}}, predicted={"ddp": predicted}
    )


def test_measured_bars_have_marks_at_their_predictions_and_the_servers_time_is_written() -> None:
    rows = fig02_breakdown.tabulate({"mlp": measured()})
    axes = panels(fig02_breakdown.FIGURE, rows)["mlp"]
    check_axes(axes)
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]  # type: ignore[attr-defined]
    assert bars == [(0, pytest.approx(3.6)), (pytest.approx(3.6), 1.5)]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[5.0, 0.0]]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["DDP"]
    server = [row | {"method": "ps-sync", "iteration": 7.25} for row in rows]
    [axes] = panels(fig02_breakdown.FIGURE, [*rows, *server]).values()
    assert axes.get_title(loc="left") == "MLP (server: 7.2 s)"
    assert len(axes.patches) == 2


def test_the_message_and_the_caption_of_the_breakdown_are_of_its_table() -> None:
    rows = fig02_breakdown.tabulate({"mlp": measured()})
    late = [row | {"method": "width 2, int8", "waiting": 0.51} for row in rows]
    assert fig02_breakdown.message([*rows, *late]) == (
        "On emulated links of 200 Mbit/s, ranks wait for 29% to 29% of an iteration with DDP, "
        "and for 10% to 10% of an iteration with width 2, int8"
    )
    times = {(row["panel"], row["method"], row["kind"]): row["iteration"] for row in fig02_breakdown.FIGURE.table()}
    for codec in ("int8", "int4"):
        predicted, found = (times["convnet", f"width 2, {codec}", kind] for kind in ("predicted", "measured"))
        assert 1 - predicted / found == pytest.approx(1 / 5, abs=0.03), "as the caption says"


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
    assert labels(axes) == {*fig07_layerwise.TITLES.values(), "measured, lowest to highest"}
    own = [row for row in rows if (row["series"], row["kind"]) == (fig07_layerwise.PIPELINED, "measured")]
    for row in own:
        row["seconds"] *= row["parts"]
    assert fig07_layerwise.message(rows) == (
        "A pipeline that sends its gradient in 32 parts takes 32.0 times as long as one that sends it whole "
        "(emulated links, 5 ms of latency)"
    )


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
