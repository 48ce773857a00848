"""The measurement of kills and stops: real ranks of each transport, and lines that name another rank or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import forked_ranks
from experiments.named_ranks import KILL, STOP, named, named_in
from pipesgd import keys


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("error: rank 2: receive with rank 1 in iteration 4 failed: rank 1 has ended", (2, {1})),
        ("error: rank 0: no heartbeat from ranks 1, 2 for 5 s", (0, {1, 2})),
        ("error: rank 0: no heartbeat from any other rank for 5 s", (0, set())),
        (
            "error: rank 1: receive of a header with rank 0 in iteration 19 failed: it has closed its connections; "
            "no heartbeat from rank 2 for 5 s",
            (1, {2}),
        ),
        ("error: rank 1: receive with rank 0 in iteration 19 failed: it has closed its connections", (1, {0})),
        ("rank 1: a line that is no error", None),
    ],
)
def test_an_error_names_its_rank_and_others(line: str, found: tuple[int, set[int]] | None) -> None:
    assert named_in(line) == found


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "run"), [(KILL, 0), (KILL, 1), (STOP, 0)])
def test_the_rank_that_was_hit_is_named(tmp_path: Path, fault: str, run: int) -> None:
    forked_ranks.import_all()
    secret = tmp_path / "job.key"
    keys.make(secret, certificate=True)
    found = named(fault, run, 0, tmp_path, secret)
    assert (found.problem, found.right) == ("", True)
    assert found.seconds is not None
