"""Accuracy of late and coded gradients: which runs are made, verdicts, the table, the figure, and the models."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _kept_runs import check_refused, make_runs, ran
from _ranks import run_module
from matplotlib.figure import Figure
from torch import nn

from experiments import accuracy, accuracy_models, command
from experiments.accuracy import FIGURE, NOT_RUN, main, message, parse, plot, tabulate
from experiments.accuracy_methods import LATE, LOW_RANK, METHODS, SYNCHRONOUS, TRAINED, WAYS, WORKLOADS, named
from experiments.accuracy_models import (
    WORDS,
    adapted_transformer,
    batch_norm_convnet,
    encoded,
    learned_merges,
    tied_transformer,
)
from experiments.accuracy_runs import (
    LONG,
    MORE_SEEDS,
    MOST_TRIED,
    RATE_SEEDS,
    SEARCHED,
    SEEDS,
    Cell,
    Difference,
    Planned,
    interval,
    lowered,
    methods_of,
    plan,
    searched,
)
from experiments.results import RESULTS, Row, load
from experiments.simulated_runs import Run
from pipesgd.cli import parse as parse_training
from pipesgd.errors import UserInputError
from pipesgd.planning.accuracy import MEASURED
from pipesgd.reducers.powersgd import PowerSgd
from timing_model.alternatives import LARGER_RANK_COST, LOW_RANK_COST

pytestmark = pytest.mark.slow

TEXT, IMAGES = "transformer, bytes", "convnet, batch norm"
LENGTHS = (*SEARCHED, LONG)


def power_of(one: Planned) -> int:
    return round(torch.tensor(one.lr / WORKLOADS[one.workload].lr).log2().item())


def finished(
    loss_of: Callable[[Planned], float | None], lengths: Sequence[int] = (200,), workload: str = TEXT
) -> dict[str, Run]:
    """Return all runs that are made where each comes to this loss, or accuracy, or diverges."""
    runs: dict[str, Run] = {}
    while missing := [one for one in plan([workload], lengths, SEEDS, runs) if one.words not in runs]:
        for one in missing:
            value = loss_of(one)
            runs[one.words] = ran(value) if value is None or workload == IMAGES else ran(0.5, value)
    return runs


def rows(loss_of: Callable[[Planned], float | None], **options: Any) -> dict[str, Row]:
    """Return the rows at 200 iterations, or at the last of the ``lengths``, by method, without those not run."""
    workload = options.get("workload", TEXT)
    found = tabulate([workload], options.get("lengths", [200])[-1:], SEEDS, finished(loss_of, **options))
    return {row["method"]: row for row in found if row["verdict"] != NOT_RUN}


def bowl(one: Planned) -> float:
    """Return a loss with its least value at the workload's rate."""
    return 2.0 + 0.1 * power_of(one) ** 2


# ---- Runs


def test_every_run_is_one_that_pipesgd_makes_with_the_defaults_of_width_2() -> None:
    planned = plan(TRAINED, LENGTHS, SEEDS, {}, most=True)
    assert len({one.words for one in planned}) == len(planned)
    assert {one.workload for one in planned} == set(TRAINED)
    for one in planned[::23]:
        config = parse_training(one.words.split())
        assert (config.optimization.lr, config.optimization.iterations) == (one.lr, one.iterations)
        assert config.optimization.lr_warmup == one.iterations / 10
        assert config.pipeline.width == (2 if one.method.startswith("width 2") else 1)
        assert (config.updates.synchronous_start, config.updates.prediction) == ("auto", "eager")
        assert (config.compression.codec == "powersgd") == ("low rank" in one.method)


def test_what_answers_most_comes_first() -> None:
    planned = plan(TRAINED, LENGTHS, SEEDS, {}, most=True)
    assert [power_of(one) for one in planned[:6]] == [-1, -1, 0, 0, 1, 1]
    assert {one.seed for one in planned[:18]} == set(RATE_SEEDS), "rates, of three methods"
    lengths = [one.iterations for one in planned]
    assert lengths.index(LONG) > max(at for at, length in enumerate(lengths) if length in SEARCHED)
    assert {one.method for one in planned if one.iterations == LONG} == {m for m in METHODS if METHODS[m].long}


def test_the_whole_takes_no_more_than_a_working_day_of_two_cores() -> None:
    planned = plan(TRAINED, LENGTHS, SEEDS, {}, most=True)
    assert sum(one.work for one in planned) / 2 <= 8 * 3600


@pytest.mark.parametrize(("best", "inside"), [(0, True), (2, True), (-3, True), (9, False), (-9, False)])
def test_a_rate_is_the_best_of_those_around_it(best: int, inside: bool) -> None:
    cell, runs = Cell(TEXT, 200), dict[str, Run]()
    while True:
        planned, found, is_inside = searched(cell, SYNCHRONOUS, runs)
        if found is not None:
            break
        runs |= {one.words: ran(0.5, 2.0 + 0.1 * abs(power_of(one) - best)) for one in planned}
    tried = {power_of(one) for one in planned}
    assert is_inside == inside
    if inside:
        assert found == best
        assert {best - 1, best + 1} <= tried
    else:
        assert found in (min(tried), max(tried))
        assert len(tried) == MOST_TRIED


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ((LOW_RANK, "compress low rank"), LOW_RANK_COST),
        (("compress low rank, rank 16, dense start of a quarter",), LARGER_RANK_COST),
    ],
)
def test_the_planner_says_what_low_rank_costs(methods: tuple[str, ...], said: int) -> None:
    costs = [
        row["cost"]
        for row in load(RESULTS / "accuracy.csv")
        if row["method"] in methods and row["iterations"] == 600 and row["workload"].startswith("transformer, b")
    ]
    assert len(costs) == 2 * len(methods)
    assert math.ceil(max(costs)) == said


@pytest.mark.parametrize(("also", "expected"), [(None, 1), (-2, -2), (1, 1)])
def test_a_search_also_looks_where_another_method_is_best(also: int | None, expected: int) -> None:
    """Low rank after 200 iterations on bytes is nearly as bad at four times the best rate, and worse in between."""
    cell, runs, found = Cell(TEXT, 200), dict[str, Run](), None
    worse = {-3: 2.9, -2: 2.5, -1: 2.7, 0: 2.65, 1: 2.6, 2: 2.7}
    while found is None:
        planned, found, is_inside = searched(cell, LOW_RANK, runs, also)
        runs |= {one.words: ran(0.5, worse[power_of(one)]) for one in planned}
    assert (found, is_inside) == (expected, True)
    assert {found - 1, found + 1} <= {power_of(one) for one in planned}


def test_a_rate_at_which_a_seed_diverges_is_not_the_best() -> None:
    runs = finished(lambda one: None if (power_of(one), one.seed) == (0, 101) else bowl(one))
    _, best, _ = searched(Cell(TEXT, 200), SYNCHRONOUS, runs)
    assert best == -1


def test_codecs_take_the_rate_of_their_width_and_low_rank_has_its_own() -> None:
    best = {SYNCHRONOUS: 1, LATE: -1, LOW_RANK: -2}
    found = rows(lambda one: 2.0 + 0.1 * abs(power_of(one) - best[METHODS[one.method].rate_of]))
    powers = {name: row["lr"] / WORKLOADS[TEXT].lr for name, row in found.items()}
    assert powers == {name: 2.0 ** best[METHODS[name].rate_of] for name in METHODS}


def test_no_rate_is_above_the_highest_at_which_synchronous_seeds_stay_together() -> None:
    """Other methods whose best is below it keep theirs."""

    def loss_of(one: Planned) -> float:
        best = {SYNCHRONOUS: 1, LATE: 3, LOW_RANK: -1}[named(one.method).rate_of]
        spread = 0.08 * one.seed if one.method == SYNCHRONOUS and one.seed in SEEDS and power_of(one) >= 1 else 0.0
        return 2.0 + 0.1 * abs(power_of(one) - best) + spread

    found = rows(loss_of)
    lr = WORKLOADS[TEXT].lr
    assert (found[SYNCHRONOUS]["lr"], found[LATE]["lr"], found[LOW_RANK]["lr"]) == (lr, lr, lr / 2)
    assert [found[name]["lr_halved"] for name in (SYNCHRONOUS, LATE, LOW_RANK)] == [1, 3, 0]


def test_rates_are_halved_for_all_where_synchronous_seeds_spread() -> None:
    def loss_of(one: Planned) -> float:
        spread = 0.08 * one.seed if one.seed in SEEDS and power_of(one) >= 0 else 0.0
        return bowl(one) + spread

    found = rows(loss_of)
    assert {row["lr"] for row in found.values()} == {WORKLOADS[TEXT].lr / 2}
    assert {row["lr_halved"] for row in found.values()} == {1}
    _, times = lowered(Cell(TEXT, 200), 0, SEEDS, finished(bowl))
    assert times == 0


def test_the_longest_training_has_the_rates_of_600_iterations() -> None:
    found = finished(lambda one: 2.0 + 0.1 * abs(power_of(one) - (one.iterations == 600)), lengths=LENGTHS)
    of_long = [row for row in tabulate([TEXT], [LONG], SEEDS, found) if row["verdict"] != NOT_RUN]
    assert {row["method"] for row in of_long} == {name for name in METHODS if METHODS[name].long}
    assert {row["lr"] for row in of_long} == {2 * WORKLOADS[TEXT].lr}


def test_both_sides_of_an_open_difference_get_more_seeds() -> None:
    noise = (0.03, -0.03, 0.02, -0.02, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0)

    def loss_of(one: Planned) -> float:
        return bowl(one) * (1 + noise[one.seed] if one.method == "width 2, int4" and one.seed < 10 else 1)

    runs = finished(loss_of)
    more = [one for one in plan([TEXT], [200], SEEDS, runs) if one.seed in MORE_SEEDS]
    assert {one.method for one in more} == {SYNCHRONOUS, "width 2, int4"}
    row = {row["method"]: row for row in tabulate([TEXT], [200], SEEDS, runs)}
    assert {name: row[name]["seeds"] for name in ("width 2, int4", LATE)} == {"width 2, int4": 10, LATE: 5}
    assert row["width 2, int4"]["verdict"] == "met"
    partly = {one.words: runs[one.words] for one in plan([TEXT], [200], SEEDS, runs) if one.seed != 9}
    row = {row["method"]: row for row in tabulate([TEXT], [200], SEEDS, partly)}
    assert row["width 2, int4"]["verdict"] == "unresolved at 5 seeds", "nine would be as many as are lucky"


@pytest.mark.parametrize("lengths", [[200], [600, LONG]])
def test_other_ways_are_tried_where_a_method_misses_its_bound_and_nowhere_else(lengths: list[int]) -> None:
    def loss_of(one: Planned) -> float:
        return bowl(one) * {"compress int4": 1.02, "compress int4, blocks of 32": 1.004}.get(one.method, 1.0)

    found = rows(loss_of, lengths=lengths)
    ways = {name: row for name, row in found.items() if name in WAYS}
    assert list(ways) == [name for name, way in WAYS.items() if way.way_of == "compress int4"]
    assert len(ways) == 3
    assert found["compress int4"]["verdict"] == "missed"
    assert ways["compress int4, blocks of 32"]["verdict"] == "met"
    assert ways["compress int4, blocks of 32"]["cost"] == pytest.approx(0.4)
    assert {row["seeds"] for row in ways.values()} == {5}
    assert set(rows(bowl, lengths=lengths)) == {name for name in METHODS if lengths == [200] or METHODS[name].long}


def test_every_way_is_a_run_that_differs_from_its_method() -> None:
    for iterations in SEARCHED:
        cell = Cell(TEXT, iterations)
        for name, way in WAYS.items():
            own, base = (parse_training(cell.run(one, 0, 0).words.split()) for one in (name, way.way_of))
            assert own != base
            assert own.pipeline.width == base.pipeline.width
    assert parse_training(cell.run(f"{LATE}, start of a half", 0, 0).words.split()).updates.synchronous_start == 300


# ---- Verdicts


@pytest.mark.parametrize(
    ("mean", "high", "verdict"),
    [
        (0.5, 1.9, "met"),
        (-3.0, -1.0, "met"),
        (1.0, 2.0, "met"),
        (0.5, 2.1, "unresolved at 5 seeds"),
        (1.1, 1.2, "missed"),
        (float("inf"), float("inf"), "missed"),
    ],
)
def test_a_verdict_needs_the_mean_and_the_interval(mean: float, high: float, verdict: str) -> None:
    assert Difference(seeds=SEEDS, mean=mean, low=2 * mean - high, high=high, bound=1.0).verdict == verdict


def test_intervals_are_students() -> None:
    """The quantile for 4 degrees of freedom is 2.776, the deviation of 1 to 5 the root of 2.5."""
    mean, low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, high - 3.0) == (3.0, pytest.approx(2.776 * 0.5**0.5))
    assert low == pytest.approx(6.0 - high)


def test_differences_are_paired_by_seed() -> None:
    """Seeds that differ by far more than the methods do not widen the interval."""
    found = rows(lambda one: bowl(one) * (1 + 0.005 * (one.seed % 5)) * (1.004 if one.method == LATE else 1.0))
    assert found[LATE]["cost"] == pytest.approx(0.4)
    assert found[LATE]["cost_high"] == pytest.approx(0.4, abs=1e-4)
    assert (found[LATE]["verdict"], found[LATE]["unit"]) == ("met", "% of the loss")
    assert found[SYNCHRONOUS]["verdict"] == ""
    assert found[SYNCHRONOUS]["spread_percent"] == pytest.approx(2, abs=0.03)


def test_images_are_judged_by_points_of_accuracy() -> None:
    found = rows(lambda one: 0.9 - 0.0025 * ("low" in one.method or one.method == LATE), workload=IMAGES)
    assert found[LATE]["cost"] == pytest.approx(0.25)
    assert {name: found[name]["verdict"] for name in (LATE, LOW_RANK)} == {LATE: "missed", LOW_RANK: "met"}


def test_a_method_that_diverges_has_missed() -> None:
    found = rows(lambda one: None if (one.method, one.seed) == ("width 2, int4", 3) else bowl(one))
    row = found["width 2, int4"]
    assert (row["cost"], row["diverged"], row["verdict"]) == (None, 1, "missed")


def test_a_cell_that_is_not_finished_is_said_to_be_not_run() -> None:
    runs = {words: run for words, run in finished(bowl).items() if "powersgd" not in words}
    found = {row["method"]: row["verdict"] for row in tabulate([TEXT], [200, LONG], SEEDS, runs)[: len(METHODS)]}
    assert {name for name, verdict in found.items() if verdict == NOT_RUN} == {LOW_RANK, "compress low rank"}


# ---- Figure


def test_the_figure_has_a_mean_and_an_interval_for_each_difference() -> None:
    runs = finished(lambda one: bowl(one) * (1.5 if one.method == LATE else 1), lengths=SEARCHED)
    found = tabulate([TEXT], SEARCHED, SEEDS, runs)
    axes = plot(found, Figure().subplots())
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [name for name in METHODS if name != SYNCHRONOUS]
    means = [line.get_xydata()[0] for line in axes.get_lines() if len(line.get_xydata()) == 1]
    assert len(means) == 2 * len(names) - 2
    assert {round(float(x), 6) for x, _ in means} == {0.0}
    assert [text.get_text() for text in axes.texts] == ["+50.0 >", "+50.0 >"], "beyond the axis"


def test_the_figure_leaves_out_what_was_not_run_and_its_message_is_of_all_lengths() -> None:
    costs = {("width 2, int8", 600): 1.01, ("width 2, int8", 200): 1.02, (LOW_RANK, 200): 1.03}
    runs = finished(lambda one: bowl(one) * costs.get((one.method, one.iterations), 1), lengths=SEARCHED)
    found = tabulate([TEXT, "LoRA"], SEARCHED, SEEDS, runs)
    shown = [row for row in found if FIGURE.has(row)]
    assert {row["workload"] for row in shown} == {TEXT}
    assert message(shown).endswith("int8 costs +1.0 to +2.0 (% of loss, or points), low rank up to +3.0")
    assert "costs" not in message([row for row in shown if row["method"] == LOW_RANK])


# ---- Models and data


def test_symbols_are_the_text_and_the_most_frequent_pairs() -> None:
    text = b"the other theme: the then of them\n    then\n    there"
    merges = learned_merges(text, 20)
    assert merges[0] in {(ord("t"), ord("h")), (ord("h"), ord("e"))}
    meant = {number: bytes([number]) for number in range(256)}
    for number, (left, right) in enumerate(merges, start=256):
        meant[number] = meant[left] + meant[right]
    for other in (text, b"another text, with 12 numbers\x00 and \xff"):
        assert b"".join(meant[symbol] for symbol in encoded(other, merges)) == other
        assert b"".join(WORDS.findall(other)) == other
    assert len(encoded(text, merges)) < len(text) / 2


def test_the_library_is_cut_into_windows_of_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_models, "read_text", lambda name: (b"a text to learn from, " * 9, b"another text"))
    accuracy_models._encoded_library.cache_clear()
    train, test = accuracy_models.byte_pairs("260", context=4)
    accuracy_models._encoded_library.cache_clear()
    inputs, labels = train[torch.tensor([0, 1])]
    assert inputs.shape == (2, 4)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert (train.num_classes, len(test) >= 1) == (260, True)
    assert int(inputs.max()) >= 256


SHAPE: dict[str, Any] = {"sample_shape": (8,), "num_classes": 20, "layers": 2, "heads": 2, "embedding": 8}


def test_a_tied_transformer_has_one_table() -> None:
    model = tied_transformer(**SHAPE)
    assert model.output.weight is model.symbols.weight
    assert model(torch.zeros(3, 8, dtype=torch.long)).shape == (3, 8, 20)


def test_factors_are_not_tried_where_all_matrices_are_too_small_for_them() -> None:
    for shape in ((8, 64), (192, 8), (64, 8)):  # those of adapters of rank 8, as in the next test
        assert PowerSgd().rule.matrices(torch.empty(shape)) == []
    assert {LOW_RANK, "compress low rank"} == set(METHODS) - set(methods_of(Cell("LoRA", 200)))
    assert not any("powersgd" in one.words for one in plan(["LoRA"], SEARCHED, SEEDS, {}, most=True))


def test_adapters_alone_are_trained_and_begin_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_models, "BASE_ITERATIONS", 2)
    monkeypatch.setattr(accuracy_models, "read_text", lambda name: (b"# a comment\n" * 100, b""))
    accuracy_models._weights_for_prose.cache_clear()
    shape = SHAPE | {"num_classes": 256}
    torch.manual_seed(1)
    model = adapted_transformer("3", **shape)
    accuracy_models._weights_for_prose.cache_clear()  # as in another process
    torch.manual_seed(2)
    again = adapted_transformer("3", **shape)
    weights = accuracy_models._weights_for_prose(*shape.values())
    accuracy_models._weights_for_prose.cache_clear()
    trained = {name: tuple(one.shape) for name, one in model.named_parameters() if one.requires_grad}
    assert len(trained) == 2 * 2 * SHAPE["layers"]
    assert set(trained.values()) == {(3, 8), (24, 3), (8, 3)}
    base = tied_transformer(**shape)
    base.load_state_dict(weights)
    symbols = torch.randint(256, (2, 8))
    assert torch.equal(model(symbols), base(symbols))
    kept = {name: one for name, one in again.named_parameters() if not one.requires_grad}
    assert all(torch.equal(model.get_parameter(name), one) for name, one in kept.items()), "whatever the seed"


def test_the_convnet_normalises_batches() -> None:
    model = batch_norm_convnet((1, 28, 28), 10)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 3
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


# ---- Command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workloads", "digit"], r"--workloads must be one of .*; got 'digit' \(did you mean digits"),
        (["--lengths", "20", "20"], "--lengths must name each once; got 20 twice"),
        (["--lengths", "200"], "--lengths must be among 20; got 200"),
        (["--seeds", "1"], "--seeds must be from 2 to 5; got 1"),
        (["--output", str(RESULTS)], "--output must name another folder"),
        (["--fresh", "--finished"], "--finished: not allowed with argument --fresh"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: Sequence[str], message: str, tmp_path: Path) -> None:
    check_refused(parse, words, message, tmp_path)


@pytest.mark.parametrize("words", [["--seeds", "3"], ["--workloads", "digits"]])
def test_the_published_table_is_not_made_from_fewer_seeds_or_other_workloads(words: Sequence[str]) -> None:
    with pytest.raises(UserInputError, match=r"--output must name another folder .* with fewer seeds, or with digits"):
        parse([*words, "--output", str(RESULTS / ".." / "results")], by_torchrun=False)


def test_the_published_table_is_that_of_all_also_after_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part must not replace the rows of the others, neither in the results nor in what runs speak of."""
    shutil.copy(RESULTS / "accuracy.runs.json", tmp_path)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(accuracy, "MEASURED", tmp_path / "measured.json")
    make_runs(main, ["--workloads", "LoRA", "--lengths", "200", "--finished", "--output", str(tmp_path)])
    assert load(tmp_path / "accuracy.csv") == load(RESULTS / "accuracy.csv")
    assert (tmp_path / "measured.json").read_bytes() == MEASURED.read_bytes()


def test_runs_are_made_kept_and_written(tmp_path: Path) -> None:
    words = ["--quick", "--workloads", "digits", "--processes", "1", "--output", str(tmp_path)]
    make_runs(main, words)
    done = run_module("experiments.accuracy", *words)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "0 runs take about" in done.stdout
    table = load(tmp_path / "accuracy.csv")
    assert [row["method"] for row in table] == list(METHODS)
    assert {row["seeds"] for row in table} == {2}
    assert NOT_RUN not in {row["verdict"] for row in table}
    assert (tmp_path / "accuracy.png").stat().st_size > 0
    empty = run_module("experiments.accuracy", *words, "--finished", "--output", str(tmp_path / "empty"))
    assert empty.returncode == 2
    assert "there is none yet" in empty.stderr
