"""AlexNet by the plans of "One weird trick" on real ranks: they train alike, and send what the paper says."""

from __future__ import annotations

from typing import Any

import pytest
from _ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from experiments.one_weird_trick.__main__ import FOLDER, PLANS, divided, parse, train
from pipesgd.data import build_model
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

RANKS, SAMPLES = 4, 8
WORDS = f"--dataset digits --model alexnet --batch-size {SAMPLES} --lr 0.02 --schedule one-cycle --iterations 3"
WHOLE_BATCH = ("data", "model", "hybrid-gather", "hybrid-turns", "hybrid-portions")


def _rows(ranks: Ranks) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("islands", "inside"))
    return [train(ranks, mesh, WORDS, plan, seed=0, test_every=10) for plan in PLANS]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """Rows of the plans, which all ranks have found alike."""
    first, *others = run_ranks(RANKS, _rows)
    assert others == [first] * (RANKS - 1)
    return {row["plan"]: row for row in first}


def test_all_plans_are_in_the_folder() -> None:
    assert sorted(PLANS) == sorted(path.stem for path in FOLDER.glob("*.toml"))


def test_one_rank_is_refused() -> None:
    with pytest.raises(UserInputError, match="at least 2 ranks must be started"):
        parse([], 1)


def test_data_model_and_hybrid_parallelism_train_alike(rows: dict[str, dict[str, Any]]) -> None:
    """In float32, three iterations from the same weights on the same samples differ by rounding alone."""
    for plan in WHOLE_BATCH:
        assert rows[plan]["train_loss"] == pytest.approx(rows["data"]["train_loss"], rel=1e-5)
        assert rows[plan]["test_accuracy"] == rows["data"]["test_accuracy"]
    for plan in ("variable-turns", "variable-portions"):
        assert rows[plan]["update_period"] == 1
        assert rows[plan]["train_loss"] != pytest.approx(rows["data"]["train_loss"], rel=1e-5)


def test_ranks_send_what_the_formulas_say(rows: dict[str, dict[str, Any]]) -> None:
    model = divided(build_model("alexnet", sample_shape=(1, 8, 8), num_classes=10, hidden_sizes=()))
    below, above = (sum(one.numel() for one in part.parameters()) for part in model.children())
    others, ring = RANKS - 1, 2 * (RANKS - 1) / RANKS
    entering, hidden = 128 * 2 * 2, 512
    assert model.get_parameter("classifier.0.weight").shape == (hidden, entering)
    assert rows["data"]["passed_bytes"] == rows["data"]["in_layers_bytes"] == 0
    assert rows["data"]["gradient_bytes"] == pytest.approx(4 * ring * (below + above), rel=1e-3)
    assert rows["model"]["passed_bytes"] == rows["model"]["gradient_bytes"] == 0
    assert rows["model"]["in_layers_bytes"] > 0
    for plan, row in rows.items():
        if plan in ("data", "model"):
            continue
        assert row["passed_bytes"] == row["formula_bytes"] == others * SAMPLES * (2 * 4 * entering + 8)
        busiest = RANKS if row["scheme"] == "turns" else 1
        assert row["busiest_bytes"] == busiest * others * SAMPLES * (4 * entering + 8)
        assert row["in_layers_bytes"] == ring * RANKS * SAMPLES * 4 * hidden, "the sum of the second layer's outputs"
        assert row["gradient_bytes"] == pytest.approx(4 * ring * below, rel=1e-3), "convolutions alone"
        assert row["bytes"] == row["passed_bytes"] + row["in_layers_bytes"] + row["gradient_bytes"]
