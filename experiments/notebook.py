"""What the notebooks need besides the figures: tables of results."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.results import RESULTS, load


class MarkdownTable:
    """Columns of a result, which a notebook shows as a table."""

    def __init__(self, lines: Sequence[Sequence[str]]):
        self._lines = lines

    def _repr_markdown_(self) -> str:
        head, *rest = ["| " + " | ".join(line) + " |" for line in self._lines]
        return "\n".join([head, "|---" * len(self._lines[0]) + "|", *rest])


def table(name: str, columns: Sequence[str]) -> MarkdownTable:
    """The ``columns`` of the result in the file ``name``."""
    rows = load(RESULTS / name)
    return MarkdownTable([columns, *([_text(row[column]) for column in columns] for row in rows)])


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
