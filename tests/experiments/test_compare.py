"""The comparison: from arguments to contenders, from runs to cells, from cells to rows; resumed; for real."""

from __future__ import annotations

import doctest
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _obstacle import obstacle
from _ranks import run_module
from matplotlib.figure import Figure
from rich.console import Console

from experiments import accuracies, contenders, iteration_times, limits
from experiments.cells import Cell, Cells, complete, order, read_run, undisturbed
from experiments.compare_plan import EVALUATIONS, parse
from experiments.contenders import CONTENDERS, THEANO_MPI, WORKLOADS, Contender
from experiments.limits import Cluster, ring_limit, server_time, textbook_server_time
from experiments.results import RESULTS, load
from experiments.testbed.links import Link
from experiments.testbed_jobs import WRAPPED_BY_TORCH, last_words
from pipesgd.cli import HelpRequested
from pipesgd.errors import UserInputError

pytestmark = pytest.mark.slow

CLUSTER = Cluster(nodes=4, link=Link(rate=200e6))
HEADERS = 1514 / 1448
NBYTES = 7_200_000
WIRE = 1.5 * NBYTES * HEADERS * 8 / 200e6
DIGITS = ["--rate", "200mbit", "--quick", "--workload", "digits"]


def made(*names: str) -> list[Contender]:
    return contenders.make(contenders.choose(names, []), WORKLOADS["digits"], "--iterations 16")


def cell(contender: str, index: int, seconds: float, **more: Any) -> Cell:
    parts = {"compute": 0.1, "update": 0.01, "exposed": max(0.0, seconds - 0.11), "communication": 0.4}
    values = {"iteration_s": seconds, "iterations_s": [seconds, seconds], "medians_s": parts, "wire_bytes": 1e6}
    return Cell(contender=contender, index=index, started="2026-11-21", **(values | {"loss": 0.5} | more))


def failed(contender: str, index: int) -> Cell:
    return Cell(contender=contender, index=index, started="2026-11-21", failure="rank 2: it broke")


# Arguments


def test_all_contenders_are_compared_by_default_and_others_can_be_added() -> None:
    assert list(contenders.choose(None, ["width 4=--width 4"])) == [*CONTENDERS, "width 4"]
    assert contenders.choose(["ddp"], ["w=--width=4 --lr 0.5"]) == {"ddp": "--strategy ddp", "w": "--width=4 --lr 0.5"}


def test_every_contender_is_one_that_pipesgd_trains() -> None:
    methods = [one.method for one in made(*CONTENDERS)]
    uncompressed = ["local", "ps-sync", "ps-async", "width 1", "ddp", "width 2", "width 3"]
    assert list(dict.fromkeys(methods)) == [*uncompressed, "width 2, int8", "width 2, int4", "width 2, ternary"]


def test_the_methods_of_theano_mpi_are_compared_when_they_are_named() -> None:
    assert not THEANO_MPI.keys() & contenders.choose(None, []).keys()
    rows = {one.name: one.config.pipeline for one in made(*THEANO_MPI)}
    assert list(rows) == ["awagd", "awagd, momentum too", "subgd", "easgd", "easgd-async"]
    assert [name for name, pipeline in rows.items() if pipeline.in_windows] == ["awagd", "awagd, momentum too", "easgd"]
    with pytest.raises(UserInputError, match="every contender must have a name of its own; got 'easgd' twice"):
        contenders.choose(["ddp"], ["easgd=--width 1"])


def test_a_contenders_own_option_wins_over_the_workloads() -> None:
    (one,) = contenders.make({"w": "--width=4 --lr 0.5"}, WORKLOADS["digits"] + " --lr 0.1", "--iterations 16")
    assert one.config.optimization.lr == 0.5
    assert one.config.optimization.iterations == 16
    assert " ".join(one.words).startswith(WORKLOADS["digits"] + " --lr 0.5 --width 4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--contenders", "dpd"], r"contender must be one of .*; got 'dpd' \(did you mean ddp\?\)"),
        (["--contenders", "ddp", "ddp"], "a name of its own; got 'ddp' twice"),
        (["--contenders", "local", "--contender", "ddp=--width 4"], "a name of its own; got 'ddp' twice"),
        (["--contender", "width 4"], 'must be "NAME=WORDS"'),
        (["--contender", "w=--width 0"], "contender w: width must be at least 1; got 0"),
        (["--contender", "w=--widht 4"], "contender w: .*did you mean width"),
        (["--contender", "w=--seed 4"], "contender w: --seed must be left out, since the comparison decides it"),
        (["--contender", "w=--batch-size 4"], "contender w: data, batch size and model must be the workload's"),
        (["--contender", "w=--strategy ps-sync --servers 3"], "contender w: servers must be at most 2 on 2 ranks"),
        (["--workload", "mpl"], r"workload must be .*; got 'mpl' \(did you mean mlp\?\)"),
        (["--workload", "mlp", "--train", "--lr 0.1"], "--train and --workload must not both be given"),
        (["--train", "--lr '0.1"], "must be words as a shell splits them"),
        (["--train", "digits"], "must begin with an option"),
        (["--train", "--batch-size 9999"], "batch-size times --accumulation must be at most"),
        (["--rate", "200foo"], "rate must be a number and a unit"),
        (["--rate", "0mbit"], "rate must be above 0"),
        (["--nodes", "1"], "--nodes: must be a whole number of at least 2; got '1'"),
        (["--nodes", "255"], "--nodes must be at most 254"),
        (["--slow-node", "2:100mbit"], "--slow-node must name each of nodes 0 to 1 once at most; got '2:100mbit'"),
        (["--slow-node", "1"], "slow-node must be"),
        (["--latency", "5"], "latency must be a number and a unit"),
        (["--time-to-accuracy", "88"], "must be a share of the test set above 0 and below 1; got '88'"),
        (["--time-to-accuracy", "0"], "above 0 and below 1"),
        (
            ["--time-to-accuracy", "0.8", "--contender", "w=--width 3"],
            "contender w: width must be at most 2 with --time-to-accuracy, .*; got 3",
        ),
        (["--time-to-accuracy", "0.8", "--rounds", "3"], "--rounds must be left out with --time-to-accuracy"),
        (["--seeds", "3"], "--seeds must be left out without --time-to-accuracy"),
        (["--time-to-accuracy", "0.8", "--epochs", "3", "--iterations", "9"], "must not both be given"),
        (["--iterations", "3"], "whole number of at least 4"),
        (["--name", "../x"], "--name must be the name of a file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=message) as error:
        parse(["--rate", "200mbit", "--quick", "--output", str(tmp_path), *words], by_torchrun=False)
    assert "\n" not in str(error.value)


def test_full_results_need_rounds_and_are_safe_from_quick_runs() -> None:
    with pytest.raises(UserInputError, match="--rounds must be at least 3 without --quick; got 2"):
        parse(["--rate", "200mbit", "--rounds", "2"], by_torchrun=False)
    with pytest.raises(UserInputError, match="--output must name another folder"):
        parse(DIGITS, by_torchrun=False)
    with pytest.raises(UserInputError, match="without torchrun"):
        parse(["--rate", "200mbit"], by_torchrun=True)
    with pytest.raises(HelpRequested, match="interleaved"):
        parse(["--help"], by_torchrun=False, description="interleaved")
    assert parse(["--rate", "200mbit", "--workload", "digits"], by_torchrun=False).output == RESULTS


def test_a_wrong_option_ends_the_command_with_code_2_before_there_is_a_testbed(tmp_path: Path) -> None:
    done = run_module("experiments.compare", "--rate", "0mbit", "--output", str(tmp_path), folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: rate must be above 0, e.g. 200mbit; got '0mbit'\n"
    assert list(tmp_path.iterdir()) == []


def test_the_plan_says_what_is_run(tmp_path: Path) -> None:
    words = [*DIGITS, "--output", str(tmp_path), "--contenders", "ddp"]
    plan = parse([*words, "--slow-node", "1:100mbit"], by_torchrun=False)
    assert plan.name == "compare_digits_2x200mbit_node1-100mbit"
    assert plan.gradient_bytes == 4 * (64 * 64 + 64 + 64 * 10 + 10)
    run = plan.contenders[0].config
    assert (run.optimization.iterations, run.optimization.lr, plan.seed(5)) == (10, 0.01, 0)
    timed = parse(["--train", "--lr 0.1 --batch-size 8", *words[:3], *words[5:]], by_torchrun=False)
    assert (timed.name, timed.contenders[0].config.optimization.lr) == ("compare_digits-mlp_2x200mbit", 0.1)
    accurate = parse([*words, "--time-to-accuracy", "0.9", "--seeds", "2"], by_torchrun=False)
    assert accurate.name == "accuracy_digits_2x200mbit"
    assert [accurate.seed(index) for index in accurate.indices] == [0, 1]
    assert accurate.contenders[0].config.optimization.epochs == 2
    short = parse([*words, "--time-to-accuracy", "0.9", "--iterations", "9"], by_torchrun=False)
    assert short.contenders[0].config.optimization.iterations == 9


# Limits


def test_the_limit_of_the_wire_is_that_of_a_ring_at_the_slowest_link() -> None:
    assert ring_limit(CLUSTER, NBYTES) == pytest.approx(0.432 * HEADERS)  # 10.8 MB at 25 MB/s
    slow = Cluster(nodes=2, link=Link(rate=200e6), slow_nodes={1: 100e6})
    assert ring_limit(slow, NBYTES) == pytest.approx(7.2 / 12.5 * HEADERS)


@pytest.mark.parametrize(
    ("servers", "colocated", "gradients"),
    [
        (1, True, 3.0),  # times 7.2 MB through the busiest NIC, each way: the server's, from three workers
        (2, True, 1.5),
        (4, True, 0.75),
        (1, False, 3.0),
        (2, False, 1.0),  # a worker's
        (3, False, 1.0),
    ],
)
def test_the_traffic_of_servers_is_that_of_the_busiest_card(servers: int, colocated: bool, gradients: float) -> None:
    seconds = server_time(CLUSTER, NBYTES, servers=servers, colocated=colocated)
    assert seconds == pytest.approx(2 * gradients * 7.2 / 25 * HEADERS)


def test_a_slow_server_and_a_slow_worker_cost_what_their_cards_carry() -> None:
    for node, seconds in ((0, 3 * 7.2 / 6.25), (3, 3 * 7.2 / 25)):  # worker 3 needs 7.2 / 6.25, which is less
        slow = Cluster(nodes=4, link=Link(rate=200e6), slow_nodes={node: 50e6} if node == 0 else {node: 100e6})
        assert server_time(slow, NBYTES, servers=1, colocated=True) == pytest.approx(2 * seconds * HEADERS)
    assert textbook_server_time(CLUSTER, NBYTES, servers=1) == pytest.approx(2 * 4 * 7.2 / 25 * HEADERS)
    several = Cluster(nodes=4, link=Link(rate=200e6), nproc_per_node=2)
    assert server_time(several, NBYTES, servers=1, colocated=True) is None


@pytest.mark.parametrize("module", [limits, accuracies])
def test_examples_in_docstrings(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_what_differs_between_clusters_shows_in_their_names() -> None:
    link = Link(rate=1e9, latency=5e-3, loss=1e-3)
    assert Cluster(nodes=3, link=link, nproc_per_node=2).slug == "3x1gbit_2-ranks_5ms_0.1pc-lost"
    assert CLUSTER.describe() == "4 nodes at 200 Mbit/s"


# Cells


def write_run(folder: Path, lines: Sequence[tuple[float, float | None]], paces: list[float]) -> None:
    """Write a run whose iterations took these seconds, with these accuracies after them."""
    names = ("loading", "compute", "communication", "exposed", "update")
    text = "".join(
        json.dumps(
            {
                "iteration": iteration,
                "epoch": 0,
                "loss": 1.0,
                "lr": 0.1,
                "samples_per_second": 1.0,
                "seconds": {"iteration": seconds, **dict.fromkeys(names, seconds / 4)},
                "wire_bytes": 100,
                "skipped": 0,
                "test_accuracy": accuracy,
            }
        )
        + "\n"
        for iteration, (seconds, accuracy) in enumerate(lines)
    )
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(text)
    final = {"train_loss": 0.25, "test_accuracy": 0.9}
    (folder / "summary.json").write_text(json.dumps({"iteration_seconds_of_ranks": paces, "final": final}))


def test_a_cell_is_read_from_a_run_without_its_first_iterations(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [(9.0, None), (9.0, 0.5), (1.0, None), (2.0, 0.8), (3.0, None)], [2.0, 2.5])
    got = Cell(contender="ddp", index=1, started="", **read_run(tmp_path / "run"))
    assert got.iterations_s == [1.0, 2.0, 3.0]
    assert got.iteration_s == 2.5
    assert got.medians_s == {"loading": 0.5, "compute": 0.5, "communication": 0.5, "exposed": 0.5, "update": 0.5}
    assert (got.wire_bytes, got.loss) == (100, 0.25)
    # On the clock of the slowest rank, which takes 1.25 times as long; nearly all iterations follow an evaluation.
    assert got.points == [[18 * 1.25, 0.5], [21 * 1.25, 0.8], [24 * 1.25, 0.9]]


def test_what_arrives_during_an_evaluation_gives_nobody_an_advantage() -> None:
    accuracies_at = [None, None, None, 0.5, None, None, None, 0.8, None]
    seconds = [9.0, 9.0, 1.0, 2.0, 0.1, 0.1, 3.0, 2.0, 0.1]
    assert undisturbed(seconds, accuracies_at) == [9.0, 9.0, 1.0, 2.0, 2.0, 2.0, 3.0, 2.0, 2.0]
    assert undisturbed([1.0, 2.0, 4.0], [None, None, 0.9]) == [1.0, 2.0, 4.0]
    often = [9.0, *[1.0, 0.1] * 5]  # evaluated at every other iteration: too few others to tell
    assert undisturbed(often, [None, *[0.5, None] * 5]) == often


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("communication", [0.03, 0.1, 0.5])
def test_evaluations_leave_the_length_of_a_simulated_pipeline_as_it_is(width: int, communication: float) -> None:
    """The recursion of a pipeline, in which communication continues while an evaluation stops the clock."""

    def run(every: int) -> list[float]:
        iterations, compute, evaluation = 240, 0.08, 5.0
        now, free, arrived, seconds, done = 0.0, 0.0, [], [], []
        for i in range(iterations):
            begin = now
            now += compute
            free = max(free, now) + communication
            arrived.append(free)
            if i >= width - 1:
                now = max(now, arrived[i - width + 1])
            seconds.append(now - begin)
            done.append(0.5 if (i + 1) % every == 0 else None)
            now += evaluation if done[-1] else 0.0
        return undisturbed(seconds, done)

    assert sum(run(9)) == pytest.approx(sum(run(10_000)), rel=0.01)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("mlp on digits\nerror: rank 2: it broke\nerror: rank 0: lost rank 2\n=====\n", "rank 2: it broke"),
        ("error: rank 1: told to stop (SIGTERM)\nerror: rank 2: it broke\n", "rank 2: it broke"),
        ("W1121 warning\nValueError: no such thing\n  at line 5\n", "ValueError: no such thing"),
        ("terminate called\n  what():  Connection closed\n====\n", "what():  Connection closed"),
        ("one\ntwo\n\n", "two"),
        (
            f"error: rank 3: {2 * WRAPPED_BY_TORCH}KeyError: 0 At: /a/b/hook.py(586): p",
            "rank 3: KeyError: 0 At: hook.py(586): p",
        ),
        ("error: rank 3: " + 500 * "x", "rank 3: " + 192 * "x"),
        ("", "not a word"),
    ],
)
def test_a_failed_runs_log_says_why(log: str, words: str) -> None:
    assert last_words(log) == words


def test_cells_come_back_as_they_were_kept_and_belong_to_one_comparison(tmp_path: Path) -> None:
    one, other = made("ddp", "ddp fp16")
    cells = Cells(tmp_path, {"links": 1})
    for kept in (cell(one.name, 0, 0.5), failed(one.name, 1), cell(one.name, 2, 0.5, loss=None)):
        cells.save(one, kept)
        assert Cells(tmp_path, {"links": 1}).load(one, kept.index) == kept
        assert cells.load(other, kept.index) is None
        assert Cells(tmp_path, {"links": 2}).load(one, kept.index) is None
    assert len(list(cells.folder.iterdir())) == 3
    cells.forget()
    assert cells.load(one, 0) is None


def test_names_that_look_alike_are_other_cells(tmp_path: Path) -> None:
    first, second = contenders.make({"a b": "--width 1", "a, b": "--width 2"}, WORKLOADS["digits"], "")
    cells = Cells(tmp_path, "key")
    assert cells.file(first, 0) != cells.file(second, 0)


def test_in_every_round_all_run_once_in_rotated_order() -> None:
    names = [(one.name, index) for one, index in order(made("local", "ddp", "ps-sync"), range(3))]
    assert names[:6] == [("local", 0), ("ddp", 0), ("ps-sync", 0), ("ddp", 1), ("ps-sync", 1), ("local", 1)]
    assert len(set(names)) == len(names) == 9


def test_a_stopped_comparison_continues_with_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = order(made("local", "ddp"), range(2))
    cells = Cells(tmp_path, "key")
    ran: list[tuple[str, int]] = []

    def run(contender: Contender, index: int) -> Cell:
        if len(ran) == 2 and (contender.name, index) not in ran:
            ran.append((contender.name, index))
            raise KeyboardInterrupt
        ran.append((contender.name, index))
        return failed("local", 0) if (contender.name, index) == ("local", 0) else cell(contender.name, index, 0.5)

    with pytest.raises(KeyboardInterrupt):
        list(complete(cells, todo, run, Console()))
    assert ran == [("local", 0), ("ddp", 0), ("ddp", 1)]
    kept = {path: path.stat().st_mtime_ns for path in cells.folder.iterdir()}
    assert len(kept) == 2
    done = list(complete(cells, todo, run, Console()))
    assert ran[3:] == [("ddp", 1), ("local", 1)]
    assert [(one.contender, one.index) for one in done] == [(one.name, index) for one, index in todo]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert done[0].failure == "rank 2: it broke"  # a failure is a result as well
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1/4 local, 0: failed: rank 2: it broke")
    assert [line.split(":")[0] for line in said[2:]] == ["3/4 ddp, 1", "4/4 local, 1"]
    list(complete(cells, todo, run, Console()))
    assert len(ran) == 5


# Rows


def compared() -> tuple[list[Contender], list[Cell]]:
    """Return three rounds on a machine that becomes half as fast and recovers."""
    base = {"local": 0.2, "ps-sync": 2.0, "ddp": 0.6, "width 2, ring": 0.5, "width 2, native": 0.48}
    cells = [cell(name, i, seconds * drift) for name, seconds in base.items() for i, drift in enumerate((1, 2, 1.2))]
    cells[8] = failed("ddp", 2)
    return made(*base, "ddp fp16"), [*cells, *(failed("ddp fp16", i) for i in range(3))]


def rows() -> list[dict[str, Any]]:
    return iteration_times.summarize(*compared(), CLUSTER, NBYTES)


def test_ratios_are_of_the_same_round() -> None:
    by_name = {row["contender"]: row for row in rows()}
    ddp, ring = by_name["ddp"], by_name["width 2, ring"]
    assert [ddp[f"ratio_to_local_{name}"] for name in ("median", "low", "high")] == pytest.approx([3.0] * 3)
    assert ring["ratio_to_ddp_median"] == pytest.approx(0.5 / 0.6)
    assert ring["iteration_median_s"] == pytest.approx(0.6)  # of 0.5, 1.0 and 0.6
    # The wire takes longer than local training in all rounds.
    assert [ring[f"ratio_to_limit_{name}"] for name in ("low", "median", "high")] == pytest.approx(
        [0.5 / WIRE, 0.6 / WIRE, 1.0 / WIRE]
    )
    assert ring["limit_median_s"] == ring["wire_limit_s"] == pytest.approx(WIRE)


def test_where_local_takes_longer_than_the_wire_it_is_the_limit() -> None:
    got = iteration_times.summarize(*compared(), CLUSTER, NBYTES // 100)
    assert got[3]["ratio_to_limit_median"] == pytest.approx(2.5)
    assert got[3]["limit_median_s"] == pytest.approx(0.24)


def test_with_a_codec_the_wires_limit_is_that_of_what_is_sent() -> None:
    sent = 2 * 3 / 4 * NBYTES / 4  # a quarter of what a ring of four ranks sends uncompressed
    cells = [cell("width 2, int8", i, 0.25, wire_bytes=sent) for i in range(3)]
    cells += [cell(name, i, seconds) for name, seconds in (("local", 0.01), ("width 2, ring", 0.5)) for i in range(3)]
    people = made("local", "width 2, int8", "width 2, ring")
    _, int8, ring = iteration_times.summarize(people, cells, CLUSTER, NBYTES)
    assert int8["limit_median_s"] == int8["wire_limit_s"] == pytest.approx(WIRE / 4)
    assert int8["ratio_to_limit_median"] == pytest.approx(0.25 / (WIRE / 4))
    assert ring["wire_limit_s"] == pytest.approx(WIRE)


def test_a_failed_cell_is_no_number() -> None:
    by_name = {row["contender"]: row for row in rows()}
    ddp, powersgd = by_name["ddp"], by_name["ddp fp16"]
    assert (ddp["rounds"], ddp["rounds_failed"], ddp["failures"]) == (2, 1, "round 2: rank 2: it broke")
    assert ddp["iteration_median_s"] == pytest.approx(0.9)  # of 0.6 and 1.2
    assert (powersgd["rounds"], powersgd["rounds_failed"]) == (0, 3)
    numbers = [name for name in powersgd if name.endswith(("_s", "_bytes", "_low", "_high")) or "median" in name]
    known = {name for name in numbers if powersgd[name] is not None}
    assert known == {"wire_limit_s", "limit_median_s"}


def test_without_local_or_ddp_there_are_no_ratios_to_them() -> None:
    _, cells = compared()
    few = made("ps-sync", "width 2, ring")
    got = iteration_times.summarize(few, [one for one in cells if one.contender in CONTENDERS], CLUSTER, NBYTES)
    assert not [name for name in got[0] if name.startswith(("ratio_to", "target"))]
    assert iteration_times.notes(got, cells, CLUSTER)


def test_targets_are_for_width_2_on_plain_links() -> None:
    everybody = iteration_times.summarize(made(*CONTENDERS), compared()[1], CLUSTER, NBYTES)
    assert {row["contender"]: row["target_ratio_to_limit"] for row in everybody if row["target_ratio_to_limit"]} == {
        "width 2, native": 1.06,
        "width 2, ring": 1.06,
        "width 2, int8": 1.12,
        "width 2, int4": 1.25,
        "width 2, ternary": 1.25,
    }
    targets = {row["contender"]: (row["target_ratio_to_limit"], row["target_met"]) for row in rows()}
    assert targets["width 2, ring"] == (1.06, False)
    assert targets["ddp"] == (None, None)
    people, cells = compared()
    for cluster, target in (
        (Cluster(nodes=4, link=Link(rate=1e9)), 1.15),
        (Cluster(nodes=4, link=Link(rate=200e6, latency=1e-3)), None),
        (Cluster(nodes=4, link=Link(rate=200e6), slow_nodes={0: 100e6}), None),
        (Cluster(nodes=3, link=Link(rate=300e6)), 1.06),
    ):
        assert iteration_times.summarize(people, cells, cluster, NBYTES)[3]["target_ratio_to_limit"] == target
    quick = [cell(one.contender, one.index, WIRE * 1.05) for one in cells if one.contender.startswith("width")]
    local = [cell("local", index, 0.1) for index in range(3)]
    met = iteration_times.summarize(made("local", "width 2, ring"), [*quick, *local], CLUSTER, NBYTES)
    assert met[1]["target_met"] is True


def test_servers_are_compared_with_width_2_and_with_the_formulas() -> None:
    _, cells = compared()
    pairs = iteration_times.against_servers(rows(), cells)
    assert [(pair["server"], pair["width_2"]) for pair in pairs] == [
        ("ps-sync", "width 2, ring"),
        ("ps-sync", "width 2, native"),
    ]
    assert pairs[0]["ratio_to_width_2_median"] == pytest.approx(4.0)
    assert pairs[0]["formula"] == pytest.approx((0.24 + 6 * 7.2 / 25 * HEADERS) / WIRE)


def test_the_table_and_the_notes_show_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    _, cells = compared()
    iteration_times.show(rows(), "a title")
    lines = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert "failed" in lines["ddp fp16"]
    assert "MISSED" in lines["width 2, ring"]
    assert "…" not in "".join(lines.values())  # everything fits
    notes = iteration_times.notes(rows(), cells, CLUSTER)
    assert notes[-2:] == [
        "ddp failed, round 2: rank 2: it broke",
        "ddp fp16 failed, round 0: rank 2: it broke; round 1: rank 2: it broke; round 2: rank 2: it broke",
    ]


def test_the_figure_shows_a_stacked_bar_for_everybody_who_got_through() -> None:
    axes = iteration_times.plot(rows(), Figure().subplots(), "mlp, 4 nodes")
    names = [row["contender"] for row in rows()]
    computed, exposed = axes.containers[0], axes.containers[1]
    assert [bar.get_width() for bar in computed] == pytest.approx([110.0] * 5)
    assert [bar.get_width() for bar in exposed] == pytest.approx([1e3 * row["exposed_median_s"] for row in rows()[:5]])
    assert [bar.get_x() for bar in exposed] == pytest.approx([110.0] * 5)
    colours = [bar.get_facecolor() for bar in computed]
    assert colours[3] == colours[4]
    assert len(set(colours)) == 4
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    texts = {text.get_text(): text.xy for text in axes.texts}
    assert texts["failed"] == (0, names.index("ddp fp16"))
    assert texts["900.0, 1 failed"][1] == names.index("ddp")
    (limit,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert limit.get_xdata()[0] == pytest.approx(1e3 * WIRE)
    assert (axes.get_title(), axes.get_xlabel()) == ("mlp, 4 nodes", "time of an iteration, median (ms)")


# Accuracy


def accurate() -> list[dict[str, Any]]:
    points = {
        "ddp": [[[10.0, 0.7], [20.0, 0.85]], [[4.0, 0.7], [6.0, 0.9], [20.0, 0.7]], [[10.0, 0.7], [40.0, 0.8]]],
        "local": [[[1.0, 0.9]], [[1.0, 0.7]], []],
    }
    cells = [cell(name, i, 0.5, points=some) for name, curves in points.items() for i, some in enumerate(curves)]
    cells[-1] = failed("local", 2)
    return accuracies.summarize(made("ddp", "local"), cells[::-1], target=0.8)


def test_time_to_accuracy_is_interpolated_between_evaluations_or_not_known() -> None:
    found = [(row["contender"], row["seed"], row["seconds_to_target"]) for row in accurate()]
    assert found[0] == ("ddp", 0, pytest.approx(10 + 10 * 0.1 / 0.15))
    assert found[1:] == [
        ("ddp", 1, pytest.approx(5.0)),
        ("ddp", 2, 40.0),
        ("local", 0, None),  # above it when it was first evaluated: nobody knows since when
        ("local", 1, None),
        ("local", 2, None),
    ]
    assert accuracies.seconds_to(0.75, [[10, 0.8], [20, 0.7], [30, 0.9]]) is None, "crossed before anybody looked"
    assert [row["final_accuracy"] for row in accurate()] == [0.85, 0.7, 0.8, 0.9, 0.7, None]


def test_a_median_over_seeds_needs_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    ddp, local = accuracies.medians(accurate())
    assert (ddp["seconds_to_target_median"], ddp["reached"], ddp["final_accuracy_median"]) == (
        pytest.approx(16 + 2 / 3),
        3,
        0.8,
    )
    assert (local["seconds_to_target_median"], local["reached"]) == (None, 0)
    accuracies.show(accurate(), "a title")
    line = capsys.readouterr().out.splitlines()[-2]
    assert [text.strip() for text in line.split("│")[2:4]] == ["not seen, not seen, failed", "0 of 3 seen"]
    assert accuracies.notes(accurate())[-1] == "local, seed 2 failed: rank 2: it broke"


def test_the_figure_has_a_colour_for_every_contender_and_a_line_for_every_seed() -> None:
    axes = accuracies.plot(accurate(), Figure().subplots(), "a title")
    *curves, target = axes.lines
    assert [list(line.get_xdata()) for line in curves] == [[10, 20], [4, 6, 20], [10, 40], [1], [1], []]
    assert list(curves[0].get_ydata()) == pytest.approx([70, 85])
    assert target.get_ydata()[0] == 80
    assert [curves[i].get_color() == curves[0].get_color() for i in range(6)] == [True] * 3 + [False] * 3
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["DDP: 16.7 s", "no network at all"]
    assert axes.get_legend().get_title().get_text() == "median seconds to 80 %"


def test_runs_that_were_evaluated_once_are_bars_that_end_at_their_seconds() -> None:
    cells = [cell(name, 0, 0.5, points=[[at, 0.85]]) for name, at in (("ddp", 40.0), ("local", 10.0))]
    axes = accuracies.plot(
        accuracies.summarize(made("ddp", "local"), cells, target=0.8), Figure().subplots(), "a title"
    )
    assert [bar.get_width() for bar in axes.patches] == [40.0, 10.0]
    assert [text.get_text() for text in axes.texts] == ["40 s, 85.00 %", "10 s, 85.00 %"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["DDP", "no network at all"]


# A real run


def run_compare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_module("experiments.compare", *DIGITS, "--output", "out", *words, folder=folder)


def test_a_real_comparison_measures_keeps_its_cells_and_says_what_failed(tmp_path: Path) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    words = ["--contenders", "width 2, ring", "--contender", "diverging=--strategy local --lr 1e15"]
    done = run_compare(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    by_name = {row["contender"]: row for row in load(tmp_path / "out" / "compare_digits_2x200mbit.csv")}
    assert list(by_name) == ["width 2, ring", "diverging"]
    ring, diverging = by_name.values()
    assert ring["iteration_median_s"] > 0
    assert ring["wire_bytes"] >= 4 * (64 * 64 + 64 + 64 * 10 + 10)  # 2 (p-1)/p of the buffer is all of it
    assert diverging["iteration_median_s"] is None
    assert "holds a NaN or an infinity" in diverging["failures"]
    manifest = json.loads((tmp_path / "out" / "compare_digits_2x200mbit.manifest.json").read_text())
    assert [link["rate"] < 200e6 for link in manifest["links_measured"]] == [True, True]
    assert (tmp_path / "out" / "compare_digits_2x200mbit.png").stat().st_size > 0
    # Only the cells and their logs are kept; the second time, nothing is run.
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert sorted(path.suffix for path in kept) == [".json"] * 3 + [".log"] * 2
    again = run_compare(tmp_path, *words)
    assert again.returncode == 0
    assert again.stdout.startswith("2 of 2 cells are there from before, 1 failed; ")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_a_real_time_to_accuracy(tmp_path: Path) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    done = run_compare(tmp_path, "--time-to-accuracy", "0.2", "--epochs", "2", "--contenders", "local")
    assert done.returncode == 0, done.stderr
    (row,) = load(tmp_path / "out" / "accuracy_digits_2x200mbit.json")
    times, reached = zip(*row["seconds_and_accuracy"], strict=True)
    assert len(times) >= EVALUATIONS
    assert 0 < times[0] < times[-1] == row["final_seconds"]
    assert list(times) == sorted(times)
    assert row["final_accuracy"] == reached[-1] > 0.2
    assert row["seconds_to_target"] is None or times[0] < row["seconds_to_target"] < times[-1]
