"""Waiting for things that do not notify when they change: files, other processes' children, threads."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(done: Callable[[], bool], timeout: float = 20.0) -> None:
    """Return once ``done()``; fail the test if that takes longer than ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.02)
