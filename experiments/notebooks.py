"""Run the notebooks and store them with what they show.

    python -m experiments.notebooks        notebooks/*.ipynb

They read results alone, so that a run takes seconds. The extra "notebooks" has what opens them.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from nbclient import NotebookClient
from PIL import Image
from rich.console import Console

from experiments import command
from experiments.results import REPOSITORY
from experiments.style import save_small
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

FOLDER = REPOSITORY / "notebooks"
TIMEOUT = 300
PICTURE = "image/png"
MOST_DIFFERENT = 0.002
"""Mean difference of two pictures' pixels, as a fraction of 1, up to which they are the same: fonts may move by one."""


def paths() -> list[Path]:
    """Return the notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


@contextlib.contextmanager
def kernel() -> Iterator[NotebookClient]:
    """Start a kernel for all notebooks, which imports torch once."""
    client = NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3")
    with client.setup_kernel(cwd=str(FOLDER)):
        yield client


def run(path: Path, kernel: NotebookClient) -> Any:
    """Return the notebook as it is after a run of all its cells."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # forgets the names of the notebook before
    client = NotebookClient(notebook, km=kernel.km, timeout=TIMEOUT, record_timing=False)
    client.execute()
    assert client.kc is not None, "it has run cells"
    client.kc.stop_channels()
    del notebook.cells[0]
    for number, cell in enumerate(code_cells(notebook), start=1):
        cell.execution_count = number
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
            if PICTURE in output.get("data", {}):
                output.data[PICTURE] = smaller(output.data[PICTURE])
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def smaller(picture: str) -> str:
    """Return a picture, in base64, that is a third of its size."""
    file = io.BytesIO()
    whole = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    save_small(whole, file)
    return base64.b64encode(file.getvalue()).decode()


def code_cells(notebook: Any) -> list[Any]:
    """Return the cells with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook: Any) -> list[Any]:
    """Return the pictures that a notebook shows, as arrays of pixels."""
    from matplotlib.image import imread

    return [imread(io.BytesIO(base64.b64decode(data[PICTURE]))) for data in _shown(notebook) if PICTURE in data]


def texts(notebook: Any) -> list[str]:
    """Return what a notebook prints and shows as text, in its order."""
    return [data[kind] for data in _shown(notebook) for kind in ("text/markdown", "text/plain") if kind in data]


def _shown(notebook: Any) -> Iterator[dict[str, Any]]:
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                yield {"text/plain": output.text}
            else:
                yield output.data


def same(first: Any, second: Any) -> bool:
    """Return True if two notebooks show the same: equal texts, and pictures that differ by no more than fonts move."""
    before, after = pictures(first), pictures(second)
    return (
        texts(first) == texts(second)
        and [one.shape for one in before] == [one.shape for one in after]
        and all(float(np.abs(one - other).mean()) < MOST_DIFFERENT for one, other in zip(before, after, strict=True))
    )


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.Parser(prog="python -m experiments.notebooks", description=__doc__, allow_abbrev=False)
    ranks.raise_together("options", lambda: options.parse_args(words))
    with kernel() as client:
        for path in paths():
            notebook = run(path, client)
            nbformat.write(notebook, path)
            kilobytes = path.stat().st_size / 1e3
            say(console, f"ran notebooks/{path.name}: {len(pictures(notebook))} pictures, {kilobytes:.0f} kB")
    say(console, "make open-notebooks opens them")


if __name__ == "__main__":
    command.run(main)
