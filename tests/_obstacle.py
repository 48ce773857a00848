"""A check that a testbed can run on this machine."""

from __future__ import annotations

from experiments import testbed
from experiments.testbed.links import Link


def obstacle() -> str | None:
    """Return the reason that no testbed can run on this machine; None if one can."""
    try:
        testbed.Testbed(nodes=2, link=Link(rate=200e6)).close()
    except testbed.InvalidInputError as failure:
        return str(failure)
    return None
