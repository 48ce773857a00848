"""The codecs' benchmark: the rows, the targets; a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _ranks import run_module
from rich.console import Console

from experiments import bench_codecs
from experiments.bench_codecs import (
    OPERATIONS,
    Buffers,
    Size,
    compute,
    parse,
    summarize,
    target_of,
    time_calls,
)
from experiments.paired import interleave_here
from experiments.results import RESULTS, load
from pipesgd.errors import UserInputError

pytestmark = pytest.mark.slow

TINY = Size(name="cache", numel=4096, calls=2, warm=True, rounds=2)


def test_there_is_a_row_for_every_contender_and_operation() -> None:
    rows = compute([TINY], ["bf16", "sign"], Console())
    got = [(row["contender"], row["operation"]) for row in rows]
    assert got == [(name, operation) for name in ("bf16", "sign") for operation in OPERATIONS]
    assert all(row["ratio_low"] <= row["ratio_median"] <= row["ratio_high"] for row in rows)
    assert {(row["nbytes"], row["rounds"]) for row in rows} == {(4 * 4096, 2)}


def test_ratios_are_to_the_copy_of_the_same_round() -> None:
    row = summarize(TINY, "int8", "encode", [2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (row["ratio_median"], row["ratio_low"], row["ratio_high"], row["ratio_iqr"]) == (2.0, 2.0, 2.0, 0.0)
    assert (row["target_ratio"], row["target_met"]) == (2.0, True)
    assert summarize(TINY, "int8", "encode", [2.01], [1.0])["target_met"] is False


def test_targets_are_those_of_the_docstring() -> None:
    assert [target_of("int8", operation) for operation in OPERATIONS] == [2.0, 2.0, 2.0, None]
    assert [target_of("ternary stochastic", operation) for operation in OPERATIONS] == [3.0, 2.0, 3.0, None]
    assert [target_of("sign", operation) for operation in OPERATIONS] == [None, 2.0, None, None]


@pytest.mark.parametrize(("warm", "calls"), [(True, 3), (False, 2)])
def test_values_are_put_back_before_the_calls_of_a_round(warm: bool, calls: int) -> None:
    buffers = Buffers(8)
    buffers.residual.fill_(1.0)
    seconds = time_calls(
        lambda: buffers.values.add_(1.0), buffers, Size(name="", numel=8, calls=2, warm=warm, rounds=1)
    )
    assert seconds >= 0
    assert torch.allclose(buffers.values, buffers.original + calls)
    assert not buffers.residual.any()


def test_contenders_take_turns_and_warm_up_rounds_are_left_out() -> None:
    calls: list[str] = []

    def contender(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    both = {name: (lambda name=name: contender(name)) for name in "ab"}
    assert interleave_here(both, 2, warm_up=1) == {"a": [4.0, 5.0], "b": [3.0, 6.0]}
    assert "".join(calls) == "abbaab"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--codecs", "int9"], "--codecs must be one of .*; got 'int9'"),
        (["--output", str(RESULTS)], "--output must name another folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=message) as error:
        parse(["--quick", "--output", str(tmp_path), *words], 1)
    assert "\n" not in str(error.value)
    with pytest.raises(UserInputError, match="without torchrun"):
        parse([], 2)


def test_a_quick_run_leaves_its_files(tmp_path: Path) -> None:
    words = ["--quick", "--codecs", "bf16", "--output", str(tmp_path)]
    done = run_module(bench_codecs.__name__, *words)
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout  # everything fits
    rows = load(tmp_path / "bench_codecs.csv")
    assert [row["size"] for row in rows] == 4 * ["cache"] + 4 * ["memory"]
    assert {path.name for path in tmp_path.iterdir()} == {f"bench_codecs.{end}" for end in ("csv", "manifest.json")}
