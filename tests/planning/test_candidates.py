"""Auditions before the training: what is compared, what is chosen, what is remembered, and whole runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from _plans import AUTOS, SMALL, choose, cluster
from _ranks import run_ranks

from pipesgd.cli import parse
from pipesgd.config import TrainConfig
from pipesgd.errors import RunError, UserInputError
from pipesgd.planning import candidates as candidates_module
from pipesgd.planning.candidates import (
    LATE_TIE,
    MOST_SHARE,
    TIE,
    Pace,
    affordable,
    best_of,
    heard,
    measured_iterations,
)
from pipesgd.planning.planned import Planned
from pipesgd.ranks import Ranks
from pipesgd.run.console import screen
from pipesgd.train import train
from timing_model.cluster_profile import Profile
from timing_model.job import Job
from timing_model.params import LinkParams


def choices(width: int, codec: str = "int8") -> dict[str, Any]:
    rest = {"all-reduce": "ring", "segment-bytes": 1 << 20, "buckets": "1", "fragments": 1}
    return {"width": width, "codec": codec} | rest


ONE, TWO, THREE = map(choices, (1, 2, 3))


def paces(*means: float, error: float = 0.0) -> list[Pace]:
    return [Pace(mean, mean, error, 20) for mean in means]


def test_the_simplest_of_those_that_are_about_equally_fast_is_chosen() -> None:
    assert best_of([TWO, THREE], paces(0.1 * (1 + 0.9 * TIE), 0.1)) == 0
    assert best_of([TWO, THREE], paces(0.1 * (1 + 1.1 * TIE), 0.1)) == 1
    assert best_of([TWO, THREE], paces(0.2, 0.1)) == 1


def test_late_gradients_must_gain_more_than_five_percent() -> None:
    assert best_of([ONE, TWO], paces(0.1 * (1 + 0.9 * LATE_TIE), 0.1)) == 0
    assert best_of([ONE, TWO], paces(0.1 * (1 + 1.1 * LATE_TIE), 0.1)) == 1


def test_a_gain_that_is_within_the_noise_is_none() -> None:
    assert best_of([TWO, THREE], paces(0.103, 0.1, error=0.001)) == 1
    assert best_of([TWO, THREE], paces(0.103, 0.1, error=0.003)) == 0


def test_a_short_run_compares_fewer_or_none() -> None:
    """Two laps of 6 iterations and those that fill the pipeline: 12, 14 and 16."""
    three, predicted = [ONE, TWO, THREE], [0.3, 0.1, 0.2]
    all_three = 12 * 0.3 + 14 * 0.1 + 16 * 0.2
    fastest_two = 14 * 0.1 + 16 * 0.2
    assert affordable(three, predicted, 1.01 * all_three / MOST_SHARE) == [0, 1, 2]
    assert affordable(three, predicted, 0.99 * all_three / MOST_SHARE) == [1, 2]
    assert affordable(three, predicted, 0.99 * fastest_two / MOST_SHARE) == []
    assert affordable([ONE], [0.1], 1e9) == []


def test_a_plan_hears_of_the_winner_and_survives_json() -> None:
    planned = dataclasses.replace(choose(cluster()), candidates=[ONE, TWO], predicted=[0.2, 0.1])
    found = heard(planned, [Pace(0.3, 0.3, 0.01, 20), Pace(0.1, 0.09, 0.001, 25)], parse(AUTOS.split()))
    assert (found.choices, found.support, found.reasons) == (TWO, "measured", [])
    assert found.source == "an audition of 25 iterations"
    assert found.low < found.iteration_seconds == 0.1 < found.high
    assert found.median_share == pytest.approx(0.9)
    assert found.job_seconds == pytest.approx(0.1 * planned.iterations)
    assert found.lines()[-1].startswith("measured by an audition of 25 iterations: ")
    assert Planned.from_json(json.loads(json.dumps(found.as_json()))).as_json() == found.as_json()


def test_a_winner_at_width_1_has_no_synchronous_start_but_whole_gradients() -> None:
    planned = choose(cluster())
    planned = dataclasses.replace(
        planned, candidates=[ONE, TWO], predicted=[0.2, 0.1], start=10, start_seconds=0.5, dense=20, dense_seconds=3.0
    )
    config = parse(f"{AUTOS} --synchronous-start 10".split())
    late, synchronous = (
        heard(planned, [Pace(one, one, 0.0, 20), Pace(0.2, 0.2, 0.0, 20)], config) for one in (0.3, 0.1)
    )
    assert (late.choices, late.start, late.settled) == (TWO, 10, 20)
    assert late.job_seconds == pytest.approx(0.2 * 90 + 0.5 * 10 + 3.0)
    assert (synchronous.choices, synchronous.start, synchronous.settled) == (ONE, 0, 20)
    assert synchronous.job_seconds == pytest.approx(0.1 * 100 + 3.0)


def test_a_winner_with_late_gradients_has_a_start_although_the_plan_had_none() -> None:
    """The plan was synchronous: its own time is that of an iteration of the start."""
    planned = dataclasses.replace(
        choose(cluster()), candidates=[ONE, TWO], predicted=[0.3, 0.3], iteration_seconds=0.3, start=0, start_seconds=0
    )
    found = heard(planned, paces(0.4, 0.2), parse(f"{AUTOS} --lr-warmup 11".split()))
    assert (found.choices, found.start, found.start_seconds) == (TWO, 9, 0.3)
    assert found.job_seconds == pytest.approx(0.2 * (planned.iterations - 9) + 0.3 * 9)


def test_what_was_measured_in_buckets_is_remembered_as_that(tmp_path: Path) -> None:
    profile, path = cluster(), tmp_path / "cluster.toml"
    candidates = [ONE | {"buckets": buckets} for buckets in ("1", "01", "2", "1MiB")]
    measured = measured_iterations(candidates, [Pace(float(one), 1.0, 0.1, 9) for one in range(1, 5)], TrainConfig(), 4)
    [compute] = profile.compute
    profile.with_measured(compute.model, compute.batch_size, measured).save(path)
    found = Profile.load(path)
    assert [(one.buckets, one.iteration.value) for one in found.compute[0].measured] == [
        ("01", 2.0),
        ("2", 3.0),
        ("1MiB", 4.0),
    ], "01 is 1, and the newer one"
    job = Job(cluster=found, compute=found.compute[0], world_size=4, codec="int8")
    times = {buckets: dataclasses.replace(job, buckets=buckets).measured for buckets in ("1", "2", "4", "1024KiB")}
    assert {buckets: one and one.iteration.value for buckets, one in times.items()} == {
        "1": 2.0,
        "2": 3.0,
        "4": None,
        "1024KiB": 4.0,
    }
    path.write_text(path.read_text().replace('buckets = "2"', 'buckets = "two"'))
    with pytest.raises(ValueError, match=r"buckets must be a whole number, or .*; got 'two'"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("words", "workers"), [("", 0), ("--dataset images --data-dir . --model resnet18", 2), ("--loader-workers 3", 3)]
)
def test_a_measured_time_is_remembered_with_the_workers_that_loaded(words: str, workers: int) -> None:
    [measured] = measured_iterations([ONE], [Pace(1.0, 0.1, 1.0, 9)], parse(words.split()), 2)
    assert measured.loader_workers == workers


# ---- Whole runs

CLOSE = LinkParams(alpha=1e-4, beta=2e-7, gamma=0.0, sync=0.0)
"""A link with which all widths are predicted to be about equally fast."""
WORDS = "--hidden-sizes 20 --batch-size 16 --lr 0.05 --width auto --buckets 1 --iterations 12 --checkpoint-iterations 5"


def _train(ranks: Ranks, words: list[str], share: float) -> tuple[str, str]:
    """Run once, with an audition that may take this share of the run; return (text of the error, stdout)."""
    candidates_module.MOST_SHARE = share  # in a process of its own, which ends with the run
    candidates_module.SECONDS = 0.4
    out = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            train(words, ranks, screen(ranks, out))
            error = ""
        except (UserInputError, RunError) as failure:
            error = str(failure)
    return error, out.getvalue()


def run(folder: Path, words: str, share: float = 1e3) -> tuple[dict[str, Any], str]:
    """Return (summary, output of rank 0) of a run on two ranks, with a cluster on which all widths are a tie."""
    if not (folder / "cluster.toml").exists():
        cluster(CLOSE, SMALL).save(folder / "cluster.toml")
    options = [*words.split(), "--cluster", str(folder / "cluster.toml"), "--output", str(folder / "run")]
    (error, text), (other, _) = run_ranks(2, _train, options, share, process_group=False)
    assert (error, other) == ("", "")
    return json.loads((folder / "run" / "summary.json").read_text()), text


@pytest.mark.slow
def test_a_run_holds_an_audition_before_it_trains_and_resumes_with_its_choice(tmp_path: Path) -> None:
    found, text = run(tmp_path, WORDS)
    planned = found["planned"]
    assert planned["support"] == "measured"
    assert len(planned["candidates"]) > 1
    assert text.count("\naudition: --width ") == len(planned["candidates"])
    width = planned["choices"]["width"]
    assert f"chosen by the audition: --width {width}" in text
    assert found["width"] == width
    assert planned["audition_seconds"] > 0
    assert found["replicas_identical"]
    same, _ = run(tmp_path, f"{WORDS.replace('auto', str(width))} --overwrite")
    assert same["weights_sha256"] == found["weights_sha256"], "an audition changes no random number"
    again, _ = run(tmp_path, f"{WORDS} --overwrite")
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "iteration-12")
    resumed, text = run(tmp_path, f"{WORDS} --resume")
    assert resumed["weights_sha256"] == again["weights_sha256"]
    assert "\naudition: " not in text
    assert "planned when the run began: --width " in text


@pytest.mark.slow
def test_a_run_without_time_for_it_has_none_and_trains_as_planned(tmp_path: Path) -> None:
    found, text = run(tmp_path, WORDS, share=0.0)
    assert "audition" not in text
    assert found["planned"]["support"] != "measured"


@pytest.mark.slow
@pytest.mark.parametrize(("words", "remembered"), [("", True), ("--connections 2", False)])
def test_an_audition_is_remembered_unless_the_run_has_options_that_a_profile_does_not_record(
    tmp_path: Path, words: str, remembered: bool
) -> None:
    found, text = run(tmp_path, f"{WORDS} {words}")
    assert "chosen by the audition" in text
    measured = Profile.load(tmp_path / "run" / "cluster.toml").compute[0].measured
    assert {one.width for one in measured} == {one["width"] for one in found["planned"]["candidates"] if remembered}
    if remembered:  # what was measured wins over predictions the next time
        shutil.copy(tmp_path / "run" / "cluster.toml", tmp_path / "cluster.toml")
        again, text = run(tmp_path, f"{WORDS} --overwrite")
        assert "\naudition: " not in text
        assert again["planned"]["support"] == "measured"
