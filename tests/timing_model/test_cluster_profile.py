"""``cluster.toml``: a saved profile can be loaded, and damage by a person or a full disk gives one clear line."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.timing_model._profiles import CORRECTIONS, MLP, PROFILE
from timing_model import ComputeTimes
from timing_model.cluster_profile import Profile
from timing_model.measured import Estimate
from timing_model.presets import ethernet
from timing_model.simulate_messages import Network


@pytest.fixture
def path(tmp_path: Path) -> Path:
    PROFILE.save(tmp_path / "cluster.toml")
    return tmp_path / "cluster.toml"


def test_what_is_saved_comes_back(path: Path) -> None:
    assert Profile.load(path) == PROFILE
    corrected = dataclasses.replace(PROFILE, link=dataclasses.replace(PROFILE.link, corrections=CORRECTIONS))
    corrected.save(path)
    assert Profile.load(path) == corrected
    accumulated = dataclasses.replace(PROFILE, compute=(MLP.accumulate(4),))
    accumulated.save(path)
    assert Profile.load(path) == accumulated
    bare = dataclasses.replace(PROFILE, links={}, codecs={}, sharing=None, compute=(), provenance={})
    bare.save(path)
    assert Profile.load(path) == bare
    assert [each.name for each in path.parent.iterdir()] == ["cluster.toml"]


@pytest.mark.parametrize(
    ("what", "by", "message"),
    [
        ("nbytes = [1024, 4096]", "nbytes = [1024]", "link.corrections.nbytes must have 2 numbers, as world_sizes has"),
        ("factors = [1.1, 0.9]", "factors = [1.1, 0]", "link.corrections.factors must be a number from 1e-06"),
        ("errors = [0.05, 0.02]", "errors = [0.05, -1]", "link.corrections.errors must be a number from 0"),
        ("world_sizes = [2, 3]", "world_sizes = []", "link.corrections.world_sizes must have at least one number"),
        ("world_sizes = [2, 3]", "world_sizes = [2, 1]", "link.corrections.world_sizes must be a whole number"),
        ("errors = [0.05, 0.02]", "errors = [0.05, 0.02], odd = 1", "link.corrections.odd must not be there"),
    ],
)
def test_corrections_that_make_no_sense(path: Path, what: str, by: str, message: str) -> None:
    dataclasses.replace(PROFILE, link=dataclasses.replace(PROFILE.link, corrections=CORRECTIONS)).save(path)
    text = path.read_text(encoding="utf-8")
    head, corrections = text.split("corrections = ", 1)
    assert what in corrections
    path.write_text(f"{head}corrections = {corrections.replace(what, by, 1)}", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Profile.load(path)


def test_numbers_of_numpy_come_back(path: Path) -> None:
    calibrated = dataclasses.replace(
        PROFILE.calibrated, residuals={"ring": np.float64(0.5)}, smallest_bytes=np.int64(8)
    )
    dataclasses.replace(PROFILE, calibrated=calibrated).save(path)
    assert Profile.load(path).calibrated == calibrated


@given(name=st.text(min_size=1), value=st.text(st.characters(codec="utf-8").filter(str.isprintable)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_name_and_text_comes_back(tmp_path: Path, name: str, value: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    profile = dataclasses.replace(PROFILE, provenance={name: value})
    profile.save(tmp_path / "cluster.toml")
    assert Profile.load(tmp_path / "cluster.toml") == profile


def test_parameters_of_the_formulas() -> None:
    assert PROFILE.link.params().beta == 8e-8
    int8 = PROFILE.codecs["int8"].cost("int8")
    assert (int8.encode, int8.call, int8.bits) == (6e-10, 2e-6, 8.25)
    assert MLP.times(1) == ComputeTimes(
        update=0.005, forward=0.02, backward=0.04, compute_slowdown=0.1, processor_share=0.75, handover=0.001
    )
    assert [MLP.times(width).update for width in (2, 3, 4)] == pytest.approx(
        [0.006, 0.006 + 0.001 / 3, 0.006 + 0.002 / 3]
    )
    assert [MLP.times(3, name).handover for name in ("ring", "native", "halving-doubling")] == [0.002, 0.002, 0.004]
    assert MLP.times(3, codec="int8").compute_slowdown == 0.15
    assert MLP.numel == 1_796_010


@pytest.mark.parametrize(
    ("what", "by", "message"),
    [
        ("format = 6", "format = 4", "cluster.toml: format must be 6, the version that this program reads .*; got 4"),
        ("format = 6", "", "cluster.toml: format must be there; it is missing"),
        ("residuals = {", "residues = {", "cluster.toml: calibrated.residuals must be there; it is missing"),
        ("ring = 0.012", "ring = -1", "calibrated.residuals.ring must be a number from 0"),
        ("ring = 0.012", "rings = 0.012", "calibrated.residuals.rings must not be there, but some of ring, halv"),
        ("[links.native]", "[links.ring]", "links.ring must not be there, but some of halving-doubling, .*, ps-sync"),
        (
            "[compute.late_handovers]\nhalving-",
            "[compute.late_handovers]\n",
            r"compute\[0\].late_handovers.doubling must not be there",
        ),
        ("[link]\nalpha", "[link]\nlatency", "cluster.toml: link.alpha must be there; it is missing"),
        ("[link]\n", "[link]\nrate = 1\n", "link.rate must not be there: there is no such field"),
        ("beta = {value = 8e-08", "beta = {value = -8e-08", "link.beta.value must be a number from 0 to 1e"),
        ("beta = {value = 8e-08", "beta = {value = nan", "link.beta.value must be a number from 0 .*; got nan"),
        ("beta = {value = 8e-08", "beta = {value = inf", "link.beta.value must be a number .*; got inf"),
        ("beta = {value = 8e-08", "beta = {value = true", "link.beta.value must be a number .*; got True"),
        ("beta = {value = 8e-08", 'beta = {value = "8e-08"', "link.beta.value must be a number .*; got '8e-08'"),
        ("beta = {value = 8e-08", "beta = {value = 7e-08", "link.beta.low must be a number from 0 to 7e-08"),
        ("beta = {value = 8e-08", "beta = {value = 9e-08", "link.beta.high must be a number from 9e-08"),
        ("bits = 8.25", "bits = 0", "codecs.int8.bits must be a number"),
        ("[codecs.topk]", "[codecs.fp32]", "codecs must not have fp32"),
        ("gathered = true", "gathered = 1", "codecs.topk.gathered must be true or false; got 1"),
        ("[2, 3, 4]", "[]", "calibrated.world_sizes must have at least one number"),
        ("[2, 3, 4]", "[2.0]", "calibrated.world_sizes must be a whole number of at least 2; got 2.0"),
        ("[2, 3, 4]", "4", "calibrated.world_sizes must be a list; got 4"),
        ("smallest_bytes = 1024", "smallest_bytes = 1e400", "calibrated.smallest_bytes must be a whole number"),
        ("largest_bytes = 33554432", "largest_bytes = 1", "calibrated.largest_bytes must be a whole number of at"),
        ("sharing = {value = 0.5", "sharing = {value = 1.5", "servers.sharing.value must be a number from 0 to 1"),
        ("slow_ranks = [1.31]", "slow_ranks = [0.9]", r"compute\[0\].slow_ranks must be a number from 1"),
        ("processor_share = 0.75", "processor_share = 1.1", r"processor_share must be a number from 0 to 1; got 1.1"),
        ("cv = 0.02", "cv = 1e9", r"compute\[0\].cv must be a number from 0 to 10; got 1"),
        ("persistence = {value = 0.5", "persistence = {value = 1", r"persistence.value must be .* from 0 to 0.99"),
        ("persistence = {value = 0.5", "persistence = {value = 0.6", r"persistence.high must be a number from 0.6 to"),
        ("batch_size = 512", "batch_size = 0", r"compute\[0\].batch_size must be a whole number of at least 1; got 0"),
        ("[[compute]]", "[compute]", "compute must be a list"),
        ("created =", "created = 2026-11-22 #", "provenance.created must be a string, a finite number"),
        ("[provenance]", "[provenance", "cluster.toml must be whole and of TOML's form; "),
        ("[provenance]", f"a = {'[' * 5000}", "cluster.toml must be whole and of TOML's form; it is nested too deeply"),
    ],
)
def test_nonsense_is_named(path: Path, what: str, by: str, message: str) -> None:
    text = path.read_text()
    assert what in text
    path.write_text(text.replace(what, by, 1))
    with pytest.raises(ValueError, match=message) as error:
        Profile.load(path)
    assert "\n" not in str(error.value)


def test_a_file_from_before_something_was_measured_is_read(path: Path) -> None:
    assert "accumulation" not in path.read_text()
    text = re.sub(r"^(persistence|comm_cv) = .*\n", "", path.read_text(), flags=re.MULTILINE)
    path.write_text(text)
    loaded = Profile.load(path)
    unknown = Estimate.exact(0.0)
    before = dataclasses.replace(MLP, persistence=unknown, comm_cv=unknown)
    assert loaded == dataclasses.replace(PROFILE, compute=(before,))
    loaded.save(path)
    assert path.read_text() == text  # which programs of that time can read, too


def test_shares_of_the_backward_pass_come_back_and_may_be_missing(path: Path) -> None:
    assert "released" not in path.read_text()
    shares = (1.0, 0.9, 0.5, 0.4, 0.1, 0.0)
    profile = dataclasses.replace(PROFILE, compute=(dataclasses.replace(MLP, released=shares),))
    profile.save(path)
    assert "\nreleased = [1.0, 0.9, 0.5, 0.4, 0.1, 0.0]\n" in path.read_text()
    assert Profile.load(path) == profile
    text = path.read_text()
    for what, by, message in (
        ("0.5, 0.4", "0.5", "have 6 numbers, as tensors has"),
        ("[1.0, 0.9", "[1.9, 0.9", "a number from 0 to 1"),
    ):
        path.write_text(text.replace(what, by, 1))
        with pytest.raises(ValueError, match=message):
            Profile.load(path)


def test_the_update_of_a_local_step_comes_back_and_may_be_missing(path: Path) -> None:
    assert "local_update" not in path.read_text()
    profile = dataclasses.replace(
        PROFILE, compute=(dataclasses.replace(MLP, local_update=Estimate(0.004, 0.003, 0.006)),)
    )
    profile.save(path)
    assert "\nlocal_update = {value = 0.004, low = 0.003, high = 0.006}\n" in path.read_text()
    assert Profile.load(path) == profile


def test_a_model_that_is_there_twice(path: Path) -> None:
    dataclasses.replace(PROFILE, compute=(MLP, MLP)).save(path)
    with pytest.raises(ValueError, match=r"compute must have each model and batch_size once; got \('mlp', 512\)"):
        Profile.load(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"nowhere\.toml must be a file to read, which pipesgd.calibrate writes; No such file or directory",
    ):
        Profile.load(tmp_path / "nowhere.toml")
    with pytest.raises(ValueError, match="must be a file to write; No such file or directory"):
        PROFILE.save(tmp_path / "nowhere" / "cluster.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="binary must be whole and of TOML's form"):
        Profile.load(tmp_path / "binary")


@pytest.mark.parametrize("numbers", [(1.0, 2.0, 3.0), (1.0, -1.0, 2.0), (math.nan, 0.0, 1.0), (1.0, 0.0, math.inf)])
def test_intervals_that_are_none(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match=r"^(value|low|high) must"):
        Estimate(*numbers)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    begin=st.floats(0, 1),
    length=st.integers(0, 40),
    by=st.sampled_from(
        ["", "0", "-", ".", "e999", '"', "[", "]", "{}", "=", "\n", "nan", "true", "9" * 400, "\x00", "é"]
    ),
    end=st.floats(0.5, 1),
)
def test_a_file_that_is_cut_or_changed_is_read_or_refused_in_a_line(
    path: Path, begin: float, length: int, by: str, end: float
) -> None:
    PROFILE.save(path)
    text = path.read_text()
    first = int(begin * len(text))
    text = text[:first] + by + text[first + length :]
    path.write_text(text[: int(end * len(text))] if end < 0.9 else text)
    try:
        profile = Profile.load(path)
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert "cluster.toml" in str(error)  # noqa: PT017
    else:
        profile.save(path)
        assert Profile.load(path) == profile


HAND = """
[[link]]
latency = "30us"
bandwidth = "25Gbit/s"

[[link]]
node = 4
latency = "3us"
bandwidth = "50GB/s"
host = "0.1ns"

[[link]]
from = [3, 7]
to = [0]
latency = "20ms"
bandwidth = "20Mbit/s"
"""


def test_links_that_a_person_wrote(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HAND)
    profile = Profile.load(path)
    between, inside, home = profile.placed
    assert between.link == ethernet(25e9 / 8, between.link.alpha)
    assert between.link.alpha == pytest.approx(30e-6)
    assert (inside.node, inside.link.host, inside.link.alpha) == pytest.approx((4, 1e-10, 3e-6))
    assert (home.senders, home.receivers) == ((3, 7), (0,))
    assert (profile.link.alpha.value, profile.link.beta.value) == (20e-3, home.link.beta)
    assert profile.calibrated.world_sizes == ()
    network = Network(link=between.link, placed=profile.placed)
    numbers = {(sender, receiver): network.path(sender, receiver)[0] for sender, receiver in ((0, 4), (1, 2), (3, 0))}
    assert numbers == {(0, 4): 0, (1, 2): 1, (3, 0): 2}


@pytest.mark.parametrize(
    ("what", "by", "message"),
    [
        ('"30us"', '"30"', r"mine.toml: link\[0\].latency must have a unit such as 30us, 30ms or 30s; got '30'"),
        ('"30us"', "30e-6", r"mine.toml: link\[0\].latency must be a string of one line; got 3e-05"),
        ('"30us"', '"1e12s"', r"link\[0\].latency must be at most 1e\+09 s; got 1000000000000.0"),
        ('"25Gbit/s"', '"25Gb"', r"link\[0\].bandwidth must have a unit such as 10Gbit/s; got '25Gb'"),
        ('"25Gbit/s"', '"0Gbit/s"', r"link\[0\].bandwidth must be above 0; got '0Gbit/s'"),
        ('"25Gbit/s"', '"1e-300Gbit/s"', r"link\[0\].bandwidth must be at least 1e-09 bytes a second; got"),
        ('bandwidth = "25Gbit/s"', "", r"link\[0\].bandwidth must be there; it is missing"),
        ("node = 4", "node = 1", r"link\[1\].node must be a whole number of at least 2; got 1"),
        ("from = [3, 7]", "from = []", r"link\[2\].from must have at least one number"),
        ("from = [3, 7]", "from = [-1]", r"link\[2\].from must be a whole number of at least 0; got -1"),
        ("from = [3, 7]", "form = [3]", r"link\[2\].form must not be there: there is no such field"),
        ("\n[[link]]", "link = [] #", "link must have at least one table"),
        ("\n[[link]]", "format = 5\n[[link]]", "mine.toml: format must not be there: there is no such field"),
    ],
)
def test_links_that_make_no_sense(tmp_path: Path, what: str, by: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    assert what in HAND
    text = HAND.replace(what, by, 1)
    path.write_text(text if "[]" not in by or "from" in by else "link = []")
    with pytest.raises(ValueError, match=message) as error:
        Profile.load(path)
    assert "\n" not in str(error.value)
