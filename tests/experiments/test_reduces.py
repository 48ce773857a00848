"""The loops of experiments.reduces: what each of them sends."""

from __future__ import annotations

from typing import Any

import pytest
from _ranks import run_ranks

from experiments import reduces
from experiments.bench_pipelined import Workload
from experiments.reduces import PIPELINES, Texts
from pipesgd.data import load_dataset
from pipesgd.ranks import Ranks

WORKLOADS = {
    "images": Workload(name="mlp", model="mlp", hidden_sizes=(100,), batch_size=2),
    "texts": Texts(name="texts", model="embedding", batch_size=2, rows=400, columns=8, words=3),
}


def _sent(ranks: Ranks) -> tuple[dict[str, dict[str, int | None]], int]:
    """Return what each loop has sent in its second iteration, and the number of words in this rank's second batch."""
    data = load_dataset("digits", None, image_size=8)
    sent: dict[str, dict[str, int | None]] = {}
    for name, workload in WORKLOADS.items():
        loops, batches = (
            reduces.make_loops(workload.build(data), ranks, rows=reduces.rows_of(workload)),
            workload.batches(data, ranks, 2),
        )
        for loop in loops.values():
            for batch in batches:
                loop.iterate(*batch)
            loop.flush()
            loop.close()
        sent[name] = {contender: loop.wire_bytes for contender, loop in loops.items()}
    return sent, batches[1][0].unique().numel()


@pytest.mark.slow
def test_every_loop_trains_and_auto_sends_what_is_less() -> None:
    (sent, words), (_, others) = run_ranks(2, _sent)
    for of_workload in sent.values():
        assert of_workload.pop(reduces.DDP) is of_workload.pop(reduces.DDP_FP16) is None
        assert of_workload.keys() == PIPELINES.keys()
        for name, nbytes in of_workload.items():
            assert nbytes is not None
            assert nbytes <= (of_workload[name.replace("auto", "matrix")] or 0)
    # Of two ranks, each sends half of a matrix twice.
    layers, biases = [(64, 100), (100, 10)], 100 + 10
    assert sent["images"]["width 1, fp32, matrix"] == 4 * (sum(a * b for a, b in layers) + biases)
    assert sent["images"]["width 1, fp32, auto"] == sum(4 + 2 * (a + b) * 4 for a, b in layers) + 4 * biases
    scores = 8 * 2 + 2
    assert sent["texts"]["width 1, fp32, matrix"] == 4 * (400 * 8 + scores)
    assert sent["texts"]["width 1, fp32, auto"] == 4 + max(words, others) * (4 + 8 * 4) + 4 * scores


def test_predictions_are_judged_by_their_error_and_speeds_by_their_intervals() -> None:
    names = [reduces.DDP, reduces.DDP_FP16, *PIPELINES]
    found = {name: {"seconds": [2.0, 2.0, 2.0] if "matrix" in name else [1.0, 1.0, 1.0]} for name in names}
    rows: list[dict[str, Any]] = [
        {"contender": name, "median_s": found[name]["seconds"][0], "predicted_s": None} for name in names[:2]
    ]
    for number, name in enumerate(PIPELINES):
        told = found[name]["seconds"][0] * (1.02 if number else 1.05)
        rows.append({"contender": name, "median_s": found[name]["seconds"][0], "predicted_s": told})
        rows[-1] |= {"predicted_low": 0.9 * told, "predicted_high": 1.1 * told}
    judged = reduces.judge(found, rows)
    assert judged["width 1, fp32, auto / width 1, fp32, matrix"]["verdict"] == "met"
    assert judged["width 2, fp32, auto / DDP, fp16"]["verdict"] == "MISSED"
    predicted = {name: one["verdict"] for name, one in judged.items() if name.startswith("predicted / ")}
    assert predicted == {f"predicted / {name}": "met" if number else "MISSED" for number, name in enumerate(PIPELINES)}


def test_every_pipeline_is_a_run_that_can_be_predicted() -> None:
    for name, options in PIPELINES.items():
        config = reduces.config_of(WORKLOADS["images"], options)
        assert name == f"width {config.pipeline.width}, {config.compression.codec}, {config.pipeline.reduce}"
