"""The planner: as good as trying everything, and its text is true."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timing_model._profiles import MLP, PROFILE
from tests.timing_model.test_predict import by_hand, compute
from timing_model.advice import advice, reason
from timing_model.alternatives import alternatives
from timing_model.choices import ACCURATE, LARGEST_ALL_TO_ALL, LATE_TIE, SEGMENTS, TIE, Space, simplicity
from timing_model.configurations import describe, training_arguments
from timing_model.costs import collective_time, costs_of, iteration_time
from timing_model.job import Job, in_groups
from timing_model.params import LinkParams, PlacedLink
from timing_model.plan import EQUAL, Plan, plan
from timing_model.predict import predict
from timing_model.presets import MODELS, NETWORKS, OVERHEAD
from timing_model.report import plan_text
from timing_model.schedules import SEGMENT_BYTES

SPACE = Space(
    codecs=("fp32", "int8", "int4", "bf16"),
    all_reduces=("ring", "halving-doubling", "all-to-all", "native"),
    widths=(1, 2, 3),
    segments=(1 << 16, 1 << 18, 1 << 20, 1 << 22),
)


def job_on(network: str, model: str, seconds: float, **options: Any) -> Job:
    tensors = (MODELS[model] // 50,) * 50
    work = compute(seconds, 1, tensors=tensors, cv=0.03)
    return Job(cluster=by_hand(NETWORKS[network]), compute=work, **in_groups({"world_size": 4} | options))


def everything(base: Job, space: Space) -> list[tuple[Job, float]]:
    """Return the time of each configuration that works, with the default segments where messages meet."""
    times = []
    pipelined = product(("pipelined",), space.widths, space.codecs, space.all_reduces, space.segments, space.buckets)
    others = [("ddp", 1, codec, "native", 1 << 20, "1") for codec in space.codecs if codec in ("fp32", "fp16")]
    others.append(("ps-sync", 1, "fp32", None, 1 << 20, "1"))
    names = ("strategy", "width", "codec", "all_reduce", "segment_bytes", "buckets")
    for values in [*pipelined, *others]:
        try:
            job = dataclasses.replace(base, **dict(zip(names, values, strict=True)))
        except ValueError:
            continue
        if job.meets and (job.segment_bytes != SEGMENT_BYTES or job.buckets != "1"):
            continue
        if job.width > 1 and job.buckets != "1":
            continue  # a whole iteration hides the gradient
        times.append((job, iteration_time(job, costs_of(job))[0].total))
    return times


@settings(deadline=None, max_examples=25)
@given(
    alpha=st.floats(1e-6, 1e-2),
    beta=st.floats(1e-11, 1e-7),
    gamma=st.floats(0, 1e-9),
    overhead=st.floats(0, 1e-4),
    values=st.integers(1000, 3_000_000),
    seconds=st.floats(1e-4, 1),
    cv=st.floats(0, 0.3),
    p=st.sampled_from((1, 2, 3, 4, 5, 8)),
)
def test_it_chooses_what_trying_everything_would(
    alpha: float, beta: float, gamma: float, overhead: float, values: int, seconds: float, cv: float, p: int
) -> None:
    link = LinkParams(alpha=alpha, beta=beta, gamma=gamma, sync=0.0, overhead=overhead)
    work = compute(seconds, values, cv=cv, tensors=(values // 3 + 1,) * 3)
    base = Job(cluster=by_hand(link), compute=work, world_size=p)
    space = dataclasses.replace(SPACE, buckets=("1", "3"))
    found, all_times = plan(base, space), everything(base, space)
    assert found.considered == len(all_times)
    segments, tie, late_tie = 1 + TIE, 1 + TIE, 1 + LATE_TIE
    groups = (
        (found.best, lambda job: True, tie if found.best.job.width > 1 else late_tie),
        (found.synchronous, lambda job: job.width == 1, 1 + EQUAL),
        (found.late, lambda job: job.width > 1, 1 + EQUAL),
        (found.uncompressed, lambda job: job.codec == "fp32", tie),
        (found.ddp, lambda job: (job.strategy, job.codec) == ("ddp", "fp32"), 1 + 1e-9),
    )
    for choice, belongs, near in groups:
        assert choice is not None
        assert choice.iteration.total == pytest.approx(next(time for job, time in all_times if job == choice.job))
        assert choice.score <= segments * near * min(time for job, time in all_times if belongs(job))
    if found.best.job.width > 1:
        assert found.synchronous is not None
        assert found.synchronous.score > late_tie * found.fastest
    check_sentences(found)


def check_sentences(found: Plan, others: Sequence[str] = ()) -> None:
    """Compare the numbers of a plan's sentences with its times."""
    first, *rest = advice(found, others)
    best, ddp, late, synchronous = found.best.iteration.total, found.ddp, found.late, found.synchronous
    helpless = first.startswith("This method will not help you here: ")
    assert not any("This method" in one for one in rest)
    if helpless:
        assert not others
        assert ddp is not None
        assert ddp.score <= found.best.score * (1 + TIE)
        assert not any("--" in one and "--accuracy-cost" not in one for one in rest), "something helps"
    if gain := re.match(r"([\d,.]+) times as fast as DDP", first):
        assert ddp is not None
        assert float(gain[1].replace(",", "")) == pytest.approx(ddp.iteration.total / best, rel=0.006)
        assert float(gain[1].replace(",", "")) > 1
    elif slower := re.match(r"Slower than DDP, which is ([\d,.]+) times as fast", first):
        assert ddp is not None
        assert float(slower[1].replace(",", "")) == pytest.approx(best / ddp.iteration.total, rel=0.006)
        assert float(slower[1].replace(",", "")) > 1
    elif first.startswith("As fast as DDP: "):
        assert ddp is not None
        assert ddp.iteration.total == pytest.approx(best, rel=0.005)
    elif first.startswith("DDP itself is the best choice"):
        assert ddp is not None
        assert found.best.job == ddp.job
    elif first.startswith("One rank exchanges nothing"):
        assert found.best.job.world_size == 1
    else:
        assert helpless or first.startswith("No comparison with DDP: ")
        assert helpless == (ddp is not None)
    if found.best.job.width > 1 and synchronous is not None:
        [prompt] = [one for one in rest if one.startswith("With no gradient late: ")]
        assert prompt.endswith(f": {training_arguments(synchronous.job)}")
        more = synchronous.iteration.total / best - 1
        assert (f"(+{more:.0%})".replace("%", " %") in prompt) == (more < 1)
        assert any(one.startswith("The pipeline is ") and describe(synchronous.job) in one for one in rest)
    elif late is not None and found.best.score > 1.01 * late.score:
        assert any(one.startswith("With no gradient late: ") and describe(late.job) in one for one in rest)


def test_a_fast_network_wants_no_codec() -> None:
    for network in ("100GbE", "infiniband"):
        found = plan(job_on(network, "resnet50", 0.3))
        assert found.best.job.codec == "fp32"
        assert any(line.startswith("Use no codec: ") for line in advice(found))


def test_a_pipeline_is_compared_with_the_best_synchronous_training_and_with_ddp() -> None:
    found = plan(job_on("1GbE", "alexnet", 0.3))
    assert found.synchronous is not None
    assert found.synchronous.job.buckets == "16"
    fastest = min(one.score for one in found.ranking if one.job.width == 1)
    ddp = {one.job.codec: one.iteration.total for one in found.ranking if one.job.strategy == "ddp"}
    assert fastest == pytest.approx(found.synchronous.score, rel=EQUAL)
    first, pipeline, late, *_ = advice(found)
    by_ddp, by_hook = map(float, re.findall(r"(\d+\.\d\d) times as", first))
    assert by_ddp == pytest.approx(ddp["fp32"] / found.best.iteration.total, abs=0.01)
    assert by_hook == pytest.approx(ddp["fp16"] / found.best.iteration.total, abs=0.01)
    [by_any] = map(float, re.findall(r"(\d+\.\d\d) times as fast", pipeline))
    assert by_any == pytest.approx(fastest / found.best.score, abs=0.01)
    assert pipeline.endswith(f" the best synchronous configuration ({describe(found.synchronous.job)}).")
    assert late.startswith("With no gradient late: ")


def test_the_job_of_the_readme_needs_no_late_gradient() -> None:
    """The plan once chose late gradients there, 1.56 times as fast as "the best synchronous configuration"."""
    base = job_on("1GbE", "resnet50", 0.3)
    found = plan(dataclasses.replace(base, compute=dataclasses.replace(base.compute, cv=0.0)))
    text = plan_text(found, predict(found.best.job), top=2)
    assert (found.best.job.width, found.best.job.codec, found.best.job.buckets) == (1, "int4", "16")
    assert found.best.score <= (1 + LATE_TIE) * found.fastest
    assert "With no gradient late: 311 ms (+4 %), next to the fastest pipeline (pipelined, width 2, int4, " in text
    assert re.search(r"^\*  synchronous, int4, ring, .*buckets 16 ", text, re.MULTILINE)
    assert re.search(r"^   ddp, no codec  ", text, re.MULTILINE), "it is shown, though not among the two best"
    first = text.split("\n\n")[2].splitlines()[0]
    assert re.fullmatch(
        r"4\.5\d times as fast as DDP, .* as with its fp16 hook: 311 ms an iteration in place .*", first
    )
    assert text.splitlines()[-1].startswith('In a program: pipesgd.ddp.compress(model, codec="int4"')


@pytest.mark.parametrize("late", [0.97, 1.03])
def test_late_gradients_must_gain_more_than_five_percent(late: float) -> None:
    """A ring takes this share of 5 % of the computation, all of which a pipeline hides."""
    seconds, values = 1.0, 10_000_000
    link = LinkParams(alpha=0.0, beta=late * LATE_TIE * seconds / (2 * 3 / 4 * 4 * values), gamma=0.0, sync=0.0)
    base = Job(cluster=by_hand(link), compute=compute(seconds, values), world_size=4)
    space = dataclasses.replace(SPACE, codecs=("fp32",), all_reduces=("ring",), strategies=("pipelined",))
    assert plan(base, space).best.job.width == (1 if late < 1 else 2)


def test_hooks_of_ddp_that_do_not_run_are_not_searched() -> None:
    found = plan(job_on("10GbE", "resnet50", 0.3), dataclasses.replace(SPACE, codecs=("fp32", "bf16", "fp16")))
    assert {one.job.codec for one in found.ranking if one.job.strategy == "ddp"} == {"fp32", "fp16"}
    asked = dataclasses.replace(job_on("10GbE", "resnet50", 0.3), strategy="ddp", all_reduce="native", codec="bf16")
    assert "torch accepts DDP's bf16 hook only in a build for CUDA with NCCL" in predict(asked).support.reasons


@pytest.mark.parametrize(
    ("options", "changes", "first"),
    [
        ({}, {"strategies": ("ps-sync",)}, "Slower than DDP, which is 3.11 times as fast as "),
        ({}, {"strategies": ("pipelined",), "codecs": ("fp32",), "widths": (1,), "buckets": ("1",)}, "Slower than DDP"),
        ({"world_size": 1}, {}, "One rank exchanges nothing"),
        ({"memory": 5e8, "split": "fsdp2"}, {}, "No comparison with DDP: a rank has not enough memory for it."),
    ],
)
def test_the_first_sentence_is_about_ddp(options: dict[str, Any], changes: dict[str, Any], first: str) -> None:
    base = job_on("10GbE", "resnet50", 0.1, **options)
    found = plan(base, dataclasses.replace(Space.of(base), **changes))
    assert advice(found)[0].startswith(first)
    assert (found.ddp is None) == first.startswith("No comparison")
    check_sentences(found)
    shown = [describe(one.job) for one in found.shown(1)]
    assert ("ddp, no codec" in shown) == (found.ddp is not None)


def test_a_slow_network_wants_a_codec_and_a_pipeline() -> None:
    found = plan(job_on("1GbE", "alexnet", 0.3))
    assert found.best.job.codec != "fp32"
    assert found.best.job.width > 1
    _, pipeline, _, codec, servers = advice(found)
    assert pipeline.startswith("The pipeline is ")
    assert codec.startswith(f"Use {found.best.job.codec}: the best without a codec ")
    assert servers.startswith("Against one parameter server for 4 workers, it is ")


def test_where_communication_is_nothing_the_method_does_not_help() -> None:
    calm = dataclasses.replace(job_on("100GbE", "mlp", 10.0), compute=compute(10.0, 1000))
    found = plan(calm)
    assert found.best.job.width == 1
    assert describe(found.best.job) == "ddp, no codec"
    assert advice(found)[0].startswith("This method will not help you here: a pipeline ")
    assert "computation hides all" in reason(found.best)
    check_sentences(found)
    others = ["More ranks help"]
    assert advice(found, others)[0].startswith("DDP itself is the best choice of those searched: a pipeline ")


@pytest.mark.parametrize("codecs", [("fp32",), ACCURATE])
def test_the_method_helps_where_something_below_says_how(codecs: tuple[str, ...]) -> None:
    """GPT-2 at home: a pipeline alone gains little, and fewer exchanges much."""
    link = LinkParams(alpha=0.02, beta=1 / 6e6, gamma=0.0, sync=0.0)
    work = compute(0.5, 1, tensors=(MODELS["gpt2"] // 50,) * 50)
    base = Job(cluster=by_hand(link), compute=work, world_size=2)
    space = dataclasses.replace(Space.of(base), codecs=codecs)
    found = plan(base, space)
    others = alternatives(found, space)
    text = plan_text(found, predict(found.best.job), 8, others)
    assert found.best.job.width == 1
    assert any("times as many samples a second" in one for one in others)
    assert "This method will not help you here" not in text
    check_sentences(found, others)


def test_accuracy_can_be_weighed() -> None:
    base = job_on("1GbE", "alexnet", 0.3)
    dear = dict.fromkeys(ACCURATE[1:], 100.0)
    found = plan(base, accuracy_cost=dear)
    assert found.best.job.codec == "fp32"
    found = plan(base, accuracy_cost=dear | {"width": 100.0})
    assert (found.best.job.codec, found.best.job.width) == ("fp32", 1)
    weighed = plan(base, accuracy_cost={"width": 0.1}).best
    assert weighed.score == pytest.approx(weighed.iteration.total * (1 + 0.1 * (weighed.job.width - 1)))


@pytest.mark.parametrize(("network", "world_size"), [("1GbE", 16), ("10GbE", 4), ("25GbE", 64)])
def test_only_what_costs_next_to_no_accuracy_is_searched_unasked(network: str, world_size: int) -> None:
    """The planner once recommended sign at width 4 to 16 ranks at 1 Gbit/s."""
    base = job_on(network, "alexnet", 0.3, world_size=world_size)
    found = plan(base)
    assert {one.job.codec for one in found.ranking} <= set(ACCURATE)
    assert max(one.job.width for one in found.ranking) <= 3
    assert found.synchronous is not None
    assert found.synchronous.job.codec in ACCURATE
    assert {one.job.buckets for one in found.ranking if one.job.width == 1} == {"1", "4", "16"}
    everything = dataclasses.replace(Space.of(base), codecs=("fp32", "sign"))
    assert {one.job.codec for one in plan(base, everything).ranking} == {"fp32", "sign"}


def test_the_synchronous_reference_of_other_codecs_is_one_of_them() -> None:
    found = plan(job_on("1GbE", "alexnet", 0.3), dataclasses.replace(SPACE, codecs=("int8", "int4")))
    assert found.synchronous is not None
    assert found.synchronous.job.codec in ("int8", "int4")


def test_of_16_bits_rounding_is_simpler_than_truncation() -> None:
    base = job_on("1GbE", "alexnet", 0.3)
    codecs = ("truncate16", "fp16", "bf16")
    ordered = sorted((dataclasses.replace(base, codec=codec) for codec in codecs), key=simplicity)
    assert [one.codec for one in ordered] == ["bf16", "fp16", "truncate16"]
    found = plan(base, dataclasses.replace(SPACE, codecs=codecs, widths=(2,), strategies=("pipelined",)))
    assert found.best.job.codec == "bf16"


@pytest.mark.parametrize(("longer", "codec"), [(0.022, "fp32"), (0.05, "bf16")])
def test_a_codec_must_gain_3_percent(longer: float, codec: str) -> None:
    """An fp32 all-reduce takes longer than the overlapping computation by this share."""
    seconds, values = 1.0, 10_000_000
    link = LinkParams(alpha=0.0, beta=(1 + longer) * seconds / (2 * 3 / 4 * 4 * values), gamma=0.0, sync=0.0)
    base = Job(cluster=by_hand(link), compute=compute(seconds, values), world_size=4)
    found = plan(base, dataclasses.replace(SPACE, strategies=("pipelined",), widths=(2,)))
    assert found.best.job.codec == codec


def test_all_to_all_is_not_searched_among_many_unless_asked_for() -> None:
    link = LinkParams(alpha=0.05, beta=8e-8, gamma=1e-10, sync=0.0)
    work = compute(1.0, 1_000_000, tensors=(20_000,) * 50)
    many = Job(cluster=by_hand(link), compute=work, world_size=10_000)
    found = plan(many)
    assert "all-to-all" not in {one.job.all_reduce for one in found.ranking}
    assert "all-to-all" in Space.of(dataclasses.replace(many, world_size=LARGEST_ALL_TO_ALL)).all_reduces
    named = dataclasses.replace(Space.of(many), all_reduces=("all-to-all",), strategies=("pipelined",))
    assert plan(many, named).best.job.all_reduce == "all-to-all"


def test_a_message_costs_the_processor_on_a_network_that_is_typed_in() -> None:
    """An all-to-all among many ranks sends so many messages that they take longer than the bytes."""
    base = job_on("1GbE", "mlp", 0.01, world_size=1024)
    job = dataclasses.replace(base, all_reduce="all-to-all")
    time = collective_time(job, costs_of(job), base.compute.numel)
    assert time.total > 2 * 1023 * OVERHEAD


@pytest.mark.parametrize(("codec", "segment"), [("int4", SEGMENT_BYTES), ("fp32", 4 << 20)])
def test_messages_that_are_simulated_are_no_larger_than_is_quick(codec: str, segment: int) -> None:
    """The bound is on what travels; where it cuts as other segments do, they are the ones nearest to the default."""
    base = job_on("1GbE", "alexnet", 0.3, world_size=64)
    [link] = {base.cluster.link.params()}
    placed = dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, placed=(PlacedLink(link=link),)))
    space = Space(codecs=(codec,), all_reduces=("ring",), strategies=("pipelined",), widths=(1,))
    assert plan(placed, space).best.job.segment_bytes == segment


def test_ties_are_one_line() -> None:
    found = plan(job_on("100GbE", "mlp", 10.0))
    text = plan_text(found, predict(found.best.job), top=8)
    assert found.tied
    [line] = [line for line in text.splitlines() if line.startswith("Equally fast (within 3%), but more complex: ")]
    assert all(describe(one.job) in line for one in found.tied[:4])
    assert f"; and {len(found.tied) - 4} more." in line
    shown = found.shown(8)
    assert {describe(one.job) for one in shown} == {"ddp, no codec", "ps-sync"}
    assert "+0.0%" not in text


def test_a_third_width_comes_with_what_it_depends_on() -> None:
    """There are many ranks with jitter, and a collective as long as the computation."""
    link = LinkParams(alpha=0.0, beta=1 / (2 * 63 / 64 * 4e7), gamma=0.0, sync=0.0)
    base = Job(cluster=by_hand(link), compute=compute(1.0, 10_000_000, cv=0.2), world_size=64)
    found = plan(base, dataclasses.replace(SPACE, codecs=("fp32",), all_reduces=("ring",)))
    assert found.best.job.width == 3
    assert any(line.startswith("Width 3 gains over width 2 only where slow") for line in advice(found))
    narrower = plan(base, dataclasses.replace(SPACE, codecs=("fp32",), all_reduces=("ring",), widths=(1, 2)))
    assert not any(line.startswith("Width") for line in advice(narrower))


def test_large_segments_where_messages_meet_and_are_many() -> None:
    """Messages that meet are simulated one by one, which is quick only if they are few."""
    space = dataclasses.replace(SPACE, all_reduces=("halving-doubling",), strategies=("pipelined",), segments=SEGMENTS)
    for model, large in (("mlp", ()), ("alexnet", ("fp32", "bf16"))):
        found = plan(job_on("1GbE", model, 0.3, world_size=31), space)
        segments = {one.job.codec: one.job.segment_bytes for one in found.ranking}
        assert segments == {codec: 1 << 22 if codec in large else 1 << 20 for codec in space.codecs}
        assert found.considered == len(space.widths) * len(space.codecs)


def test_what_was_not_measured_is_not_searched() -> None:
    base = Job(cluster=PROFILE, compute=MLP, world_size=4)
    found = plan(base)
    assert {one.job.codec for one in found.ranking} <= {"fp32", "int8"}
    assert {one.job.all_reduce for one in found.ranking} <= {"ring", "halving-doubling", "native", None}
    with pytest.raises(ValueError, match=r"extrapolate must be asked for, .*; got 64 ranks; measured: 2, 3, 4"):
        plan(dataclasses.replace(base, world_size=64))
    assert plan(dataclasses.replace(base, world_size=64), extrapolate=True).best


@pytest.mark.parametrize(
    ("options", "cost", "message"),
    [
        ({"codecs": ()}, {}, "codecs must be at least one; got none"),
        ({"widths": (0,)}, {}, "widths must be a whole number of at least 1; got 0"),
        ({"strategies": ("dpp",)}, {}, "strategy must be one of"),
        ({"all_reduces": ("rings",)}, {}, r"all_reduce must be one of .*\(did you mean ring\?\)"),
        ({"codecs": ("int9",)}, {}, r"codec must be one of .*\(did you mean int8\?\)"),
        ({}, {"widht": 1.0}, r"accuracy_cost must be one of .*\(did you mean width\?\)"),
        ({}, {"width": -1.0}, "accuracy_cost must be finite and at least 0"),
    ],
)
def test_searches_that_make_no_sense(options: dict[str, Any], cost: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(job_on("1GbE", "mlp", 0.1), dataclasses.replace(SPACE, **options), accuracy_cost=cost)


def test_configurations_in_words() -> None:
    base = job_on("1GbE", "mlp", 0.1)
    wide = dataclasses.replace(base, width=2, codec="int8", segment_bytes=1 << 18)
    assert describe(wide) == "pipelined, width 2, int8, ring, segments of 256 KiB"
    assert training_arguments(wide) == "--width 2 --codec int8 --all-reduce ring --segment-bytes 262144"
    ddp = dataclasses.replace(base, strategy="ddp", all_reduce="native", codec="bf16")
    assert (describe(ddp), training_arguments(ddp)) == ("ddp, bf16", "--strategy ddp --ddp-hook bf16")
    servers = dataclasses.replace(base, strategy="ps-sync", all_reduce=None)
    assert (describe(servers), training_arguments(servers)) == ("ps-sync", "--strategy ps-sync --servers 1")
    assert describe(base) == "synchronous, no codec, ring"
    assert isinstance(plan(base, SPACE), Plan)
