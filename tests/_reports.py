"""For tests of reports: pages that are read and checked, and folders of runs that nobody has trained."""

from __future__ import annotations

import json
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from pipesgd.config import TrainConfig
from pipesgd.report.folder import read_run
from pipesgd.report.page import report
from pipesgd.run.metrics import IterationMetrics

EMPTY = {"meta", "br"}
"""Elements that are never closed."""
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2", "p", "span"),
    *("dl", "div", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "details"),
    *("summary", "svg", "line", "rect", "circle", "path", "text"),
}


class Page(HTMLParser):
    """A page that has been read; every element must be one that a report needs, and be closed."""

    def __init__(self, source: str):
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def read(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def line(iteration: int, **values: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
    seconds = {"iteration": 0.5, "loading": 0.05, "compute": 0.2, "communication": 0.3, "exposed": 0.15, "update": 0.1}
    metrics = IterationMetrics(
        iteration=iteration,
        epoch=0,
        loss=2.0,
        lr=0.1,
        samples_per_second=128.0,
        seconds=seconds,
        wire_bytes=1000,
        skipped=0,
        width=2,
    )
    return asdict(metrics) | values


def write_run(folder: Path, lines: list[dict[str, Any]] | None = None, **options: Any) -> Path:
    """Write the folder of a run of two ranks that ended without a word, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"world_size": 2, "options": TrainConfig().options() | options, "planned": None}
    (folder / "run.json").write_text(json.dumps(described), encoding="utf-8")
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return folder


def page_of(folder: Path) -> Page:
    return Page(report(read_run(folder)))
