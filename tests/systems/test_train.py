"""Whole runs of the command with published systems: what is exchanged of a gradient, and servers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from _runs import EXAMPLES, SHORT, lose_the_last_checkpoint, run, succeed, succeed_as_told, summary

pytestmark = pytest.mark.slow


MODEL_OF_TEXT = "--model transformer --layers 1 --heads 2 --embedding 32 --context 16 --batch-size 16"


def text_in(folder: Path) -> str:
    """Write files of text into ``folder``; return the option that names them.

    No two files have the same sentences, but all have the same words, so that a test file can be predicted.
    """
    words = ["the", "ring", "sums", "what", "every", "rank", "has", "found", "and", "gives", "it", "back"]
    (folder / "text").mkdir()
    for i in range(20):
        numbers = random.Random(i)
        (folder / "text" / f"{i}.txt").write_text(" ".join(numbers.choice(words) for _ in range(100)))
    return f"--dataset text:{folder / 'text'}"


def test_a_transformer_learns_text(tmp_path: Path) -> None:
    result = succeed(
        2,
        f"{MODEL_OF_TEXT} {text_in(tmp_path)} --optimizer adamw --lr 0.01 --iterations 60 --evaluate-iterations 25",
        tmp_path / "run",
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(math.log(256), abs=0.1)
    assert lines[-1]["loss"] < 2.5
    tested = [line for line in lines if line["test_loss"] is not None]
    assert [line["iteration"] for line in tested] == [24, 49]
    assert [line["iteration"] for line in lines if line["test_accuracy"] is not None] == [24, 49]
    final = result["final"]
    assert final["test_loss"] < min(2.5, tested[0]["test_loss"])
    assert final["test_accuracy"] > max(0.3, tested[0]["test_accuracy"])
    assert result["replicas_identical"]


def test_embeddings_exchanged_by_rows_train_and_resume_as_if_exchanged_whole(tmp_path: Path) -> None:
    """Two ranks add two values in one order only, so that weights are the same, bit for bit."""
    model = MODEL_OF_TEXT.replace("--batch-size 16", "--batch-size 4")
    words = f"{model} {text_in(tmp_path)} --optimizer adamw --iterations 12 --checkpoint-iterations 5"
    whole = succeed(2, words, tmp_path / "whole")
    sent = {"matrix": whole["wire_bytes_per_iteration"]}
    for reduce in ("rows", "auto"):
        found = succeed(2, f"{words} --reduce {reduce}", tmp_path / reduce)
        lose_the_last_checkpoint(tmp_path / reduce)
        results = run(2, f"{words} --reduce {reduce} --resume", tmp_path / reduce)
        assert "continuing after iteration 10" in results[0][1]
        assert ", embeddings by rows" in results[0][1]
        assert ("--reduce auto: symbols.weight by rows, positions.weight by matrix" in results[0][1]) == (
            reduce == "auto"
        )
        resumed = summary(tmp_path / reduce)
        assert whole["weights_sha256"] == found["weights_sha256"] == resumed["weights_sha256"]
        sent[reduce] = found["wire_bytes_per_iteration"]
        assert resumed["wire_bytes_per_iteration"] == sent[reduce]
        recorded = json.loads((tmp_path / reduce / "run.json").read_text())
        assert ("exchanges" in recorded) == (reduce == "auto")
        if reduce == "auto":
            assert recorded["exchanges"].pop("symbols.weight") == "rows"
            others = set(recorded["exchanges"].values())
            assert others == {"matrix"}, "a batch has many more positions than a layer has rows"
    assert sent["auto"] < sent["rows"] < sent["matrix"], "positions are all used, and few of the symbols"


def test_linear_layers_exchanged_by_factors_train_and_resume_by_fewer_bytes(tmp_path: Path) -> None:
    """64-200-10 on two ranks, with four samples on each: both layers have more values than the factors of a batch."""
    words = "--hidden-sizes 200 --batch-size 4 --iterations 12 --lr 0.05 --width 2 --checkpoint-iterations 5"
    hidden, output, biases = 64 * 200, 200 * 10, 200 + 10
    factors = {"hidden": 4 + 4 * 4 * (64 + 200), "output": 4 + 4 * 4 * (200 + 10)}
    expected = {
        "matrix": 4 * (hidden + output + biases),
        "factors": factors["hidden"] + factors["output"] + 4 * biases,
        "auto": factors["hidden"] + factors["output"] + 4 * biases,
    }
    found = {}
    for reduce, sent in expected.items():
        found[reduce] = succeed(2, f"{words} --reduce {reduce}", tmp_path / reduce)
        assert found[reduce]["wire_bytes_per_iteration"] == sent
        assert found[reduce]["replicas_identical"]
    assert found["factors"]["weights_sha256"] == found["auto"]["weights_sha256"]
    assert found["factors"]["final"]["train_loss"] == pytest.approx(found["matrix"]["final"]["train_loss"], rel=1e-4)
    lose_the_last_checkpoint(tmp_path / "auto")
    [(_, said, _), *_] = run(2, f"{words} --reduce auto --resume", tmp_path / "auto")
    assert "continuing after iteration 10" in said
    assert ", embeddings by rows and linear layers by factors where that sends less" in said
    assert "--reduce auto: 1.weight by factors, 3.weight by factors" in said
    assert summary(tmp_path / "auto")["weights_sha256"] == found["auto"]["weights_sha256"]
    recorded = json.loads((tmp_path / "auto" / "run.json").read_text())
    assert recorded["exchanges"] == {"1.weight": "factors", "3.weight": "factors"}


def test_an_example_with_a_large_embedding_sends_its_few_rows(tmp_path: Path) -> None:
    found = succeed_as_told((EXAMPLES / "hashed_words.py").read_text(encoding="utf-8"), tmp_path / "run")
    assert found["final"]["test_accuracy"] > 0.9
    assert found["replicas_identical"]
    others = 4 * (16 * 2 + 2)  # of two ranks, each sends half of them twice
    in_a_batch = 32 * 8
    assert found["wire_bytes_per_iteration"] < others + 4 + in_a_batch * (4 + 4 * 16), "a table has 6.4 MB"


def test_rows_of_a_model_without_embeddings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    [(error, _, _)] = run(1, f"{SHORT} --reduce rows", tmp_path / "run")
    assert error.startswith("UserInputError: reduce must be matrix unless a torch.nn.Embedding is trained")
    assert not (tmp_path / "run").exists()
