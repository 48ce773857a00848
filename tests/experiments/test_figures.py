"""Figures of the paper drawn from other experiments' results: their tables are those of the results."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from experiments import fig05_timing_model, fig06_all_reduces, fig08_codecs, first_screen, style
from experiments.figures import PAGE_PX, PX_PER_INCH, PaperFigure
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


# All figures.


def figure_of(plot: Callable[[list[Row], Axes], Axes], **options: Any) -> PaperFigure:
    return PaperFigure(
        name="bench", title="", caption="", message=lambda rows: f"{len(rows)} rows", plot=plot, height=1.5, **options
    )


def test_a_figure_has_a_panel_for_every_value_and_its_message_above(tmp_path: Path) -> None:
    drawn: list[list[Row]] = []

    def plot(rows: list[Row], axes: Axes) -> Axes:
        drawn.append(rows)
        return axes

    rows = [{"name": "a"}, {"name": "b"}, {"name": "left out"}]
    figure = figure_of(plot, by=("name",), has=lambda row: row["name"] != "left out")
    assert figure.save(rows, tmp_path).read_bytes().startswith(b"\x89PNG")
    assert drawn == [[rows[0]], [rows[1]]]
    assert [text.get_text() for text in figure.draw(rows).texts] == ["2 rows"]
    assert figure.draw_panels(rows).texts == []


def test_panels_are_told_apart_by_several_columns_and_fill_line_after_line() -> None:
    titles: list[list[str]] = []

    def plot(rows: list[Row], axes: Axes) -> Axes:
        titles.append([row["name"] for row in rows])
        return axes

    rows = [{"p": p, "codec": codec, "name": f"{p} {codec}"} for codec in ("a", "b") for p in (2, 2, 3)]
    figure = figure_of(plot, by=("p", "codec"), abreast=3).draw(rows)
    assert titles == [["2 a", "2 a"], ["3 a"], ["2 b", "2 b"], ["3 b"]]
    assert len(figure.axes) == 4
    assert figure.get_size_inches() * PX_PER_INCH == pytest.approx([PAGE_PX, 2 * 1.5 * PX_PER_INCH])


# The README's picture.


def test_a_bar_ends_at_its_number_and_says_how_many_times_as_fast_it_is() -> None:
    rows = first_screen.compute()
    set_off = []
    for panel, axes in panels(first_screen.FIGURE, rows).items():
        own = [row for row in rows if row["panel"] == panel]
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([1e3 * row["iteration_s"] for row in own])
        for row, bar, text in zip(own, axes.patches, axes.texts, strict=True):
            assert text.xy[0] == bar.get_width()
            assert text.get_text().split()[0] == f"{bar.get_width():.0f}"
            assert text.get_text().endswith("ms" if row["system"] == "ddp" else "x")
        assert [label.get_text() for label in axes.get_yticklabels()][-1] == "no network at all"
        assert axes.get_title(loc="left") == f"emulated {panel}"
        set_off += [text.get_text() for text in axes.texts if text.get_fontweight() == "bold"]
    [slow, fast] = [row for row in rows if row["system"] == "pipesgd-int8"]
    ratio = f"{slow['times_as_fast_as_ddp']:.1f}x"
    assert set_off == [f"{1e3 * slow['iteration_s']:.0f} ms   {ratio}"]
    assert first_screen.message(rows) == (
        f"pipesgd, int8, width 2: {ratio} as fast as DDP on links of 200 Mbit/s, "
        f"{fast['times_as_fast_as_ddp']:.1f}x on links of 1 Gbit/s"
    )


# fig05: the timing model.


def test_the_panels_of_the_timing_model() -> None:
    rows = fig05_timing_model.compute(quick=True)
    drawn = panels(fig05_timing_model.FIGURE, rows)
    for axes in drawn.values():
        check_axes(axes)
    assert {"no jitter", "10% jitter", "30% jitter"} < labels(drawn["width"])
    for name in ("ranks", "bandwidth", "latency"):
        assert labels(drawn[name]) == {style.method_title(method) for method in fig05_timing_model.METHODS}
    regions = {text.get_text() for text in drawn["border"].get_legend().get_texts()}
    # Where width 2 needs no codec, a codec in buckets is as good without late gradients.
    assert regions == fig05_timing_model.REGIONS.keys() - {"width 2"}


def test_simulated_iterations_are_on_the_lines() -> None:
    rows = [row for row in fig05_timing_model.FIGURE.table() if row["panel"] == "width"]
    assert {row["x"] for row in rows} == set(range(1, 7))
    simulated = {(row["series"], row["x"]): row["y"] for row in rows if row["kind"] == "simulated"}
    for row in rows:
        assert simulated[row["series"], row["x"]] == pytest.approx(row["y"], rel=0.06)


def test_what_to_do_where() -> None:
    region = fig05_timing_model.region
    assert region(10.0, 100e9) == "synchronous"
    assert region(0.3, 25e9) == "synchronous, codec"
    assert region(2.0, 1e9) == "synchronous, codec", "with 16 buckets"
    assert region(0.3, 1e9) == "width 2, codec"
    assert region(0.3, 100e6) == "local steps"


def test_no_late_gradient_is_advised_where_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = dict.fromkeys(fig05_timing_model.METHODS, 2.0)

    def advised(changed: dict[str, float]) -> str:
        monkeypatch.setattr(fig05_timing_model, "seconds", lambda name, **_: (times | changed)[name])
        return fig05_timing_model.region(1.0, 1e9)

    assert advised({"width 2": 1.0}) == "width 2"
    assert advised({"width 2": 1.0, "D-Sync, int4": 1.04}) == "synchronous, codec"
    assert advised({"width 2": 1.0, "D-Sync, int4": 1.04, "ddp": 1.04}) == "synchronous"
    assert advised({"width 2, int8": 1.0, "D-Sync, int4": 1.06}) == "width 2, codec"


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


def test_the_message_names_the_fastest_and_the_slowest_as_measured() -> None:
    def point(nbytes: int, p: int, name: str, seconds: float) -> Row:
        return {"kind": "measured", "nbytes": nbytes, "p": p, "algorithm": name, "seconds": seconds}

    small = [point(4_000, 4, "ring", 0.001), point(4_000, 4, "native", 0.003), point(4_000, 3, "native", 9.0)]
    large = [point(16_000_000, 5, "ring", 4.0), point(16_000_000, 5, "native", 2.0)]
    model = {"kind": "model", "nbytes": 4_000, "p": 16, "algorithm": "ring", "seconds": 0.0}
    assert fig06_all_reduces.message([*small, *large, model]) == (
        "On emulated links, for 4 kB, ring is 3.0 times as fast as native (4 ranks); "
        "for 16 MB, native is 2.0 times as fast as ring (5 ranks)"
    )


def test_for_the_smallest_buffers_points_lie_as_far_off_the_lines_as_the_caption_says() -> None:
    rows = [row for row in fig06_all_reduces.FIGURE.table() if row["nbytes"] == 4_000 and row["panel"] == "4 ranks"]
    of = {(row["algorithm"], row["kind"]): row["seconds"] for row in rows}
    ratios = [of[name, "model"] / of[name, "measured"] for name in style.ALL_REDUCES]
    assert f"up to {max(max(one, 1 / one) for one in ratios):.1f} times off" in fig06_all_reduces.FIGURE.caption


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
    assert list(drawn) == ["bits", "error", "ranks", "time", "accuracy, mlp", "accuracy, convnet"]
    for name, axes in drawn.items():
        check_axes(axes)
        if name != "ranks":
            assert [text.get_text() for text in axes.get_yticklabels()] == list(style.CODECS)
    bars = [round(bar.get_width()) for bar in drawn["bits"].patches]
    assert bars[0] == 32
    assert len(bars) == len(style.CODECS)
    [line] = [one for one in drawn["accuracy, mlp"].lines if list(one.get_xdata()) == [-0.81]]
    assert list(line.get_ydata()) == [list(style.CODECS).index("ternary")]


def test_the_message_on_codecs_leaves_out_the_other_rounding() -> None:
    def end(codec: str, variant: str, bits: float, points: float) -> Row:
        return {"panel": "accuracy, mlp", "codec": codec, "variant": variant, "x": bits, "y": points}

    rows = [end("int4", "int4", 4.1, 0.21), end("int8", "int8", 8.0, -0.1), end("int4", "int4 stochastic", 4.1, -5.0)]
    rows += [end("sign", "sign", 1.06, -7.2), {"panel": "time", "codec": "int8", "variant": "", "x": 8.0, "y": 9.0}]
    assert fig08_codecs.message(rows) == (
        "Codecs of 4 and more bits end within 0.2 points of uncompressed training; sign, of 1 bit, up to 7 points "
        "below it"
    )


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
