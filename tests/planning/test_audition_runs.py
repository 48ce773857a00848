"""Whole runs with an audition: real updates, the same replicas, and choices that a resumed run follows."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _plans import SMALL, cluster
from _ranks import run_ranks

from pipesgd import train as train_module
from pipesgd.errors import RunError, UserInputError
from pipesgd.membership.farewell import Farewell
from pipesgd.pipeline.divergence_guard import SYNCHRONOUS_ITERATIONS, Guard
from pipesgd.planning import audition
from pipesgd.planning.audition import AGAIN_AFTER, TURN, UNTIMED, Audition
from pipesgd.planning.choose import MOST_CANDIDATES
from pipesgd.planning.drift import Drift
from pipesgd.planning.followed import FollowedPlan
from pipesgd.planning.planned import Planned
from pipesgd.ranks import Ranks
from pipesgd.run import output
from pipesgd.run.console import screen
from pipesgd.run.metrics import read_metrics
from pipesgd.strategy import Strategy
from pipesgd.train import train
from timing_model.cluster_profile import Profile
from timing_model.params import LinkParams

pytestmark = pytest.mark.slow

CLOSE = LinkParams(alpha=1e-4, beta=2e-7, gamma=0.0, sync=0.0)
"""A link with which all widths are predicted to be about equally fast."""
WORDS = "--hidden-sizes 20 --batch-size 16 --lr 0.05 --width auto --buckets 1 --checkpoint-iterations 5"
WORDS += " --keep-checkpoints 100"


Prepare = Callable[[], None]
"""Changes the code in each rank's process, which ends with the run."""


def change_nothing() -> None:
    return


def _train(
    ranks: Ranks, words: list[str], share: float, contradicted: bool | None, prepare: Prepare = change_nothing
) -> tuple[str, str]:
    """Run once, with auditions that may take this share of the run; return (text of the error, stdout).

    ``contradicted`` replaces what the iterations after an audition say about it, unless it is None.
    """
    audition.MOST_SHARE = share
    prepare()
    if contradicted is not None:
        told = property(lambda _: contradicted, lambda *_: None)
        Drift.contradicted = told  # in a process of its own, which ends with the run
    out = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            train(words, ranks, screen(ranks, out))
            error = ""
        except (UserInputError, RunError) as failure:
            error = str(failure)
    return error, out.getvalue()


def attempt(
    folder: Path,
    words: str,
    share: float = 1e3,
    contradicted: bool | None = None,
    prepare: Prepare = change_nothing,
) -> tuple[str, str]:
    """Return (error, output of rank 0) of a run on two ranks, with a cluster on which all widths are a tie."""
    cluster(CLOSE, SMALL).save(folder / "cluster.toml")
    options = [*words.split(), "--cluster", str(folder / "cluster.toml"), "--output", str(folder / "run")]
    (error, text), (other, _) = run_ranks(2, _train, options, share, contradicted, prepare, process_group=False)
    assert error == other
    return error, text


def run(folder: Path, words: str, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], str]:
    """Return (summary, output of rank 0) of an ``attempt`` that ends without an error."""
    error, text = attempt(folder, words, *args, **kwargs)
    assert error == ""
    return json.loads((folder / "run" / "summary.json").read_text()), text


def stop_before_the_first_iteration() -> None:
    def is_due(farewell: Farewell, iteration: int) -> bool:
        farewell.requested = "SIGTERM"
        return True

    Farewell.is_due = is_due  # type: ignore[method-assign]


def choose_a_coarser_codec() -> None:
    """Let every candidate stay in the audition, and the first that is not fp32 win."""
    Audition._left = lambda self, *_: list(range(len(self.candidates)))  # type: ignore[method-assign]
    Audition._best = lambda self, _: [one["codec"] != "fp32" for one in self.candidates].index(True)  # type: ignore[method-assign]


def back_to(folder: Path, iteration: int) -> None:
    """Make the run in ``folder`` look as if it had been killed after its checkpoint of ``iteration``."""
    (folder / "run" / "summary.json").unlink()
    for path in (folder / "run" / "checkpoints").glob("iteration-*"):
        if int(path.name.partition("-")[2]) > iteration:
            shutil.rmtree(path)


def back_to_before_the_first_decision(folder: Path) -> None:
    """Make a run that has compared three widths look as if it had been killed in the first turn of the last one."""
    path = folder / "run" / "run.json"
    described = json.loads(path.read_text())
    planned = described["planned"]
    begun = planned["audition"] | {"turns": planned["audition"]["turns"][:3], "passes": 1, "decision_at": 3 * TURN}
    described["planned"] = planned | {"audition": begun | {"paces": []}, "support": "interpolated"}
    path.write_text(json.dumps(described))
    back_to(folder, 30)


def widths(planned: dict[str, Any]) -> list[tuple[int, int]]:
    return [(iteration, choices["width"]) for iteration, choices in planned["audition"]["turns"]]


def test_a_run_auditions_keeps_the_winner_and_resumes_bit_for_bit_from_anywhere(tmp_path: Path) -> None:
    words = f"{WORDS} --codec auto --iterations 170 --warmup-iterations 6"
    result, text = run(tmp_path, f"{words} --check-replicas 10", contradicted=False)
    planned = result["planned"]
    turns = widths(planned)
    candidates = planned["audition"]["candidates"]
    assert len(candidates) == MOST_CANDIDATES
    assert {one["width"] for one in candidates} == {1, 2, 3}
    assert [(iteration, width) for iteration, width in turns[:MOST_CANDIDATES]] == [
        (6 + number * TURN, one["width"]) for number, one in enumerate(candidates)
    ]
    assert planned["audition"]["passes"] == 0
    assert planned["choices"] == planned["audition"]["turns"][-1][1]
    assert (result["width"], result["codec"]) == (planned["choices"]["width"], planned["choices"]["codec"])
    assert planned["support"] == "measured"
    assert [pace[3] >= TURN - 2 - 2 for pace in planned["audition"]["paces"]] == [True] * MOST_CANDIDATES
    assert result["replicas_identical"]
    assert "train in turns of 12 iterations or more from iteration 6 on, and the fastest stays\n" in text
    assert text.count("audition, time of an iteration: ") == 1
    assert f"; --width {result['width']}" in text
    assert " in the audition: " in text
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["planned"]["audition"] == planned["audition"]
    assert described["options"]["width"] == result["width"]
    assert planned["audition"]["decision_at"] > 170 > turns[-1][0] + AGAIN_AFTER, (
        "a look after the decision has changed nothing"
    )

    # Before the first turn, in the middle of a turn, at its end (the checkpoint is of the pipeline before the change),
    # and after the decision. That iterations contradict the audition now changes nothing: the look was before.
    for iteration in (5, 20, 30, 60, 100):
        back_to(tmp_path, iteration)
        resumed, text = run(tmp_path, f"{words} --resume", contradicted=True)
        assert f"continuing after iteration {iteration} of 170" in text
        assert resumed["weights_sha256"] == result["weights_sha256"]
        assert resumed["planned"]["audition"] == planned["audition"]


def test_a_run_that_was_killed_before_a_decision_decides_by_what_it_had_measured(tmp_path: Path) -> None:
    words = f"{WORDS} --iterations 90"
    run(tmp_path, words)
    back_to_before_the_first_decision(tmp_path)
    result, _ = run(tmp_path, f"{words} --resume")
    found = result["planned"]["audition"]
    assert found["passes"] == 0
    assert widths(result["planned"])[:3] == [(0, 1), (TURN, 2), (2 * TURN, 3)]
    turns = [width for iteration, width in widths(result["planned"]) if iteration < found["turns"][-1][0]]
    assert found["paces"][0][3] == (TURN - UNTIMED) * turns.count(1), "the first turn's times are in metrics.jsonl"
    assert result["replicas_identical"]


def decisions_take_an_hour() -> None:
    clock, record = time.perf_counter, FollowedPlan._record
    hours = 0

    def slowly(plan: FollowedPlan, planned: Planned | None) -> dict[str, str] | None:
        nonlocal hours
        hours += 1
        return record(plan, planned)

    FollowedPlan._record = slowly  # type: ignore[method-assign]
    time.perf_counter = lambda: clock() + 3600 * hours


def test_the_time_of_a_decision_is_no_part_of_an_iteration(tmp_path: Path) -> None:
    result, _ = run(tmp_path, f"{WORDS} --iterations 90", prepare=decisions_take_an_hour)
    assert result["wall_seconds"] > 3600
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["iteration"] for line in lines if line["seconds"]["iteration"] > 3600] == []


def gradients_before_a_change_are_infinite() -> None:
    compute = train_module.forward_backward

    def poisoned(strategy: Strategy, *others: Any) -> Any:
        result = compute(strategy, *others)
        if others[-1] == 2 * TURN - 1:  # the last turn but one is that of width 2
            next(strategy.module.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
        return result

    train_module.forward_backward = poisoned


def test_an_update_that_is_left_out_at_a_change_is_counted_and_said(tmp_path: Path) -> None:
    words = f"{WORDS} --iterations 90 --on-nonfinite skip"
    result, text = run(tmp_path, words, prepare=gradients_before_a_change_are_infinite)
    assert widths(result["planned"])[1:3] == [(TURN, 2), (2 * TURN, 3)]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(line["iteration"], line["nonfinite_ranks"]) for line in lines if line["skipped"]] == [(2 * TURN, [0, 1])]
    assert (result["skipped_updates"], result["nonfinite_gradients_of_ranks"]) == (1, {"0": 1, "1": 1})
    assert f"the gradient of iteration {2 * TURN - 1} is not finite on ranks 0, 1" in text
    assert all(line["seconds"]["compute"] > 0 for line in lines), "the change's time is no part of the iteration"


def test_a_checkpoint_of_iteration_0_is_of_the_configuration_that_the_run_began_with(tmp_path: Path) -> None:
    words = f"{WORDS} --codec auto --iterations 110"
    error, _ = attempt(tmp_path, words, prepare=stop_before_the_first_iteration)
    assert "stopped by SIGTERM after iteration 0" in error
    result, _ = run(tmp_path, f"{words} --resume", prepare=choose_a_coarser_codec)
    assert result["codec"] != "fp32"
    back_to(tmp_path, 0)
    resumed, _ = run(tmp_path, f"{words} --resume")
    assert resumed["weights_sha256"] == result["weights_sha256"]


def fall_back_in_the_first_turn_of_width_2() -> None:
    def observe(guard: Guard, norm: float, iteration: int) -> bool:
        begins = iteration > TURN + 1 and not guard.is_synchronous(iteration)
        if begins:
            guard._synchronous_until = iteration + SYNCHRONOUS_ITERATIONS
        return begins

    Guard.observe = observe  # type: ignore[method-assign]


def test_widths_that_a_guard_does_not_let_train_are_not_timed(tmp_path: Path) -> None:
    words = f"{WORDS} --iterations 90 --guard"
    result, text = run(tmp_path, words, prepare=fall_back_in_the_first_turn_of_width_2)
    assert "the gradient blew up in iteration 13: " in text
    assert [line["iteration"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["fell_back"]] == [13]
    assert [pace is not None for pace in result["planned"]["audition"]["paces"]] == [True, False, False]
    back_to_before_the_first_decision(tmp_path)
    resumed, _ = run(tmp_path, f"{words} --resume", prepare=fall_back_in_the_first_turn_of_width_2)
    assert [pace is not None for pace in resumed["planned"]["audition"]["paces"]] == [True, False, False]
    assert resumed["weights_sha256"] == result["weights_sha256"]


def choose_a_coarser_codec_on_a_full_disk() -> None:
    choose_a_coarser_codec()
    write = output.write_text_atomically

    def written_when_the_run_begins(path: Path, text: str) -> None:
        if path.name == output.RUN_FILE and path.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    output.write_text_atomically = written_when_the_run_begins


def test_decisions_that_could_not_be_written_are_in_the_checkpoints(tmp_path: Path) -> None:
    words = f"{WORDS} --codec auto --iterations 110"
    result, _ = run(tmp_path, words, prepare=choose_a_coarser_codec_on_a_full_disk)
    assert result["codec"] != "fp32"
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(described["planned"]["audition"]["turns"]) < len(result["planned"]["audition"]["turns"])
    for iteration in (60, 105):
        back_to(tmp_path, iteration)
        (tmp_path / "run" / "run.json").write_text(json.dumps(described))
        resumed, _ = run(tmp_path, f"{words} --resume", prepare=choose_a_coarser_codec)
        assert resumed["weights_sha256"] == result["weights_sha256"]
        told = json.loads((tmp_path / "run" / "run.json").read_text())
        assert told["planned"]["choices"] == result["planned"]["choices"]
        assert told["options"]["codec"] == result["codec"]


def test_a_run_without_time_for_it_has_none_and_trains_as_planned(tmp_path: Path) -> None:
    result, text = run(tmp_path, f"{WORDS} --iterations 20", share=audition.MOST_SHARE)
    assert result["planned"]["audition"] is None
    assert "audition" not in text
    explicit = WORDS.replace("--width auto", f"--width {result['width']}")
    again, _ = run(tmp_path, f"{explicit} --iterations 20 --overwrite")
    assert again["weights_sha256"] == result["weights_sha256"]


def test_what_an_audition_has_measured_wins_over_predictions_the_next_time(tmp_path: Path) -> None:
    words = f"{WORDS} --iterations 90"
    result, text = run(tmp_path, words)
    assert f"wrote {tmp_path / 'run' / 'cluster.toml'}\n" in text
    [compute] = Profile.load(tmp_path / "run" / "cluster.toml").compute
    paces = result["planned"]["audition"]["paces"]
    assert [(one.width, one.iteration.value, one.iterations) for one in compute.measured] == [
        (width, pytest.approx(pace[0]), pace[3]) for width, pace in zip((1, 2, 3), paces, strict=True)
    ]
    shutil.copy(tmp_path / "run" / "cluster.toml", tmp_path / "measured.toml")
    options = [*words.split(), "--cluster", str(tmp_path / "measured.toml"), "--output", str(tmp_path / "next")]
    (error, text), _ = run_ranks(2, _train, options, 1e3, None, process_group=False)
    assert error == ""
    planned = json.loads((tmp_path / "next" / "run.json").read_text())["planned"]
    fastest = min(pace[0] for pace in paces)
    assert planned["support"] == "measured"
    assert planned["audition"] is None
    assert planned["iteration_seconds"] == pytest.approx(paces[planned["choices"]["width"] - 1][0])
    assert planned["iteration_seconds"] <= fastest * 1.03
    assert f"measured by {tmp_path / 'measured.toml'}: " in text
