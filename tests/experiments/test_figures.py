"""Figures of the paper drawn from other experiments' results: their tables are those of the results."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments import fig05_timing_model, fig06_all_reduces, fig08_codecs, first_screen, style
from experiments.figures import PaperFigure
from experiments.results import RESULTS, Row, save
from tests.experiments._panels import check_axes, labels, panels

DERIVED: dict[str, tuple[PaperFigure, Callable[[], list[Row]]]] = {
    "fig05": (fig05_timing_model.FIGURE, fig05_timing_model.compute),
    "fig06": (fig06_all_reduces.FIGURE, fig06_all_reduces.compute),
    "fig08": (fig08_codecs.FIGURE, fig08_codecs.compute),
    "first_screen": (first_screen.FIGURE, first_screen.compute),
}


@pytest.mark.parametrize("name", list(DERIVED))
def test_the_saved_table_is_what_comes_out_of_the_results_now(name: str) -> None:
    """A failure means that a result or a formula changed: `python -m experiments.figNN_...` makes the table again."""
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


# The README's picture.


def test_a_bar_ends_at_its_number_and_says_how_many_times_as_fast_it_is() -> None:
    rows = first_screen.compute()
    for panel, axes in panels(first_screen.FIGURE, rows).items():
        own = [row for row in rows if row["panel"] == panel]
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([1e3 * row["iteration_s"] for row in own])
        for row, bar, text in zip(own, axes.patches, axes.texts, strict=True):
            assert text.xy[0] == bar.get_width()
            assert text.get_text().split()[0] == f"{bar.get_width():.0f}"
            assert text.get_text().endswith("ms" if row["system"] == "ddp" else "x")
        assert [label.get_text() for label in axes.get_yticklabels()][-1] == "no network at all"
        assert axes.get_title(loc="left").startswith(f"emulated {panel}, width 2: ")


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


@pytest.mark.slow
def test_predictions_are_drawn_as_soon_as_they_were_measured_and_not_before(tmp_path: Path) -> None:
    assert "measured" not in {row["panel"] for row in fig05_timing_model.compute(tmp_path, quick=True)}
    cell = {"kind": "held out", "counts": True, "measured_s": 0.5, "predicted_s": 0.55, "low_s": 0.5, "high_s": 0.6}
    busy = cell | {"kind": "extrapolated", "counts": False}
    save("validate_timing_model", [cell, cell | {"measured_s": 1.0}, busy], folder=tmp_path)
    rows = fig05_timing_model.compute(tmp_path, quick=True)
    axes = panels(fig05_timing_model.FIGURE, rows)["measured"]
    assert labels(axes) == {"held out"}
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
