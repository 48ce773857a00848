"""The notebooks are stored with what they show, which is what they show when they run, and hold no logic."""

from __future__ import annotations

import ast
import base64
import copy
import io
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image, ImageOps

from experiments import notebooks, paper

pytestmark = pytest.mark.slow

NOTEBOOKS = {
    "1_the_method": 5,
    "2_the_timing_model": 6,
    "3_convergence": 4,
    "4_compression": 3,
    "5_plan_your_own_job": 1,
}
"""Notebooks, and the pictures that each shows."""
MOST_BYTES = 300_000
LOGIC = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.If, ast.For, ast.While, ast.Try, ast.ListComp, ast.DictComp)
of_every_notebook = pytest.mark.parametrize("path", notebooks.paths(), ids=lambda path: path.stem)


def test_there_is_one_for_every_theme() -> None:
    assert [path.stem for path in notebooks.paths()] == list(NOTEBOOKS)


@of_every_notebook
def test_it_is_stored_with_its_pictures_is_small_and_holds_no_logic(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < MOST_BYTES
    assert len(notebooks.pictures(notebook)) == NOTEBOOKS[path.stem]
    for number, cell in enumerate(notebooks.code_cells(notebook), start=1):
        assert cell.execution_count == number
        source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
        assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, LOGIC)]


@of_every_notebook
def test_it_begins_with_the_table_next_to_the_paper(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    table = paper.compared(path.stem[2:].replace("_", " "))
    assert table.startswith("| the paper's figure | the paper's value | ours | substituted | agrees? |")
    assert paper.NOT_AT_HAND in table
    assert notebooks.texts(notebook)[0] == table


@pytest.fixture(scope="module")
def kernel() -> Iterator[NotebookClient]:
    with notebooks.kernel() as client:
        yield client


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by Jupyter's own packages
@of_every_notebook
def test_what_is_stored_is_what_a_run_shows(path: Path, kernel: NotebookClient) -> None:
    """After a change of the results, `make notebooks` stores them again."""
    stored, now = nbformat.read(path, as_version=4), notebooks.run(path, kernel)
    assert notebooks.texts(now) == notebooks.texts(stored)
    assert notebooks.same(now, stored)
    for cell in notebooks.code_cells(now):
        assert not [output.text for output in cell.outputs if output.get("name") == "stderr"]


def test_another_text_or_picture_is_noticed() -> None:
    notebook = nbformat.read(notebooks.paths()[0], as_version=4)
    assert notebooks.same(notebook, copy.deepcopy(notebook))
    other_text, other_picture = copy.deepcopy(notebook), copy.deepcopy(notebook)
    notebooks.code_cells(other_text)[0].outputs[0].data["text/markdown"] += "."
    assert not notebooks.same(notebook, other_text)
    data = notebooks.code_cells(other_picture)[-1].outputs[0].data
    picture = Image.open(io.BytesIO(base64.b64decode(data[notebooks.PICTURE]))).convert("RGB")
    file = io.BytesIO()
    ImageOps.mirror(picture).save(file, "png")
    data[notebooks.PICTURE] = base64.b64encode(file.getvalue()).decode()
    assert not notebooks.same(notebook, other_picture)
