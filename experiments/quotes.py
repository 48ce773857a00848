"""Writes into README and documentation what they quote of results and code: ``python -m experiments.quotes``.

A quote stands between ``<!-- quote: NAME WORDS -->`` and ``<!-- end -->``, on lines of their own: it is what the
function NAME of quoted.py returns for these words. No measured figure stands anywhere else (``tests/test_quotes.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import command
from experiments.quoted import QUOTES
from experiments.results import REPOSITORY
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

PAGES = (
    REPOSITORY / "README.md",
    *(page for page in sorted((REPOSITORY / "docs").glob("*.md")) if page.stem != "gallery"),
)
"""The gallery is written as a whole, by ``experiments.gallery``."""
QUOTE = re.compile(r"^<!-- quote: (?P<words>.+?) -->\n(?P<text>.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE)


def requoted(text: str, page: Path) -> str:
    """``text``, of ``page``, with all its quotes made anew.

    Raises:
        UserInputError: it asks for a quote that there is not.
    """

    def quote(found: re.Match[str]) -> str:
        name, *words = found["words"].split()
        if name not in QUOTES:
            raise UserInputError(f"{page.name} must quote one of {', '.join(sorted(QUOTES))}; got {name}")
        return f"<!-- quote: {found['words']} -->\n\n{QUOTES[name](*words)}\n\n<!-- end -->"

    return QUOTE.sub(quote, text)


def write(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Write all pages anew."""
    command.Parser(prog="python -m experiments.quotes", description=__doc__).parse_args(words)
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = requoted(before, page)
        if after != before:
            page.write_text(after, encoding="utf-8")
            say(console, f"wrote {page.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    command.run(write)
