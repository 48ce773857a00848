"""Reasons for which a job failed, and the best case that the links of a testbed allow; examples in docstrings."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from experiments import limits, simulated_tables
from experiments.limits import Cluster, ring_limit
from experiments.testbed import Link
from experiments.testbed_jobs import WRAPPED_BY_TORCH, last_words


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("mlp on digits\nerror: rank 2: it broke\nerror: rank 0: lost rank 2\n=====\n", "rank 2: it broke"),
        ("error: rank 1: told to stop (SIGTERM)\nerror: rank 2: it broke\n", "rank 2: it broke"),
        ("W1121 warning\nValueError: no such thing\n  at line 5\n", "ValueError: no such thing"),
        ("terminate called\n  what():  Connection closed\n====\n", "what():  Connection closed"),
        ("one\ntwo\n\n", "two"),
        (
            f"error: rank 3: {2 * WRAPPED_BY_TORCH}KeyError: 0 At: /a/b/hook.py(586): p",
            "rank 3: KeyError: 0 At: hook.py(586): p",
        ),
        ("error: rank 3: " + 500 * "x", "rank 3: " + 192 * "x"),
        ("", "not a word"),
    ],
)
def test_a_failed_runs_log_says_why(log: str, words: str) -> None:
    assert last_words(log) == words


def test_the_limit_of_the_wire_is_that_of_a_ring() -> None:
    cluster = Cluster(nodes=4, link=Link(rate=200e6))
    assert ring_limit(cluster, 7_200_000) == pytest.approx(0.432 * 1514 / 1448)  # 10.8 MB at 25 MB/s
    assert cluster.describe() == "4 nodes at 200 Mbit/s"


@pytest.mark.parametrize("module", [limits, simulated_tables])
def test_examples_in_docstrings(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
