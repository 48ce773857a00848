"""The codecs' benchmark: torch's versions agree with ours, the rows, the targets, the figure; a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _ranks import run_module
from rich.console import Console

from experiments import bench_codecs
from experiments.bench_codecs import (
    CODECS,
    OPERATIONS,
    RIVALS,
    Buffers,
    Size,
    compute,
    own_operations,
    parse,
    summarize,
    target_of,
    time_calls,
    torch_operations,
)
from experiments.paired import interleave_here
from experiments.results import RESULTS, load
from experiments.torch_codecs import TORCH_CODECS
from pipesgd.errors import UserInputError

pytestmark = pytest.mark.slow

TINY = Size(name="cache", numel=4096, calls=2, warm=True, rounds=2)


@pytest.mark.parametrize("name", list(TORCH_CODECS))
@pytest.mark.parametrize("operation", ["decode", "hop"])
def test_torchs_versions_say_what_ours_say(name: str, operation: str) -> None:
    own, torchs = Buffers(4096), Buffers(4096)
    operations = (own_operations(CODECS[name].make(), own), torch_operations(name, "eager", torchs))
    for buffers, some in zip((own, torchs), operations, strict=True):
        buffers.reset()
        some["encode"]()
        some[operation]()
    # A value may be between two levels, and be rounded up by one version and down by the other.
    level = {"bf16": 2.0**-8, "int8": 1 / 127, "int4": 1 / 7}[name] * own.original.abs().max()
    assert (own.values - torchs.values).abs().max() <= level * 1.001
    assert torch.isclose(own.values, torchs.values).float().mean() > 0.99
    assert not torch.equal(own.values, own.original)


@pytest.mark.parametrize("name", list(TORCH_CODECS))
def test_torchs_messages_are_as_long_as_ours_and_a_hop_makes_that_of_the_sums(name: str) -> None:
    codec, buffers = TORCH_CODECS[name], Buffers(4096)
    scales, payload = codec.message(4096)
    sent = payload.nbytes + (scales.nbytes if name != "bf16" else 0)
    assert sent == CODECS[name].make().wire_bytes(4096)
    codec.encode(buffers.values, scales, payload)
    made, again, decoded = codec.message(4096), codec.message(4096), torch.empty(4096)
    codec.decode(scales, payload, decoded)
    sums = buffers.values + decoded
    codec.hop(scales, payload, buffers.values, *made)
    assert torch.equal(buffers.values, sums)
    codec.encode(sums, *again)
    assert torch.equal(made[1], again[1])


def test_there_is_a_row_for_every_contender_and_operation() -> None:
    rows = compute([TINY], ["bf16", "sign"], ["eager"], Console())
    got = [(row["contender"], row["operation"]) for row in rows]
    ours = [(name, operation) for name in ("bf16", "sign") for operation in OPERATIONS]
    assert got == [*ours, *(("bf16, torch eager", operation) for operation in OPERATIONS[:3])]
    assert all(row["ratio_low"] <= row["ratio_median"] <= row["ratio_high"] for row in rows)
    assert {(row["nbytes"], row["rounds"], row["failure"]) for row in rows} == {(4 * 4096, 2, "")}


def test_what_cannot_be_compiled_is_said_and_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(function: object, dynamic: bool) -> object:
        def call(*tensors: torch.Tensor) -> None:
            raise RuntimeError("no compiler found\nin any folder")

        return call

    monkeypatch.setattr(torch, "compile", no_compiler)
    rows = compute([TINY], ["bf16"], list(RIVALS), Console())
    failed = [row for row in rows if row["failure"]]
    assert {row["contender"] for row in failed} == {"bf16, torch compile"}
    assert {row["failure"] for row in failed} == {"RuntimeError: no compiler found"}
    assert {row["ratio_median"] for row in failed} == {row["target_met"] for row in failed} == {None}
    assert len(rows) == 4 + 3 + 3


def test_ratios_are_to_the_copy_of_the_same_round() -> None:
    row = summarize(TINY, "int8", "encode", [2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (row["ratio_median"], row["ratio_low"], row["ratio_high"], row["ratio_iqr"]) == (2.0, 2.0, 2.0, 0.0)
    assert (row["target_ratio"], row["target_met"]) == (2.0, True)
    assert summarize(TINY, "int8", "encode", [2.01], [1.0])["target_met"] is False


def test_targets_are_for_ours() -> None:
    assert [target_of("int8", operation) for operation in OPERATIONS] == [2.0, 2.0, 2.0, None]
    assert [target_of("ternary stochastic", operation) for operation in OPERATIONS] == [3.0, 2.0, 3.0, None]
    assert [target_of("sign", operation) for operation in OPERATIONS] == [None, 2.0, None, None]
    assert target_of("int8, torch eager", "encode") is target_of("int8, torch eager", "decode") is None


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
        (["--rivals", "lazy"], "--rivals must be eager or compile; got 'lazy'"),
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
    words = ["--quick", "--codecs", "bf16", "--rivals", "eager", "--output", str(tmp_path)]
    done = run_module(bench_codecs.__name__, *words)
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout  # everything fits
    rows = load(tmp_path / "bench_codecs.csv")
    assert [row["size"] for row in rows] == 7 * ["cache"] + 7 * ["memory"]
    assert {path.name for path in tmp_path.iterdir()} == {f"bench_codecs.{end}" for end in ("csv", "manifest.json")}
