"""The choice that a run leaves to the timing model, and its description."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from _plans import INSTANT, SLOW, choose, cluster, prediction
from torch import nn

from pipesgd.cli import parse
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.pipeline.buckets import bucket_indices
from pipesgd.planning import choose as choose_options
from pipesgd.planning.choose import decide, of_file, space_of
from pipesgd.planning.planned import choices_of
from tests.timing_model._profiles import MLP, PROFILE, ran, rates
from timing_model.cluster_profile import Profile
from timing_model.fragments import in_windows, windows_of
from timing_model.job import Job, Length
from timing_model.measured import CodecProfile, Estimate, LowRankProfile
from timing_model.params import LinkParams
from timing_model.predict import predict
from timing_model.support import GIVEN, INTERPOLATED

EXPENSIVE = rates(1e-6)
LIMIT = "--rate-limit 8mbit"
HUNDRED = Length(iterations=100)
FACTORS = LowRankProfile(rank=4, left=10_050, right=11_136, work=Estimate.exact(0.004))


def test_a_slow_link_gets_a_pipeline_and_a_codec() -> None:
    planned = choose(cluster())
    assert (planned.choices["width"], planned.choices["codec"]) == (2, "int8")
    assert planned.choices["all-reduce"] in PROFILE.calibrated.all_reduces
    assert planned.choices["segment-bytes"] == TrainConfig().wire.segment_bytes
    assert (planned.support, planned.reasons) == ("interpolated", [])
    chosen, advice, predicted = planned.lines()
    assert "--width 2 --codec int8" in chosen
    assert " times as fast as DDP" in advice
    assert "times as fast as the best synchronous configuration" in advice
    assert "With no gradient late: " in advice
    assert "Use int8" in advice
    assert predicted.startswith("predicted by a test: ")
    assert "for all 100" in predicted


@pytest.mark.parametrize(("synchronous", "dense"), [(0, 0), (10, 0), (0, 25), (10, 25), (25, 10), (10, 10), (0, 999)])
def test_a_plan_counts_the_first_iterations_at_their_own_times(synchronous: int, dense: int) -> None:
    """They are synchronous, or send whole gradients where later ones are factors, or both."""
    factored = dataclasses.replace(MLP, low_rank=FACTORS)
    given = f"--synchronous-start {synchronous} --dense-start {dense}"
    planned = choose(cluster(compute=factored), f"--width 2 --codec powersgd {given} --all-reduce ring")

    def seconds(number: int) -> float:
        known = cluster(compute=factored)
        job = Job(cluster=known, compute=known.compute[0], world_size=4, width=2, codec="powersgd", length=HUNDRED)
        if number >= max(synchronous, dense):
            return predict(job).total / 100  # with the last gradients, which arrive after the last iteration
        unlike = {"width": 1} if number < synchronous else {}
        return predict(job.changed(**unlike, **{"codec": "fp32"} if number < dense else {})).iteration.total

    assert planned.job_seconds == pytest.approx(sum(map(seconds, range(100))), rel=1e-9)
    assert planned.settled == min(100, max(synchronous, dense))
    whole = f", the first {min(100, dense)} of them with whole gradients"
    assert (whole in planned.lines()[-1]) == bool(dense)


def test_a_file_that_was_measured_with_a_small_data_set_holds_for_a_run_with_a_larger_one() -> None:
    small = dataclasses.replace(MLP, samples=512)
    assert choose(cluster(compute=small)).iteration_seconds == choose(cluster()).iteration_seconds


def test_an_instant_link_gets_neither() -> None:
    planned = choose(cluster(INSTANT))
    assert planned.choices == {
        "width": 1,
        "codec": "fp32",
        "all-reduce": "ring",
        "segment-bytes": 1 << 20,
        "buckets": "1",
        "fragments": 1,
    }
    assert "This method will not help you here" in planned.lines()[1]
    assert "Use no codec" in planned.lines()[1]


def test_buckets_are_chosen_where_the_backward_pass_hides_much_of_the_wire() -> None:
    """Half of the MLP's bytes are complete after half of the backward pass."""
    planned = choose(cluster(), "--width 1 --codec int8 --buckets auto")
    assert planned.choices["buckets"] == "2"
    assert "--buckets 2" in planned.lines()[0]
    assert choose(cluster(INSTANT), "--width 1 --buckets auto").choices["buckets"] == "1"


@pytest.mark.parametrize("buckets", ["1", "4"])
def test_buckets_hide_the_wire_behind_the_last_micro_batch_alone(tmp_path: Path, buckets: str) -> None:
    """A run predicts what the timing model does for as many micro-batches of a file, measured together or one alone."""
    path = tmp_path / "cluster.toml"
    config = parse(f"--width 1 --buckets {buckets} --batch-size 512 --accumulation 8".split())
    cluster().save(path)
    one = Profile.load(path)
    compute = one.compute[0]
    asked = Job(cluster=one, compute=compute, world_size=4, accumulation=8, buckets=buckets)
    for measured in (compute, compute.accumulate(8)):
        dataclasses.replace(one, compute=(measured,)).save(path)
        known = of_file(path, config, MLP.tensors)
        planned = decide(*known, config, world_size=4, iterations=100, source="a test", own=False)
        assert planned.iteration_seconds == pytest.approx(predict(asked).iteration.total, rel=1e-12)


@pytest.mark.parametrize(("micro_batches", "times"), [(1, 1), (3, 3), (4, 1), (8, 2)])
def test_a_file_holds_for_multiples_of_the_micro_batches_it_was_measured_with(
    tmp_path: Path, micro_batches: int, times: int
) -> None:
    path = tmp_path / "cluster.toml"
    alone, four = (dataclasses.replace(MLP, batch_size=16 * n, accumulation=n) for n in (1, 4))
    dataclasses.replace(PROFILE, compute=(alone, four)).save(path)
    config = parse(f"--batch-size 16 --accumulation {micro_batches}".split())
    profile, compute = of_file(path, config, MLP.tensors)
    assert compute == (four if micro_batches % 4 == 0 else alone).accumulate(times)
    assert profile == dataclasses.replace(PROFILE, compute=(compute,))


@pytest.mark.parametrize(("words", "asked"), [("64", "64"), ("16", "16"), ("16 --accumulation 6", "6 x 16")])
def test_a_file_with_other_micro_batches_is_refused(tmp_path: Path, words: str, asked: str) -> None:
    path = tmp_path / "cluster.toml"
    dataclasses.replace(PROFILE, compute=(dataclasses.replace(MLP, batch_size=64, accumulation=4),)).save(path)
    with pytest.raises(UserInputError, match=f"mlp with {asked} samples on each rank; got .* with mlp with 4 x 16$"):
        of_file(path, parse(f"--batch-size {words}".split()), MLP.tensors)


def test_a_codec_that_costs_more_than_the_wire_is_not_chosen() -> None:
    slow = CodecProfile(bits=8.25, call=Estimate.exact(0.0), rates=EXPENSIVE)
    assert choose(cluster(codecs={"int8": slow})).choices["codec"] == "fp32"


def job(profile: Profile) -> Job:
    compute = profile.compute[0]
    return Job(cluster=profile, compute=compute, world_size=4, width=2, codec="int8", all_reduce="ring", length=HUNDRED)


def test_what_is_predicted_is_what_the_timing_model_says() -> None:
    profile = cluster()
    planned = choose(profile)
    answer = predict(dataclasses.replace(job(profile), all_reduce=planned.choices["all-reduce"]))
    assert planned.iteration_seconds == answer.iteration.total
    assert (planned.low, planned.high, planned.job_seconds) == (answer.low, answer.high, answer.total)


def test_a_rate_limit_is_predicted_as_the_bandwidth_and_not_compared_with_ddp_which_has_none() -> None:
    free, limited = (choose(cluster(), f"--codec int8 --width auto --cluster x {words}") for words in ("", LIMIT))
    assert limited.iteration_seconds > 2 * free.iteration_seconds
    slow = cluster().limited_to(1e6)
    given = choose(slow, "--codec int8 --width auto")
    assert (limited.iteration_seconds, limited.choices) == (given.iteration_seconds, given.choices)
    assert limited.why[1].startswith("No comparison with DDP: ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--width 3 --codec auto", {"width": 3, "codec": "int8", "all-reduce": "ring"}),
        (
            "--codec sign --width auto --all-reduce halving-doubling",
            {"codec": "sign", "all-reduce": "halving-doubling"},
        ),
        ("--all-reduce native --codec auto", {"codec": "fp32", "all-reduce": "native"}),
        ("--segment-bytes 4096 --width auto", {"segment-bytes": 4096}),
        ("--buckets 3 --codec auto --width 1", {"buckets": "3"}),
    ],
)
def test_what_is_given_stays(words: str, expected: dict[str, Any]) -> None:
    planned = choose(cluster(), words)
    assert {name: planned.choices[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("share", "chosen", "candidates"),
    [
        (0.1, (2, "int8"), [(2, "int8"), (2, "int4"), (3, "int8"), (3, "int4")]),
        (0.2, (2, "int4"), [(2, "int4"), (3, "int4")]),
        (0.03, (1, "int4"), [(1, "int4"), (3, "bf16"), (2, "int4"), (3, "int4")]),
        (0.04, (2, "bf16"), [(2, "bf16"), (3, "bf16"), (2, "int4"), (3, "int4")]),
    ],
)
def test_the_simplest_and_the_fastest_of_each_width_are_auditioned(
    share: float, chosen: tuple[int, str], candidates: list[tuple[int, str]]
) -> None:
    """Codecs whose all-reduces are hidden are predicted to be a tie, of which the plan takes the simplest."""
    bits = {"bf16": 16.0, "int8": 8.25, "int4": 4.25}
    codecs = {name: CodecProfile(bits=one, call=Estimate.exact(0.0), rates=rates(0.0)) for name, one in bits.items()}
    profile = cluster(dataclasses.replace(SLOW, beta=share * SLOW.beta), codecs=codecs)
    planned = choose(profile, "--width auto --codec auto --buckets 1", iterations=100_000)
    assert (planned.choices["width"], planned.choices["codec"]) == chosen
    assert [(one["width"], one["codec"]) for one in planned.candidates] == candidates


def test_the_plans_own_choice_is_always_auditioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_options, "MOST_CANDIDATES", 2)
    bits = {"bf16": 16.0, "int8": 8.25, "int4": 4.25}
    codecs = {name: CodecProfile(bits=one, call=Estimate.exact(0.0), rates=rates(0.0)) for name, one in bits.items()}
    profile = cluster(dataclasses.replace(SLOW, beta=0.04 * SLOW.beta), codecs=codecs)
    planned = choose(profile, "--width auto --codec auto --buckets 1", iterations=100_000)
    assert [(one["width"], one["codec"]) for one in planned.candidates] == [(2, "bf16"), (2, "int4")]


def test_width_1_is_compared_at_its_best_unless_buckets_are_given() -> None:
    """Half of the MLP's bytes are hidden behind half of the backward pass: then no gradient need be late."""
    fast = CodecProfile(bits=4.25, call=Estimate.exact(0.0), rates=rates(0.0))
    profile = cluster(dataclasses.replace(SLOW, beta=0.06 * SLOW.beta), codecs={"int4": fast})
    free, whole = (
        choose(profile, f"--width auto --codec auto {words}", iterations=100_000) for words in ("", "--buckets 1")
    )
    assert free.asked == ["width", "codec", "buckets"]
    assert whole.asked == ["width", "codec"]
    assert (whole.choices["width"], whole.choices["buckets"]) == (2, "1")
    assert free.choices["width"] == 1
    assert free.choices["buckets"] != "1"
    assert f"--width 1 --codec int4 --all-reduce ring --buckets {free.choices['buckets']}" in free.why[0]
    assert "With no gradient late: " in free.why[1]
    assert {one["width"] for one in free.candidates} >= {1, 2}
    config = parse(["--width", "auto", "--codec", "auto"])
    chosen = config.with_choices({name: free.choices[name] for name in free.asked})
    assert (chosen.pipeline.width, chosen.wire.buckets) == (1, free.choices["buckets"])
    assert parse(["--codec", "auto"]).planning.auto == ("codec",)


def test_a_width_that_gains_less_than_five_percent_is_not_chosen() -> None:
    slower = dataclasses.replace(SLOW, beta=3 * SLOW.beta)
    expected = {"width": 1, "codec": "fp32", "all-reduce": "ring"}
    planned = choose(cluster(slower), "--codec fp32 --width auto")
    assert {name: planned.choices[name] for name in expected} == expected
    late = predict(dataclasses.replace(job(cluster(slower)), width=2, codec="fp32")).iteration.total
    assert 1.02 < planned.iteration_seconds / late < 1.03


def test_nothing_is_said_of_a_codec_that_was_given() -> None:
    assert "codec:" not in " ".join(choose(cluster(), "--codec fp32 --width auto").why)


def test_without_an_auto_it_only_predicts() -> None:
    planned = choose(cluster(), "--width 3 --codec int8")
    assert planned.why == []
    assert planned.choices == {
        "width": 3,
        "codec": "int8",
        "all-reduce": "ring",
        "segment-bytes": 1 << 20,
        "buckets": "1",
        "fragments": 1,
    }


@pytest.mark.parametrize(
    ("words", "fragments"), [("--local-steps 16", 1), ("--local-steps 8", 2), ("--width 3 --local-steps 8", 2)]
)
def test_the_fewest_fragments_that_a_window_hides_are_chosen_and_predicted(words: str, fragments: int) -> None:
    """An exchange of all weights takes 12 iterations, and one of the larger half of them 7."""
    profile = cluster()
    planned = choose(profile, f"{words} --fragments auto")
    assert planned.asked == ["fragments"]
    assert planned.choices == choices_of(parse(words.split())) | {"fragments": fragments}
    assert planned.why == [
        f"chosen: --fragments {fragments}, the fewest of which each is exchanged while a window computes"
    ]
    config = parse(words.split())
    steps = config.windows.local_steps
    job = Job(cluster=profile, compute=profile.compute[0], world_size=4, width=config.pipeline.width, length=HUNDRED)
    answers = [predict(one) for one in windows_of(job, steps, fragments)]
    assert len(answers) == fragments
    assert planned.iteration_seconds == pytest.approx(fmean(one.iteration.total for one in answers))
    assert planned.job_seconds == pytest.approx(fmean(one.total or math.nan for one in answers))
    assert (planned.window, planned.candidates) == (fragments * steps, [])
    assert choose(profile, f"{words} --fragments {fragments}").iteration_seconds == planned.iteration_seconds


def test_fragments_are_cut_as_the_trainer_cuts_them() -> None:
    model = nn.Sequential(nn.Linear(784, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 10))
    parameters = list(model.parameters())
    assert tuple(one.numel() for one in parameters) == MLP.tensors
    job = Job(cluster=PROFILE, compute=MLP, world_size=4, width=2)
    for fragments in range(1, 7):
        parts = bucket_indices(model, parameters, str(fragments))
        numels = [sum(parameters[index].numel() for index in part) for part in parts]
        assert in_windows(job, 4, fragments).compute.numel == max(numels)


def test_a_rate_limit_needs_more_fragments() -> None:
    free, limited = (
        choose(cluster(INSTANT), f"--local-steps 100 --fragments auto --cluster x {words}").choices["fragments"]
        for words in ("", LIMIT)
    )
    assert (free, limited) == (1, 2)


def test_one_fragment_in_every_iteration_is_predicted_as_the_pipeline_that_it_is() -> None:
    planned = choose(cluster(INSTANT), "--fragments auto")
    assert planned.choices["fragments"] == 1
    assert planned.iteration_seconds == choose(cluster(INSTANT), "--width 2").iteration_seconds
    windows = choose(cluster(INSTANT), "--fragments auto --outer average")
    assert windows.iteration_seconds == pytest.approx(planned.iteration_seconds + MLP.update.value, rel=1e-12)


def test_where_no_fragment_is_hidden_it_says_what_would_hide_one() -> None:
    with pytest.raises(UserInputError) as refused:
        choose(cluster(), "--local-steps 2 --fragments auto")
    assert str(refused.value) == (
        "local-steps must be at least 7 with --fragments auto, to hide the exchange of the largest parameter; got 2"
    )
    assert choose(cluster(), "--local-steps 7 --fragments auto").choices["fragments"] == 2
    with pytest.raises(UserInputError) as refused:
        choose(cluster(compute=MLP.accumulate(4)), "--accumulation 4 --fragments auto")
    assert str(refused.value) == (
        "local-steps must be at least 8, and accumulation 1, with --fragments auto, to hide the exchange of the "
        "largest parameter; got 1 and 4"
    )
    assert choose(cluster(), "--local-steps 8 --fragments auto").choices["fragments"] == 2
    with pytest.raises(UserInputError) as refused:
        choose(cluster(LinkParams(alpha=0.0, beta=1e-4, gamma=0.0, sync=0.0)), "--local-steps 2 --fragments auto")
    assert str(refused.value) == (
        "fragments must be given where not even 500 local steps hide the exchange of the largest parameter; got auto"
    )


def test_only_codecs_that_cost_no_accuracy_are_chosen_unasked() -> None:
    cheap = CodecProfile(bits=1.0, call=Estimate.exact(0.0), rates=rates(0.0))
    profile = cluster(codecs={"sign": cheap, "int4": cheap})
    assert space_of(profile, parse(["--codec", "auto"]), 6).codecs == ("fp32", "int4")


@pytest.mark.parametrize("words", ["--connections 2", "--segment-bytes 4096"])
def test_torchs_own_all_reduce_is_left_out_where_options_exclude_it(words: str) -> None:
    free, bound = parse(["--all-reduce", "auto"]), parse(["--all-reduce", "auto", *words.split()])
    assert "native" in space_of(PROFILE, free, 6).all_reduces
    assert space_of(PROFILE, bound, 6).all_reduces == ("ring", "halving-doubling")


def test_what_was_not_measured_is_said() -> None:
    planned = choose(cluster(), "--width auto --codec sign --connections 2")
    assert planned.support == "outside"
    assert planned.reasons == ["codec sign was not measured; its costs are typical ones", "2 connections; measured: 1"]
    assert planned.lines()[-1].endswith(f"outside: {', '.join(planned.reasons)}")
    assert choose(cluster(), "--width auto --connections 2").support == "extrapolated"


@pytest.mark.parametrize(
    ("words", "support"),
    [
        ("", "measured"),
        ("--connections 4", "extrapolated"),
        ("--codec-block 64", "extrapolated"),
        ("--error-feedback on", "extrapolated"),
    ],
)
def test_a_measured_time_is_not_that_of_a_run_with_options_that_were_not_measured(words: str, support: str) -> None:
    profile = cluster(compute=dataclasses.replace(MLP, measured=(ran(iteration=Estimate.exact(9.0)),)))
    planned = choose(profile, f"--width 2 --codec int8 {words}")
    assert planned.support == support
    assert (planned.iteration_seconds == 9.0) == (support == "measured")


def test_numbers_typed_in_are_said_to_be_only_that() -> None:
    typed = dataclasses.replace(prediction(), support=GIVEN, reasons=())
    assert typed.lines()[-1].endswith("; as given")
    measured = dataclasses.replace(prediction(), support=INTERPOLATED, reasons=())
    assert measured.lines()[-1].endswith(f"for all {measured.iterations}")


def test_a_cluster_far_from_the_job_is_refused_unless_it_is_the_runs_own() -> None:
    message = r"^cluster must have been measured near this job; got 64 ranks; measured: 2, 3"
    with pytest.raises(UserInputError, match=message):
        choose(cluster(), world_size=64)
    assert choose(cluster(), world_size=64, own=True).support == "outside"


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (1.1, "the median iteration took 1.10 s, predicted 1.00 s (900 ms to 1.20 s): +10.0%, inside the interval"),
        (1.5, "the median iteration took 1.50 s, predicted 1.00 s (900 ms to 1.20 s): +50.0%, above the interval"),
        (0.8, "the median iteration took 800 ms, predicted 1.00 s (900 ms to 1.20 s): -20.0%, below the interval"),
    ],
)
def test_the_measured_time_is_set_beside_the_predicted_one(measured: float, said: str) -> None:
    assert prediction().compare(measured) == said


def test_a_measured_median_is_set_beside_a_predicted_median() -> None:
    """A recursion of the test's own gives iterations as rank 0 measures them: jitter makes a few of them long."""
    profile = cluster(INSTANT)
    noisy = dataclasses.replace(profile.compute[0], cv=0.4, late_update=Estimate.exact(0.0), update=Estimate.exact(0.0))
    planned = choose(dataclasses.replace(profile, compute=(noisy,)), "--width 2 --codec fp32")
    generator, ready, begun, sums = np.random.default_rng(1), np.zeros(4), [], [0.0, 0.0]
    sigma = np.sqrt(np.log1p(0.4**2))
    for _ in range(20_000):
        begun.append(max(ready[0], sums[-2]))
        drawn = np.exp(sigma * generator.standard_normal(4) - sigma**2 / 2)
        ready = np.maximum(ready, sums[-2]) + drawn * (noisy.forward.value + noisy.backward.value)
        sums.append(max(ready.max(), sums[-1]))
    taken = np.diff(begun)
    assert np.median(taken) < 0.96 * taken.mean()
    assert planned.iteration_seconds == pytest.approx(taken.mean(), rel=0.03)
    assert planned.median[1] == pytest.approx(np.median(taken), rel=0.03)
    assert "inside the interval" in planned.compare(planned.median[1])
