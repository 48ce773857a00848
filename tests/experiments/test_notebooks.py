"""The notebooks run from the first cell to the last, hold no logic, and are stored without output."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from experiments.results import REPOSITORY

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
LOGIC = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.If, ast.For, ast.While, ast.Try, ast.ListComp, ast.DictComp)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_is_one_for_every_theme() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "1_the_method",
        "2_the_timing_model",
        "3_convergence",
        "4_compression",
        "5_plan_your_own_job",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_output_and_holds_no_logic(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
        source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
        assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, LOGIC)]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """Start a kernel for all notebooks, which imports torch once."""
    client = NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3")
    with client.setup_kernel(cwd=NOTEBOOKS[0].parent):
        yield client.km


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by Jupyter's own packages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, kernel: Any) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # forgets the names of the notebook before
    client = NotebookClient(notebook, km=kernel, timeout=120)
    client.execute()
    client.kc.stop_channels()
    for cell in code_cells(notebook):
        assert not [output.text for output in cell.outputs if output.get("name") == "stderr"]
    shown = [kind for cell in code_cells(notebook) for output in cell.outputs for kind in output.get("data", {})]
    printed = [output for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "stream"]
    assert "image/png" in shown or (path.stem == "5_plan_your_own_job" and printed)
