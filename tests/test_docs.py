"""The documentation: the site builds without a warning, links and anchors among them."""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path

import pytest

from pipesgd.calibration.options import CalibrateConfig
from pipesgd.config import TrainConfig

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet, with which --strict passes everything.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_options_page_has_every_option(site: Path) -> None:
    page = html.unescape((site / "options.html").read_text(encoding="utf-8"))
    names = [*TrainConfig().options(), *CalibrateConfig().options(), "accuracy-cost", "slow-ranks", "seed", "out"]
    assert [name for name in names if f"<code>--{name}</code>" not in page] == []


def test_every_equation_is_drawn(site: Path) -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.glob("*.html")}
    assert [name for name, text in pages.items() if "arithmatex" in text] == []
    assert "<math" in pages["equations.html"]
