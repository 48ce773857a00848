"""Set-up of tests that start worker processes."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture
def nothing_is_left_to_collect() -> None:
    """Collect what earlier tests have left: in a forked worker, that would abort it if a torch store with threads is
    part of it."""
    gc.collect()
