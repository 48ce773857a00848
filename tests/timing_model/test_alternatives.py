"""Alternatives to a plan: accumulation hides a slow network, and more ranks stop helping somewhere."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import Any

import pytest

from tests.timing_model._profiles import MLP, PROFILE, ask
from tests.timing_model.test_predict import by_hand, compute
from timing_model.advice import training_arguments
from timing_model.alternatives import (
    FURTHEST,
    MOST_ACCUMULATION,
    alternatives,
    epoch,
    epochs,
    hiding,
    last_worth,
)
from timing_model.choices import Space
from timing_model.configurations import in_program
from timing_model.job import Job, in_groups
from timing_model.measured import Estimate
from timing_model.params import LinkParams
from timing_model.plan import plan
from timing_model.predict import predict

NUMEL = 1_000_000
SPACE = Space(codecs=("fp32",), all_reduces=("ring",), segments=(1 << 30,), strategies=("pipelined",))


def job_of(
    ratio: float, *, alpha: float = 0.0, tensors: tuple[int, ...] = (NUMEL,), samples: int = 400_000, **options: Any
) -> Job:
    """Return a job on 4 ranks whose fp32 ring takes ``ratio`` times as long as its computation of 1 s.

    ``tensors`` have ``NUMEL`` values together.
    """
    link = LinkParams(alpha=alpha, beta=ratio / (2 * 3 / 4 * 4 * NUMEL), gamma=0.0, sync=0.0)
    work = dataclasses.replace(compute(1.0, NUMEL, batch_size=10, samples=samples), tensors=tensors)
    return Job(cluster=by_hand(link), compute=work, **in_groups({"world_size": 4} | options))


@pytest.mark.parametrize(
    ("ratio", "factor"), [(0.5, 1), (0.99, 1), (2.5, 3), (5.99, 6), (1.1 * MOST_ACCUMULATION, None)]
)
def test_accumulation_hides_as_much_as_the_formula_says(ratio: float, factor: int | None) -> None:
    assert hiding(plan(job_of(ratio), SPACE).best, 2) == factor


def test_a_plan_says_what_accumulation_gains_and_costs() -> None:
    said = alternatives(plan(job_of(2.5), SPACE), SPACE)
    assert said[0] == (
        "Communication takes 2.5 times as long as computation: --width 2 --codec fp32 --all-reduce ring "
        "--segment-bytes 1073741824 --accumulation 3 would hide it, with 2.5 times as many samples a second, in "
        "iterations of 3.00 s; the price is a batch 3 times as large, so an epoch has 3 times fewer updates."
    )
    accumulated = predict(job_of(2.5, width=2, accumulation=3, segment_bytes=1 << 30))
    assert accumulated.iteration.total == pytest.approx(3.0)
    assert accumulated.samples_per_second == pytest.approx(4 * 3 * 10 / 3.0)
    assert accumulated.job.iterations_per_epoch == 400_000 // (4 * 3 * 10)


def test_no_batch_is_larger_than_the_data_set() -> None:
    for samples, advised in ((119, False), (120, True)):  # 4 ranks, 3 micro-batches of 10
        job = job_of(2.5)
        job = dataclasses.replace(job, compute=dataclasses.replace(job.compute, samples=samples))
        assert any("--accumulation 3" in one for one in alternatives(plan(job, SPACE), SPACE)) == advised
        assert [one.world_size for one in epochs(job, SPACE)] == [1, 2, 4, 8]


def test_a_network_that_no_accumulation_hides_is_called_too_slow() -> None:
    [said, *_] = alternatives(plan(job_of(1000.0), SPACE), SPACE)
    assert said.startswith("Communication takes 1,000 times as long as computation, which --accumulation 64 would not")


def test_nothing_hides_behind_no_computation() -> None:
    job = job_of(1.0)
    nothing = {name: Estimate.exact(0.0) for name in ("forward", "backward", "update", "late_update")}
    job = dataclasses.replace(job, compute=dataclasses.replace(job.compute, **nothing))
    assert not any("inf" in one or "Communication takes" in one for one in alternatives(plan(job, SPACE), SPACE))


def test_topk_at_width_1_is_no_hook_of_a_program() -> None:
    """``pipesgd.ddp.compress`` refuses it."""
    assert in_program(ask(codec="topk")).startswith('pipesgd.Pipelined(layers, optimizer, width=1, codec="topk"')
    assert in_program(ask(codec="topk", width=2)).startswith("pipesgd.ddp.attach(")
    assert in_program(ask(codec="int8")).startswith("pipesgd.ddp.compress(")


@pytest.mark.parametrize(
    ("ratio", "accumulation", "says"),
    [
        (1000.0, 16, "which --accumulation 1024 would not hide"),
        (40.0, 16, "--accumulation 640 would hide it"),
        (40.0, 1 << 12, "which --accumulation 65536 would not hide"),
        (15.5, 1 << 12, "--accumulation 65536 would hide it"),
    ],
)
def test_micro_batches_that_are_named_are_those_that_were_tried_and_a_job_may_have(
    ratio: float, accumulation: int, says: str
) -> None:
    """An accumulated iteration computes for as many seconds as it has micro-batches."""
    enough = 4 * 10 << 16
    job = job_of(ratio * accumulation, accumulation=accumulation, samples=enough)
    [said, *_] = alternatives(plan(job, SPACE), SPACE)
    assert says in said
    named = int(re.findall("--accumulation ([0-9]+)", said)[0])
    assert job_of(1.0, accumulation=named, samples=enough).accumulation <= 1 << 16


def test_a_width_that_hides_and_costs_too_much_accuracy_needs_no_other_price() -> None:
    found = plan(job_of(0.8), SPACE, accuracy_cost={"width": 1.0})
    assert found.best.job.width == 1
    assert [one for one in alternatives(found, SPACE) if "--width" in one] == []
    found = plan(job_of(1.6), SPACE, accuracy_cost={"width": 2.0})
    assert found.best.job.width == 1
    assert any("--accumulation 2 " in one for one in alternatives(found, SPACE))


def test_a_file_of_several_micro_batches_is_planned_with_options_that_have_them() -> None:
    """An iteration of the file computes four micro-batches in 1 s; local steps have none."""

    def said(ratio: float, **options: Any) -> tuple[str, list[str]]:
        job = job_of(ratio, **options)
        four = dataclasses.replace(job, compute=dataclasses.replace(job.compute, batch_size=40, accumulation=4))
        found = plan(four, SPACE)
        return training_arguments(found.best.job), alternatives(found, SPACE)

    options, [accumulation, *_] = said(2.5)
    assert options.endswith(" --accumulation 4")
    assert " --accumulation 12 would hide it" in accumulation
    assert accumulation.endswith("a batch 3 times as large, so an epoch has 3 times fewer updates.")
    assert said(2.5, accumulation=2)[0].endswith(" --accumulation 8")
    assert ", which --accumulation 256 would not hide" in said(1000.0)[1][0]
    assert not any("--local-steps" in one for one in said(20.5)[1])


def test_hidden_communication_needs_no_accumulation() -> None:
    assert not any("--accumulation" in one for one in alternatives(plan(job_of(0.9), SPACE), SPACE))


def test_accumulation_multiplies_the_passes_and_not_the_update() -> None:
    one, three = (predict(ask(accumulation=number)) for number in (1, 3))
    assert three.collective == one.collective
    assert three.iteration.compute == pytest.approx(3 * 0.06 + 0.005)
    assert three.high - three.low > one.high - one.low


def test_an_accumulated_iteration_is_not_the_one_that_was_measured() -> None:
    job = ask(accumulation=2)
    assert job.measured is None


def test_ranks_help_until_latency_takes_over() -> None:
    """A ring's latency grows with its ranks: from some number on an epoch takes as long on twice as many."""
    found = plan(job_of(0.01, alpha=0.01, world_size=64), SPACE)
    job = found.best.job
    rows = epochs(job, SPACE)
    assert [one.world_size for one in rows] == [1 << power for power in range(10)]
    assert rows[-1].world_size == FURTHEST * 64
    assert rows[3].seconds == predict(dataclasses.replace(job, world_size=8)).epoch
    worth = last_worth(rows)
    assert worth is not None
    assert all(more.seconds > 0.9 * fewer.seconds for fewer, more in pairwise(rows) if fewer.world_size >= worth)
    [before] = [fewer.seconds / more.seconds for fewer, more in pairwise(rows) if more.world_size == worth]
    assert before >= 1 / 0.9
    [said] = [one for one in alternatives(found, SPACE) if "ranks on" in one]
    assert said.startswith(f"From {worth} ranks on, twice as many save less than 10% of an epoch ({worth} ranks: ")


def test_more_ranks_of_a_fast_network_help() -> None:
    [said] = alternatives(plan(job_of(0.1, price=1.0), SPACE), SPACE)
    assert said.startswith("More ranks help, up to 32 at least (16 ranks: 41.7 min and 40,000.00, 32 ranks: ")


def test_one_rank_may_be_as_fast_as_many() -> None:
    said = alternatives(plan(job_of(10.0), SPACE), SPACE)
    assert said[-1].startswith("One rank alone is as fast (1 rank: 11.1 h, 4 ranks: 27.8 h for an epoch): do not")


def test_nothing_is_said_of_an_epoch_that_is_not_known() -> None:
    job = job_of(0.1)
    job = dataclasses.replace(job, compute=dataclasses.replace(job.compute, samples=None))
    assert epochs(job, SPACE) == []
    assert alternatives(plan(job, SPACE), SPACE) == []


def test_more_ranks_than_were_measured_are_left_out() -> None:
    job = Job(cluster=PROFILE, compute=MLP, world_size=4)
    assert [one.world_size for one in epochs(job, Space.of(job))] == [1, 2, 4, 8, 16, 32]
    assert epoch(job, 64, Space.of(job), extrapolate=False) is None


def test_the_price_is_that_of_all_ranks() -> None:
    answer = predict(job_of(0.5, price=2.0, epochs=3))
    assert answer.epoch is not None
    assert answer.as_json()["epoch_cost"] == pytest.approx(4 * 2.0 * answer.epoch)
    assert answer.as_json()["job_cost"] == pytest.approx(3 * answer.as_json()["epoch_cost"], rel=0.01)


def test_limits_that_tie_are_all_named() -> None:
    """Computation and network take 1 s each, one after the other."""
    answer = predict(job_of(1.0, width=1, segment_bytes=1 << 30))
    assert set(answer.limits) == {"computation", "network"}
    assert answer.limits[0] == answer.limit
    assert predict(job_of(3.0, width=1)).limits == ("network",)
    assert predict(job_of(1.0, width=2)).limits == ("balance",)
