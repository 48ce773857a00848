"""The site of the documentation: no warning, no dead link, and what a browser shows first."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import pipesgd.ddp
from experiments.browser import BROWSER, boxes
from pipesgd.calibration.options import CalibrateConfig
from pipesgd.config import TrainConfig

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet, which would make --strict pass everything.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_page_of_reference_has_every_option(site: Path) -> None:
    page = html.unescape((site / "reference.html").read_text(encoding="utf-8"))
    names = [*TrainConfig().options(), *CalibrateConfig().options(), "accuracy-cost", "slow-ranks", "seed", "out"]
    assert [name for name in names if f"<code>--{name}</code>" not in page] == []


def test_the_api_reference_has_every_public_name_with_its_text(site: Path) -> None:
    page = html.unescape((site / "api.html").read_text(encoding="utf-8"))
    doors = [f"ddp.{name}" for name in pipesgd.ddp.__all__] + ["backend.BackendOptions", "accelerate.attach"]
    names = [f"pipesgd.{name}" for name in [*pipesgd.__all__, *doors, "transformers.PipesgdCallback"]]
    assert [name for name in names if f'id="{name}"' not in page] == []
    text = re.sub(r"\s+", " ", re.sub("<[^>]+>", "", page))
    assert "Pipe-SGD of width K (Li et al., NeurIPS 2018)" in text
    assert "Norm of the averaged gradient that was applied last" in text, "fields of dataclasses"
    assert ">>> with Pipelined(model" in text, "examples"


def test_it_can_be_read_and_searched_from_a_folder(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    scripts = {
        (path, script) for path, text in pages.items() for script in re.findall(r'<script src="?([^ ">]+)', text)
    }
    assert [script for path, script in scripts if not (path.parent / script).is_file()] == []  # all are local
    assert site / "iframe-worker.js" in {(path.parent / script).resolve() for path, script in scripts}
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = {")


def test_every_equation_is_drawn(site: Path) -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.glob("*.html")}
    assert [name for name, text in pages.items() if "arithmatex" in text] == []
    assert "<math" in pages["equations.html"]


class Found(HTMLParser):
    """Links, pictures and names of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.names: set[str | None] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [value for name in ("href", "src", "srcset") if (value := values.get(name)) is not None]
        self.names |= {values.get("id"), values.get("name")}
        if tag == "img":
            self.pictures.append(values)


@pytest.fixture(scope="module")
def found(site: Path) -> dict[Path, Found]:
    """Every page, and what is on it."""
    return {path: Found(path) for path in site.rglob("*.html")}


def dead_links(found: dict[Path, Found]) -> list[tuple[str, str]]:
    """Return names of pages, and their links to files or places that are not there."""
    dead = []
    for page, own in found.items():
        for link in own.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = page.parent.joinpath(unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            named = not parts.fragment or target not in found or unquote(parts.fragment) in found[target].names
            if not (target.is_file() and named):
                dead.append((page.name, link))
    return dead


def test_no_link_is_dead(found: dict[Path, Found]) -> None:
    assert sum(len(one.links) for one in found.values()) > 1000
    assert dead_links(found) == []


@pytest.mark.parametrize("link", ["nowhere.html", "faults.html#nowhere", "#nowhere", "/page.html"])
def test_a_dead_link_is_found(link: str, tmp_path: Path) -> None:
    (tmp_path / "faults.html").write_text("<h1 id=here>A page</h1>")
    (tmp_path / "page.html").write_text(
        f'<a id="there" href="faults.html#here"></a><a href="#there"></a><a href="{link}"></a>'
    )
    assert dead_links({path: Found(path) for path in tmp_path.glob("*.html")}) == [("page.html", link)]


def test_every_picture_is_told_in_words(found: dict[Path, Found]) -> None:
    pictures = [(page.name, one.get("src"), one.get("alt")) for page, own in found.items() for one in own.pictures]
    assert len(pictures) > 10
    assert [one for one in pictures if not (one[2] or "").strip()] == []


def test_a_picture_can_be_seen_larger(site: Path) -> None:
    page = (site / "gallery.html").read_text(encoding="utf-8")
    shown = re.findall(r'<img [^>]*src="([^"]+)"', page)
    assert len(shown) > 5
    assert [one for one in shown if f'<a href="{one}"><img ' not in page] == []


def test_every_example_is_a_page(site: Path) -> None:
    programs = sorted(
        path.name for path in (REPOSITORY / "examples").iterdir() if path.suffix in (".py", ".sh", ".yaml")
    )
    assert [name for name in programs if not (site / "examples" / f"{name}.html").is_file()] == []


def test_logs_are_not_among_what_a_search_finds(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "troubleshooting.html#" in index
    assert "LOG.html" not in index


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (400, 800)])
def test_the_first_screen_has_sentence_number_command_and_picture(site: Path, width: int, height: int) -> None:
    """On a telephone, the picture follows the command, and is the one that is drawn for that width."""
    first = ".md-content__inner > {}:nth-of-type({})"
    shown = {
        "sentence": first.format("p", 1),
        "number": first.format("p", 2),
        "command": ".highlight",
        "picture": "picture img",
    }
    found = boxes(site, "index.html", width, height, shown)
    order = sorted(found, key=lambda name: found[name]["top"])
    assert order == ["sentence", "number", "command", "picture"]
    assert "as fast as DDP" in found["number"]["text"]
    assert "make train" in found["command"]["text"]
    for name, box in found.items():
        assert box["left"] >= 0, name
        assert box["left"] + box["width"] <= width, name
        if (width, name) != (400, "picture"):
            assert box["top"] + box["height"] <= height, name
    command, picture = found["command"], found["picture"]
    assert picture["top"] - (command["top"] + command["height"]) < 40
    assert picture["top"] < height - 100
    assert picture["source"].endswith("first_screen.png" if width > 600 else "first_screen_narrow.png")


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_no_page_is_wider_than_the_screen(site: Path, width: int) -> None:
    """Tables and code that are wider can be moved by themselves."""
    for page in ("index.html", "reference.html", "results.html", "systems.html", "integrations.html"):
        found = boxes(site, page, width, 900, {"page": "html"})
        assert found["page"]["scrolls"] <= width, page
