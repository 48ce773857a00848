"""Loading in the timing model: an iteration is the longest of computing, communicating and loading."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timing_model._profiles import MLP, PROFILE, about, ask, ran
from timing_model.advice import advice, loading_advice
from timing_model.all_reduce import CollectiveTime
from timing_model.cli import main
from timing_model.cluster_profile import Profile
from timing_model.costs import costs_of, iteration_time, workers_that_hide
from timing_model.iteration import IterationTime, loaded_iteration_time, pipelined_iteration_time
from timing_model.job import Job, compute_of
from timing_model.measured import Estimate
from timing_model.params import ComputeTimes
from timing_model.plan import plan
from timing_model.predict import LOADING, predict
from timing_model.simulate_job import simulate_job

SECONDS = st.floats(0, 10)
FREE = dataclasses.replace(PROFILE, calibrated=dataclasses.replace(PROFILE.calibrated, ranks_per_core=0.125))
"""A cluster with eight cores for each rank."""


def loaded(loading: float, workers: int, **options: object) -> Job:
    return ask(
        **{"cluster": FREE, "compute": dataclasses.replace(MLP, loading=about(loading)), "width": 2}
        | {"loader_workers": workers}
        | options
    )


@given(
    computing=SECONDS,
    t_comm=SECONDS,
    loading=st.floats(0.01, 10),
    width=st.integers(1, 4),
    workers=st.integers(0, 9),
    cores_used=st.floats(0, 1),
)
def test_the_longest_of_three(
    computing: float, t_comm: float, loading: float, width: int, workers: int, cores_used: float
) -> None:
    collective = CollectiveTime(t_comm, t_comm, 0.0)

    def iteration(times: ComputeTimes) -> IterationTime:
        return pipelined_iteration_time(times, collective, width)

    times = ComputeTimes(update=0.0, forward=computing, backward=0.0, loading=loading)
    found = loaded_iteration_time(iteration, times, workers, cores_used=cores_used)
    without = iteration(times)
    assert found.total == pytest.approx(found.compute + found.exposed)
    assert found.loading == pytest.approx(found.total - without.total, abs=1e-12)
    if workers == 0:
        longer = dataclasses.replace(times, forward=computing + loading, loading=0.0)
        assert found.total == iteration(longer).total
    else:
        assert found.total == max(without.total, loading / workers, cores_used * (computing + loading))
        more = loaded_iteration_time(iteration, times, workers + 1, cores_used=cores_used)
        assert more.total <= found.total


def test_without_loading_nothing_changes() -> None:
    for strategy, all_reduce, width in (("pipelined", "ring", 2), ("ddp", "native", 1), ("ps-sync", None, 1)):
        alone, workers = (
            ask(strategy=strategy, all_reduce=all_reduce, width=width, loader_workers=number) for number in (0, 3)
        )
        assert iteration_time(alone, costs_of(alone)) == iteration_time(workers, costs_of(workers))


def test_every_strategy_waits_for_its_batch() -> None:
    for strategy, all_reduce, width in (("pipelined", "ring", 2), ("ddp", "native", 1), ("ps-sync", None, 1)):
        job = loaded(8.0, 2, strategy=strategy, all_reduce=all_reduce, width=width)
        iteration, _ = iteration_time(job, costs_of(job))
        assert iteration.total == 4.0
        assert iteration.loading > 1


def test_the_limit_is_named_with_the_workers_that_remove_it() -> None:
    answer = predict(loaded(4.0, 1))
    assert answer.limit == LOADING
    assert answer.gains[LOADING] == pytest.approx(2.0)
    assert answer.low < 3.9 < 4.2 < answer.high
    without = predict(loaded(0.0, 0)).iteration.total
    assert workers_that_hide(answer.job) == -(-4.0 // without)
    enough = dataclasses.replace(answer.job, loader_workers=int(-(-4.0 // without)))
    assert predict(enough).iteration.total == without
    assert predict(dataclasses.replace(enough, loader_workers=enough.loader_workers - 1)).iteration.loading > 0
    assert loading_advice(answer.job, answer.iteration) == (
        f"Loading adds {4.0 - without:.2f} s to an iteration: --loader-workers {enough.loader_workers} hides it."
    )
    assert loading_advice(enough, predict(enough).iteration) is None


def test_workers_on_cores_that_are_busy_are_not_recommended() -> None:
    job = loaded(4.0, 0, cluster=PROFILE)  # a core for each rank
    assert workers_that_hide(job) is None
    iteration = predict(job).iteration
    line = loading_advice(job, iteration)
    assert line is not None
    assert line.endswith(" s to an iteration, and no number of --loader-workers hides all of it: cores are the limit.")


def test_a_plan_says_what_exposed_loading_costs() -> None:
    found = plan(loaded(4.0, 2))
    assert any("--loader-workers" in line for line in advice(found))
    assert not any("--loader-workers" in line for line in advice(plan(loaded(0.0, 2))))


def test_loading_grows_with_the_batch_and_is_kept_in_the_file(tmp_path: Path) -> None:
    measured = dataclasses.replace(PROFILE, compute=(dataclasses.replace(MLP, loading=about(0.25)),))
    measured.save(tmp_path / "new.toml")
    read = Profile.load(tmp_path / "new.toml")
    assert read == measured
    assert compute_of(read, "mlp", 1024).loading.value == 0.5
    PROFILE.save(tmp_path / "old.toml")
    assert "loading" not in (tmp_path / "old.toml").read_text()
    assert Profile.load(tmp_path / "old.toml").compute[0].loading == Estimate.exact(0.0)


@pytest.mark.parametrize(
    ("recorded", "words", "measured"),
    [
        (2, "--loader-workers 2", True),
        (2, "--loader-workers 2 --samples 5000", True),
        (2, "--loader-workers 2 --loading 5s", False),
        (2, "", False),
        (0, "", True),
        (0, "--loader-workers 4", False),
    ],
)
def test_a_measured_time_is_that_of_jobs_which_load_as_it_did(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recorded: int, words: str, measured: bool
) -> None:
    compute = dataclasses.replace(MLP, measured=(ran(loader_workers=recorded),))
    profile = dataclasses.replace(PROFILE, compute=(compute,))
    path = tmp_path / "cluster.toml"
    profile.save(path)
    assert Profile.load(path) == profile
    asked = f"predict --cluster {path} --world-size 4 --model mlp --codec int8 --json {words}"
    assert main(asked.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["support"] == "measured") == (answer["iteration_seconds"]["total"] == 9.0) == measured


@pytest.mark.parametrize("options", [{"width": 2}, {"width": 1, "local_steps": 4}, {"width": 2, "accumulation": 3}])
@pytest.mark.parametrize(("cluster", "workers"), [(FREE, 0), (FREE, 1), (FREE, 3), (FREE, 90), (PROFILE, 3)])
def test_simulated_iterations_agree_with_the_formula(cluster: Profile, workers: int, options: dict[str, int]) -> None:
    none = Estimate.exact(0.0)
    calm = dataclasses.replace(MLP, loading=Estimate.exact(2.0), cv=0.0, comm_cv=none, slow_ranks=())
    job = ask(cluster=cluster, compute=calm, loader_workers=workers, iterations=48, **options)
    assert simulate_job(job).period == pytest.approx(predict(job).iteration.total, rel=1e-6)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict --latency 50us --bandwidth 10Gbit/s --world-size 4 --parameters 1M --compute 100ms --loading 500ms"
    main([*words.split(), "--loader-workers", "2"])
    text = capsys.readouterr().out
    assert "an iteration takes 250 ms" in text
    assert "limited by" in text
    assert "the loading of batches" in text
    assert "--loader-workers 5 hides it." in text
    main([*words.split(), "--loader-workers", "9"])
    text = capsys.readouterr().out
    assert "hides it" not in text
    assert "the computation" in text
