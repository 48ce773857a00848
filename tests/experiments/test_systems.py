"""All systems: their files, each run by the command; their accuracies; HogWild's program; the page about them."""

from __future__ import annotations

import functools
import itertools
import json
import queue
import re
import shlex
import threading
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _kept_runs import check_refused
from _ranks import run_ranks
from _runs import run_job_on_forked_ranks, train_each_as_a_rank, train_on_forked_ranks
from rich.console import Console

from experiments import validation_runs
from experiments.kept_runs import KeptRuns
from experiments.results import REPOSITORY, RESULTS, code_state, load
from experiments.simulated_runs import DIVERGED_LOSS, Run, batches_of, loss_of, simulate
from experiments.systems import accuracy, hogwild, times
from experiments.systems.__main__ import compute, main, parse
from experiments.systems.accuracy import Curve, diverged_at, finished_curves, is_simulated, read_points
from experiments.systems.catalogue import FOLDER, HOGWILD, NOT_HERE, WITHOUT_EFFECT
from experiments.systems.catalogue import load as load_system
from experiments.systems.times import KEPT, Cell, Setting, finished_cells
from experiments.systems.workloads import NODES, QUICK, WORKLOADS
from pipesgd.cli import parse as parse_training
from pipesgd.config import TrainConfig, differing_options
from pipesgd.data import make_workload
from pipesgd.data.datasets import load_dataset
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import alone
from tests.experiments._systems import KEYS, SYSTEMS, cell, config_of, curve
from tests.experiments.test_simulation import CASES, WINDOWS
from tests.timing_model._profiles import PROFILE
from timing_model.cli import main as main_of_timing_model

pytestmark = pytest.mark.slow

TRAINED = {name: one.trained_words for name, one in SYSTEMS.items()} | {HOGWILD: ""}
SHORT = "--dataset digits --hidden-sizes 20 --batch-size 16 --lr 0.05 --iterations 4 --evaluate-iterations 2"


@functools.cache
def parsed(words: str) -> TrainConfig:
    return parse_training(shlex.split(words))


# ---- Files


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_arguments_of_a_system_are_those_of_its_file(name: str) -> None:
    assert parsed(SYSTEMS[name].words) == config_of(name)


def test_what_has_no_effect_on_weights_is_not_in_what_trains() -> None:
    trained = {name: parsed(one.trained_words) for name, one in SYSTEMS.items()}
    same = {name for name, one in SYSTEMS.items() if trained[name] == config_of(name)}
    assert SYSTEMS.keys() - same == {"pmls-managed", "theano-loading"}
    for name in WITHOUT_EFFECT:
        assert all(one.options()[name] == TrainConfig().options()[name] for one in trained.values())


def test_a_file_without_its_head_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("# A system.\n# Here: what it is.\nwidth = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"own\.toml must begin with a title, .*; got 'A system\. Here: what it is\.'"):
        load_system(file)


REFUSED = {
    "caffe-streaming": ("--outer nesterov", "fragments must be 1 with --outer nesterov"),
    "cuda-convnet2-data": ("--buckets 0", "buckets must be at least 1; got 0"),
    "d-sync": ("--moving-rate 0.1", "moving-rate must be left out with --outer average; got 0.1"),
    "ddp": ("--ddp-hook powersgd", "ddp-hook must be one of none, fp16, bf16; got 'powersgd'"),
    "ddp-fp16": ("--width 1", "width must be left out with --strategy ddp"),
    "diloco": ("--accumulation 2", "accumulation must be 1 with --local-steps"),
    "local": ("--codec int8", "codec and its options must be left out with --strategy local"),
    "pipe-sgd": ("--strategy ddp", "prediction must be left out with --strategy ddp"),
    "pipe-sgd-q": ("--all-reduce native", "codec must be one of fp32, bf16, fp16, powersgd with --all-reduce native"),
    "pipe-sgd-t": ("--all-reduce native", "codec must be one of fp32, bf16, fp16, powersgd with --all-reduce native"),
    "pipesgd": ("--width 65", "width must be at most 64"),
    "pipesgd-int4": ("--outer elastic", "prediction must be left out|error-feedback must be off with --outer elastic"),
    "pipesgd-int8": ("--strategy ps-sync", "codec and its options must be left out with --strategy ps-sync"),
    "pmls-managed": ("--rate-limit 10kbit", "rate-limit must be at least 1mbit; got '10kbit'"),
    "pmls-ssp": ("--staleness-bound -1", "staleness-bound must be at least 0; got -1"),
    "pmls-structure-aware": ("--all-reduce native", "reduce must be matrix with --all-reduce native"),
    "pmls-wait-free": ("--codec topk", "buckets must be 1 with --codec topk"),
    "ps-async": ("--check-replicas 5", "check-replicas must be left out with --strategy ps-async"),
    "ps-sync": ("--precision fp16", "precision must be left out with --strategy ps-sync"),
    "theano-ar": ("--rate-limit 50mbit", "rate-limit must be left out with --all-reduce native"),
    "theano-asa": ("--codec topk", "all-reduce must be ring with --codec topk"),
    "theano-asa16": ("--strategy ps-sync", "width must be left out with|all-reduce must be left out with --strategy"),
    "theano-awagd": ("--width 2", "width must be 1 with --average-state"),
    "theano-easgd": ("--codec int4", "error-feedback must be off with --outer elastic"),
    "theano-easgd-async": ("--outer elastic", "outer must be left out with --strategy easgd-async"),
    "theano-loading": ("--loader-workers -1", "loader-workers must be at least 0; got -1"),
    "theano-subgd": ("--average-state", "average-state must be left out without --local-steps or --outer"),
}
"""An option that each system does not go with, and the line that says so."""


def test_every_system_has_a_refusal() -> None:
    assert REFUSED.keys() == SYSTEMS.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_system_is_refused_in_one_line_where_it_cannot_run(name: str) -> None:
    words, message = REFUSED[name]
    with pytest.raises(UserInputError, match=message) as error:
        config_of(name, *shlex.split(words))
    assert "\n" not in str(error.value)


# ---- Runs


def test_every_system_runs_from_the_command_line(tmp_path: Path) -> None:
    words = {
        name: ["--config", str(FOLDER / f"{name}.toml"), *SHORT.split(), "--output", str(tmp_path / name)]
        for name in SYSTEMS
    }
    for errors in run_ranks(NODES, train_each_as_a_rank, words, process_group=False, deadline=120.0):
        assert errors == dict.fromkeys(SYSTEMS, "")
    for name in SYSTEMS:
        summary = json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8"))
        differ = config_of(name).pipeline.strategy == "local"
        assert summary["replicas_identical"] is not differ, name
        [[halfway, _], [iterations, accuracy]] = read_points(tmp_path / name)
        assert (halfway, iterations, accuracy) == (2, 4, summary["final"]["test_accuracy"]), name
        assert diverged_at(tmp_path / name) is None, name


# ---- Accuracies

EXACT = {"d-sync", "cuda-convnet2-data", "pipe-sgd", "pipe-sgd-t", "pipe-sgd-q"}
EXACT |= {"pipesgd", "pipesgd-int8", "pipesgd-int4", "theano-easgd", "diloco", "caffe-streaming"}
PIPELINE_DEFAULTS = {"width": 2, "prediction": "eager", "codec": "fp32"}


def test_only_systems_that_simulated_ranks_equal_bit_for_bit_are_simulated() -> None:
    configs = {name: config_of(name) for name in SYSTEMS}
    assert {name for name, config in configs.items() if is_simulated(config)} == EXACT
    assert not is_simulated(config_of("d-sync", "--codec", "topk"))
    assert not is_simulated(config_of("pipesgd-int4", "--error-feedback", "off"))
    tested = [PIPELINE_DEFAULTS | case for case in CASES.values()]
    tested_windows = [{"width": 2, "outer": None, "codec": "fp32", "fragments": 1} | case for case in WINDOWS]
    for case in tested_windows:
        case.pop("local_steps", None)
    for name in EXACT:
        config, codec = configs[name], configs[name].compression.codec
        width, windows = config.pipeline.width, config.windows
        if config.in_windows:
            own = {"width": width, "outer": windows.outer, "fragments": windows.fragments}
            assert own | {"codec": codec} in tested_windows, name
        elif width == 1:
            assert PIPELINE_DEFAULTS | {"width": 1, "codec": codec} in tested, name
        else:
            assert {"width": width, "prediction": config.updates.prediction, "codec": codec} in tested, name


def test_systems_that_train_alike_share_their_trainings() -> None:
    planned = accuracy.plan(WORKLOADS, TRAINED, 2)
    for same in (("theano-asa", "theano-subgd", "theano-loading"), ("pmls-wait-free", "pmls-managed")):
        assert len({planned["mlp", name, 0, 1.0].words for name in same}) == 1
    assert planned["mlp", HOGWILD, 0, 1.0].words.startswith(f"{HOGWILD} --dataset experiments.systems")
    for name, every in (("d-sync", 78), ("theano-easgd", 80), ("diloco", 90)):
        config = parsed(planned["mlp", name, 1, 1.0].words)
        assert (config.optimization.iterations, config.optimization.seed) == (WORKLOADS["mlp"].iterations, 1)
        assert config.run.evaluate_iterations == every, "whole windows"


SYNCHRONOUS = {"ddp", "ps-sync", "theano-ar", "theano-asa", "theano-subgd", "theano-loading"}
SYNCHRONOUS |= {"pmls-wait-free", "pmls-managed", "pmls-structure-aware"}
LATE = {"pipe-sgd", "pipe-sgd-t", "pipe-sgd-q", "ps-async", "pmls-ssp", HOGWILD}
TRAINED_BY_THEMSELVES = {"theano-easgd", "theano-easgd-async", "diloco"}


def test_synchronous_sums_in_another_order_train_once_and_what_may_diverge_at_two_learning_rates() -> None:
    planned = accuracy.plan({"mlp": WORKLOADS["mlp"]}, TRAINED, 3)
    trainings: dict[str, set[tuple[int, float]]] = {}
    for _, name, seed, share in planned:
        trainings.setdefault(name, set()).add((seed, share))
    assert TRAINED.keys() - trainings.keys() == {"local"}, "no way to train"
    assert {name for name, one in trainings.items() if one == {(0, 1.0)}} == SYNCHRONOUS
    twice = LATE | TRAINED_BY_THEMSELVES
    assert {name for name, one in trainings.items() if one == set(itertools.product(range(3), (1.0, 0.25)))} == twice
    others = trainings.keys() - SYNCHRONOUS - twice
    assert all(trainings[name] == {(seed, 1.0) for seed in range(3)} for name in others)
    for name in twice - {HOGWILD}:
        rates = {parsed(planned["mlp", name, 0, share].words).optimization.lr for share in (1.0, 0.25)}
        assert rates == {0.1, 0.025}


def test_the_learning_rate_counts_at_which_all_seeds_together_end_best() -> None:
    curves = {
        ("mlp", "pipe-sgd", 0, 1.0): curve(0.5, 0.9),
        ("mlp", "pipe-sgd", 1, 1.0): curve(failure="diverged in iteration 3"),
        ("mlp", "pipe-sgd", 0, 0.25): curve(0.5, 0.6),
        ("mlp", "pipe-sgd", 1, 0.25): curve(0.5, 0.6),
        ("convnet", "pipe-sgd", 0, 1.0): curve(0.5, 0.9),
        ("convnet", "pipe-sgd", 0, 0.25): curve(0.5, 0.6),
        ("convnet", "diloco", 0, 1.0): curve(failure="diverged in iteration 3"),
    }
    best = accuracy.best_curves(curves)
    assert {key: share for key, (share, _) in best.items()} == {
        ("mlp", "pipe-sgd"): 0.25,
        ("convnet", "pipe-sgd"): 1.0,
        ("convnet", "diloco"): 1.0,
    }
    _, found = best["mlp", "pipe-sgd"]
    assert found == [curves["mlp", "pipe-sgd", seed, 0.25] for seed in (0, 1)]


def test_a_system_that_cannot_train_on_a_workload_is_refused_before_hours_of_others() -> None:
    workloads = {"mlp": WORKLOADS["mlp"], "odd": replace(WORKLOADS["mlp"], words="--dataset digits --accumulation 2")}
    with pytest.raises(UserInputError, match="accumulation must be 1 with --local-steps"):
        accuracy.plan(workloads, {"diloco": SYSTEMS["diloco"].trained_words}, 1)


def test_a_curve_is_that_of_the_run_or_says_why_there_is_none() -> None:
    run = Run(commit="c0ffee", seconds=1.0, diverged_at=None, test_accuracy=0.5, points=[[2, 0.3], [4, 0.5]])
    assert accuracy.curve_of(run) == Curve(commit="c0ffee", how="simulated", failure=None, points=[[2, 0.3], [4, 0.5]])
    gone = accuracy.curve_of(Run(commit="c0ffee", seconds=1.0, diverged_at=3))
    assert gone == Curve(commit="c0ffee", how="simulated", failure="diverged in iteration 3", points=[])


def test_a_failure_that_is_no_result_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned = accuracy.plan(QUICK, {"ps-async": SYSTEMS["ps-async"].trained_words}, 2)
    planned = {key: one for key, one in planned.items() if key[3] == 1.0}
    failures = {0: "did not end within 3600 s", 1: "gradients of iteration 3 are not finite on rank 0"}

    def train(words: str) -> Curve:
        seed = parsed(words).optimization.seed
        return Curve(commit=None, how="real", failure=failures[seed], points=[])

    monkeypatch.setattr(accuracy, "train", train)
    arguments = Namespace(quick=True, fresh=False, finished=False, output=tmp_path, processes=1)
    with pytest.raises(RunError, match=r"1 of 2 failed, .* the first was digits, ps-async, seed 0: did not end within"):
        finished_curves(planned, arguments, Console(quiet=True))
    arguments.finished = True
    [(key, found)] = finished_curves(planned, arguments, Console(quiet=True)).items()
    assert (key, found.failure) == (("digits", "ps-async", 1, 1.0), failures[1])


def test_ranks_that_differ_are_no_training_that_diverged() -> None:
    """ReplicasDivergedError is a fault of the software."""
    assert not accuracy.has_diverged("ReplicasDivergedError: weights differ between ranks")
    assert accuracy.has_diverged("the averaged gradient of iteration 3 holds a NaN or an infinity: lower --lr")


def test_real_runs_diverge_at_the_loss_at_which_simulated_ones_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def with_losses(*losses: float | None) -> str | None:
        monkeypatch.setattr(accuracy, "read_metrics", lambda path: [{"loss": loss} for loss in losses])
        return diverged_at(tmp_path)

    assert with_losses(2.3, DIVERGED_LOSS, 1.0) is None
    assert with_losses(2.3, 1.01 * DIVERGED_LOSS, 1.0) == "diverged in iteration 1"
    assert with_losses(2.3, 2.0, None) == "diverged in iteration 2"
    with pytest.raises(RunError, match=r"hogwild failed: .*diverged in iteration"):
        hogwild.train("--dataset digits --hidden-sizes 20 --lr 1e9 --iterations 20", 2)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_every_fourth_test_sample_is_evaluated(name: str) -> None:
    config = parsed(WORKLOADS[name].trained())
    whole = load_dataset({"mlp": "fashion-mnist", "transformer": "python-stdlib"}[name], None, image_size=28)
    data, _ = make_workload(config)
    assert (len(data.train), len(data.test)) == (len(whole.train), len(range(0, len(whole.test), 4)))
    for part, right in zip(data.test[torch.tensor([0, 2])], whole.test[torch.tensor([0, 8])], strict=True):
        assert torch.equal(part, right)


# ---- HogWild


def test_ranks_of_hogwild_change_one_copy_of_the_weights_in_place() -> None:
    """Without any other rank at the same time, it is SGD of one rank and then of the other, at half the rate."""
    words = "--dataset digits --hidden-sizes 20 --batch-size 16 --lr 0.1 --schedule one-cycle --iterations 8"
    config = hogwild.parse(words.split())
    torch.manual_seed(config.optimization.seed)
    weights = [parameter.detach() for parameter in make_workload(config)[1].parameters()]
    results: queue.SimpleQueue[hogwild.Outcome] = queue.SimpleQueue()
    for rank in range(2):
        hogwild._train_rank(rank, 2, f"{words} --evaluate-iterations 4", weights, threading.Barrier(1), results)
    assert [at for at, _ in results.get().points] == [4, 8]

    torch.manual_seed(config.optimization.seed)
    data, model = make_workload(config)
    for rank in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8, cycle_momentum=False)
        for batch, _ in zip(batches_of(config, data, rank, 2), range(8), strict=False):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            schedule.step()
    assert all(map(torch.equal, weights, model.parameters()))


def test_hogwild_runs_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--ranks {NODES} --dataset digits --hidden-sizes 20 --batch-size 16 --iterations 4 --evaluate-iterations 2"
    hogwild.main(words.split(), alone(), Console())
    halfway, end, time = capsys.readouterr().out.splitlines()
    assert halfway.startswith(f"2 iterations of each of {NODES} ranks: test accuracy ")
    assert end.startswith(f"4 iterations of each of {NODES} ranks: test accuracy ")
    assert time.endswith(" ms an iteration; another run ends elsewhere")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--iterations 9 --width 1", "width must be left out of hogwild, which has no use for it; got 1"),
        ("--iterations 9 --codec int8", "codec must be left out of hogwild, which has no use for it; got int8"),
        ("--iterations 9 --clip-norm 1", "clip-norm must be left out of hogwild, which has no use for it; got 1.0"),
        ("--dataset digits", "iterations must be given to hogwild; got none"),
    ],
)
def test_hogwild_refuses_what_it_has_no_use_for(words: str, message: str) -> None:
    with pytest.raises(UserInputError, match=f"^{re.escape(message)}$"):
        hogwild.parse(words.split())


# ---- The page

PAGE = (REPOSITORY / "docs" / "systems.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(
    r"^\| [^|]+ \| `timing-model (plan [^`|]+)` \| `([^`|]+)` \| \[`([\w-]+)`\]\([^)]+\)(?:, with `([^`|]+)`)? \|$",
    PAGE,
    re.MULTILINE,
)
NAMED_BY_SPEED = frozenset({"all-reduce", "segment-bytes", "local-steps", "buckets", "fragments"})
"""Options of an answer that a system leaves open."""


def test_the_page_has_every_system_and_links_to_its_file() -> None:
    linked = dict(re.findall(r"\[`([\w-]+)`\]\((\S+)\)", PAGE))
    assert linked.keys() == {*SYSTEMS, HOGWILD}
    for name, path in linked.items():
        assert (REPOSITORY / "docs" / path).resolve() == FOLDER / ("hogwild.py" if name == HOGWILD else f"{name}.toml")
    assert all(f"`{name}`" in PAGE for name in NOT_HERE)


def test_every_question_of_the_page_is_asked() -> None:
    assert len(QUESTIONS) == PAGE.count("`timing-model plan ") > 4


@pytest.mark.parametrize(("question", "answer", "name", "changed"), QUESTIONS)
def test_the_planner_gives_the_answers_of_the_page(
    question: str, answer: str, name: str, changed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_of_timing_model([*shlex.split(question), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(answer in said for said in (found["best"]["options"], *found["advice"])), found["best"]["options"]
    assert found["best"]["strategy"] != "ps-sync"
    asked, system = config_of(name, *answer.split()).options(), config_of(name, *changed.split()).options()
    assert differing_options(asked, system, free=NAMED_BY_SPEED) == []


# ---- Command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "dpd"], r"--only must be one of .*; got 'dpd' \(did you mean ddp\?\)"),
        (["--only", "ddp", "ddp"], "--only must name each once; got 'ddp' twice"),
        (["--only", HOGWILD], "--only must name a system of pipesgd.train, too; got caffe-hogwild alone"),
        (["--only", "ddp", "--output", str(RESULTS)], "--output must name another folder"),
        (["--processes", "0"], "--processes: must be a whole number of at least 1; got '0'"),
        (["--fresh", "--finished"], "--finished: not allowed with argument --fresh"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: Sequence[str], message: str, tmp_path: Path) -> None:
    check_refused(parse, words, message, tmp_path)


def test_some_systems_are_measured_trained_kept_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the links, their calibration and the start of torchrun, which other experiments' tests have."""
    monkeypatch.setattr(Setting, "testbed", lambda setting: nullcontext())
    monkeypatch.setattr(times, "calibrate", lambda testbed, words, folder: PROFILE)
    monkeypatch.setattr(validation_runs, "run_job", run_job_on_forked_ranks)
    monkeypatch.setattr(accuracy, "run_training", train_on_forked_ranks)
    names = ["d-sync", "local", "ps-async", HOGWILD]
    simulated = accuracy.plan(QUICK, {"d-sync": SYSTEMS["d-sync"].trained_words}, 1)["digits", "d-sync", 0, 1.0].words
    KeptRuns(tmp_path / "systems.simulated.runs.json", Run).add(simulated, simulate(simulated))
    words, console = ["--quick", "--only", *names, "--output", str(tmp_path)], Console()
    main(words, alone(), console)
    found = {row["system"]: row for row in load(tmp_path / "systems.csv")}
    assert list(found) == names
    values = 64 * 64 + 64 + 64 * 10 + 10
    for name, row in found.items():
        assert row["iteration_s"] > 0.005, name
        if name == "local":
            assert row["failures"].startswith("no training: ")
        else:
            assert row["accuracy_mean"] > 0.2, name
    bytes_of_rings = 2 * 4 * values  # each of these two ranks sends half of the gradient twice
    assert [found[name]["wire_bytes"] for name in ("d-sync", "local", HOGWILD)] == [bytes_of_rings, 0, 0]
    assert found["d-sync"]["memory_bytes"] > 4 * values
    assert found["d-sync"]["predicted_s"] > 0
    assert (found["d-sync"]["trained_on"], found["ps-async"]["trained_on"]) == ("simulated", "real")
    assert not (tmp_path / "systems.png").exists(), "without DDP there is no speed-up"
    assert {row["system"] for row in load(tmp_path / "systems_convergence.json")} == {"d-sync"}
    assert (tmp_path / "systems_convergence.png").stat().st_size > 0
    manifest = json.loads((tmp_path / "systems.manifest.json").read_text(encoding="utf-8"))
    assert manifest["not_here"] == NOT_HERE
    assert manifest["systems"].keys() == {"d-sync", "local", "ps-async"}
    assert manifest["made_with"] == [str(code_state())]
    assert manifest["workloads"] == {"digits": f"{QUICK['digits'].trained()} --iterations 20"}
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.runs.json")}
    assert len(kept) == 3
    for option in ([], ["--finished"]):
        again, *_ = compute(parse([*words, *option], by_torchrun=False), console)
        assert [row["system"] for row in again] == names
    assert capsys.readouterr().out.count("1 of 1 runs are there") == 5, "times twice, the simulated run all three times"
    for missing in (["--only", "ddp"], ["--seeds", "2"]):
        with pytest.raises(UserInputError, match="--finished must find the times and all trainings of a workload"):
            compute(parse([*words, *missing, "--finished"], by_torchrun=False), console)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_fresh_forgets_what_was_kept(tmp_path: Path) -> None:
    KeptRuns(tmp_path / KEPT, Cell).add("a cell", cell())
    KeptRuns(tmp_path / "systems.real.runs.json", Curve).add("a run", curve(0.5))
    arguments = Namespace(quick=True, fresh=True, finished=True, output=tmp_path)
    assert finished_cells(QUICK, KEYS, arguments, Console()) == {}
    assert finished_curves({}, arguments, Console()) == {}
    assert list(tmp_path.iterdir()) == []
