"""Tables in Markdown, which pages quote and notebooks show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from experiments.results import RESULTS, load


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with these ``heads`` and ``rows`` of cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def table_of(name: str, columns: Sequence[str]) -> str:
    """Return a table of these columns of the result in the file ``name``."""
    return table(columns, ([_text(row[column]) for column in columns] for row in load(RESULTS / name)))


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
