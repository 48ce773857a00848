"""Words that commands refuse, and why, from refusals.toml."""

from __future__ import annotations

import tomllib

from conftest import REPOSITORY


def refused(table: str) -> list[tuple[str, str]]:
    """Return the words in a table, and the line that refuses them."""
    tables = tomllib.loads((REPOSITORY / "tests" / "refusals.toml").read_text(encoding="utf-8"))
    return list(tables[table].items())
