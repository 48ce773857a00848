"""The calibrate command: real ranks, the file that it writes, and the options that it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from _ranks import run_module, run_ranks, start_module
from _refusals import refused
from _waiting import wait_until
from matplotlib.figure import Figure

from experiments.command import torchrun
from pipesgd.calibrate import calibrate, check_files
from pipesgd.calibration import report
from pipesgd.calibration.fit_cluster import CollectiveFit
from pipesgd.calibration.machines import Machine, ranks_per_core
from pipesgd.calibration.options import CalibrateConfig
from pipesgd.calibration.report import plot_residuals
from pipesgd.calibration.robust_fit import Fit
from pipesgd.calibration.sweep import Cell
from pipesgd.cli import HelpRequested, parse_as
from pipesgd.config import TrainConfig
from pipesgd.errors import DisagreementError, UserInputError
from pipesgd.planning import choose
from pipesgd.planning.choose import MOST_CANDIDATES
from pipesgd.ranks import Ranks
from pipesgd.run.console import screen
from timing_model.all_reduce import all_reduce_time
from timing_model.cluster_profile import Profile
from timing_model.job import Job
from timing_model.measured import Estimate
from timing_model.predict import Answer, predict
from timing_model.support import support_of

pytestmark = pytest.mark.slow

SHORT = "--seconds 1 --largest-bytes 65536 --codecs int8 --hidden-sizes 20 --batch-size 16"


def _calibrate(ranks: Ranks, words: list[str], by_rank: list[list[str]] | None = None) -> tuple[str, str]:
    """Run one calibration; return (kind and text of the error, stdout)."""
    out = io.StringIO()
    try:
        calibrate([*words, *(by_rank[ranks.rank] if by_rank else [])], ranks, screen(ranks, out))
        error = ""
    except UserInputError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return error, out.getvalue()


def run(world_size: int, words: str, by_rank: list[list[str]] | None = None) -> list[tuple[str, str]]:
    return run_ranks(world_size, _calibrate, words.split(), by_rank, process_group=False)


def test_two_ranks_write_a_profile_that_the_timing_model_reads(tmp_path: Path) -> None:
    out, plot = tmp_path / "cluster.toml", tmp_path / "residuals.png"
    (error, text), other = run(2, f"{SHORT} --accumulation 2 --out {out} --plot {plot}")
    assert (error, other) == ("", ("", ""))
    assert f"wrote {out}\n" in text
    assert {path.name for path in tmp_path.iterdir()} == {out.name, plot.name}
    profile = Profile.load(out)
    low_rank = profile.compute[0].low_rank
    assert low_rank is not None
    # Only the matrix of 20 x 64 is large enough for factors of rank 4; 230 other values are summed as they are.
    assert (low_rank.rank, low_rank.left, low_rank.right) == (4, 20 * 4 + 230, 64 * 4)
    assert low_rank.work.value > 0
    assert profile.calibrated.world_sizes == (2,)
    assert profile.calibrated.all_reduces == ("ring", "native")
    assert profile.calibrated.smallest_bytes >= 1024
    assert profile.calibrated.largest_bytes == 65536
    assert profile.links.keys() == {"native"}
    assert all_reduce_time("ring", profile.link.params(), 16384, 2).total > 0
    assert profile.codecs.keys() == {"int8"}
    assert profile.codecs["int8"].bits == pytest.approx(8 + 32 / 1024)
    [compute] = profile.compute
    assert (compute.model, compute.batch) == ("mlp", "2 x 16")
    assert compute.tensors == (64 * 20, 20, 20 * 10, 10)
    assert len(compute.released) == 4
    assert 0 < compute.released[2] < compute.released[0] <= 1, "the last layer is complete first"
    assert compute.samples == 1497
    for part in (compute.forward, compute.backward, compute.update, compute.late_update, compute.loading):
        assert part.value > 0
    assert compute.local_update is not None
    assert 0 < compute.local_update.value < compute.update.value
    assert compute.comm_cv.value > 0
    assert profile.provenance["ranks"] == 2
    assert str(profile.provenance["command"]).startswith("torchrun ... -m pipesgd.calibrate --seconds 1 ")


def _calibrate_where_any_could_be_the_fastest(ranks: Ranks, words: list[str]) -> tuple[str, str]:
    """Calibrate as if no prediction were certain: on a busy machine one configuration may be far ahead otherwise."""

    def uncertain(job: Job, *, extrapolate: bool = False) -> Answer:
        return dataclasses.replace(predict(job, extrapolate=extrapolate), low=0.0)

    choose.predict = uncertain  # in a process of its own, which ends with this
    return _calibrate(ranks, words)


def test_an_audition_measures_the_configurations_that_a_plan_compares(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    words = f"{SHORT} --out {out} --audition".split()
    (error, text), _ = run_ranks(2, _calibrate_where_any_could_be_the_fastest, words, process_group=False)
    assert error == ""
    profile = Profile.load(out)
    [compute] = profile.compute
    assert text.count("audition: --width ") == len(compute.measured) > 0
    measured = {(one.width, one.codec, one.all_reduce) for one in compute.measured}
    assert 1 < len(measured) == len(compute.measured) <= MOST_CANDIDATES
    for one in compute.measured:
        assert one.iteration.low < one.iteration.value < one.iteration.high
        job = Job(
            cluster=profile,
            compute=compute,
            world_size=2,
            width=one.width,
            codec=one.codec,
            all_reduce=one.all_reduce,
            segment_bytes=one.segment_bytes,
        )
        answer = predict(job)
        assert (answer.iteration.total, answer.low, answer.high) == pytest.approx(
            (one.iteration.value, one.iteration.low, one.iteration.high)
        )
        assert answer.support.kind == "measured"
        assert predict(dataclasses.replace(job, world_size=3), extrapolate=True).support.kind != "measured"


def test_every_all_reduce_and_the_servers_get_links_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    others = ["halving-doubling", "recursive-doubling", "all-to-all", "native"]
    (error, text), *_ = run(3, f"{SHORT} --out {out} --servers --all-reduces {' '.join(others)} ring")
    assert error == ""
    profile = Profile.load(out)
    assert profile.calibrated.world_sizes == (2, 3)
    assert profile.calibrated.residuals.keys() == {"ring", "ps-sync", *others}
    assert profile.links.keys() == {"ps-sync", *others}
    assert len({*profile.links.values(), profile.link}) == 6
    assert profile.sharing is not None
    [compute] = profile.compute
    assert compute.late_handovers.keys() in (set(others), set())  # a busy machine measures the ring's alone
    assert profile.links["ps-sync"].alpha == profile.link.alpha
    assert "parameter server" in text
    assert "late handover, ring" in text
    assert 0 < float(str(profile.provenance["product_seconds"])) < 1
    assert 0 <= float(str(profile.provenance["stolen_share"])) < 1
    assert float(str(profile.provenance["calibration_seconds"])) > 0
    compute = profile.compute[0]
    for strategy, all_reduce in (("pipelined", "all-to-all"), ("ps-sync", None)):
        job = Job(cluster=profile, compute=compute, world_size=3, strategy=strategy, all_reduce=all_reduce)
        assert not any("not measured" in reason for reason in support_of(job).reasons)


def test_one_rank_is_told_at_once_that_there_is_no_network(tmp_path: Path) -> None:
    """The error comes before the measurement: otherwise the file would be missing when somebody plans with it."""
    done = run_module(
        "pipesgd.calibrate",
        "--out",
        str(tmp_path / "cluster.toml"),
        "--seconds",
        "1000",
        folder=tmp_path,
        deadline=120.0,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: ranks must be at least 2, or there is no network to measure; got 1 "
        "(try torchrun --nproc-per-node 4 -m pipesgd.calibrate ...)\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    out.write_text("mine")
    found = run(2, f"{SHORT} --out {out}")
    expected = f"UserInputError: rank 0: out must not exist yet; got {out} (--overwrite replaces it)"
    assert found == [(expected, "")] * 2
    assert out.read_text() == "mine"
    assert run(2, f"{SHORT} --out {out} --overwrite")[0][0] == ""
    assert Profile.load(out).calibrated.world_sizes == (2,)


@pytest.mark.parametrize(("words", "message"), refused("calibrate"))
def test_bad_options_are_refused_in_one_line(words: str, message: str) -> None:
    with pytest.raises(UserInputError, match=f"^{message}"):
        parse_as(CalibrateConfig, "calibrate", words.split())


@pytest.mark.parametrize("name", ["residuals.foo", "residuals"])
def test_a_picture_of_no_known_format_is_refused_before_anything_is_measured(tmp_path: Path, name: str) -> None:
    words = ["--out", str(tmp_path / "cluster.toml"), "--plot", str(tmp_path / name)]
    with pytest.raises(UserInputError, match=r"^plot must end in a format of matplotlib, such as \.png; got "):
        check_files(parse_as(CalibrateConfig, "calibrate", words), rank=0)
    check_files(parse_as(CalibrateConfig, "calibrate", [*words[:3], str(tmp_path / "residuals.SVG")]), rank=0)


def _calibrate_where_no_picture_can_be_written(ranks: Ranks, words: list[str]) -> tuple[str, str]:
    def fail(*_: object) -> None:
        raise UserInputError("plot must be a file to write")

    report.save_plot = fail  # in a process of its own, which ends with this
    return _calibrate(ranks, words)


def test_a_picture_that_cannot_be_written_costs_nothing_but_itself(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    words = f"{SHORT} --out {out} --plot {tmp_path / 'residuals.png'}".split()
    (error, text), _ = run_ranks(2, _calibrate_where_no_picture_can_be_written, words, process_group=False)
    assert error == "UserInputError: rank 0: plot must be a file to write"
    assert f"wrote {out}\n" in text
    assert Profile.load(out).calibrated.world_sizes == (2,)


def test_help_names_every_option_and_those_of_training_are_called_as_there() -> None:
    with pytest.raises(HelpRequested) as request:
        parse_as(CalibrateConfig, "calibrate", ["--help-all"])
    names = CalibrateConfig().options().keys()
    assert all(f"--{name}" in str(request.value) for name in names)
    own = {"out", "plot", "seconds", "largest-bytes", "codecs", "all-reduces", "servers", "audition"}
    assert names - own <= TrainConfig().options().keys()
    config = parse_as(CalibrateConfig, "calibrate", ["--batch-size", "7", "--hidden-sizes", "3", "--optimizer", "adam"])
    training = config.training()
    assert (training.data.batch_size, training.model.hidden_sizes) == (7, (3,))
    assert training.optimization.optimizer == "adam"


def test_ranks_that_were_asked_different_things_say_so() -> None:
    found = run(2, SHORT, [["--seed", "1"], ["--seed", "2"]])
    assert [error for error, _ in found] == [
        f"{DisagreementError.__name__}: --seed must be the same on all ranks; got 1 on rank 0, 2 on rank 1"
    ] * 2


def test_a_folder_that_is_not_there_ends_the_command_with_code_2_and_one_line(tmp_path: Path) -> None:
    done = run_module("pipesgd.calibrate", "--out", str(tmp_path / "none" / "cluster.toml"), folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: out must be in a folder to write to; got {tmp_path / 'none' / 'cluster.toml'}\n"
    assert done.stdout == ""


def test_ctrl_c_ends_it_with_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    printed, folder = tmp_path / "printed", tmp_path / "calibrated"
    for made in (printed, folder):
        made.mkdir()
    words = torchrun(2, "-m", "pipesgd.calibrate", "--out", str(folder / "cluster.toml"), "--seconds", "100")[2:]
    process = start_module(*words, folder=folder, printed=printed)
    assert process.pid is not None
    said, complained = printed / "stdout", printed / "stderr"
    try:
        wait_until(lambda: said.exists() and "\n" in said.read_text(), 60)
        assert said.read_text().startswith("calibrating 2 ranks"), complained.read_text()  # it is under way
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to torchrun and all its ranks
        process.join(60)
        assert process.exitcode not in (None, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert complained.read_text().splitlines().count("interrupted") == 1
    assert list(folder.iterdir()) == []


def test_the_picture_shows_the_held_out_residuals() -> None:
    sizes, worlds = (1024, 4096), (2, 4)
    cells = [
        Cell(all_reduce="ring", world_size=p, nbytes=n, seconds=np.array([1.0, 1.0, 1.0]))
        for p in worlds
        for n in sizes
    ]
    one = np.ones(5)
    fit = Fit(parameters=one, low=one, high=one, fitted=np.ones(4), held_out=np.array([0.01, -0.02, 0.03, 0.04]))
    found = CollectiveFit(all_reduce="ring", cells=cells, fit=fit, sums=Estimate.exact(0.0))
    axes = plot_residuals(found, Figure().subplots())
    two, four, _ = axes.get_lines()
    assert [line.get_label() for line in (two, four)] == ["2 ranks", "4 ranks"]
    assert list(two.get_xdata()) == list(four.get_xdata()) == list(sizes)
    # Each cell is corrected by the error of the other cell with the same number of ranks.
    assert list(two.get_ydata()) == pytest.approx([100 * (1.01 / 0.98 - 1), 100 * (0.98 / 1.01 - 1)])
    assert list(four.get_ydata()) == pytest.approx([100 * (1.03 / 1.04 - 1), 100 * (1.04 / 1.03 - 1)])
    assert "(%)" in axes.get_ylabel()


def test_ranks_in_containers_of_one_machine_share_its_cores() -> None:
    one, other = (Machine(host=name, kernel="k", cores=2) for name in ("a", "b"))
    alone = Machine(host="c", kernel="l", cores=8)
    assert ranks_per_core([one, other, other, alone]) == 1.5
    assert ranks_per_core([alone, one]) == 0.5
