"""Refitting: runs of a cluster that is slower than its profile bring the profile to the truth."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesgd.config import DataConfig
from tests.timing_model._profiles import MLP, PROFILE
from timing_model.cli import main
from timing_model.cluster_profile import Profile
from timing_model.costs import costs_of, iteration_time
from timing_model.job import Job
from timing_model.measured import Estimate, LinkProfile
from timing_model.refit import fit
from timing_model.run_logs import read_run

NOTHING = Estimate.exact(0.0)
CALM = dataclasses.replace(
    MLP, cv=0.0, slow_ranks=(), compute_slowdown=NOTHING, codec_compute_slowdown=NOTHING, comm_slowdown=NOTHING
)
BEFORE = dataclasses.replace(PROFILE, compute=(CALM,))


def scaled(link: LinkProfile, latency: float, transfer: float) -> LinkProfile:
    times = {name: getattr(link, name).times(latency) for name in ("alpha", "sync", "overhead")}
    return dataclasses.replace(link, beta=link.beta.times(transfer), **times)


def leave(folder: Path, cluster: Profile, compute: Any = CALM, **options: Any) -> Path:
    """Write the folder of a run that took exactly what the model says, with computation that is up to 0.1 % off."""
    job = Job(cluster=cluster, compute=compute, **{"world_size": 4} | options)
    iteration, collective = iteration_time(job, costs_of(job))
    times = compute.times(job.width)
    lines = []
    for number in range(40):
        computed = (times.forward + times.backward) * (1 + 0.001 * (number % 3 - 1))
        seconds = {"iteration": iteration.total, "compute": computed, "communication": collective.total}
        seconds |= {"exposed": 0.0, "update": times.update}
        lines.append({"iteration": number, "seconds": seconds, "wire_bytes": round(1.5 * job.nbytes)})
    said = {
        "strategy": "pipelined",
        "width": job.width,
        "codec": job.codec,
        "all-reduce": job.all_reduce,
        "segment-bytes": job.segment_bytes,
        "model": compute.model,
        "batch-size": compute.batch_size,
        "loader-workers": job.loader_workers or None,
    }
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"world_size": job.world_size, "options": said}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_is_neither_computation_nor_communication(tmp_path: Path, workers: int) -> None:
    """It stays as it was calibrated, and the runs' iterations are predicted with it."""
    slow = dataclasses.replace(CALM, loading=CALM.backward.times(3.0))
    before = dataclasses.replace(BEFORE, compute=(slow,))
    fitted = fit(before, [leave(tmp_path / "run", before, slow, loader_workers=workers)])
    [one] = fitted.profile.compute
    assert one.loading == slow.loading
    assert one.forward.value == pytest.approx(slow.forward.value, rel=0.01)
    [(_, after)] = fitted.predicted
    assert after == pytest.approx(fitted.runs[0].iteration, rel=0.02)


@pytest.mark.parametrize(("dataset", "workers"), [("digits", 0), ("images", 2)])
def test_loader_workers_that_were_not_asked_for_are_those_of_the_trainer(
    tmp_path: Path, dataset: str, workers: int
) -> None:
    folder = leave(tmp_path / "run", BEFORE)
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"strategy"', f'"dataset": "{dataset}", "strategy"'))
    assert read_run(folder).loader_workers == workers
    assert DataConfig(dataset=dataset).workers == workers


def test_latency_and_bandwidth_are_found(tmp_path: Path) -> None:
    truth = dataclasses.replace(BEFORE, link=scaled(BEFORE.link, 3.0, 0.5))
    small = dataclasses.replace(CALM, tensors=(2000,), model="small")
    runs = [leave(tmp_path / "large", truth), leave(tmp_path / "small", truth, small, world_size=3)]
    fitted = fit(dataclasses.replace(BEFORE, compute=(CALM, small)), runs)
    link = fitted.profile.link
    assert link.alpha.value == pytest.approx(truth.link.alpha.value, rel=0.02)
    assert link.beta.value == pytest.approx(truth.link.beta.value, rel=0.02)
    assert link.alpha.low < truth.link.alpha.value < link.alpha.high
    assert link.beta.low < truth.link.beta.value < link.beta.high
    assert link.gamma == BEFORE.link.gamma
    assert fitted.profile.links == BEFORE.links
    for run, (before, after) in zip(fitted.runs, fitted.predicted, strict=True):
        assert after == pytest.approx(run.iteration, rel=0.02)
        assert abs(before - run.iteration) >= abs(after - run.iteration)


def test_what_the_runs_do_not_tell_stays_and_says_so(tmp_path: Path) -> None:
    """With one large gradient, time depends on bandwidth, and latency could be anything."""
    large = dataclasses.replace(CALM, tensors=(1 << 23,))
    truth = dataclasses.replace(BEFORE, link=scaled(BEFORE.link, 1.0, 2.0))
    fitted = fit(dataclasses.replace(BEFORE, compute=(large,)), [leave(tmp_path / "run", truth, large)])
    link = fitted.profile.link
    assert link.beta.value == pytest.approx(truth.link.beta.value, rel=0.02)
    assert link.alpha.value == pytest.approx(BEFORE.link.alpha.value, rel=0.05)
    assert link.alpha.high > 2 * link.alpha.value
    assert link.beta.high < 1.1 * link.beta.value


def test_computation_is_the_runs(tmp_path: Path) -> None:
    slower = dataclasses.replace(
        CALM, forward=CALM.forward.times(2), backward=CALM.backward.times(2), late_update=CALM.late_update.times(3)
    )
    runs = [leave(tmp_path / "run", dataclasses.replace(BEFORE, compute=(slower,)), slower, width=2)]
    (compute,) = fit(BEFORE, runs).profile.compute
    assert compute.forward.value == pytest.approx(0.04, rel=0.011)
    assert compute.forward.low < 0.04 < compute.forward.high
    assert compute.late_update.value == pytest.approx(0.018)
    assert compute.update == CALM.update
    assert compute.cv == pytest.approx(0.00148, rel=0.02)


def test_a_new_model_is_as_large_as_what_it_sent(tmp_path: Path) -> None:
    other = dataclasses.replace(CALM, model="other", batch_size=7)
    fitted = fit(BEFORE, [leave(tmp_path / "run", BEFORE, other)])
    (compute,) = (one for one in fitted.profile.compute if one.model == "other")
    assert (compute.numel, compute.batch_size) == (other.numel, 7)
    assert CALM in fitted.profile.compute


def test_what_ran_is_calibrated(tmp_path: Path) -> None:
    run = leave(tmp_path / "run", BEFORE, world_size=6, all_reduce="all-to-all")
    calibrated = fit(BEFORE, [run]).profile.calibrated
    assert calibrated.world_sizes == (2, 3, 4, 6)
    assert calibrated.all_reduces == ("ring", "halving-doubling", "native", "all-to-all")


def test_torchs_own_link_is_fitted_apart(tmp_path: Path) -> None:
    native = BEFORE.links["native"]
    truth = dataclasses.replace(BEFORE, links={**BEFORE.links, "native": scaled(native, 1.0, 3.0)})
    run = leave(tmp_path / "run", truth, all_reduce="native")
    for before in (BEFORE, dataclasses.replace(BEFORE, links={})):
        fitted = fit(before, [run]).profile
        assert fitted.links["native"].beta.value == pytest.approx(3 * native.beta.value, rel=0.05)
        assert fitted.link == BEFORE.link


def test_an_all_reduce_without_a_link_of_its_own_is_fitted_with_the_ring(tmp_path: Path) -> None:
    own = dataclasses.replace(BEFORE, links={**BEFORE.links, "halving-doubling": BEFORE.link})
    truth = dataclasses.replace(BEFORE, link=scaled(BEFORE.link, 1.0, 2.0))
    run = leave(tmp_path / "run", truth, all_reduce="halving-doubling")
    together, apart = (fit(before, [run]).profile for before in (BEFORE, own))
    assert together.link.beta.value == pytest.approx(truth.link.beta.value, rel=0.02)
    assert together.links == BEFORE.links
    assert apart.links["halving-doubling"].beta.value == pytest.approx(truth.link.beta.value, rel=0.02)
    assert apart.link == BEFORE.link


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BEFORE.save(tmp_path / "cluster.toml")
    truth = dataclasses.replace(BEFORE, link=scaled(BEFORE.link, 1.0, 0.5))
    leave(tmp_path / "run", truth)
    words = f"fit {tmp_path}/run --cluster {tmp_path}/cluster.toml --out {tmp_path}/new.toml"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "ring: bandwidth  100 Mbit/s  200 Mbit/s" in out
    assert Profile.load(tmp_path / "new.toml").link.beta.value == pytest.approx(4e-8, rel=0.02)
    assert main([*words.split(), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["after_seconds"] == pytest.approx(run["measured_seconds"], rel=0.02)


def change(folder: Path, name: str, what: str, by: str) -> None:
    text = (folder / name).read_text()
    assert what in text
    (folder / name).write_text(text.replace(what, by))


@pytest.mark.parametrize(
    ("name", "what", "by", "message"),
    [
        (
            "run.json",
            '"width": 1',
            '"width": 0',
            "run.json: options.width must be a whole number of at least 1; got 0",
        ),
        (
            "run.json",
            '"pipelined"',
            '"ddp"',
            r"run.json: options.strategy must be pipelined, .*; got 'ddp'",
        ),
        ("run.json", '"fp32"', '"int4"', "codec must be one of fp32, int8, topk; got int4"),
        ("run.json", '"world_size"', '"world"', "run/run.json: world_size must be there; it is missing"),
        ("run.json", "{", "[", "run/run.json must be as pipesgd.train wrote it; got '"),
        (
            "metrics.jsonl",
            '"compute": 0',
            '"compute": -0',
            "metrics.jsonl: seconds.compute must be a number from 0",
        ),
        ("metrics.jsonl", '"compute"', '"computed"', "run/metrics.jsonl: seconds.compute must be there"),
        ("metrics.jsonl", "}\n", "}", "metrics.jsonl must have at least 14 iterations; got 1"),
    ],
)
def test_folders_that_are_wrong(tmp_path: Path, name: str, what: str, by: str, message: str) -> None:
    run = leave(tmp_path / "run", BEFORE)
    change(run, name, what, by)
    with pytest.raises(ValueError, match=message) as error:
        fit(BEFORE, [run])
    assert "\n" not in str(error.value)


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    run = leave(tmp_path / "run", BEFORE)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text + '{"iteration": 40, "sec')
    assert read_run(run).iterations == 36
    assert np.isfinite(read_run(run).cv)
