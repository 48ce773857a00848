"""Whether there can be a testbed here."""

from __future__ import annotations

from experiments import testbed
from experiments.testbed.links import Link


def obstacle() -> str | None:
    """Why there can be no testbed here; None if there can."""
    try:
        testbed.Testbed(nodes=2, link=Link(rate=200e6)).close()
    except testbed.InvalidInputError as failure:
        return str(failure)
    return None
