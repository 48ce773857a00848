"""The paper's question: a quick run answers it, and the answers agree with results that need no model."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_module
from matplotlib.figure import Figure

from experiments.paper_question import (
    CVS,
    METHODS,
    WIDTHS,
    WORKLOADS,
    WORLD_SIZES,
    answers,
    compute,
    jitter_answers,
    order,
    parse,
    plot,
    plot_third,
)
from experiments.results import load
from pipesgd.errors import UserInputError

pytestmark = pytest.mark.slow


def test_a_quick_run_answers_for_every_network_and_spread(tmp_path: Path) -> None:
    done = run_module("experiments.paper_question", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows, jitter = (load(tmp_path / f"{name}.csv") for name in ("paper_question", "paper_question_jitter"))
    assert len(rows) == len(WORKLOADS) * 3 * len(METHODS)
    assert len(jitter) == len(WORLD_SIZES) * len(CVS) * 2 * len(WIDTHS)
    assert [row["workload"] for row in answers(rows)] == list(WORKLOADS)
    without, *_, most = (row for row in jitter_answers(jitter) if row["world_size"] == 4)
    assert (without["cv"], without["enough_formula"], without["enough_simulated"]) == (0, 2, 2)
    assert without["gain_formula"] == without["gain_simulated"] == 0
    assert most["gain_formula"] > 0.05
    assert most["gain_simulated"] > 0.05
    assert (tmp_path / "paper_question.png").stat().st_size > 0


def test_speed_ups_are_those_of_the_formulas_where_the_network_is_all() -> None:
    """Gradients are large, and computation is negligible: a server next to a worker gets and gives three gradients, or
    five with those that it serves in turn; the ring sends 3/2."""
    rows = compute(["alexnet"], [2.0**-10])
    by_method = {row["method"]: row for row in rows}
    assert by_method["ps-sync"]["speed_up"] == 1
    assert by_method["pipelined"]["speed_up"] == pytest.approx(5 / 1.5, rel=0.1)
    assert by_method["pipelined + T"]["speed_up"] == pytest.approx(2 * by_method["pipelined"]["speed_up"], rel=0.05)
    assert by_method["width 3"]["iteration_s"] == by_method["pipelined"]["iteration_s"]


def test_where_computation_is_as_long_as_the_ring_width_2_halves_the_time() -> None:
    rows = compute(["resnet18"], [1.0, 100.0])
    half = order(rows, "resnet18", 1.0)
    times = {row["method"]: row["iteration_s"] for row in half}
    assert times["D-Sync"] == pytest.approx(2 * times["pipelined"])
    assert half[-1]["method"] == "ps-sync, server apart"
    [answer] = answers(rows)
    assert answer["claim_to_ratio"] is None  # 5.4 needs less computation than the ring takes
    assert answer["widest_gain"] == pytest.approx(0)


def test_pictures_show_the_rows() -> None:
    rows = compute(["mlp"], [0.5, 1.0])
    lines = {line.get_label(): line for line in plot(rows, Figure().subplots()).get_lines()}
    expected = [row["speed_up"] for row in rows if row["method"] == "pipelined"]
    assert list(lines["pipelined"].get_ydata()) == expected
    periods = {2: 1.1, 3: 1.0}
    jitter = [
        {"world_size": 4, "cv": 0.1, "ratio": 1.0, "width": width, "formula": period, "simulated": period + 1}
        for width, period in periods.items()
    ]
    gain = {line.get_label(): list(line.get_ydata()) for line in plot_third(jitter, Figure().subplots()).get_lines()}
    assert gain["cv 10%"] == pytest.approx([10.0])


def test_it_is_one_process() -> None:
    with pytest.raises(UserInputError, match="without torchrun"):
        parse([], by_torchrun=True)
