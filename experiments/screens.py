"""Take pictures of what a browser shows: the first page of the site, and reports of three runs.

    python -m experiments.screens        docs/pictures/*.png; needs Chromium, and a minute

Three ranks train on scikit-learn's digits, forked from this process: with gradients that are an iteration late; with a
kill of all ranks in iteration 60, after which they resume; and with DDP.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich.console import Console

from experiments import browser, command, forked_ranks
from experiments.forked_ranks import TRAINING, Kill
from experiments.results import REPOSITORY
from experiments.style import save_small
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

FOLDER = REPOSITORY / "docs" / "pictures"
HOME = {"home": (1280, 900), "home_narrow": (400, 800)}
"""Pictures of the first page, and the sizes of their screens."""
WORDS = (
    "--dataset digits --model mlp --hidden-sizes 64 --batch-size 32 --iterations 120 --momentum 0.9 "
    "--evaluate-iterations 20 --checkpoint-iterations 25"
)
REPORTS: dict[str, tuple[str, tuple[Kill, ...]]] = {
    "report_late": ("--width 2 --codec int8", ()),
    "report_fault": ("--width 2 --codec int8", (Kill(phase=TRAINING, rank=1, call=60, seconds=0.0, all_ranks=True),)),
    "report_ddp": ("--strategy ddp", ()),
}
"""Pictures of reports: options of the run, and its kills."""
WIDTHS = {"": 1280, "_narrow": 400}


def save(picture: Image.Image, name: str, folder: Path) -> Path:
    """Write a picture, and return its path."""
    path = folder / f"{name}.png"
    save_small(picture, path)
    return path


def home(folder: Path, console: Console) -> None:
    """Build the site, and take pictures of its first page."""
    with tempfile.TemporaryDirectory() as site:
        words = ["-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", site]
        quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        subprocess.run([sys.executable, *words], cwd=REPOSITORY, env=quiet, check=True)
        for name, (width, height) in HOME.items():
            taken = save(browser.picture(Path(site), "index.html", width, height), name, folder)
            say(console, f"took {taken.name}")


def reports(folder: Path, console: Console) -> None:
    """Make the runs, and take pictures of their reports.

    Raises:
        RunError: a run ends otherwise than it must.
    """
    forked_ranks.import_all()
    for name, (options, kills) in REPORTS.items():
        with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):  # whose name is in no picture
            here = Path(name)
            here.mkdir()
            if forked_ranks.run(f"{WORDS} {options}", 3, here, kills) != len(kills):
                raise RunError(
                    f"the run of {name} must succeed; it said:\n{(here / 'log').read_text(encoding='utf-8')}"
                )
            for ending, width in WIDTHS.items():
                taken = save(browser.picture(here / "run", "report.html", width), f"{name}{ending}", folder)
                say(console, f"took {taken.name}")


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.bare_parser("python -m experiments.screens", __doc__)
    options.add_argument(
        "--folder", type=Path, default=FOLDER, metavar="DIR", help="folder to write to (docs/pictures)"
    )
    folder: Path = ranks.raise_together("options", lambda: options.parse_args(words)).folder
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    reports(folder, console)
    home(folder, console)


if __name__ == "__main__":
    command.run(main)
