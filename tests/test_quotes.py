"""README and documentation hold no figures except those quoted from result files and code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.figures import manifest
from experiments.quoted import QUOTES
from experiments.quotes import PAGES, QUOTE, requoted
from experiments.results import RESULTS, load
from experiments.tutorial import steps

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^    .*$", re.MULTILINE)
"""Code and commands of a page, except fences marked as text, which are output."""
CODE = re.compile(r"`[^`\n]+`")
DECLARED = re.compile(r"<!-- constants: (.*?) -->", re.DOTALL)
FIGURE = re.compile(
    r"(?<![\w.,/-])[-+]?\d[\d.,]*\s?(?:%|(?:ns|us|ms|s|min|seconds?|minutes?|hours?|x|times|points|kB|MB|GB|KiB|MiB|GiB)\b)"
)
"""Numbers with a unit in which results are given."""


@pages
def test_quotes_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert requoted(text, page) == text, "python -m experiments.quotes writes them"


@pages
def test_there_is_no_figure_outside_of_quotes(page: Path) -> None:
    """Figures that a comment in the page declares to be constants (settings, thresholds of the code) are allowed."""
    text = page.read_text(encoding="utf-8")
    declared = {figure for comment in DECLARED.findall(text) for figure in FIGURE.findall(comment)}
    text = FENCE.sub(lambda fence: fence[2] if fence[1] == "text" else "", QUOTE.sub("", text))
    for pattern in (DECLARED, INDENTED, CODE):
        text = pattern.sub("", text)
    figures = set(FIGURE.findall(text))
    assert figures - declared == set()
    assert declared - figures == set(), "declared, but not there"


def test_the_tutorials_outputs_are_those_of_its_commands() -> None:
    ran = [(row["step"], "\n".join(row["commands"])) for row in load(RESULTS / "tutorial.json")]
    written = [(title, commands.rstrip()) for title, commands in steps()]
    assert ran == written, "python -m experiments.tutorial runs them"


def test_a_table_of_targets_has_every_ratio_of_a_manifest() -> None:
    targets = manifest("bench_accelerators")["targets"]
    lines = QUOTES["judged"]("bench_accelerators").splitlines()
    assert len(lines) == 2 + sum(map(len, targets.values()))
    assert all(line.rstrip(" |").endswith(("met", "open", "MISSED")) for line in lines[2:])
