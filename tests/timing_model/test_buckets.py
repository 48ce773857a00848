"""Buckets that leave during the backward pass: their times, against a clock that is moved by hand, and the plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.timing_model._profiles import MLP, PROFILE, ask
from timing_model.advice import describe, training_arguments
from timing_model.buckets import WHOLE, Cut, completed
from timing_model.choices import Space
from timing_model.costs import Buckets, buckets_of, collective_time, costs_of, iteration_time
from timing_model.iteration import ddp_buckets
from timing_model.job import Job
from timing_model.measured import ComputeProfile, Estimate
from timing_model.plan import plan
from timing_model.predict import predict
from timing_model.simulate_job import simulate_job

EIGHT = ComputeProfile.exact(model="eight", batch_size=32, tensors=(100_000,) * 8, compute=0.3, update=0.01)


def _job(**options: Any) -> Job:
    return ask(**{"compute": EIGHT, "width": 1} | options)


def _by_hand(job: Job, buckets: Buckets) -> float:
    """Return the time of an iteration without jitter and slowdown: the wire takes one bucket after the other."""
    times, now = costs_of(job).times, 0.0
    passes = job.accumulation * 0.3
    last = 0.2  # the backward pass of the last micro-batch
    for share, collective in buckets:
        now = max(now, passes - last + share * last) + collective.total
    return max(now, passes) + times.update


@pytest.mark.parametrize("buckets", ["2", "3", "8", "800kB", "1B"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_iteration_takes_what_a_clock_says(buckets: str, accumulation: int) -> None:
    job = _job(buckets=buckets, accumulation=accumulation)
    iteration, collective = iteration_time(job, costs_of(job))
    assert iteration.total == pytest.approx(_by_hand(job, buckets_of(job, costs_of(job))), rel=1e-12)
    parts = (iteration.compute, iteration.wire, iteration.codec, iteration.jitter, iteration.loading)
    assert sum(parts) == pytest.approx(iteration.total, rel=1e-12)
    whole, _ = iteration_time(dataclasses.replace(job, buckets="1"), costs_of(job))
    assert max(iteration.compute, collective.total) <= iteration.total < whole.total
    assert whole.total - iteration.total <= 0.2, "no more than the backward pass can be hidden"


@pytest.mark.parametrize("accumulation", [1, 3])
def test_buckets_of_ddp_leave_in_the_last_micro_batch(accumulation: int) -> None:
    large = dataclasses.replace(EIGHT, tensors=(5_000_000,) * 8)
    job = _job(compute=large, strategy="ddp", all_reduce="native", accumulation=accumulation)
    costs = costs_of(job)
    buckets = [
        (share, collective_time(job, costs, nbytes / 4))
        for share, nbytes in ddp_buckets([4 * numel for numel in large.tensors])
    ]
    iteration, collective = iteration_time(job, costs)
    assert iteration.total == pytest.approx(_by_hand(job, buckets), rel=1e-12)
    assert iteration.wire >= collective.total - 0.2, "no more than one backward pass can be hidden"


def test_the_last_bucket_is_handed_over_as_a_whole_gradient_is() -> None:
    later = dataclasses.replace(EIGHT, handover=Estimate.exact(0.02))
    for buckets in ("1", "4"):
        without, with_it = (_job(compute=compute, buckets=buckets) for compute in (EIGHT, later))
        assert predict(with_it).iteration.total - predict(without).iteration.total == pytest.approx(0.02)


def test_a_wider_pipeline_gains_nothing_and_pays_every_buckets_latency() -> None:
    whole, cut = predict(_job(width=2)), predict(_job(width=2, buckets="4"))
    assert cut.collective.total > whole.collective.total
    assert cut.iteration.total >= whole.iteration.total


@pytest.mark.parametrize("buckets", ["1", "2", "6", "1MB"])
def test_shares_and_bytes_are_those_of_the_cut(buckets: str) -> None:
    sizes = [4.0 * numel for numel in MLP.tensors]
    found = completed(Cut.parse(buckets), sizes)
    assert sum(nbytes for _, nbytes in found) == sum(sizes)
    assert found[-1][0] == 1.0
    done = 0.0
    for share, nbytes in found:
        done += nbytes
        assert share == done / sum(sizes)


def test_buckets_are_complete_when_their_gradients_were_measured_to_be() -> None:
    sizes, released = [1.0, 1.0, 8.0, 1.0], [1.0, 0.9, 0.1, 0.2]
    assert completed(Cut(count=3), sizes, released=released) == [(0.2, 1.0), (0.2, 8.0), (1.0, 2.0)]
    assert completed(Cut(count=2), sizes, apart=[0], released=released) == [(0.2, 9.0), (0.9, 1.0)]
    assert completed(WHOLE, sizes, apart=[0, 1], released=released) == [(1.0, 9.0)]
    assert ddp_buckets(sizes, first_bucket=1, bucket=9, released=released) == [(0.2, 1.0), (0.9, 9.0), (1.0, 1.0)]


@pytest.mark.parametrize("options", [{"buckets": "2"}, {"strategy": "ddp", "all_reduce": "native"}])
def test_a_large_last_layer_that_is_soon_complete_is_hidden(options: dict[str, Any]) -> None:
    """Last layers of a convolutional net have most of the values, and its first layers take the time."""
    values = dataclasses.replace(EIGHT, tensors=(100_000, 4_000_000))
    by_values, measured = (
        iteration_time(job, costs_of(job))[0]
        for job in (_job(compute=one, **options) for one in (values, dataclasses.replace(values, released=(1.0, 0.02))))
    )
    assert by_values.exposed - measured.exposed == pytest.approx((40 / 41 - 0.02) * 0.2)


def test_a_plan_takes_buckets_where_they_gain_and_says_the_option() -> None:
    space = Space(codecs=("fp32",), all_reduces=("ring",), strategies=("pipelined",), widths=(1,), buckets=("1", "8"))
    found = plan(_job(), space)
    assert found.best.job.buckets == "8"
    assert describe(found.best.job).endswith(", buckets 8")
    assert training_arguments(found.best.job).endswith(" --buckets 8")
    assert found.best.iteration == iteration_time(found.best.job, costs_of(found.best.job))[0]
    wider = plan(_job(), dataclasses.replace(space, widths=(2,)))
    assert wider.best.job.buckets == "1", "of what takes as long, the simplest"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": "9"}, "buckets must be at most the number of parameters, 8; got 9"),
        ({"buckets": "0"}, "buckets must be at least 1; got 0"),
        (
            {"buckets": "2", "codec": "topk"},
            "buckets must be 1 with topk, which compresses the gradient as a whole; got 2",
        ),
        (
            {"buckets": "2", "strategy": "ddp", "all_reduce": "native"},
            "buckets must be left out with strategy ddp; got 2",
        ),
    ],
)
def test_buckets_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _job(**options)


def test_local_steps_have_no_buckets() -> None:
    with pytest.raises(ValueError, match=r"^buckets must be 1 with local_steps, .*; got 4$"):
        _job(buckets="4", local_steps=8)


def test_what_is_not_covered_is_refused() -> None:
    with pytest.raises(ValueError, match="buckets must be 1 to be simulated at width 1; got 2"):
        simulate_job(_job(buckets="2"), extrapolate=True)
    assert simulate_job(_job(buckets="2", width=2), extrapolate=True).period > 0
    with pytest.raises(ValueError, match="buckets must be at most the number of parameters, 6; got 7"):
        plan(Job(cluster=PROFILE, compute=MLP, world_size=4), dataclasses.replace(Space.of(ask()), buckets=("7",)))
