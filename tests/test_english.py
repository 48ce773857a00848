"""Docstrings can be read without the identifier above them, and nobody has to guess at a word.

A docstring that begins with "Of", "That" or "What" is the second half of a sentence whose first half is a name. Refused
words are those that readers stumbled over; each has its replacement next to it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.quotes import QUOTE
from experiments.results import REPOSITORY

CODE = [
    path
    for folder in ("pipesgd", "timing_model", "experiments", "tests")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "ARCHITECTURE.md", "DECISIONS.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
    REPOSITORY / "experiments" / "testbed" / "README.md",
]
"""Pages for readers; experiments/LOG.md is a record, whose entries stay as they were written."""

FRAGMENTS = {
    *("Above", "Also", "And", "As", "Below", "But", "By", "How", "Likewise", "Nor", "Of", "Or", "So", "That", "This"),
    *("Those", "What", "Where", "Whether", "Which", "Who", "Whom", "Whose", "Why"),
}
"""First words of a docstring that is neither a sentence nor a noun phrase."""
REFUSED = {
    r"anew": "again",
    r"amiss": "wrong",
    r"for long(?! (?:messages|links|runs))": "for a while",
    r"so many(?! \w+ that)": "this many",
    r"stands? in(?! for)": "is in",
    r"cards?": "NIC",
    r"(?:goes|going|go|went|gone) on": "continue, resume",
    r"beside": "next to, with",
}
"""Patterns of refused words, and what to write instead."""
EXCEPTIONS = {
    "tests/test_english.py": "names the refused words",
}
"""Files that may hold refused words, and the reason."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring in ``source``, those of fields and constants included."""
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):  # statements alone, not what is in them
            inner = getattr(node, block, None)
            nodes += inner if isinstance(inner, list) else []


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string and comment in ``source``."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], token.string


def is_fragment(docstring: str) -> bool:
    """Return True if ``docstring`` begins with one of ``FRAGMENTS``."""
    first = re.match(r"\W*(\w+)", docstring)
    return first is not None and first[1] in FRAGMENTS


def refused_words(text: str) -> list[str]:
    """Return each refused word in ``text`` with what to write instead."""
    return [
        f"{found[0]!r} (write {better!r})"
        for pattern, better in REFUSED.items()
        for found in re.finditer(rf"(?<![\w-]){pattern}(?![\w-])", text, re.IGNORECASE)
    ]


def test_docstrings_are_read_without_the_name_above_them() -> None:
    found = {path: list(docstrings(path.read_text(encoding="utf-8"))) for path in CODE}
    assert sum(map(len, found.values())) > 3000
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}: {' '.join(text.split())[:60]}"
        for path, own in found.items()
        for line, text in own
        if is_fragment(text)
    ]
    assert wrong == []


def test_code_holds_no_refused_words() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in CODE}
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}: {word}"
        for path, source in sources.items()
        if str(path.relative_to(REPOSITORY)) not in EXCEPTIONS
        if refused_words(source)  # few sources hold any, if only as names: to find strings and comments takes longer
        for line, text in texts(source)
        for word in refused_words(text)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_hold_no_refused_words(page: Path) -> None:
    if str(page.relative_to(REPOSITORY)) not in EXCEPTIONS:
        assert refused_words(QUOTE.sub("", page.read_text(encoding="utf-8"))) == []


def test_exceptions_are_needed() -> None:
    for name in EXCEPTIONS:
        assert refused_words((REPOSITORY / name).read_text(encoding="utf-8")), name


@pytest.mark.parametrize("text", ["Of the gradient.", "``Whether`` it is.", "\n    That it was.\n", "What is sent."])
def test_a_fragment_is_found(text: str) -> None:
    assert is_fragment(text)
    assert not is_fragment("Bytes of the whole gradient.")


@pytest.mark.parametrize("text", ["starts anew", "It stands in a file.", "two cards", "goes on", "so many words"])
def test_a_refused_word_is_found(text: str) -> None:
    assert refused_words(text)
    assert not refused_words("It stands in for torch; so many ranks that it is slow; a wildcard")
