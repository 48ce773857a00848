"""The figures of the paper: their tables are those of the results, and their panels say what they should."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from experiments import (
    fig01_schedules,
    fig02_breakdown,
    fig03_convergence,
    fig04_speedups,
    fig05_timing_model,
    fig06_all_reduces,
    fig07_layerwise,
    fig08_codecs,
    style,
)
from experiments.figures import PaperFigure
from experiments.limits import Cluster, ring_limit
from experiments.results import RESULTS, Row, load, save
from experiments.testbed import Link
from pipesgd.command_line import parse as parse_training
from tests.experiments._traces import trace_of
from timing_model.spans import COMPUTATION, UPDATE

DERIVED: dict[str, tuple[PaperFigure, Callable[[], list[Row]]]] = {
    "fig04": (fig04_speedups.FIGURE, fig04_speedups.compute),
    "fig05": (fig05_timing_model.FIGURE, fig05_timing_model.compute),
    "fig06": (fig06_all_reduces.FIGURE, fig06_all_reduces.compute),
    "fig08": (fig08_codecs.FIGURE, fig08_codecs.compute),
}


def panels(figure: PaperFigure, rows: list[Row]) -> dict[str, Axes]:
    """Every panel, drawn alone."""
    found = {}
    for name in dict.fromkeys(row["panel"] for row in rows):
        with style.styled():
            axes = Figure().add_subplot()
            assert figure.plot([row for row in rows if row["panel"] == name], axes) is axes
        found[name] = axes
    return found


def labels(axes: Axes) -> set[str]:
    return set(axes.get_legend_handles_labels()[1])


def check_axes(axes: Axes) -> None:
    """Both axes say what they are, and in which unit, where there is one."""
    assert axes.get_title(loc="left")
    ticks_have_names = any(label.get_text().isidentifier() for label in axes.get_yticklabels())
    for text in (axes.get_xlabel(), *([] if ticks_have_names else [axes.get_ylabel()])):
        assert text
        if text.startswith("time"):
            assert "(s)" in text or "(ns)" in text


@pytest.mark.parametrize("name", list(DERIVED))
def test_the_saved_table_is_what_comes_out_of_the_results_now(name: str) -> None:
    """If this fails, a result or a formula has changed: `python -m experiments.figNN_...` makes the table again."""
    figure, compute = DERIVED[name]
    saved, now = figure.table(), compute()
    assert len(saved) == len(now)
    for before, after in zip(saved, now, strict=True):
        assert before.keys() == after.keys()
        for column, value in after.items():
            if isinstance(value, float):
                assert before[column] == pytest.approx(value, rel=1e-5), (column, before, after)
            else:
                assert before[column] == value, (column, before, after)


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
    from experiments.contenders import WORKLOADS

    for workload in fig02_breakdown.CHOSEN:
        for words in fig02_breakdown.METHODS.values():
            parse_training(f"{WORKLOADS[workload]} {words}".split())


# fig03: convergence.


def run(values: list[float], failure: str | None = None) -> fig03_convergence.Run:
    points = [[10.0 * (index + 1), 1.5 * (index + 1), value] for index, value in enumerate(values)]
    return fig03_convergence.Run(
        started="2026-11-22", commit="c0ffee", failure=failure, losses=points, accuracies=points[1:]
    )


def test_curves_have_bands_and_a_run_that_diverges_says_so() -> None:
    runs = {
        ("D-Sync", 0): run([2.0, 1.0, 0.5]),
        ("D-Sync", 1): run([2.2, 1.2, 0.7]),
        ("pipelined", 0): run([2.0], failure="loss must be finite"),
        ("ours, int4", 0): run([2.0, 0.9, 0.4]),
    }
    drawn = panels(fig03_convergence.FIGURE, fig03_convergence.tabulate(runs))
    assert len(drawn) == 4
    for axes in drawn.values():
        check_axes(axes)
        assert labels(axes) == {"D-Sync", "pipelined (diverged)", "ours, int4"}
    loss = drawn[fig03_convergence.LOSS_BY_TIME]
    line = next(line for line in loss.lines if line.get_label() == "D-Sync")
    np.testing.assert_allclose(line.get_xdata(), [1.5, 3.0, 4.5])
    np.testing.assert_allclose(line.get_ydata(), [2.1, 1.1, 0.6])
    assert to_hex(str(line.get_color())).upper() == style.METHODS["D-Sync"]
    accuracy = drawn[fig03_convergence.ACCURACY_BY_ITERATION]
    line = next(line for line in accuracy.lines if line.get_label() == "ours, int4")
    np.testing.assert_allclose(line.get_ydata(), [90.0, 40.0])
    np.testing.assert_allclose(line.get_xdata(), [20.0, 30.0])


def test_curves_are_read_from_a_runs_folder_even_if_it_ended_early(tmp_path: Path) -> None:
    lines = [
        {"loss": 4.0 - index, "seconds": {"iteration": 0.5}, "test_accuracy": 0.8 if index == 1 else None}
        for index in range(4)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    losses, accuracies = fig03_convergence.read_curves(tmp_path, bins=2)
    assert losses == [[2.0, 1.0, 3.5], [4.0, 2.0, 1.5]]
    assert accuracies == [[2.0, 1.0, 0.8]]
    (tmp_path / "summary.json").write_text(json.dumps({"final": {"test_accuracy": 0.9}}))
    assert fig03_convergence.read_curves(tmp_path)[1][-1] == [4.0, 2.0, 0.9]


def test_every_run_of_the_convergence_is_one_that_trains() -> None:
    for words in fig03_convergence.METHODS.values():
        config = parse_training(f"{fig03_convergence.RECIPE} --epochs 4 {words}".split())
        assert config.data.batch_size == 128


# fig04: speed-ups.


def test_speedups_are_those_of_the_comparisons() -> None:
    rows = {(row["panel"], row["method"]): row for row in fig04_speedups.compute()}
    panel = "an iteration: mlp, 4 nodes at 200 Mbit/s"
    compared = {row["contender"]: row for row in load(RESULTS / "compare_mlp_4x200mbit.csv")}
    pipelined = compared["width 2, ring"]["ratio_to_ddp_median"]
    assert rows[panel, "width 2, ring"]["over_ddp"] == pytest.approx(1 / pipelined)
    ratio = compared["ps-sync"]["iteration_median_s"] / compared["width 2, ring"]["iteration_median_s"]
    assert rows[panel, "width 2, ring"]["over_server"] == pytest.approx(ratio, rel=0.05)
    for row in rows.values():
        for over in ("over_server", "over_ddp"):
            if row[f"{over}_low"] is not None:
                assert row[f"{over}_low"] <= row[over] <= row[f"{over}_high"]
    raced = rows["to 84.0%: fashion-mnist-mlp, 4 nodes at 200 Mbit/s", "width 2, int4"]
    assert raced["over_server"] > 5


def test_a_comparison_shows_both_baselines_and_the_accuracy() -> None:
    rows = fig04_speedups.FIGURE.table()
    drawn = panels(fig04_speedups.FIGURE, rows)
    assert len(drawn) == len(fig04_speedups.COMPARISONS) + len(fig04_speedups.run_races())
    for axes in drawn.values():
        assert labels(axes) == {"over ps-sync", "over ddp"}
        assert axes.get_xlabel() == "times as fast"
    texts = [text.get_text() for text in drawn[rows[-1]["panel"]].get_yticklabels()]
    assert texts[-1].startswith("width 2, int4\n")
    assert texts[-1].endswith("% accuracy")


# fig05: the timing model.


def test_the_panels_of_the_timing_model() -> None:
    rows = fig05_timing_model.compute(quick=True)
    drawn = panels(fig05_timing_model.FIGURE, rows)
    for axes in drawn.values():
        check_axes(axes)
    assert {"no jitter", "10% jitter", "30% jitter"} < labels(drawn["width"])
    for name in ("ranks", "bandwidth", "latency"):
        assert labels(drawn[name]) == set(fig05_timing_model.METHODS)
    regions = {text.get_text() for text in drawn["border"].get_legend().get_texts()}
    assert regions == set(fig05_timing_model.REGIONS)


def test_simulated_iterations_are_on_the_lines() -> None:
    rows = [row for row in fig05_timing_model.FIGURE.table() if row["panel"] == "width"]
    assert {row["x"] for row in rows} == set(range(1, 7))
    simulated = {(row["series"], row["x"]): row["y"] for row in rows if row["kind"] == "simulated"}
    for row in rows:
        assert simulated[row["series"], row["x"]] == pytest.approx(row["y"], rel=0.06)


def test_what_to_do_where() -> None:
    region = fig05_timing_model.region
    assert region(10.0, 100e9) == "synchronous is fine"
    assert region(0.3, 25e9) == "pipeline"
    assert region(0.3, 5e9) == "pipeline and compress"
    assert region(0.3, 100e6) == "take local steps instead"


def test_predictions_are_drawn_as_soon_as_they_were_measured_and_not_before(tmp_path: Path) -> None:
    assert "measured" not in {row["panel"] for row in fig05_timing_model.compute(tmp_path, quick=True)}
    cell = {"setting": "4 x 200mbit mlp", "measured_s": 0.5, "predicted_s": 0.55, "low_s": 0.5, "high_s": 0.6}
    save("validate_timing_model", [cell, cell | {"measured_s": 1.0}], folder=tmp_path)
    rows = fig05_timing_model.compute(tmp_path, quick=True)
    axes = panels(fig05_timing_model.FIGURE, rows)["measured"]
    assert labels(axes) == {"4 x 200mbit mlp"}
    identity = axes.lines[-1]
    np.testing.assert_allclose(identity.get_xdata(), identity.get_ydata())


# fig06: all-reduces.


def test_lines_go_through_the_points_where_the_wire_decides() -> None:
    rows = fig06_all_reduces.FIGURE.table()
    model = {(row["algorithm"], row["p"], row["nbytes"]): row["seconds"] for row in rows if row["kind"] == "model"}
    large = [row for row in rows if row["kind"] == "measured" and row["nbytes"] == 16_000_000]
    assert len(large) == 2 * 3 * 5  # in a panel of p, and in one of the size
    for row in large:
        measured_s = row["seconds"]
        assert model[row["algorithm"], row["p"], 16_000_000] == pytest.approx(measured_s, rel=0.3)


def test_crossovers_are_where_the_fastest_changes() -> None:
    def point(x: float, name: str, seconds: float) -> Row:
        return {"kind": "model", "nbytes": x, "algorithm": name, "seconds": seconds}

    times = {"ring": (4.0, 4.0, 4.0, 4.0), "native": (2.0, 3.0, 4.1, 5.0)}
    rows = [point(x, name, own[x]) for name, own in times.items() for x in range(4)]
    assert fig06_all_reduces.crossovers(rows, "nbytes") == [(3, "ring")]


def test_the_panels_of_the_all_reduces() -> None:
    drawn = panels(fig06_all_reduces.FIGURE, fig06_all_reduces.compute(quick=True))
    assert list(drawn) == ["3 ranks", "4 ranks", "5 ranks", "4 kB", "1 MB", "16 MB"]
    for axes in drawn.values():
        check_axes(axes)
        assert labels(axes) == {*style.ALL_REDUCES, "measured (median)"}
        colours = {str(line.get_label()): str(line.get_color()) for line in axes.lines if line.get_label() == "ring"}
        assert colours == {"ring": style.ALL_REDUCES["ring"]}


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


# fig08: codecs.


def test_fewer_bits_mean_a_larger_error_and_more_ranks_too() -> None:
    errors = {(row["codec"], row["x"]): row["y"] for row in fig08_codecs.FIGURE.table() if row["panel"] == "ranks"}
    for codec in ("bf16", "int8", "int4", "ternary"):
        of_ranks = [errors[codec, p] for p in fig08_codecs.WORLD_SIZES]
        assert of_ranks == sorted(of_ranks)
    assert errors["bf16", 4] < errors["int8", 4] < errors["int4", 4] < errors["ternary", 4]
    # Rounding to nearest in blocks of 1024 normal values, whose largest is about 3.2: two roundings for two ranks.
    step = 3.2 / 127
    assert errors["int8", 2] == pytest.approx(step / np.sqrt(12) * np.sqrt(1 + 2) / np.sqrt(2), rel=0.2)


def test_the_panels_of_the_codecs() -> None:
    rows = fig08_codecs.compute(quick=True)
    drawn = panels(fig08_codecs.FIGURE, rows)
    assert list(drawn) == ["error", "ranks", "time", "accuracy, mlp", "accuracy, convnet"]
    for axes in drawn.values():
        check_axes(axes)
        figure = axes.get_figure()
        assert figure is not None
        assert [text.get_text() for text in figure.legends[0].get_texts()] == list(style.CODECS)
    assert drawn["accuracy, mlp"].get_ylabel() == "difference to fp32 (points)"


def test_points_of_accuracy_are_those_of_the_experiment() -> None:
    [row] = [
        row
        for row in fig08_codecs.FIGURE.table()
        if row["panel"] == "accuracy, mlp" and row["variant"] == "ternary nearest"
    ]
    assert row["y"] == -0.81


def test_a_missing_result_is_an_error_and_no_empty_panel(tmp_path: Path) -> None:
    shutil.copy(RESULTS / fig08_codecs.SPEEDS, tmp_path)
    with pytest.raises(FileNotFoundError, match=fig08_codecs.ACCURACIES):
        fig08_codecs.compute(tmp_path, quick=True)
