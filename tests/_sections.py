"""Flat options of the command, for tests that get them from anywhere, as the sections that the API takes."""

from __future__ import annotations

import dataclasses
from typing import Any

from pipesgd.sections import Updates, Windows, Wire

_SECTIONS = {"wire": Wire, "updates": Updates, "windows": Windows}


def sections(**options: Any) -> dict[str, Any]:
    """Return ``options`` with those that belong to a section in it; a section of which there is none is left out."""
    made: dict[str, Any] = dict(options)
    for name, section in _SECTIONS.items():
        own = {item.name: made.pop(item.name) for item in dataclasses.fields(section) if item.name in made}
        if own:
            made[name] = section(**own)
    return made
