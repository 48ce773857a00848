"""Write the quotes of results and code into README and documentation: ``python -m experiments.quotes``.

A quote is the text between ``<!-- quote: NAME ARGUMENTS -->`` and ``<!-- end -->``, on lines of their own. Function
NAME of quoted.py returns it for these arguments. Measured figures appear nowhere else (``tests/test_quotes.py``).
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
"""Pages with quotes; ``experiments.gallery`` writes the gallery as a whole."""
QUOTE = re.compile(r"^<!-- quote: (?P<words>.+?) -->\n(?P<text>.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE)


def requoted(text: str, page: Path) -> str:
    """Return ``text``, of ``page``, with all its quotes made again.

    Raises:
        UserInputError: the text asks for a quote that does not exist.
    """

    def quote(found: re.Match[str]) -> str:
        name, *words = found["words"].split()
        if name not in QUOTES:
            raise UserInputError(f"{page.name} must quote one of {', '.join(sorted(QUOTES))}; got {name}")
        return f"<!-- quote: {found['words']} -->\n\n{QUOTES[name](*words)}\n\n<!-- end -->"

    return QUOTE.sub(quote, text)


def write(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Write all pages again."""
    command.Parser(prog="python -m experiments.quotes", description=__doc__).parse_args(words)
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = requoted(before, page)
        if after != before:
            page.write_text(after, encoding="utf-8")
            say(console, f"wrote {page.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    command.run(write)
