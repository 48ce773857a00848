"""Comparing two commits: ratios, the target, and the checkout of the other commit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments import compare_commits
from experiments.compare_commits import checkout, geometric, missed, parse, summarize
from experiments.results import REPOSITORY, code_state, save
from pipesgd.errors import UserInputError

SECONDS = {
    "mlp: ddp": [[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]],
    "mlp: pipelined": [[1.0, 1.1, 1.2], [1.0, 1.1, 1.2]],
    "testbed, width 2": [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]],
}


def test_the_mean_of_all_rows_leaves_the_control_out() -> None:
    rows = summarize(SECONDS)
    assert [row["row"] for row in rows] == [*SECONDS, "all but controls"]
    assert [row["ratio"] for row in rows] == [2.0, 1.0, 1.0, 1.0]
    assert [row["rounds"] for row in rows] == [3, 3, 3, 3]
    assert missed(rows) == []


def test_a_row_that_is_slower_in_every_round_is_missed_and_so_is_the_mean() -> None:
    slower = SECONDS | {"mlp: pipelined": [[1.03, 1.133, 1.236], [1.0, 1.1, 1.2]]}
    assert missed(summarize(slower)) == ["mlp: pipelined", "all but controls"]


def test_a_row_whose_interval_holds_the_baseline_is_not_missed() -> None:
    noisy = SECONDS | {"mlp: pipelined": [[1.04, 1.1, 1.14], [1.0, 1.1, 1.2]]}
    assert missed(summarize(noisy)) == []


def test_the_interval_of_a_geometric_mean_holds_it_and_narrows_with_rounds() -> None:
    few, many = geometric([[0.9, 1.1] * 3]), geometric([[0.9, 1.1] * 30])
    assert few.low < few.median < few.high
    assert many.high - many.low < few.high - few.low


def test_a_benchs_table_becomes_rows_and_torchs_own_are_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: Sequence[str], code: Path) -> None:
        assert words[1:3] == ["-m", "torch.distributed.run"]
        row = {"p": 2, "nbytes": 4096, "native_median_s": 3.0, "ring_median_s": 2.0}
        save("bench_ring_p2", [row], folder=Path(words[-1]))

    monkeypatch.setattr(compare_commits, "_run", run)
    seconds = compare_commits.bench_turn(REPOSITORY, compare_commits.BENCHES["bench_ring"])
    assert seconds == {"bench_ring: 2 4096": 2.0, "bench_ring: 2 4096, torch's own": 3.0}
    assert [compare_commits.is_control(row) for row in seconds] == [False, True]


@pytest.mark.skipif(code_state() is None, reason="the sources are no git repository")
def test_a_commit_is_checked_out_for_a_while() -> None:
    with checkout("HEAD") as folder:
        assert (folder / "pipesgd" / "train.py").exists()
    assert not folder.exists()


@pytest.mark.skipif(code_state() is None, reason="the sources are no git repository")
def test_a_baseline_must_have_the_program_that_times_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_commits, "BLOCKS", Path("experiments", "not_yet.py"))
    with pytest.raises(UserInputError, match=r"that has experiments/not_yet.py; got HEAD"), checkout("HEAD"):
        pass


def test_a_baseline_must_be_a_commit(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="baseline must be a commit of this"), checkout("no-such-commit"):
        pass
    with pytest.raises(UserInputError, match="baseline"):
        parse(["--output", str(tmp_path)], by_torchrun=False)
