"""The benchmark of imports: what it times, and what it says of the times."""

from __future__ import annotations

import subprocess

import pytest

from experiments.bench_import import TORCH, import_seconds, summarize


def test_an_import_that_fails_is_no_result() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        import_seconds("import no_such_module", "pass")


def test_every_case_but_torch_itself_has_the_target() -> None:
    rows = summarize({TORCH: [2.0, 1.0, 3.0], "import pipesgd": [0.1, 0.2, 0.2], "slow": [0.4, 0.5, 0.2]})
    assert [row["median_s"] for row in rows] == [2.0, 0.2, 0.4]
    assert [row["target_met"] for row in rows] == [None, True, False]
