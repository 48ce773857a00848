"""The error message for a name that is not among the valid ones."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def not_one_of(what: str, choices: Sequence[str], got: str) -> str:
    """One line that lists ``choices`` and names the one nearest to ``got``, if any is near.

    >>> not_one_of("model", ("mlp", "convnet"), "convet")
    "model must be one of mlp, convnet; got 'convet' (did you mean 'convnet'?)"
    """
    nearest = get_close_matches(got, choices, n=1)
    suggestion = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"{what} must be one of {', '.join(choices)}; got {got!r}{suggestion}"
