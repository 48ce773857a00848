"""Runs next to each other: after equally many samples, whatever their lengths, numbers of ranks and options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from _reports import Page, line, write_run
from _runs import SHORT, succeed

from pipesgd.errors import UserInputError
from pipesgd.report import commands
from pipesgd.report.charts import WIDTHS
from pipesgd.report.compare import MOST_RUNS, Comparison, compare, comparison_page, lines
from pipesgd.report.folder import read_run

CHANCE = "Each is one run: other seeds show whether a difference is more than chance."
LENGTHS = "Lengths differ: below the ends they are compared after as many samples as the shortest run has trained on."


def run(folder: Path, iterations: int, seconds: float = 0.5, ranks: int = 2, **options: object) -> Path:
    """Write a run whose iteration t has loss 1000 - t and 32 samples a rank."""
    of_iteration = {"iteration": seconds, "loading": 0.0, "compute": seconds, "communication": 0.1, "exposed": 0.0}
    written = [
        line(
            index,
            loss=1000.0 - index,
            seconds=of_iteration | {"update": 0.0},
            samples_per_second=32 * ranks / seconds,
        )
        for index in range(iterations)
    ]
    write_run(folder, written, **options)
    described = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(described | {"world_size": ranks}))
    return folder


def compared(*folders: Path) -> Comparison:
    return compare([read_run(folder) for folder in folders])


def part(comparison: Comparison, title: str) -> dict[str, list[str]]:
    [found] = [dict(one.rows) for one in comparison.parts if one.title == title]
    return found


def test_runs_of_other_lengths_are_compared_after_equal_samples(tmp_path: Path) -> None:
    found = compared(run(tmp_path / "a", 100), run(tmp_path / "b", 50, seconds=0.25))
    assert part(found, "After the same 3,200 samples") == {
        "iterations": ["50", "50"],
        "training time": ["25.0 s", "12.5 s"],
        "as fast as the first": ["1.00x", "2.00x"],
        "loss": ["953", "953"],  # of iterations 45 to 49: the last tenth of the samples
    }
    assert part(found, "At the end")["iterations"] == ["100", "50"]
    assert LENGTHS in found.notes
    assert CHANCE in found.notes


def test_runs_of_other_numbers_of_ranks_are_compared_after_equal_samples(tmp_path: Path) -> None:
    found = compared(run(tmp_path / "a", 100), run(tmp_path / "b", 50, ranks=4))
    assert part(found, "After the same 6,400 samples")["iterations"] == ["100", "50"]
    assert part(found, "After the same 6,400 samples")["as fast as the first"] == ["1.00x", "2.00x"]
    assert part(found, "At the end")["ranks"] == ["2", "4"]
    assert LENGTHS not in found.notes
    assert [note for note in found.notes if note.startswith("Numbers of ranks differ")]


def test_a_schedule_over_other_lengths_is_told(tmp_path: Path) -> None:
    def told(schedule: str, iterations: int) -> bool:
        folders = [run(tmp_path / name, number, schedule=schedule) for name, number in (("a", 20), ("b", iterations))]
        return any(note.startswith("The learning rate follows a schedule") for note in compared(*folders).notes)

    assert told("cosine", 10)
    assert not told("constant", 10)
    assert not told("cosine", 20)


def test_options_and_versions_that_differ_are_told_and_no_others(tmp_path: Path) -> None:
    folders = [run(tmp_path / name, 10, codec=codec, output=name) for name, codec in (("a", "fp32"), ("b", "int8"))]
    for folder, torch in zip(folders, ("2.12", "2.13"), strict=True):
        (folder / "summary.json").write_text(json.dumps({"versions": {"torch": torch, "numpy": "2"}}))
    found = compared(*folders)
    assert part(found, "Options that differ") == {"--codec": ["fp32", "int8"]}
    assert part(found, "Versions that differ") == {"torch": ["2.12", "2.13"]}


@pytest.mark.parametrize("name", ["dataset", "loss"])
def test_other_tasks_are_not_compared(tmp_path: Path, name: str) -> None:
    found = compared(run(tmp_path / "a", 10), run(tmp_path / "b", 10, **{name: "own:other"}))
    assert [one.title for one in found.parts] == ["At the end", "Options that differ"]
    assert found.notes[0].startswith(f"They do not learn the same (--{name})")
    assert CHANCE not in found.notes
    assert "svg" not in [element for element, _ in Page(comparison_page(found)).elements]


def test_a_run_without_iterations_or_with_losses_that_are_not_finite_is_compared(tmp_path: Path) -> None:
    lost = write_run(tmp_path / "lost", [line(index, loss=None) for index in range(10)])
    found = compared(run(tmp_path / "a", 10), lost)
    assert part(found, "After the same 640 samples")["loss"] == ["991", "not finite"]
    found = compared(run(tmp_path / "a", 10), write_run(tmp_path / "none"))
    assert part(found, "At the end")["training time"] == ["5.00 s", "-"]
    assert not [one.title for one in found.parts if one.title.startswith("After")]
    assert "Runs that have not finished have no evaluation at their end." in found.notes
    assert "svg" in [element for element, _ in Page(comparison_page(found)).elements]


def test_columns_are_aligned_and_named_by_where_folders_differ(tmp_path: Path) -> None:
    said = lines(compared(run(tmp_path / "x" / "run", 100), run(tmp_path / "longer name" / "run", 50)))
    head, _, title, *rows = said.splitlines()
    assert head.split() == ["x/run", "longer", "name/run"]
    assert title == "At the end:"
    starts = {row.index("not finished") for row in rows if row.startswith("state")}
    assert starts == {head.index("x/run")}
    assert not [row for row in said.splitlines() if row != row.rstrip()]


def test_every_run_has_a_curve_over_samples_and_over_time(tmp_path: Path) -> None:
    folders = [run(tmp_path / f"run{index}", 5 + index) for index in range(MOST_RUNS)]
    page = Page(comparison_page(compared(*folders)))
    drawn = [attributes["class"] for element, attributes in page.elements if element == "path"]
    assert sorted(drawn) == sorted([f"curve c{index}" for index in range(MOST_RUNS)] * 2 * len(WIDTHS))
    assert not re.search(r"https?:|src=", comparison_page(compared(*folders)))


def test_too_few_and_too_many_are_refused(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", 1)
    for number in (1, MOST_RUNS + 1):
        with pytest.raises(UserInputError, match=rf"^runs must be 2 to 5 folders; got {number}$"):
            compared(*[folder] * number)


def test_the_command_prints_it_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(run(tmp_path / "a", 10)), str(run(tmp_path / "b", 10))]
    before = sorted(tmp_path.rglob("*"))
    assert commands.compare(["compare", *words], program="pipesgd") == 0
    said = capsys.readouterr().out
    assert said == lines(compared(*map(Path, words))) + "\n"
    assert sorted(tmp_path.rglob("*")) == before
    assert commands.compare(["compare", *words, "--output", str(tmp_path / "page.html")], program="pipesgd") == 0
    assert capsys.readouterr().out == f"{said}wrote {tmp_path}/page.html\n"
    assert Page((tmp_path / "page.html").read_text()).texts.count("a") > 1
    for wrong, told in {
        (words[0],): "runs must be 2 to 5 folders; got 1",
        (
            words[0],
            f"{tmp_path}/c",
        ): f"run must be a folder that pipesgd.train has written; got {tmp_path}/c, which is no folder",
        (
            *words,
            "--output",
            str(tmp_path),
        ): f"output must be a file of HTML, such as {tmp_path.name}.html; got {tmp_path.name!r}",
    }.items():
        assert commands.compare(["compare", *wrong], program="pipesgd") == 2
        assert capsys.readouterr().err == f"error: {told}\n"


@pytest.mark.slow
def test_real_runs_are_compared(tmp_path: Path) -> None:
    one = succeed(2, f"{SHORT} --width 2 --codec int8", tmp_path / "late")
    other = succeed(2, f"{SHORT} --strategy ddp".replace("--iterations 12", "--iterations 8"), tmp_path / "ddp")
    found = compared(tmp_path / "late", tmp_path / "ddp")
    accuracies = [f"{run['final']['test_accuracy']:.2%}" for run in (one, other)]
    assert part(found, "At the end")["test accuracy"] == accuracies
    assert part(found, "At the end")["samples"] == ["384", "256"]
    assert part(found, "After the same 256 samples")["iterations"] == ["8", "8"]
    assert part(found, "Options that differ")["--strategy"] == ["pipelined", "ddp"]
    assert "Versions that differ" not in [one.title for one in found.parts]
