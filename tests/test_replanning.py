"""Planning again: when, on all ranks at once, and what the run is after it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _plans import INSTANT, SMALL, choose, cluster
from _ranks import run_ranks

from pipesgd import planning, replanning
from pipesgd.command_line import parse
from pipesgd.config import AUTO_OPTIONS
from pipesgd.decision import Planned
from pipesgd.drift import SETTLING, WINDOW, WINDOWS
from pipesgd.launch import Ranks
from pipesgd.progress import screen
from pipesgd.replanning import MOST_REPLANS, Watch, as_asked, carry_over
from pipesgd.strategies.pipelined import Pipelined
from pipesgd.train import train
from timing_model import LinkParams

TOLD = SETTLING + WINDOW * WINDOWS
"""Iterations after which a drift is told."""
DUE = -(-TOLD // WINDOW) * WINDOW
"""Those after which it is time to plan again."""
SHORT = "--hidden-sizes 20 --batch-size 16 --lr 0.05 --width auto --codec auto --check-replicas 7"


def prediction(seconds: float) -> Planned:
    return dataclasses.replace(choose(cluster()), iteration_seconds=seconds, low=seconds, high=seconds)


def _watch(ranks: Ranks, total: int) -> tuple[list[int], list[str]]:
    """When a run is to be planned again whose iterations take 9 s on rank 0, predicted is 1 s; what is said."""
    said = io.StringIO()
    watch = Watch(prediction(1.0), ranks, screen(ranks, said), replans=True)
    times = []
    for done in range(1, total + 1):
        if watch.is_time(9.0 if ranks.rank == 0 else 1.0, done, total):
            times.append(done)
            watch.go_on(prediction(1.0))
    return times, said.getvalue().splitlines()


def test_all_ranks_plan_again_in_the_same_iteration_but_not_for_ever() -> None:
    (times, said), (others, nothing) = run_ranks(2, _watch, 320, process_group=False)
    assert times == others == [DUE * number for number in range(1, MOST_REPLANS + 1)]
    assert nothing == []
    assert "the cluster is slower than" in said[0]
    assert said[-2].startswith(f"planned again {MOST_REPLANS} times")
    assert "the cluster is slower than" in said[-1]  # it is still said


def test_near_the_end_it_is_not_worth_it() -> None:
    (times, said), _ = run_ranks(2, _watch, DUE + 1, process_group=False)
    assert times == []
    assert said[-1] == "not planned again: the 1 iterations that are left take no longer than measuring"


def test_what_was_chosen_is_free_again() -> None:
    config = parse(["--width", "auto", "--all-reduce", "auto", "--codec", "int8", "--replan"])
    chosen = config.with_choices({"width": 3, "all-reduce": "halving-doubling"})
    assert as_asked(chosen, config.planning.auto) == dataclasses.replace(
        config, planning=dataclasses.replace(config.planning, replan=False)
    )


def _carried(ranks: Ranks, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What of a strategy's state another one has that follows it, and what the weights do."""
    torch.manual_seed(ranks.rank)
    model = torch.nn.Linear(70, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    old = Pipelined(model, optimizer, ranks=ranks, **before)
    for _ in range(6):
        model(torch.randn(4, 70)).square().sum().backward()
        old.step()
    old.flush()
    kept = old.state_dict()
    old.close()
    weights = model.weight.detach().clone()
    new = Pipelined(model, optimizer, ranks=ranks, **after)
    dropped = carry_over(kept, new, same_codec=before["codec"] == after["codec"])
    state = new.state_dict()
    same = torch.equal(model.weight, weights)
    for _ in range(4):
        model(torch.randn(4, 70)).square().sum().backward()
        applied = new.step().applied
    new.flush()
    new.close()
    return {
        "iteration": state["iteration"],
        "same": same,
        "dropped": dropped,
        "cosine": state["agreement"]["cosine"] == kept["agreement"]["cosine"] < 1,
        "residuals": [one.tolist() for one in state["exchange"].get("residuals", [])],
        "before": [one.tolist() for one in kept["exchange"].get("residuals", [])],
        "applied": applied,
        "after": model.weight.tolist(),
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"width": 2, "codec": "int4"}, {"width": 3, "codec": "int4", "all_reduce": "halving-doubling"}),
        ({"width": 2, "codec": "int4"}, {"width": 1, "codec": "fp32"}),
        ({"width": 1, "codec": "fp32"}, {"width": 2, "codec": "int4"}),
        ({"width": 3, "codec": "int8", "prediction": "previous"}, {"width": 1, "codec": "int8"}),
    ],
)
def test_a_strategy_follows_another_one_with_what_it_knew(before: dict[str, Any], after: dict[str, Any]) -> None:
    one, other = run_ranks(2, _carried, before, after)
    for found in (one, other):
        assert (found["iteration"], found["same"]) == (6, True)
        assert found["applied"] == (9 - (after["width"] - 1),)
        assert found["cosine"] == (before["width"] > 1 and "prediction" not in before)  # eager alone learns it
        assert found["dropped"] == (before["codec"] == "int4" != after["codec"])
        if before["codec"] == after["codec"] == "int4":
            assert found["residuals"] == found["before"]
            assert any(value != 0 for flat in found["residuals"] for value in flat)
    assert one["after"] == other["after"]


def _train(ranks: Ranks, words: list[str]) -> str:
    """What a run said whose calibrations find an instant network."""
    planning.CALIBRATION_SECONDS = 1e-3
    profile = cluster(INSTANT, SMALL)
    known = profile, profile.compute[0]
    replanning.calibrate_briefly = lambda *_, **__: known if ranks.rank == 0 else None  # type: ignore[assignment]
    out = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):
        train(words, ranks, screen(ranks, out))
    return out.getvalue()


def run(words: str) -> str:
    said, *others = run_ranks(2, _train, words.split(), process_group=False)
    assert others == [""]
    return str(said)


def test_a_run_that_is_faster_than_its_cluster_was_gets_another_plan_and_can_be_continued(tmp_path: Path) -> None:
    """Predicted are two seconds, so width 2 and int8; then the network is found to be instant."""
    slow, folder = tmp_path / "slow.toml", tmp_path / "run"
    cluster(LinkParams(alpha=1.0, beta=1e-3, gamma=0.0, sync=0.0), SMALL).save(slow)
    words = f"{SHORT} --iterations {DUE + 10} --output {folder} --checkpoint-iterations {DUE + 5}"
    said = run(f"{words} --cluster {slow} --replan")
    for line in (
        "the cluster is faster than the calibration found it",
        f"planning again after iteration {DUE} of {DUE + 10} (--replan)",
        "going on with --width 1 --codec fp32 --all-reduce ring --segment-bytes 1048576; so far it was --width 2",
    ):
        assert line in said
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["width"], summary["codec"], summary["replicas_identical"]) == (1, "fp32", True)
    assert [one["iteration"] for one in summary["planned"]["replanned"]] == [DUE]
    assert summary["planned"]["iterations"] == 10
    assert {name: summary["options"][name] for name in AUTO_OPTIONS} == summary["planned"]["choices"]

    for path in (folder / "checkpoints").glob(f"iteration-*{DUE + 5}"):
        for file in path.iterdir():  # so that it continues where it was planned again
            file.unlink()
    said = run(f"{words} --cluster {slow} --replan --resume")
    assert f"continuing after iteration {DUE} of {DUE + 10}" in said
    assert "planned when the run began" in said
    resumed = json.loads((folder / "summary.json").read_text())
    assert resumed["weights_sha256"] == summary["weights_sha256"]


def test_without_the_option_it_only_says_so(tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    cluster(LinkParams(alpha=1.0, beta=1e-3, gamma=0.0, sync=0.0), SMALL).save(slow)
    said = run(f"{SHORT} --iterations {DUE + 10} --output {tmp_path / 'run'} --cluster {slow}")
    assert "the cluster is faster than the calibration found it" in said
    assert "planning again" not in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["planned"]["replanned"] == []
