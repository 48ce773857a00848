"""The gallery shows the current results, and no figure is missing from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from experiments import gallery
from experiments.figures import PaperFigure
from experiments.results import RESULTS

pytestmark = pytest.mark.slow

MOST_DIFFERENT = 0.002
"""Mean difference of two pictures of one figure, as a fraction of 1: fonts may move by a pixel between versions."""
DRAWN = [one for one in gallery.FIGURES if (RESULTS / one.file).exists()]


def test_the_page_is_that_of_the_results() -> None:
    """After a change of the results, `make figures` writes the page again."""
    assert (gallery.DOCS / gallery.PAGE).read_text(encoding="utf-8") == gallery.page()
    pictures = {path.stem for path in (gallery.DOCS / gallery.PICTURES).glob("*.png")}
    assert pictures == {one.name for one in DRAWN}


def different(first: Path, second: Path) -> float:
    """Return the mean difference of two pictures' pixels, as a fraction of 1; 1 if their sizes differ."""
    before, after = imread(first), imread(second)
    return float(np.abs(before - after).mean()) if before.shape == after.shape else 1.0


@pytest.mark.parametrize("figure", DRAWN, ids=lambda figure: figure.name)
def test_the_pictures_are_those_of_the_results(figure: PaperFigure, tmp_path: Path) -> None:
    """After a change of the results, `make figures` draws the pictures again."""
    picture = figure.save(figure.name, figure.table(), tmp_path, dpi=gallery.DPI)
    assert different(picture, gallery.DOCS / gallery.PICTURES / picture.name) < MOST_DIFFERENT


def test_pictures_of_other_results_differ(tmp_path: Path) -> None:
    figure = DRAWN[-1]
    rows = figure.table()
    last = rows[-1]["panel"]
    picture = figure.save(figure.name, rows, tmp_path, dpi=gallery.DPI)
    (tmp_path / "other").mkdir()
    other = figure.save(figure.name, [row for row in rows if row["panel"] != last], tmp_path / "other", dpi=gallery.DPI)
    assert different(picture, other) > MOST_DIFFERENT


def test_every_picture_is_one_of_a_result_and_none_is_missing() -> None:
    pictures = {path.stem for path in RESULTS.glob("*.png")}
    assert gallery.all_drawn().keys() <= pictures
    assert all((RESULTS / f"{name}.manifest.json").exists() for name in pictures)


def test_a_figure_without_results_is_said_to_be_missing(tmp_path: Path) -> None:
    text = gallery.page(tmp_path)
    for figure in gallery.FIGURES:
        assert f"Not measured yet: python -m experiments.{figure.module or figure.name} does it." in text
    assert "![" not in text


def test_no_two_figures_share_a_name_or_a_title() -> None:
    assert len({one.name for one in gallery.FIGURES}) == len({one.title for one in gallery.FIGURES}) == 9
