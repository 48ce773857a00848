"""Set-up of tests that start worker processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_is_left_to_collect() -> Iterator[None]:
    """Collect what earlier tests have left: in a forked worker, that would abort it if a torch store with threads is
    part of it. Fail a test that leaves processes behind."""
    gc.collect()
    before = multiprocessing.active_children()
    yield
    assert set(multiprocessing.active_children()) <= set(before), "processes left behind"
