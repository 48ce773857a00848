"""Docstrings can be read without the identifier above them, and nobody has to guess at a word.

A docstring that begins with "Of", "That" or "What" is the second half of a sentence whose first half is a name. The
words that are refused are those that readers stumbled over; the pattern beside each says how it is meant.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("pipesgd", "timing_model", "experiments", "tests", "notebooks")
FRAGMENTS = frozenset(
    [
        *("Above", "Also", "And", "As", "Below", "But", "By", "How", "Likewise", "Nor", "Of", "Or", "So", "That"),
        *("This", "Those", "What", "Where", "Whether", "Which", "Who", "Whom", "Whose", "Why"),
    ]
)
"""First words of docstrings that are no sentence and no noun phrase."""
REFUSED = {
    r"\banew\b": "again",
    r"\bamiss\b": "wrong",
    r"\bfor long\b": "for a while",
    r"\bso many\b(?! \w+ that)": "this many",
    r"\bstands? in\b(?! for)": "is in",
    r"\bcards?\b": "NIC",
    r"\b(?:goes|going|go|went|gone) on\b": "continues, resumes",
    r"\bbeside\b": "next to, with",
}
"""Patterns of words that are refused, and what to write."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring in ``source``, those of fields and constants included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment in ``source``."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every other string in ``source``: messages, help, headings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def is_fragment(docstring: str) -> bool:
    """Return True if ``docstring`` begins with a word that no sentence and no noun phrase here begins with."""
    first = re.match(r"\W*(\w+)", docstring)
    return first is not None and first[1] in FRAGMENTS


def refused_words(text: str) -> list[str]:
    """Return each refused word in ``text`` with what to write for it."""
    return [
        f"{found[0]!r} (write {better!r})"
        for pattern, better in REFUSED.items()
        for found in re.finditer(pattern, text, re.IGNORECASE)
    ]
