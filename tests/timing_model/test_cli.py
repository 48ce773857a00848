"""The ``timing-model`` command: its output; and every error is one line, exit code 2, and nothing written."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipesgd
from experiments.results import REPOSITORY
from tests.timing_model._profiles import PROFILE
from timing_model.choices import ACCURATE
from timing_model.cli import COMMANDS, main
from timing_model.presets import MODELS, NETWORKS, PAYLOAD_SHARE

HAND = "--latency 50us --bandwidth 10Gbit/s --world-size 4 --compute 0.3s --parameters 61.1M"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    PROFILE.save(tmp_path / "cluster.toml")
    return tmp_path / "cluster.toml"


def said(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """Return the output of a command that must not fail."""
    assert main(words.split()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_predict_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, f"predict {HAND} --width 1 --batch-size 64 --samples 50000 --epochs 10")
    assert "pipelined" not in out
    assert "synchronous, no codec, ring" in out
    assert (
        "a model of 61.1 M parameters (244 MB), batch of 64 a rank, on 4 ranks: 9.56 Gbit/s of payload, 50.0 us latency"
        in out
    )
    assert "Based only on the numbers given; no network was measured." in out
    assert "limited by" in out
    values = json.loads(said(capsys, f"predict {HAND} --width 1 --json"))
    assert values["iteration_seconds"]["total"] == pytest.approx(0.3 + 1.5 * 61.1e6 * 4 / 1.25e9, rel=0.03)
    assert values["support"] == "as given"
    assert values["epoch_seconds"] is None


def test_predict_of_a_measured_cluster(capsys: pytest.CaptureFixture[str], cluster: Path) -> None:
    words = f"predict --cluster {cluster} --model mlp --world-size 3 --codec int8 --epochs 2"
    out = said(capsys, words)
    assert "pipelined, width 2, int8, ring" in out
    assert "(90 % between " in out
    assert "Interpolated: within what was measured." in out
    values = json.loads(said(capsys, f"{words} --json"))
    assert values["job_seconds"] == pytest.approx(2 * values["epoch_seconds"], rel=0.05)
    out = said(capsys, f"predict --cluster {cluster} --model mlp --world-size 6")
    assert "Extrapolated" in out
    assert "  - 6 ranks; measured: 2, 3, 4" in out
    assert "OUTSIDE" in said(capsys, f"predict --cluster {cluster} --model mlp --world-size 64 --extrapolate")


@pytest.mark.parametrize(("seconds", "shown"), [("200s", "0.02"), ("3s", "1.33"), ("1ms", "4,000")])
def test_samples_a_second_that_are_few_are_not_none(
    capsys: pytest.CaptureFixture[str], seconds: str, shown: str
) -> None:
    link = "--latency 0s --bandwidth 100Gbit/s --world-size 4"
    out = said(capsys, f"predict {link} --compute {seconds} --parameters 1 --batch-size 1")
    assert re.search(f"^samples a second +{shown}$", out, flags=re.MULTILINE)


@pytest.mark.parametrize("options", ["", "--batch-size 512", "--batch-size 7"])
def test_a_computation_that_is_typed_in_was_not_measured_whatever_its_model_is_called(
    capsys: pytest.CaptureFixture[str], cluster: Path, options: str
) -> None:
    job = f"predict --cluster {cluster} --world-size 3 --model mlp --json"
    assert json.loads(said(capsys, job))["support"] == "interpolated"
    answer = json.loads(said(capsys, f"{job} --compute 3s {options}"))
    reasons = ["the computation is as given; it was not measured"]
    assert (answer["support"], answer["reasons"]) == ("extrapolated", reasons)


def test_what_a_job_costs(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{HAND} --batch-size 64 --samples 50000 --epochs 10 --price 1.20/h --accumulation 2"
    out = said(capsys, f"predict {words} --width 1")
    assert "batch of 2 x 64 a rank" in out
    [line] = [line for line in out.splitlines() if line.startswith("the whole job")]
    assert line.endswith("14.7 min, at a price of 1.17")
    out = said(capsys, f"plan {words}")
    assert "An epoch will take 59.1 s, at a price of 0.0789.\nThe whole job will take " in out
    assert "--accumulation 2\n" in out
    assert json.loads(said(capsys, f"plan {words} --json"))["predicted"]["job_cost"] == pytest.approx(0.789, rel=0.01)


@pytest.mark.parametrize("strategy", ["ddp", "ps-sync"])
def test_other_strategies(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    assert strategy in said(capsys, f"predict {HAND} --strategy {strategy}")


def test_plan(capsys: pytest.CaptureFixture[str], cluster: Path) -> None:
    out = said(capsys, f"plan {HAND} --top 3")
    assert "configurations searched" in out
    assert out.splitlines()[4].startswith("*  ")
    assert "Choose synchronous, int8, ring, segments of 64 KiB, buckets 16: " in out
    assert "Choose pipelined, width 2, " in said(capsys, f"plan {HAND} --buckets 1")
    values = json.loads(said(capsys, f"plan --cluster {cluster} --model mlp --world-size 4 --json --top 3"))
    assert len(values["ranking"]) <= 3
    assert values["best"]["options"].startswith("--")
    weighed = json.loads(
        said(capsys, f"plan {HAND} --accuracy-cost width=900% truncate16=9 --codecs fp32 truncate16 --json")
    )
    assert (weighed["best"]["width"], weighed["best"]["codec"]) == (1, "fp32")


def test_sentences_are_broken_between_words_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = said(capsys, f"plan {HAND}")
    assert max(len(line) for line in whole.splitlines() if "  " not in line.strip()) > 150
    assert max(map(len, whole.splitlines())) > 150
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    broken = said(capsys, f"plan {HAND} --buckets 16")
    assert max(map(len, broken.splitlines())) <= 80, "the rows of the table, too"
    monkeypatch.setenv("COLUMNS", "150")
    assert sorted(said(capsys, f"plan {HAND} --buckets 16").split()) == sorted(broken.split())
    rows = [line for line in whole.splitlines() if "  " in line.strip()]
    assert [line for line in said(capsys, f"plan {HAND}").splitlines() if "  " in line.strip()] == rows, "these fit"
    assert json.loads(said(capsys, f"plan {HAND} --json"))


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"simulate {HAND} --cv 0.1 --slow-ranks 1.5 --iterations 50 --seed 3"
    assert "jitter: cv 10.0% lognormal, ranks always slow: 1.5x" in said(capsys, words)
    values = json.loads(said(capsys, f"{words} --json"))
    simulated, predicted = values["simulated_seconds"], values["predicted"]["iteration_seconds"]["total"]
    assert simulated["iterations"] == 50
    assert simulated["period"] == pytest.approx(predicted, rel=0.1)
    assert simulated["median"] <= simulated["p95"] <= simulated["slowest"]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(f"  {name}  " in said(capsys, "--help") for name in COMMANDS)
    assert max(map(len, said(capsys, "--help").splitlines())) <= 80
    assert all(f"timing-model {name}" in said(capsys, f"{name} --help") for name in COMMANDS)


@pytest.mark.parametrize("words", ["--version", "plan --help", f"predict {HAND}"])
def test_a_text_that_nobody_reads_to_its_end_ends_the_command_quietly(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = os.pipe()
    os.close(here)
    with os.fdopen(there, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        assert main(words.split()) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["predict", "plan", "simulate"])
def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    pytest.importorskip("matplotlib")
    said(capsys, f"{command} {HAND} --plot {tmp_path / 'picture.svg'}")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_a_picture_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(f"predict {HAND} --plot {tmp_path / 'a.png'}".split()) == 2
    assert capsys.readouterr().err.startswith("error: plot must be left out where matplotlib is not installed")


def test_ten_gigabits_are_ten_gigabits(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--world-size 4 --compute 0.3s --parameters 61.1M --width 1 --json"
    by_name, by_hand = (
        json.loads(said(capsys, f"predict {network} {job}"))["iteration_seconds"]["total"]
        for network in ("--network 10GbE", "--latency 30us --bandwidth 10Gbit/s")
    )
    assert by_hand == by_name
    overridden = json.loads(said(capsys, f"predict --network 1GbE --latency 30us --bandwidth 10Gbit/s {job}"))
    assert overridden["iteration_seconds"]["total"] == by_name


def test_a_rank_that_is_slow_is_named_as_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, f"predict {HAND} --slow-ranks 3 --codec int8")
    assert [line.split(maxsplit=2)[2] for line in out.splitlines() if line.startswith("limited by")] == [
        "jitter and slow ranks"
    ]
    [line] = [line for line in out.splitlines() if line.startswith("without jitter and slow ranks")]
    assert line.endswith("3.00 times as fast as now")


def test_a_simulated_epoch_has_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"simulate {HAND} --batch-size 64 --samples 50000 --epochs 1"
    assert "price" not in said(capsys, words)
    [epoch] = [line for line in said(capsys, f"{words} --price 1.20/h").splitlines() if line.startswith("an epoch")]
    assert ", at a price of 0." in epoch


def test_simulate_has_no_bound_on_the_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert "jitter: cv 70.0% lognormal" in said(capsys, f"simulate {HAND} --cv 0.7 --iterations 20")


def test_simulated_jitter_persists(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"simulate {HAND} --cv 0.1 --iterations 300"
    assert "jitter: cv 10.0% lognormal, persistence 0.9\n" in said(capsys, f"{words} --persistence 0.9")
    assert "persistence" not in said(capsys, words)


def test_simulated_all_reduces_vary(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"simulate {HAND} --iterations 300"
    assert "jitter: cv 0.0% lognormal, all-reduce cv 30.0%\n" in said(capsys, f"{words} --comm-cv 0.3")
    values = json.loads(said(capsys, f"{words} --comm-cv 0.3 --json"))["simulated_seconds"]
    assert values["median"] < values["p95"] < values["slowest"]


def test_codecs_that_cost_accuracy_are_searched_when_all_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --network 1GbE --world-size 16 --compute 0.1s --model alexnet --json --top 100"
    names = [
        {one["codec"] for one in json.loads(said(capsys, f"{words}{more}"))["ranking"]}
        for more in ("", " --codecs all", " --codecs sign")
    ]
    assert names[0] <= set(ACCURATE)
    assert "sign" in names[1]
    assert names[2] == {"sign", "fp32"}  # a parameter server has no codec


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """One distribution holds both packages."""
    assert said(capsys, "--version") == f"timing-model {pipesgd.__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["timing_model", "timing_model.cli"])
def test_as_a_module(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("timing-model ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timing-model", "pipesgd"])
def test_the_installed_command_finds_functions_in_the_current_folder(tmp_path: Path, name: str) -> None:
    """Python begins its path with the folder of the command, which pip writes as here, and not with the current one."""
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, function = config["project"]["scripts"][name].partition(":")
    command = tmp_path / "bin" / name
    command.parent.mkdir()
    command.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n", encoding="utf-8")
    words = [sys.executable, str(command), "predict", *HAND.split(), "--all-reduce", "own_all_reduce:binomial_tree"]
    done = subprocess.run(
        words,
        cwd=REPOSITORY / "examples",
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "own_all_reduce:binomial_tree" in done.stdout


@pytest.mark.slow
def test_as_a_program() -> None:
    words = [sys.executable, "-m", "timing_model", "predict", *HAND.split()]
    done = subprocess.run([*words, "--width", "0"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: width must be a whole number of at least 1; got '0'\n"


def instead(words: str) -> list[str]:
    """Return the arguments without those options of ``HAND`` that are given again."""
    anew = words.replace(HAND, "").split()
    kept = [pair for pair in zip(HAND.split()[::2], HAND.split()[1::2], strict=True) if pair[0] not in anew]
    return words.replace(HAND, " ".join(" ".join(pair) for pair in kept)).split()


BAD = {
    "": None,
    "predcit": r"command must be one of predict, plan, simulate; got predcit (did you mean predict?)",
    f"predict {HAND} --widht 2": "every option must be one that --help lists; got --widht (did you mean --width?)",
    f"predict {HAND} --wid 2": "every option must be one that --help lists; got --wid",
    f"predict {HAND} surplus": "every option must be one that --help lists; got surplus",
    f"predict {HAND} --width": "width must have a value; got none",
    f"predict {HAND} --width 1 --width=2": "width must be given once; got it 2 times",
    f"predict {HAND} --width 0": "width must be a whole number of at least 1; got '0'",
    f"predict {HAND} --width 2.5": "width must be a whole number of at least 1; got '2.5'",
    f"predict {HAND} --bandwidth -10Gbit/s": "bandwidth must be from 0 to 1e+18; got '-10Gbit/s'",
    f"predict {HAND} --bandwidth 0Gbit/s": "bandwidth must be above 0; got '0Gbit/s'",
    f"predict {HAND} --bandwidth 10": "bandwidth must have a unit such as 10Gbit/s; got '10'",
    f"predict {HAND} --bandwidth 10Gb": "such as 10Gbit/s; got '10Gb' (did you mean 10Gbit/s or",
    f"predict {HAND} --bandwidth 10GB": "such as 10Gbit/s; got '10GB' (did you mean 10GB/s?)",
    f"predict {HAND} --latency 50": "latency must have a unit such as 50us, 50ms or 50s; got '50'",
    f"predict {HAND} --compute 0.3": "compute must have a unit such as 0.3us, 0.3ms or 0.3s; got '0.3'",
    f"predict {HAND} --latency -1us": "latency must be from 0 to 1e+18; got '-1us'",
    f"predict {HAND} --latency nan": "latency must be a number with a unit such as 50us; got 'nan'",
    f"predict {HAND} --world-size 0": "world-size must be a whole number of at least 1; got '0'",
    f"predict {HAND} --world-size -4": "world-size must be a whole number of at least 1; got '-4'",
    f"predict {HAND} --world-size 1000000000": "world-size must be at most 65536; got 1000000000",
    f"predict {HAND} --parameters 0": "parameters must be from 1 to 1e13; got 0",
    f"predict {HAND} --parameters 61.1": None,
    f"predict {HAND} --compute 1e300s": "compute must be from 0 to 1e+18; got '1e300s'",
    f"predict {HAND} --accumulation 0": "accumulation must be a whole number of at least 1; got '0'",
    f"predict {HAND} --accumulation 65537": "accumulation must be at most 65536; got 65537",
    f"predict {HAND} --batch-size 64 --samples 511 --accumulation 2 --epochs 10 --price 1/h": (
        "samples must be at least 512, a batch of 2 x 64 for each of 4 ranks; got 511"
    ),
    f"predict {HAND} --batch-size 64 --samples 9 --epochs 1 --strategy ps-sync --server-placement dedicated "
    "--servers 4": "servers must be at most 3 with 4 ranks and placement dedicated; got 4",
    f"predict {HAND} --price 1.20": "price must have a unit such as 1.20/h; got '1.20' (did you mean 1.20/h?)",
    f"predict {HAND} --price $1.20/h": "price must be a number with a unit such as 1.20/h; got '$1.20/h'",
    f"predict {HAND} --price 1.20/month": "price must have a unit such as 1.20/h; got '1.20/month'",
    f"predict {HAND} --price -1/h": "price must be from 0 to 1e+18; got '-1/h'",
    f"plan {HAND} --price 1.20/h": "price must be left out where neither the job's iterations nor the samples and",
    f"predict {HAND} --cv -1": "cv must be a number of at least 0; got '-1'",
    f"predict {HAND} --cv nan": "cv must be a number of at least 0; got 'nan'",
    f"predict {HAND} --cv 0.1 --persistence 1": "persistence must be a number of at least 0 and below 1; got '1'",
    f"predict {HAND} --cv 0.1 --persistence -0.1": "persistence must be a number of at least 0; got '-0.1'",
    f"predict {HAND} --persistence 0.5": "persistence must come with a cv above 0; got 0.5 without one",
    f"predict {HAND} --comm-cv -1": "comm-cv must be a number of at least 0; got '-1'",
    f"predict {HAND} --comm-cv 10%": "comm-cv must be a number of at least 0; got '10%'",
    f"predict {HAND} --cv 0.7": "outside of what was measured or checked; got cv 0.7; the",
    f"plan {HAND} --cv 0.7": "nothing is left; got cv 0.7; the formulas were checked up to 0.6 (timing-model simulate",
    f"predict {HAND} --ranks-per-node 2 --all-reduce all-to-all": "ranks-per-node must be 1 with all-to-all, whose",
    f"predict {HAND} --ranks-per-node 3": "ranks-per-node must divide 4 ranks; got 3",
    f"predict {HAND} --slow-ranks 0.5": "slow-ranks must be a number of at least 1; got '0.5'",
    f"predict {HAND} --slow-ranks 2 2 2 2 2": "slow-ranks must be at most 4; got 5",
    f"predict {HAND} --codec int9": "codec must be one of fp32, bf16, fp16, truncate16,",
    f"predict {HAND} --all-reduce rings": "all-reduce must be one of ring,",
    f"predict {HAND} --strategy dpp": "strategy must be one of pipelined, ddp, ps-sync; got dpp (did you mean ddp?)",
    f"predict {HAND} --strategy ddp --width 2": "width must be 1 with strategy ddp, which has no pipeline; got 2",
    f"predict {HAND} --strategy ps-sync --server-placement away": "server-placement must be one of colocated, ded",
    f"predict {HAND} --servers 4": "servers must be left out with strategy pipelined, which has none; got 4",
    f"predict {HAND} --strategy ddp --server-placement dedicated": (
        "server-placement must be left out with strategy ddp, which has none; got dedicated"
    ),
    f"predict {HAND} --strategy ps-sync --servers 5": "servers must be at most 4 with 4 ranks",
    f"predict {HAND} --segment-bytes 1": "segment-bytes must be at least ",
    f"predict {HAND} --width 1{'0' * 400}": "width must be at most 1e+18; got a number of 401 digits",
    f"predict {HAND} --iterations 1{'0' * 18}1": "iterations must be at most 1e+18; got a number of 20 digits",
    f"predict {HAND} --epochs 3": "epochs must be left out where the samples or the batch size are not",
    f"predict {HAND} --model resnet50": "parameters must be left out with --model resnet50; got 6.11e+07",
    f"predict {HAND} --network 10GbE --cluster x": "network must be left out with --cluster, which says it; got 10GbE",
    f"predict {HAND} --network 40GbE": "network must be one of 1GbE, 10GbE, 25GbE, 100GbE, infiniband; got 40GbE",
    "predict --network 1GbE --world-size 4": "compute must be given: the time of a forward and",
    "predict --network 1GbE --world-size 4 --compute 1s": "parameters must be given with --compute, or --model",
    "predict --network 1GbE --world-size 4 --compute 1s --model x": "model must be one of mlp, mlp-1000, convnet,",
    "predict --network 1GbE --world-size 4 --update 1s": "update must be left out without --compute; got 1",
    "predict --latency 1us --world-size 4": "bandwidth must be given, too, without --cluster or --network; got none",
    "predict --world-size 4": "cluster must be given, or --network, or --latency and --bandwidth; got none",
    "predict --network 1GbE": "world-size must be given; got none",
    "predict --cluster {folder}/none.toml --world-size 4 --model mlp": "none.toml must be a file to read, which pipes",
    "predict --cluster {cut} --world-size 4 --model mlp": "cut.toml must be whole and of TOML's form; ",
    "predict --cluster {version} --world-size 4 --model mlp": "version.toml: format must be 7, the version that this",
    "predict --cluster {nonsense} --world-size 4 --model mlp": "nonsense.toml: link.beta.value must be a number from 0",
    "predict --cluster {cluster} --world-size 4": "model must be given, one of mlp, or --compute",
    "predict --cluster {cluster} --world-size 4 --model resnet18": "model must be one of mlp; got resnet18",
    "predict --cluster {cluster} --world-size 64 --model mlp": "extrapolate must be asked for outside of what",
    f"predict {HAND} --plot {{folder}}/a.xyz": "plot must end in one of .pdf, .png, .svg; got ",
    f"predict {HAND} --plot {{folder}}/none/a.png": "plot must be a file in an existing folder; got ",
    f"plan {HAND} --codecs int9": "codec must be one of ",
    f"plan {HAND} --widths 0": "widths must be a whole number of at least 1; got '0'",
    f"plan {HAND} --strategies dpp": "strategy must be one of ",
    f"plan {HAND} --accuracy-cost width=1 width=2": "accuracy-cost must be given once for each name; got width twice",
    f"predict {HAND} --samples 1000": "samples must be left out without --batch-size; got 1000",
    f"predict {HAND} --width 1000000000000": "width must be at most 64; got 1000000000000",
    f"predict {HAND} --all-reduce operator:add": (
        "all-reduce operator:add must return a timing_model.schedules.Schedule; got int"
    ),
    f"predict {HAND} --all-reduce builtins:divmod=0": "must return a schedule for each of 4 ranks; got TypeError",
    f"plan {HAND} --accuracy-cost width": "accuracy-cost must be a name and a share, such as width=1%; got 'width'",
    f"plan {HAND} --accuracy-cost widht=1": "accuracy-cost must be one of width, fp32,",
    f"plan {HAND} --top 0": "top must be a whole number of at least 1; got '0'",
    "plan --cluster {cluster} --world-size 64 --model mlp": "extrapolate must be asked for, or more be searched,",
    f"simulate {HAND} --strategy ddp": "strategy must be pipelined or ps-sync to be simulated; got ddp",
    f"simulate {HAND} --iterations 9999999999": "iterations must be at most 32894736 to be simulated; got 9999999999",
    f"simulate {HAND} --seed -1": "seed must be a whole number of at least 0; got '-1'",
}


@pytest.mark.parametrize("words", [words for words, message in BAD.items() if message])
def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cluster: Path, words: str
) -> None:
    text = cluster.read_text()
    named = {
        "cut": text[: len(text) // 2],
        "version": text.replace("format = 7", "format = 2"),
        "nonsense": text.replace("beta = {value = ", "beta = {value = -"),
    }
    paths = {name: tmp_path / f"{name}.toml" for name in named}
    for name, path in paths.items():
        path.write_text(named[name])
    before = sorted(tmp_path.iterdir())
    message = BAD[words]
    assert main(instead(words.format(folder=tmp_path, cluster=cluster, **paths))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message is not None
    assert err.startswith("error: ")
    assert message in err
    assert sorted(tmp_path.iterdir()) == before


LINKS = """
[[link]]
latency = "20ms"
bandwidth = "100Mbit/s"
[[link]]
from = [3]
latency = "20ms"
bandwidth = "20Mbit/s"
"""
BY_HAND = "--world-size 4 --compute 0.1s --parameters 1M"


def test_a_slow_uplink_limits_the_ring(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "home.toml"
    path.write_text(LINKS)
    out = said(capsys, f"predict --cluster {path} {BY_HAND} --width 1")
    assert "on 4 ranks: links of 19.1 Mbit/s to 95.6 Mbit/s of payload, up to 20.0 ms latency" in out
    found = json.loads(said(capsys, f"predict --cluster {path} {BY_HAND} --width 1 --json"))
    slow = 8 * 1.5 * 4e6 / (20e6 * PAYLOAD_SHARE)
    assert found["collective_seconds"]["total"] == pytest.approx(slow, rel=0.1)
    assert found["gains"]["network"] > 1.8
    planned = json.loads(said(capsys, f"plan --cluster {path} {BY_HAND} --json --top 50"))
    kinds = {(one["strategy"], one["all_reduce"]) for one in planned["ranking"]}
    assert {strategy for strategy, _ in kinds} == {"pipelined"}
    assert "native" not in {all_reduce for _, all_reduce in kinds}


def test_ranks_that_a_file_names_do_not_hide_that_one_alone_is_faster(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "home.toml"
    path.write_text(LINKS)
    job = f"--cluster {path} --world-size 4 --parameters 1M --batch-size 10 --samples 1000"
    assert "One rank alone is as fast (1 rank: 1.00 s, 4 ranks: " in said(capsys, f"plan {job} --compute 0.01s")
    more = said(capsys, f"plan {job} --compute 10s")
    assert "More ranks help, up to 4 at least (2 ranks: " in more, "nobody knows the links of a fifth"
    said(capsys, f"predict --cluster {path} {BY_HAND}".replace("--world-size 4", "--world-size 1"))


def test_links_need_only_lead_where_the_asked_all_reduce_sends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "square.toml"  # 0-1-3-2-0, where the ring goes 0-1-2-3
    peers = {0: [1, 2], 1: [0, 3], 2: [0, 3], 3: [1, 2]}
    link = 'latency = "1ms"\nbandwidth = "1Gbit/s"\n'
    path.write_text("".join(f"[[link]]\n{link}from = [{rank}]\nto = {to}\n" for rank, to in peers.items()))
    assert "halving-doubling" in said(capsys, f"predict --cluster {path} {BY_HAND} --all-reduce halving-doubling")
    ranking = json.loads(said(capsys, f"plan --cluster {path} {BY_HAND} --json --top 50"))["ranking"]
    assert "halving-doubling" in {one["all_reduce"] for one in ranking}
    assert "ring" not in {one["all_reduce"] for one in ranking}
    assert main(f"predict --cluster {path} {BY_HAND}".split()) == 2
    assert "link must lead from rank 1 to rank 2, which ring sends to" in capsys.readouterr().err


def test_links_that_cores_cap_are_told_apart_by_where_the_cap_comes_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "nodes.toml"
    slow = '[[link]]\nlatency = "1ms"\nbandwidth = "1Gbit/s"\n'
    for host, words in (
        ("", "than one of the links carries them: the CPU time of a byte, 0.5 ns, is a default"),
        ('host = "2ns"\n', "than one of the links carries them: the CPU time of a byte, 2 ns, is as given; "),
        ('host = "0ns"\n', None),
    ):
        path.write_text(f'{slow}[[link]]\nnode = 2\nlatency = "3us"\nbandwidth = "300GB/s"\n{host}')
        out = said(capsys, f"predict --cluster {path} {BY_HAND}")
        assert ("the CPU time of a byte" in out) == (words is not None)
        assert words is None or words in out


def test_many_ranks_with_links_of_their_own_are_planned_with_large_segments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "alike.toml"
    path.write_text('[[link]]\nlatency = "1ms"\nbandwidth = "10Gbit/s"\n')
    space = "--codecs sign --all-reduces recursive-doubling"
    words = f"plan --cluster {path} --world-size 128 --compute 1s --model alexnet {space} --json"
    assert json.loads(said(capsys, words))["best"]["segment_bytes"] > 1 << 20


@pytest.mark.parametrize(
    ("changed", "words", "message"),
    [
        (
            "[[link]]\nfrom = [0, 1, 2]",
            "",
            "link must lead from rank 3 to rank 0, which ring sends to; no table",
        ),
        ("[[link]]\nto = [0, 1]", "", "link must lead from rank 1 to rank 2, which ring sends to"),
        ("[[link]]\nnode = 2", "", "link must lead from rank 1 to rank 2, which ring sends to"),
        ("[[link]]\nto = [4]", "", "link must name ranks from 0 to 3; got 4"),
        (
            "[[link]]",
            "--strategy ddp",
            "all-reduce must send messages that can be simulated where the cluster's file",
        ),
        ("[[link]]", "--strategy ps-sync", "or parameter servers or a codec whose parts are gathered; got ps-sync"),
        (
            "[[link]]",
            "--ranks-per-node 2 --nics 2",
            "nics must be left out where each rank has links of its own",
        ),
        ("[[link]]", "--latency 1us", "latency must be left out with --cluster, which says it; got 1e-06"),
    ],
)
def test_links_that_do_not_connect_the_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changed: str, words: str, message: str
) -> None:
    path = tmp_path / "home.toml"
    path.write_text(LINKS.replace("[[link]]", changed, 1).split("[[link]]\nfrom = [3]")[0])
    for command in ["predict"] if "strategy" in words else ["predict", "plan"]:
        assert main(f"{command} --cluster {path} {BY_HAND} {words}".split()) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err


WORDS = st.sampled_from(
    f"""{HAND} --width --codec --all-reduce --strategy --cv --slow-ranks --json --segment-bytes --batch-size --samples
    --epochs --iterations --model --network --update --servers --ranks-per-node --extrapolate --top --persistence --seed
    0 1 2 -1 1e9 1e308s nan inf int8 native ddp ps-sync hierarchical halving-doubling 1GbE vgg16 3 7 64 1s
    1e-300bit/s 0s --accumulation --price 1.2/h --compute --bandwidth --latency --parameters
    --split fsdp2 tensor --members --activations 8MiB --split-share 0.5 --memory 1GB --optimizer-state
    --inner-latency --inner-bandwidth
    = -- - 50mbit --local-steps é predict --width=2 999999999999999999999999999999""".split()
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(command=st.sampled_from(["predict", "plan", "simulate"]), words=st.lists(WORDS, max_size=6), hand=st.booleans())
def test_no_words_make_a_traceback(
    capsys: pytest.CaptureFixture[str], command: str, words: list[str], hand: bool
) -> None:
    code = main([command, *(HAND.split() if hand else []), *words])
    out, err = capsys.readouterr()
    assert code in (0, 2)
    assert (err.count("\n"), out == "") == ((1, True) if code else (0, False))
    assert "nan" not in out.lower()


def test_presets_are_what_they_say() -> None:
    """Presets are parameters of layers of known shapes, and rates after headers."""
    mlp = [784 * 500 + 500, 500 * 500 + 500, 500 * 10 + 10]
    assert MODELS["mlp"] == sum(mlp)
    convolutions = [(3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3)]
    dense = [(9216, 4096), (4096, 4096), (4096, 1000)]
    alexnet = [i * o * k * k + o for i, o, k in convolutions] + [i * o + o for i, o in dense]
    assert MODELS["alexnet"] == sum(alexnet)
    assert MODELS["convnet"] == sum([32 * 25 + 32, 64 * 32 * 25 + 64, 64 * 7 * 7 * 256 + 256, 256 * 10 + 10])
    rates = [1 / link.beta for link in NETWORKS.values()]
    assert rates == sorted(rates)
    assert 0.94 < rates[1] * 8 / 10e9 < 0.96
    assert all(0 < link.alpha < 1e-3 for link in NETWORKS.values())
