"""The measurement of strangers: a short one with real ranks, and what counts as harm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments import forked_ranks
from experiments.strangers import CONNECTIONS, EARLY, FORGER, KINDS, Ended, harm, others, rows_of
from pipesgd import keys

WELL = Ended(codes=[0, 0, 0], text="", weights="a", seconds=0.05, grown_bytes=2_000_000)
FORGED = "warning: rank 1: 3 values were forged in the store of the job"


@pytest.mark.parametrize(
    ("kind", "ended", "problem"),
    [
        (FORGER, WELL, ""),
        (FORGER, replace(WELL, text=FORGED), ""),
        (FORGER, replace(WELL, text=f"{FORGED}\n{FORGED}"), "2 warnings of forged values"),
        (FORGER, replace(WELL, weights="b"), "other weights"),
        (CONNECTIONS, replace(WELL, grown_bytes=6_000_000), ""),
        (CONNECTIONS, replace(WELL, grown_bytes=8_000_000), "a rank has grown by 6.0 MB more"),
        (FORGER, replace(WELL, grown_bytes=6_000_000), "a rank has grown by 6.0 MB more"),
        (CONNECTIONS, replace(WELL, cut_short="the ranks ended"), "the ranks ended"),
        (CONNECTIONS, replace(WELL, text="error: no heartbeat from rank 1"), "error: no heartbeat from rank 1"),
        (CONNECTIONS, replace(WELL, codes=[0, 1, 0], text="why"), "exit codes [0, 1, 0]: why"),
        (EARLY, replace(WELL, codes=[1, 1, 1], text="error: rank 0: a value (forged)"), ""),
        (EARLY, replace(WELL, codes=[1, 1, 1], text="error: rank 0: gone"), "exit codes [1, 1, 1] without the word"),
        (EARLY, replace(WELL, codes=[1, 0, 1], text="forged"), "exit codes [1, 0, 1] without the word"),
    ],
)
def test_what_is_harm(kind: str, ended: Ended, problem: str) -> None:
    assert harm(kind, ended, WELL) == problem


@pytest.mark.slow
def test_a_short_measurement_sees_no_harm(tmp_path: Path) -> None:
    forked_ranks.import_all()
    secret = tmp_path / "job.key"
    keys.make(secret, certificate=True)
    rows = list(rows_of("tcp", secret, True, lambda amount, what: None))
    assert [row["strangers"] for row in rows] == list(KINDS)
    assert all(not row["harm"] or "as long" in row["harm"] for row in rows), rows  # times are no matter of a test
    assert others("tls", tmp_path)["harm"] == ""
