"""All experiments in one command: the work and the time that are left, and resuming after an interruption."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from experiments.__main__ import EXPERIMENTS, KEEP_RUNS, Experiment, run_all
from experiments.figures import manifest
from experiments.gallery import FIGURES
from experiments.results import RESULTS

THREE = [
    Experiment(name=name, words=f"bench_{name}", minutes=minutes) for name, minutes in (("a", 10), ("b", 20), ("c", 30))
]


def archived() -> dict[str, str]:
    """Return the commits of the archived results, by name, as the table of the log has them."""
    text = (RESULTS.parent / "LOG.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(\w+)` \|.*\| `(\w{7})` \|$", text, re.MULTILINE))


def test_the_log_has_the_commit_at_which_an_archived_experiment_can_be_repeated() -> None:
    assert archived() == {name: manifest(name)["git"]["commit"][:7] for name in archived()}


def test_every_result_is_made_by_one_of_them_or_its_experiment_is_archived() -> None:
    names = {one.name for one in EXPERIMENTS}
    assert len(names) == len(EXPERIMENTS)
    made = {path.name.removesuffix(".manifest.json") for path in RESULTS.glob("*.manifest.json")}
    beside = {
        "local_steps_accuracy_summary": "local_steps_accuracy",
        "survivors_changes": "survivors",
        "survivors_on_links_changes": "survivors_on_links",
        "systems_convergence": "systems",
        "validate_timing_model_auto": "validate_timing_model",
    }
    assert {beside.get(name, name) for name in made} - names == set(archived())
    assert {beside.get(one.name, one.name) for one in FIGURES} <= names


def test_those_that_read_results_come_after_those_that_make_them() -> None:
    order = [one.name for one in EXPERIMENTS]
    assert order[-1] == "gallery"
    assert order.index("bench_all_reduce_matrix") < order.index("fig06_all_reduces") < order.index("fig07_layerwise")
    assert order.index("systems") < order.index("first_screen")
    assert order.index("validate_timing_model") < order.index("fig05_timing_model")


@pytest.mark.parametrize("one", EXPERIMENTS, ids=lambda one: one.name)
def test_every_one_is_a_command_with_options_that_it_has(one: Experiment) -> None:
    assert importlib.util.find_spec(f"experiments.{one.words.split()[0]}") is not None
    assert ("--fresh" in one.arguments(fresh=True)) == (one.words.split()[0] in KEEP_RUNS)
    assert "--fresh" not in one.arguments(fresh=False)


@pytest.mark.slow
def test_a_command_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "runs" / "experiments.json"
    ran: list[tuple[str, bool]] = []

    def run(one: Experiment, fresh: bool) -> int:
        ran.append((one.name, fresh))
        if one.name == "b" and len(ran) == 2:
            raise KeyboardInterrupt
        return 3 if one.name == "c" else 0

    with pytest.raises(KeyboardInterrupt):
        run_all(THREE, state, Console(), run)
    assert run_all(THREE, state, Console(), run) == ["c"]
    # b was begun: the runs that it has kept are reused. c failed: it is tried again, and resumes.
    assert run_all(THREE, state, Console(), run) == ["c"]
    assert ran == [("a", True), ("b", True), ("b", False), ("c", True), ("c", False)]
    assert [name for name, one in json.loads(state.read_text()).items() if "minutes" in one] == ["a", "b"]
    out = capsys.readouterr().out
    assert "[1/3] a, about 10 min; 1:00:00 h left in all" in out
    assert "c failed with exit code 3" in out
    assert run_all(THREE[:1], state, Console(), run, again=True) == []
    assert ran[-1] == ("a", True)
