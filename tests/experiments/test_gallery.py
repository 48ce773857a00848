"""Pictures of the pages: of the current results, legible where they are shown, and none is missing or left over."""

from __future__ import annotations

import functools
import itertools
import posixpath
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from experiments import first_screen, gallery
from experiments.figures import PAGE_PX, PHONE_PX
from experiments.results import REPOSITORY, RESULTS
from experiments.style import styled

pytestmark = pytest.mark.slow

MOST_DIFFERENT = 0.002
"""Mean difference of two pictures of one figure, as a fraction of 1: fonts may move by a pixel between versions."""
LEAST_TEXT_PX = 9
POINTS_PER_INCH = 72
PICTURES = {one.name: one for one in (*gallery.FIGURES, *gallery.OTHERS)}
DRAWN = [one for one in PICTURES.values() if (RESULTS / one.file).exists()]
of_every_picture = pytest.mark.parametrize("name", [one.name for one in DRAWN])


def test_the_page_is_that_of_the_results() -> None:
    """After a change of the results, `make figures` writes the page again."""
    assert (gallery.DOCS / gallery.PAGE).read_text(encoding="utf-8") == gallery.page()


def different(first: Path, second: Path) -> float:
    """Return the mean difference of two pictures' pixels, as a fraction of 1; 1 if their sizes differ."""
    before, after = imread(first), imread(second)
    return float(np.abs(before - after).mean()) if before.shape == after.shape else 1.0


@of_every_picture
def test_the_pictures_are_those_of_the_results(name: str, tmp_path: Path) -> None:
    """After a change of the results, `make figures` draws the pictures again."""
    one = PICTURES[name]
    assert different(one.save(one.table(), tmp_path), RESULTS / f"{name}.png") < MOST_DIFFERENT


def test_pictures_of_other_results_differ(tmp_path: Path) -> None:
    one = PICTURES["systems"]
    rows = one.table()
    for row in rows:
        if row["system"] == "pipesgd-int8" and row["rate"] == "200mbit":
            row["times_as_fast_as_ddp"] *= 2
    assert different(one.save(rows, tmp_path), RESULTS / "systems.png") > MOST_DIFFERENT


# ---- Legible where they are shown


@functools.cache
def drawn(name: str) -> Figure:
    figure = PICTURES[name].draw(PICTURES[name].table())
    with styled():
        FigureCanvasAgg(figure).draw()
    return figure


def texts(figure: Figure) -> list[Text]:
    """Return the texts that are seen. Ticks beyond an axis have texts, too, which are not drawn."""
    found: list[Text] = []
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text().strip():
            found.append(text)
    ticks = {
        id(text)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.majorTicks, *axis.minorTicks)
        for text in (tick.label1, tick.label2)
    }
    seen = {
        id(text)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis._update_ticks()  # type: ignore[attr-defined]  # those within the axis
        for text in (tick.label1, tick.label2)
    }
    return [text for text in found if id(text) not in ticks or id(text) in seen]


def too_small(figure: Figure, shown_px: float) -> dict[str, float]:
    """Return the texts that are lower than ``LEAST_TEXT_PX``, with their px, in a picture shown at ``shown_px``."""
    px_per_point = shown_px / figure.get_size_inches()[0] / POINTS_PER_INCH
    sizes = {text.get_text(): text.get_fontsize() * px_per_point for text in texts(figure)}
    return {text: size for text, size in sizes.items() if size < LEAST_TEXT_PX}


@of_every_picture
def test_no_text_is_too_small_to_be_read_where_it_is_shown(name: str) -> None:
    assert len(texts(drawn(name))) > 5
    assert too_small(drawn(name), PICTURES[name].shown_px) == {}


def test_the_texts_of_a_wide_picture_are_too_small() -> None:
    figure = Figure(figsize=(13.8, 3))
    figure.subplots().set_title("wide", fontsize=9)
    assert too_small(figure, PAGE_PX)["wide"] == pytest.approx(6.8, abs=0.05)


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Return the texts that lie over each other, or, with an empty text, beyond the picture's edge."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [(text.get_text(), text.get_window_extent(renderer).padded(-1)) for text in texts(figure)]
    whole = figure.bbox
    cut = [(text, "") for text, box in boxes if not (whole.x0 <= box.x0 and box.x1 <= whole.x1)]
    cut += [(text, "") for text, box in boxes if not (whole.y0 <= box.y0 and box.y1 <= whole.y1)]
    pairs = itertools.combinations(boxes, 2)
    return cut + [(one, other) for (one, a), (other, b) in pairs if Bbox.intersection(a, b) is not None]


@of_every_picture
def test_no_text_lies_over_another_or_beyond_the_edge(name: str) -> None:
    assert overlaps(drawn(name)) == []


def test_texts_over_each_other_and_beyond_the_edge_are_found() -> None:
    figure = Figure(figsize=(2, 2))
    for x, text in ((0.1, "one text"), (0.15, "another"), (0.9, "beyond")):
        figure.text(x, 0.5, text)
    FigureCanvasAgg(figure).draw()
    assert overlaps(figure) == [("beyond", ""), ("one text", "another")]


@of_every_picture
def test_the_message_has_numbers_and_stands_above_the_panels(name: str) -> None:
    [title] = [text for text in drawn(name).texts if text.get_fontweight() == "bold"]
    assert re.search(r"\d", title.get_text())
    assert title.get_text().replace("\n", " ") == PICTURES[name].message(
        [row for row in PICTURES[name].table() if PICTURES[name].has(row)]
    )


def test_links_are_said_to_be_emulated_in_every_picture_of_measurements() -> None:
    """The others are computed on one machine; of accuracy, ranks are simulated, which it says."""
    said = {name for name in PICTURES if any("emulated" in text.get_text() for text in texts(drawn(name)))}
    assert PICTURES.keys() - said == {"accuracy", "fig08_codecs"}


def test_the_readmes_picture_fits_above_the_fold_and_has_one_for_phones() -> None:
    width, height = drawn("first_screen").get_size_inches()
    assert height / width * PAGE_PX <= 330
    assert first_screen.NARROW.shown_px == PHONE_PX


# ---- On pages


def shown() -> set[str]:
    """Return the names of the results' pictures that pages show."""
    found = set()
    for page in (REPOSITORY / "README.md", *gallery.DOCS.glob("*.md")):
        for link in re.findall(r"(?:!\[[^]]*\]\(|src(?:set)?=\")([^)\s\"]+\.png)", page.read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(page.parent.relative_to(REPOSITORY).as_posix(), link))
            assert path.startswith("experiments/results/"), f"{page.name} shows {link}, which no result made"
            found.add(Path(path).stem)
    return found


def test_every_picture_is_drawn_here_and_shown_by_a_page() -> None:
    stored = {path.stem for path in RESULTS.glob("*.png")}
    assert stored == {one.name for one in DRAWN}
    assert shown() | {first_screen.NARROW.name} == stored


def test_a_figure_without_results_is_said_to_be_missing(tmp_path: Path) -> None:
    text = gallery.page(tmp_path)
    for figure in gallery.FIGURES:
        assert f"Not measured yet: python -m experiments.{figure.module or figure.name} does it." in text
    assert "![" not in text


def test_no_two_figures_share_a_name_or_a_title() -> None:
    assert len({one.name for one in gallery.FIGURES}) == len({one.title for one in gallery.FIGURES}) == 9
