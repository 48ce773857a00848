"""Parts of gradients that are gathered: their time, the iterations they are in, and what refuses them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.timing_model._profiles import ask
from timing_model.advice import describe
from timing_model.all_reduce import CollectiveTime, gather_time, parts_time
from timing_model.choices import Space
from timing_model.costs import buckets_of, collective_time, costs_of, iteration_time, whole
from timing_model.iteration import layerwise_iteration_time, pipelined_iteration_time
from timing_model.job import Job
from timing_model.measured import ComputeProfile
from timing_model.params import LinkParams, Parts, uncompressed
from timing_model.plan import plan
from timing_model.predict import CODEC, predict
from timing_model.support import EXTRAPOLATED, support_of

LINK = LinkParams(alpha=1e-3, beta=4e-8, gamma=1e-10, sync=1e-4, overhead=3e-5)
LAYERS = ComputeProfile.exact(
    model="layers", batch_size=32, tensors=(600_000, 100_000, 300_000), compute=0.3, update=0.01
)
PARTS = (Parts(tensors=(0,), nbytes=40_000.0, messages=3, work=0.004),)


def _job(**options: Any) -> Job:
    return ask(**{"compute": LAYERS, "width": 1, "parts": PARTS} | options)


@pytest.mark.parametrize("world_size", [2, 4, 7])
@pytest.mark.parametrize("messages", [1, 3])
def test_parts_take_as_long_as_the_gathers_they_are_made_of(world_size: int, messages: int) -> None:
    parts = Parts(tensors=(0,), nbytes=messages * 12_000.0, messages=messages, work=0.5)
    each = gather_time(LINK, 3_000, world_size, codec=uncompressed(0.0))
    found = parts_time(LINK, parts, world_size)
    assert found.wire == pytest.approx(messages * each.total, rel=1e-12)
    assert found == CollectiveTime(found.wire + 0.5, found.wire, 0.5)
    hop = LINK.alpha + LINK.overhead + 12_000 * LINK.byte_seconds()
    assert each.total == pytest.approx((world_size - 1) * hop + LINK.sync, rel=1e-12)


def test_one_rank_only_works_on_its_parts() -> None:
    assert parts_time(LINK, PARTS[0], 1) == CollectiveTime(0.004, 0.0, 0.004)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("width", [1, 2])
def test_an_iteration_has_the_sum_of_the_others_and_then_the_parts(width: int, codec: str) -> None:
    job = _job(width=width, codec=codec)
    costs = costs_of(job)
    others = collective_time(job, costs, 400_000)
    parts = parts_time(costs.link, PARTS[0], 4)
    together = CollectiveTime(*[one + other for one, other in zip(others, parts, strict=True)])
    expected = pipelined_iteration_time(costs.times, together, width, world_size=4, noise=job.noise)
    iteration, collective = iteration_time(job, costs)
    assert iteration == pytest.approx(expected, rel=1e-12)
    assert collective == pytest.approx(together, rel=1e-12)


def test_the_bytes_are_those_of_an_all_reduce_that_sends_as_much() -> None:
    assert _job().wire_bytes == 4 * 400_000 + 2 * 40_000
    assert _job(codec="int8").wire_bytes == 8.25 / 8 * 400_000 + 2 * 40_000
    assert _job(parts=()).wire_bytes == 4 * 1_000_000


def test_buckets_are_cut_of_the_others_and_parts_leave_last() -> None:
    job = _job(buckets="2")
    costs = costs_of(job)
    found = buckets_of(job, costs)
    assert [share for share, _ in found] == [0.3, 0.4, 1.0]
    expected = [collective_time(job, costs, numel) for numel in (300_000, 100_000)]
    assert [one for _, one in found] == [*expected, parts_time(costs.link, PARTS[0], 4)]
    late = [
        *found[:-1],
        (1.0, CollectiveTime(*[one + costs.times.handover * (at < 2) for at, one in enumerate(found[-1][1])])),
    ]
    by_hand = layerwise_iteration_time(costs.times, late, world_size=4, noise=job.noise)
    assert iteration_time(job, costs)[0] == pytest.approx(by_hand, rel=1e-12)
    assert iteration_time(_job(width=2, buckets="2"), costs)[1] == whole(found)


def test_all_gradients_may_be_gathered() -> None:
    job = _job(
        parts=(Parts(tensors=(0, 2), nbytes=9_000.0, messages=2, work=0.0), dataclasses.replace(PARTS[0], tensors=(1,)))
    )
    assert job.whole == []
    assert [share for share, _ in buckets_of(job, costs_of(job))] == [1.0, 1.0]


def test_fewer_bytes_are_faster_and_the_answer_says_how_sure_it_is() -> None:
    gathered, summed = (predict(_job(parts=parts)) for parts in (PARTS, ()))
    assert gathered.iteration.total < summed.iteration.total
    assert gathered.low < gathered.iteration.total < gathered.high
    assert gathered.support.kind == EXTRAPOLATED
    assert "parts of gradients are gathered; measured: sums of whole gradients" in gathered.support.reasons
    assert not any("gathered" in reason for reason in summed.support.reasons)
    assert describe(gathered.job).endswith(", 40.0 kB gathered")
    told = json.loads(json.dumps(gathered.as_json()))["job"]["parts"]
    assert told == [{"tensors": [0], "nbytes": 40_000.0, "messages": 3, "work": 0.004}]


def test_work_on_the_parts_counts_as_that_of_a_codec() -> None:
    slow = _job(parts=(dataclasses.replace(PARTS[0], work=1.0),))
    assert predict(slow).limit == CODEC
    assert predict(slow).gains[CODEC] > predict(_job()).gains[CODEC]


def test_a_plan_has_parts_in_every_pipeline_and_in_nothing_else() -> None:
    space = Space(codecs=("fp32", "int8"), all_reduces=("ring", "native", "halving-doubling"), widths=(1, 2))
    found = plan(_job(), space, extrapolate=True)
    of = {
        strategy: [one.job for one in found.ranking if one.job.strategy == strategy]
        for strategy in ("pipelined", "ddp")
    }
    assert of["pipelined"]
    assert of["ddp"]
    assert all(job.parts == PARTS and job.all_reduce != "native" for job in of["pipelined"])
    assert all(job.parts == () for job in of["ddp"])
    synchronous = dataclasses.replace(space, widths=(1,), codecs=("fp32",), strategies=("pipelined",))
    gathered, summed = (plan(_job(parts=parts), synchronous, extrapolate=True).best for parts in (PARTS, ()))
    assert gathered.iteration.total < summed.iteration.total


def test_an_audition_of_whole_gradients_says_nothing_of_parts() -> None:
    assert support_of(_job()).kind == EXTRAPOLATED
    assert _job().measured is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "ddp", "all_reduce": "native"}, "parts must be left out with strategy ddp; got 1"),
        ({"all_reduce": "native"}, "parts must be left out with all_reduce native, which sums whole gradients; got 1"),
        ({"codec": "topk"}, "parts must be left out with codec topk, which compresses the gradient as a whole; got 1"),
        (
            {"local_steps": 2},
            "parts must be left out with local_steps, whose movement is that of a whole window; got 1",
        ),
        ({"members": 2, "split": "fsdp2"}, "parts must be left out with islands, which exchange whole shares; got 1"),
        ({"accumulation": 2}, "parts must be left out with accumulation, since their size is that of one micro-batch"),
        ({"parts": (*PARTS, *PARTS)}, r"parts must be of different tensors, from 0 to 2; got \[0, 0\]"),
        (
            {"parts": (dataclasses.replace(PARTS[0], tensors=(3,)),)},
            r"parts must be of different tensors, from 0 to 2; got \[3\]",
        ),
        ({"buckets": "3"}, "buckets must be at most the number of parameters, 2; got 3"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _job(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": ()}, "tensors must be at least one; got none"),
        ({"nbytes": -1.0}, "nbytes must be finite and at least 0; got -1.0"),
        ({"messages": 0}, "messages must be a whole number of at least 1; got 0"),
        ({"work": -1.0}, "work must be finite and at least 0; got -1.0"),
    ],
)
def test_parts_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PARTS[0], **changes)
