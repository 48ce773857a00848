"""Cost of late gradients by layer: the runs, those of simulated ranks among them, the summary and the figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from _kept_runs import check_refused, make_runs, ran
from _ranks import run_module
from matplotlib.figure import Figure
from torch import Tensor, nn

from experiments.late_layers import late_layers, layers_of, not_in
from experiments.lateness import (
    ALONE,
    MEASURED,
    ONWARDS,
    SYNCHRONOUS,
    Planned,
    main,
    parse,
    plan,
    plot,
    summarize,
    tabulate,
)
from experiments.results import RESULTS, Row, load
from experiments.simulated_runs import simulate
from experiments.simulation import SimulatedRanks
from pipesgd.cli import parse as parse_training

pytestmark = pytest.mark.slow

LOSSES = {
    (SYNCHRONOUS, -1): (2.0, 2.0),
    (ONWARDS, 0): (2.2, 2.2),
    (ONWARDS, 1): (2.02, 2.018),
    (ALONE, 0): (2.1, None),
}
"""Test losses of each seed; None for one that diverges. Others are 2.0."""


def loss_of(one: Planned) -> float | None:
    return LOSSES.get((one.late, one.number), (2.0, 2.0))[one.seed]


def rows() -> list[Row]:
    planned = plan(["transformer-2"], 2)
    runs = {}
    for one in planned:
        loss = loss_of(one)
        runs[one.words] = ran(None) if loss is None else ran(0.5, loss)
    return tabulate(planned, runs)


# ---- Runs


def test_every_run_is_one_that_pipesgd_makes_but_for_the_layers_that_are_late() -> None:
    planned = plan(MEASURED, 2)
    assert len({one.words for one in planned}) == len(planned)
    for one in planned[::11]:
        arguments, late = late_layers(one.words.split())
        config = parse_training(arguments)
        assert config.pipeline.width == (1 if one.late == SYNCHRONOUS else 2)
        assert config.updates.prediction == "eager"
        assert (late is None) == (one.late == SYNCHRONOUS)
        if late is not None:
            assert late[0] == one.layer
            assert (len(late) == 1) or one.late == ONWARDS


def test_layers_are_those_of_the_model_in_its_order() -> None:
    planned = [one for one in plan(["transformer-2"], 1) if one.late == ONWARDS]
    names = ["symbols", "positions", "blocks.0", "blocks.1", "norm", "output"]
    assert [(one.layer, one.number) for one in planned] == [(name, number) for number, name in enumerate(names)]
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.BatchNorm1d(2))
    assert layers_of(model) == ["0.0", "1"]
    assert not_in(["0.0"], model) == {id(parameter) for parameter in model[1].parameters()}


# ---- Simulated ranks


def _classify(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch), batch.argmax(1))


def _problem(iterations: int, world_size: int) -> tuple[nn.Module, list[list[Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
    return model, [[torch.randn(6, 4) for _ in range(world_size)] for _ in range(iterations)]


def test_the_late_layers_are_late_and_the_others_are_not() -> None:
    """The reference has an optimizer for each layer, and the means of two iterations."""
    model, batches = _problem(6, world_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    fresh = {id(parameter) for parameter in model[0].parameters()}
    ranks = SimulatedRanks(model, optimizer, world_size=2, width=2, prediction="none", fresh=fresh)
    reference, _ = _problem(0, world_size=2)
    own = {name: torch.optim.SGD(reference[int(name)].parameters(), lr=0.3, momentum=0.9) for name in ("0", "2")}
    delayed: list[Tensor] | None = None
    for of_ranks in batches:
        ranks.iterate(_classify, of_ranks)
        reference.zero_grad()
        (sum(_classify(reference, batch) for batch in of_ranks) / 2).backward()  # type: ignore[union-attr]
        now = [parameter.grad.clone() for parameter in reference[2].parameters()]
        own["0"].step()
        if delayed is not None:
            for parameter, gradient in zip(reference[2].parameters(), delayed, strict=True):
                parameter.grad = gradient
            own["2"].step()
        delayed = now
        for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("late", [["0"], ["2"], []])
def test_with_one_rank_whatever_is_late_is_predicted_exactly(late: list[str]) -> None:
    weights = []
    for width in (1, 2):
        model, batches = _problem(6, world_size=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        fresh = not_in(late, model) if width == 2 else ()
        ranks = SimulatedRanks(model, optimizer, world_size=1, width=width, fresh=fresh)
        for of_ranks in batches:
            ranks.iterate(_classify, of_ranks)
        ranks.flush()
        weights.append([parameter.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_run_in_which_nothing_is_named_late_is_late_everywhere() -> None:
    words = "--dataset digits --hidden-sizes 20 --batch-size 16 --iterations 10 --lr 0.3"
    synchronous, everywhere = simulate(f"{words} --width 1"), simulate(f"{words} --width 2")
    assert simulate(f"{words} --width 2 --late 1,3").test_loss == everywhere.test_loss
    only_last = simulate(f"{words} --width 2 --late 3").test_loss
    assert only_last not in (synchronous.test_loss, everywhere.test_loss)


# ---- Summary


def test_a_lateness_is_as_good_as_none_up_to_one_percent_of_the_loss() -> None:
    found = {(row["late"], row["number"]): row for row in summarize(rows())}
    assert [found[ONWARDS, number]["as_good"] for number in range(3)] == ["no", "yes", "yes"]
    assert found[ONWARDS, 1]["loss_to_sync_percent"] == pytest.approx(0.95)
    assert found[SYNCHRONOUS, -1]["as_good"] == ""
    assert (found[SYNCHRONOUS, -1]["late_share"], found[ONWARDS, 0]["late_share"]) == (0, 1)
    assert found[ONWARDS, 4]["late_share"] > found[ALONE, 4]["late_share"] > 0
    gone = found[ALONE, 0]
    assert (gone["diverged"], gone["test_loss_mean"], gone["as_good"]) == (1, None, "no")


def test_images_are_judged_by_points_of_accuracy() -> None:
    planned = plan(["mlp, adagrad"], 1)
    accuracies = {(SYNCHRONOUS, -1): 0.9, (ONWARDS, 0): 0.8969, (ONWARDS, 1): 0.8971}
    runs = {one.words: ran(accuracies.get((one.late, one.number), 0.9)) for one in planned}
    found = {(row["late"], row["number"]): row["as_good"] for row in summarize(tabulate(planned, runs))}
    assert (found[ONWARDS, 0], found[ONWARDS, 1]) == ("no", "yes")


def test_a_mean_is_over_all_seeds_or_there_is_none() -> None:
    some = [row for row in rows() if (row["late"], row["number"], row["seed"]) != (SYNCHRONOUS, -1, 1)]
    summary = summarize(some)
    assert SYNCHRONOUS not in {row["late"] for row in summary}
    assert {row["as_good"] for row in summary} == {""}


def test_the_figure_has_a_line_for_one_layer_and_one_for_all_after_it() -> None:
    axes = plot(rows(), Figure().subplots())
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines[f"late: {ONWARDS}"][:2] == [[0, pytest.approx(10)], [1, pytest.approx(0.95)]]
    assert [x for x, _ in lines[f"late: {ALONE}"]] == [1, 2, 3, 4], "a seed of the first one diverged"
    assert [label.get_text() for label in axes.get_xticklabels()][2] == "blocks.0"


# ---- Command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workloads", "digit"], r"--workloads must be one of .*; got 'digit' \(did you mean digits\?\)"),
        (["--output", str(RESULTS)], "--output must name another folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: Sequence[str], message: str, tmp_path: Path) -> None:
    check_refused(parse, words, message, tmp_path)


def test_runs_are_made_kept_and_written(tmp_path: Path) -> None:
    words = ["--quick", "--workloads", "digits", "--processes", "1", "--output", str(tmp_path)]
    make_runs(main, words)
    done = run_module("experiments.lateness", *words)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 runs are there" in done.stdout
    assert "Warning" not in done.stderr
    table = load(tmp_path / "lateness.csv")
    assert [(row["late"], row["layer"]) for row in table] == [
        (SYNCHRONOUS, "-"),
        (ONWARDS, 1),
        (ALONE, 1),
        (ONWARDS, 3),
    ]
    assert {row["as_good"] for row in load(tmp_path / "lateness_summary.csv")} <= {None, "yes", "no"}
    assert (tmp_path / "lateness.png").stat().st_size > 0
    assert [label.get_text() for label in plot(table, Figure().subplots()).get_xticklabels()] == ["1", "3"]
