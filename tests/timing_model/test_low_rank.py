"""Factors of low rank in place of gradients: their time, what refuses them, and what a plan says of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.timing_model._profiles import MLP, PROFILE, about, ask
from timing_model.all_reduce import all_reduce_time
from timing_model.alternatives import alternatives
from timing_model.choices import Space, simplicity
from timing_model.cluster_profile import Profile
from timing_model.costs import buckets_of, collective_time, costs_of, whole
from timing_model.fragments import hiding_windows, windows_of
from timing_model.job import Job
from timing_model.measured import ComputeProfile, LowRankProfile
from timing_model.memory import rank_memory
from timing_model.params import Parts
from timing_model.plan import plan
from timing_model.predict import CODEC, predict
from timing_model.simulate_job import simulate_job
from timing_model.support import INTERPOLATED, OUTSIDE, support_of

LOW_RANK = LowRankProfile(rank=4, left=10_050, right=11_136, work=about(0.004))
FACTORED = dataclasses.replace(MLP, low_rank=LOW_RANK)
WITH_FACTORS = dataclasses.replace(PROFILE, compute=(FACTORED,))


def job_with(**options: Any) -> Job:
    return ask(**{"cluster": WITH_FACTORS, "compute": FACTORED, "width": 2, "codec": "powersgd"} | options)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_collective_is_two_all_reduces_of_the_factors_and_their_work(world_size: int, width: int) -> None:
    job = job_with(world_size=world_size, width=width)
    costs = costs_of(job)
    found = collective_time(job, costs, job.compute.numel)
    each = [all_reduce_time("ring", costs.link, numel, world_size) for numel in (10_050, 11_136)]
    assert found.total == pytest.approx(sum(one.total for one in each) + 0.004, rel=1e-12)
    assert found.wire == pytest.approx(sum(one.wire for one in each), rel=1e-12)
    assert job.wire_bytes == 4 * 21_186


def test_buckets_share_the_factors_and_pay_for_each_of_their_all_reduces() -> None:
    job = job_with(width=1)
    one, three = (whole(buckets_of(cut, costs_of(cut))) for cut in (job, job.changed(buckets="3")))
    assert three.codec == pytest.approx(one.codec, rel=0.02)
    latency = 2 * 3 * PROFILE.link.alpha.value  # a ring of four ranks has 2 * 3 steps
    assert three.wire - one.wire > 2 * (latency + PROFILE.link.sync.value)


def test_fragments_share_the_factors() -> None:
    """The trainer factors the parameters of a fragment alone."""
    parts = [one.low_rank for one in windows_of(job_with(), 8, 3)]
    assert all(one is not None for one in parts)
    assert sum(one.numel for one in parts if one) == pytest.approx(LOW_RANK.numel, abs=6)
    assert sum(one.work.value for one in parts if one) == pytest.approx(LOW_RANK.work.value)
    whole_steps, third_steps = (hiding_windows(job_with(compute=slow_factors()), number) for number in (1, 3))
    assert whole_steps is not None
    assert third_steps is not None
    assert third_steps < whole_steps


def slow_factors() -> ComputeProfile:
    return dataclasses.replace(FACTORED, low_rank=dataclasses.replace(LOW_RANK, work=about(1.0)))


def test_half_the_work_is_half_of_what_is_waited_for_it() -> None:
    slow = dataclasses.replace(FACTORED, low_rank=dataclasses.replace(LOW_RANK, work=about(1.0)))
    answer = predict(job_with(compute=slow, width=1))
    assert answer.iteration.codec == pytest.approx(1.0, rel=0.01)
    assert answer.limit == CODEC
    assert answer.high - answer.low > 0.1, "the interval knows that of the work"


def test_a_job_is_simulated_with_them() -> None:
    job = job_with(iterations=200)
    assert simulate_job(job).period == pytest.approx(predict(job).iteration.total, rel=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compute": MLP},
            "codec must be another one where the factors of the model's matrices were not measured "
            r"\(by pipesgd.calibrate\); got powersgd",
        ),
        ({"all_reduce": "native"}, "codec must be one of fp32, bf16, fp16 with native; got powersgd"),
        (
            {"parts": (Parts(tensors=(0,), nbytes=8.0, messages=1, work=0.0),)},
            "parts must be left out with codec powersgd, whose factors are those of all gradients; got 1",
        ),
        (
            {"members": 2, "split": "fsdp2"},
            "members must be 1 with codec powersgd, with which islands are not modelled; got 2",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job_with(**options)


def test_they_are_within_what_was_measured_if_all_reduces_of_their_size_were() -> None:
    assert support_of(job_with()).kind == INTERPOLATED
    larger = dataclasses.replace(PROFILE.calibrated, smallest_bytes=1 << 22)
    beyond = support_of(job_with(cluster=dataclasses.replace(WITH_FACTORS, calibrated=larger)))
    assert (beyond.kind, beyond.reasons) == (OUTSIDE, ("factors of 84.7 kB; measured: 4.19 MB to 33.6 MB",))


def test_a_residual_is_held_and_few_bytes_count_as_few_bits() -> None:
    with_factors, without = job_with(), job_with(codec="fp32")
    assert rank_memory(with_factors) == (rank_memory(without) or 0) + without.nbytes
    assert simplicity(with_factors) > simplicity(job_with(codec="int8")) > simplicity(without)


def test_they_are_kept_in_a_profiles_file(tmp_path: Path) -> None:
    WITH_FACTORS.save(tmp_path / "cluster.toml")
    assert Profile.load(tmp_path / "cluster.toml") == WITH_FACTORS


def test_a_plan_names_them_where_they_gain_enough_and_searches_them_if_asked_to() -> None:
    slow = dataclasses.replace(PROFILE.link, beta=about(3e-7))
    job = job_with(cluster=dataclasses.replace(WITH_FACTORS, link=slow, links={}), codec="fp32", width=1)
    space = Space.of(job)
    assert "powersgd" not in space.codecs
    found = plan(job, space)
    [said] = [one for one in alternatives(found, space) if one.startswith("Factors")]
    low_rank = found.best.job.changed(codec="powersgd", width=2, buckets="1", all_reduce="ring")
    gain = found.best.iteration.total / predict(low_rank).iteration.total
    assert said.startswith("Factors of rank 4, --width 2 --codec powersgd --all-reduce ring")
    assert f", would be {gain:.1f} times as fast. Of rank 4 they cost small transformers up to" in said
    asked = dataclasses.replace(space, codecs=(*space.codecs, "powersgd"))
    with_them = plan(job, asked)
    assert with_them.best.job.codec == "powersgd"
    assert not [one for one in alternatives(with_them, asked) if one.startswith("Factors")]
