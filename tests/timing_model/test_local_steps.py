"""Local steps: compared with their formula, with the simulator, and with a pipeline; and what a plan says of them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timing_model._profiles import MLP, about, ask
from tests.timing_model.test_alternatives import NUMEL, SPACE, job_of
from tests.timing_model.test_iteration import NOISES, SECONDS, TIMES, collectives, compute_times
from timing_model.advice import describe, training_arguments
from timing_model.all_reduce import CollectiveTime
from timing_model.alternatives import COARSER, alternatives
from timing_model.cli import main
from timing_model.fragments import MOST_LOCAL_STEPS, hiding_windows, in_windows
from timing_model.iteration import IterationTime, job_time, local_steps_iteration_time, pipelined_iteration_time
from timing_model.measured import Estimate
from timing_model.params import ComputeTimes, Noise
from timing_model.plan import plan
from timing_model.predict import predict
from timing_model.simulate import simulate_iterations
from timing_model.simulate_job import simulate_job


@given(times=compute_times(), collective=collectives(), width=st.integers(1, 5), p=st.integers(1, 600), noise=NOISES)
def test_one_local_step_is_a_pipeline(
    times: ComputeTimes, collective: CollectiveTime, width: int, p: int, noise: Noise
) -> None:
    one = local_steps_iteration_time(times, collective, width, 1, world_size=p, noise=noise)
    assert one == pipelined_iteration_time(times, collective, width, world_size=p, noise=noise)


@given(collective=collectives(), outer=SECONDS, width=st.integers(1, 5), steps=st.integers(1, 100))
def test_it_is_the_closed_form(collective: CollectiveTime, outer: float, width: int, steps: int) -> None:
    times = dataclasses.replace(TIMES, outer_update=outer)
    iteration = local_steps_iteration_time(times, collective, width, steps)
    window, m = steps * TIMES.total + outer, collective.total
    assert iteration.total == pytest.approx(max(window, m, (window + m) / width) / steps, rel=1e-12)
    assert iteration.compute == pytest.approx(window / steps, rel=1e-12)
    assert iteration.compute + iteration.exposed == pytest.approx(iteration.total, rel=1e-9)


@given(c=st.floats(0.01, 10), m=SECONDS, width=st.integers(1, 4), steps=st.integers(1, 9), n=st.integers(1, 60))
def test_without_noise_a_job_takes_what_the_simulator_says(c: float, m: float, width: int, steps: int, n: int) -> None:
    """The last window has the iterations that are left."""
    times = ComputeTimes(update=0.0, forward=c, backward=0.0)
    iteration = local_steps_iteration_time(times, CollectiveTime(m, m, 0.0), width, steps)
    simulated = simulate_iterations(t_compute=c, t_comm=m, width=width, world_size=3, iterations=n, local_steps=steps)
    windows = math.ceil(n / steps)
    assert len(simulated.ends) == windows
    job = job_time(iteration.times(steps), windows, m, missing=(windows * steps - n) * c)
    assert job == pytest.approx(float(simulated.ends[-1]), rel=1e-9)
    if n >= 20 * steps and c >= m:
        assert simulated.period == pytest.approx(iteration.total, rel=1e-9)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("n", [1, 5, 64, 65, 127])
def test_a_job_of_few_iterations_ends_with_a_short_window(width: int, n: int) -> None:
    for loading in (0.0, 0.02):
        calm = dataclasses.replace(MLP, cv=0.0, comm_cv=about(0.0), slow_ranks=(), loading=about(loading))
        job = ask(compute=calm, width=width, local_steps=64, iterations=n)
        answer = predict(job)
        assert answer.total == pytest.approx(simulate_job(job).job, rel=0.04)
        assert answer.total is not None
        assert answer.total < 1.1 * (n * answer.iteration.total + 2 * answer.collective.total)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("steps", [2, 8])
@pytest.mark.parametrize(
    "noise",
    [Noise(cv=0.1), Noise(cv=0.4), Noise(cv=0.1, slow_ranks=(1.2,)), Noise(cv=0.1, persistence=0.9, comm_cv=0.1)],
)
def test_with_noise_it_is_as_near_to_the_simulator_as_a_pipeline(width: int, steps: int, noise: Noise) -> None:
    """A window's mean varies less than an iteration; the simulator draws every iteration."""
    times = ComputeTimes(update=0.0, forward=1.0, backward=0.0)
    for world_size in (4, 64, 1024):
        for m in (0.5 * steps, steps, 1.5 * steps):
            simulated = simulate_iterations(
                t_compute=1.0,
                t_comm=m,
                width=width,
                world_size=world_size,
                iterations=steps * 600,
                local_steps=steps,
                noise=noise,
            )
            collective = CollectiveTime(m, m, 0.0)
            predicted = local_steps_iteration_time(
                times, collective, width, steps, world_size=world_size, noise=noise
            ).total
            assert predicted == pytest.approx(simulated.period, rel=0.03)


@pytest.mark.parametrize("width", [1, 2])
def test_micro_batches_average_jitter_as_local_steps_without_updates_do(width: int) -> None:
    no_update = {"update": Estimate.exact(0.0), "late_update": Estimate.exact(0.0)}
    compute = dataclasses.replace(MLP, samples=None, cv=0.4, **no_update)
    accumulated, window = (
        ask(compute=compute, width=width, world_size=8, **{name: 16}) for name in ("accumulation", "local_steps")
    )
    expected = predict(window, extrapolate=True).iteration.times(16)
    assert predict(accumulated, extrapolate=True).iteration == pytest.approx(expected, rel=1e-9)
    simulated = simulate_job(window, extrapolate=True).period  # draws every iteration
    assert simulate_job(accumulated, extrapolate=True).period == pytest.approx(16 * simulated, rel=0.02)


def test_the_cv_of_a_file_is_that_of_its_micro_batches_together() -> None:
    compute = dataclasses.replace(MLP, cv=0.1, accumulation=4, persistence=Estimate.exact(0.0))
    assert ask(compute=compute).noise.cv == 0.1
    assert ask(compute=compute, accumulation=4).noise.cv == pytest.approx(0.05)


def test_an_answer_is_of_the_mean_iteration() -> None:
    one, four = (predict(ask(width=2, local_steps=steps, iterations=100)) for steps in (1, 4))
    assert four.collective == one.collective
    inner, outer = MLP.update.value, MLP.late_update.value
    assert four.iteration.compute == pytest.approx(0.06 + inner + outer / 4)
    assert four.iteration.total < one.iteration.total
    assert four.samples_per_second == pytest.approx(4 * 512 / four.iteration.total)
    assert four.epoch == pytest.approx(60_000 // (4 * 512) * four.iteration.total)
    assert four.low < four.iteration.total < four.high
    assert four.total == pytest.approx(job_time(four.iteration.times(4), 25, four.collective.total), rel=1e-12)
    assert four.iteration.total <= four.lasting < 1.5 * four.iteration.total
    assert four.efficiency < 1
    assert four.as_json()["job"]["local_steps"] == 4


@pytest.mark.parametrize(("width", "outer"), [(1, 0.005), (2, 0.02 - 0.004), (3, 0.02 + 0.015 / 3 - 0.004)])
def test_a_window_hands_over_once_and_its_end_has_no_local_update(width: int, outer: float) -> None:
    before = dataclasses.replace(MLP, late_update=about(0.02))
    compute = dataclasses.replace(before, local_update=about(0.004))
    one, four = (predict(ask(compute=compute, width=width, local_steps=steps)) for steps in (1, 4))
    assert one == dataclasses.replace(predict(ask(compute=before, width=width)), job=one.job)
    assert four.iteration.compute == pytest.approx(0.06 + 0.004 + outer / 4)
    assert four.low < four.iteration.total < four.high
    windows = in_windows(ask(compute=compute, width=width), 1, 3)
    assert predict(windows).iteration.compute == pytest.approx(0.06 + 0.004 + outer)


def test_a_late_update_that_is_shorter_than_a_local_one_counts_as_it_is() -> None:
    for late in (about(0.003), Estimate.exact(0.0)):
        compute = dataclasses.replace(MLP, late_update=late, local_update=about(0.004))
        assert compute.updates(2, 4) == {"update": about(0.004), "outer_update": late}


def test_a_job_says_its_local_steps() -> None:
    job = ask(width=2, local_steps=8)
    assert describe(job) == "pipelined, width 2, 8 local steps, no codec, ring"
    assert describe(ask(local_steps=8)) == "synchronous, 8 local steps, no codec, ring"
    assert training_arguments(job) == "--width 2 --local-steps 8 --codec fp32 --all-reduce ring"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, "local_steps must be a whole number of at least 1; got 0"),
        ({"local_steps": 65537}, "local_steps must be at most 65536; got 65537"),
        ({"local_steps": 2, "accumulation": 2}, "accumulation must be 1 with local_steps; got 2"),
        (
            {"local_steps": 2, "strategy": "ddp", "all_reduce": "native"},
            "local_steps must be 1 with strategy ddp, which has no pipeline; got 2",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(**options)


def test_a_simulation_has_windows() -> None:
    job = ask(width=2, local_steps=8, iterations=800)
    simulated = simulate_job(job)
    assert simulated.period == pytest.approx(predict(job).iteration.total, rel=0.03)
    assert simulated.job == pytest.approx(800 * simulated.period, rel=0.05)


def test_the_command_has_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--world-size 4 --compute 0.3s --model resnet50 --codec int4"
    words = f"--latency 20ms --bandwidth 10Mbit/s {job}".split()
    times = []
    for steps in (1, 64):
        assert main(["predict", *words, "--local-steps", str(steps), "--json"]) == 0
        times.append(json.loads(capsys.readouterr().out)["iteration_seconds"]["total"])
    assert times[0] > 15
    assert times[1] == pytest.approx(0.3, rel=0.01)
    assert main(["simulate", *words, "--local-steps", "64"]) == 0
    assert "pipelined, width 2, 64 local steps, int4, ring" in capsys.readouterr().out


# --- Plans ------------------------------------------------------------------------------------------------------------

WITH_COARSER = dataclasses.replace(SPACE, codecs=("fp32", COARSER))


def said_of_local_steps(ratio: float, **options: Any) -> list[str]:
    space = dataclasses.replace(SPACE, **options.pop("space", {}))
    return [one for one in alternatives(plan(job_of(ratio, **options), space), space) if "--local-steps" in one]


@pytest.mark.parametrize(
    ("ratio", "steps"), [(1.5, 2), (2.5, 3), (5.99, 6), (53.1, 54), (1.1 * MOST_LOCAL_STEPS, None)]
)
def test_the_fewest_local_steps_that_hide_are_the_ratio_of_communication_and_computation(
    ratio: float, steps: int | None
) -> None:
    choice = plan(job_of(ratio), SPACE).best
    assert hiding_windows(choice.job.changed(width=2), 1) == steps
    if steps is not None:
        assert steps == math.ceil(ratio)
        collective = choice.collective
        times = ComputeTimes(update=0.0, forward=1.0, backward=0.0)
        totals = [local_steps_iteration_time(times, collective, 2, one).total for one in (steps - 1, steps)]
        assert totals[0] > 1.0
        assert totals[1] == pytest.approx(1.0)


def test_a_movement_is_exchanged_whole_where_gradients_are_cut() -> None:
    """The latencies of four buckets, 1.2 s, would need another local step, and those of one are 0.3 s."""
    space = dataclasses.replace(SPACE, buckets=("4",))
    choice = plan(job_of(20.5, alpha=0.05, tensors=(NUMEL // 4,) * 4), space).best
    assert choice.collective.total == pytest.approx(21.7)
    assert hiding_windows(choice.job.changed(width=2, buckets="1"), 1) == 21


def test_local_steps_are_mentioned_where_no_codec_hides_with_what_they_cost() -> None:
    [said] = said_of_local_steps(20.5, space={"segments": (1 << 20,)})
    assert said == (
        "--width 2 --local-steps 21 --codec fp32 --all-reduce ring would hide the communication, with 21.5 times as "
        "many samples a second; the price was up to 2.0 points of accuracy with two small image models."
    )
    assert said_of_local_steps(10.0) == [], "the coarser codec hides"
    assert said_of_local_steps(0.9) == [], "nothing is exposed"
    [said] = said_of_local_steps(40.0)
    assert said.endswith("; the price of more than 32 iterations between two exchanges of a weight was not measured.")


def test_fragments_are_mentioned_where_they_hide_at_a_lower_price() -> None:
    """Four parameters alike: of 20.5 s, the exchange of two takes 10.25, and that of each 5.125."""
    alike = (NUMEL // 4,) * 4
    [said] = said_of_local_steps(20.5, tensors=alike)
    assert said.startswith(
        "--width 2 --local-steps 11 --codec fp32 --all-reduce ring --segment-bytes 1073741824 --fragments 2 would hide "
        "the communication, with 21.5 times as many samples a second; the price was up to 1.6 points of accuracy"
    )
    job = job_of(20.5, width=2, segment_bytes=1 << 30, tensors=alike)
    for steps, seconds in ((10, 1.025), (11, 1.0)):
        assert simulate_job(in_windows(job, steps, 2)).period == pytest.approx(seconds)
    [said] = said_of_local_steps(20.5, tensors=alike, iterations=400)
    assert "--local-steps 21 " in said, "by fragments, a weight would be exchanged 19 times"
    [said] = said_of_local_steps(20.5, tensors=(NUMEL - 3, 1, 1, 1))
    assert "--local-steps 21 " in said, "by fragments, 42 iterations would be between two exchanges of a weight"
    assert "--fragments" not in said


@pytest.mark.parametrize(("ratio", "mentioned"), [(20.5, True), (18.0, False)])
def test_local_steps_that_gain_little_are_not_mentioned(ratio: float, mentioned: bool) -> None:
    found = plan(job_of(ratio), WITH_COARSER)
    assert 1.1 < found.best.iteration.total < 1.4, "what local steps would gain"
    said = alternatives(found, WITH_COARSER)
    assert any("--local-steps" in sentence for sentence in said) == mentioned


@pytest.mark.parametrize("ratio", [2.5, 20.5])
def test_what_is_mentioned_comes_with_all_its_options(ratio: float) -> None:
    space = dataclasses.replace(SPACE, all_reduces=("halving-doubling",))
    said = alternatives(plan(job_of(ratio), space), space)
    mentioned = [one for one in said if "--width" in one]
    assert len(mentioned) >= 2
    for one in mentioned:
        assert "--all-reduce halving-doubling --segment-bytes 1073741824" in one


def test_they_are_called_senseless_where_they_are() -> None:
    [said] = said_of_local_steps(1e5)
    assert said == "Local steps are senseless here: --local-steps 500 would not hide the communication."
    [said] = said_of_local_steps(20.5, iterations=398)
    assert said.startswith("Local steps are senseless here: --width 2 --local-steps 21 --codec fp32 ")
    assert said.endswith(" the communication, but in this job the ranks would exchange a weight only 19 times.")


@pytest.mark.parametrize(("iterations", "senseless"), [(390, False), (389, True)])
def test_a_job_in_windows_has_as_many_micro_batches(iterations: int, senseless: bool) -> None:
    """There are 1560, or 1556, of them, and 20 or 19 windows of 82."""
    [said] = said_of_local_steps(81.5, accumulation=4, iterations=iterations)
    assert "--local-steps 82 " in said
    assert said.startswith("Local steps are senseless here: ") == ("only 19 times" in said) == senseless


def test_a_coarser_codec_is_mentioned_with_its_price() -> None:
    found = plan(job_of(2.5), SPACE)
    [said] = [one for one in alternatives(found, SPACE) if "coarser" in one]
    assert said == (
        "A coarser codec, --width 2 --codec ternary --all-reduce ring --segment-bytes 1073741824, would be 2.5 times "
        "as fast, and hide the communication; the price was 0.1 points of accuracy on average, measured at width 1 "
        "with two small image models."
    )
    found = plan(job_of(40.0), SPACE)
    [said] = [one for one in alternatives(found, SPACE) if "coarser" in one]
    assert "times as fast; the price" in said, "it does not hide the communication"
    found = plan(job_of(40.0), WITH_COARSER)
    assert not any("coarser" in one for one in alternatives(found, WITH_COARSER)), "it was searched"


def test_an_iteration_can_be_scaled() -> None:
    assert IterationTime(4.0, 1.0, 1.0, 1.0, 0.5, 0.5).times(0.5) == IterationTime(2.0, 0.5, 0.5, 0.5, 0.25, 0.25)
