"""README and documentation hold no figures except those quoted from result files and code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.figures import manifest
from experiments.quotes import BLOCKS, PAGES, QUOTE, WITHIN, answered, requoted, table, value, written
from experiments.results import RESULTS, Row, load
from experiments.tutorial import steps
from pipesgd.errors import UserInputError
from timing_model.cli import main as main_of_timing_model

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^    .*$", re.MULTILINE)
"""Code and commands of a page, except fences marked as text, which are output."""
CODE = re.compile(r"`[^`\n]+`")
DECLARED = re.compile(r"<!-- constants: (.*?) -->", re.DOTALL)
FIGURE = re.compile(
    r"(?<![\w.,/-])[-+]?\d[\d.,]*\s?(?:%|(?:ns|us|ms|s|min|seconds?|minutes?|hours?|x|times|points|kB|MB|GB|KiB|MiB|GiB)\b)"
)
"""Numbers with a unit in which results are given."""
ROWS: list[Row] = [
    {"system": "ddp", "rate": 1, "iteration_s": 0.5, "why": None},
    {"system": "ddp", "rate": 2, "iteration_s": 0.25, "why": None},
    {"system": "int4", "rate": 1, "iteration_s": 0.1, "why": None},
    {"system": "int4", "rate": 2, "iteration_s": None, "why": "not | run"},
]


@pages
def test_quotes_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert requoted(text) == text, "python -m experiments.quotes writes them"


@pages
def test_every_quote_of_a_page_is_one_that_is_read(page: Path) -> None:
    """A quote without its end, or with a kind that does not exist, would never be compared."""
    text = page.read_text(encoding="utf-8")
    kinds = "|".join(["quote", "value", *BLOCKS, *WITHIN])
    assert not re.search(rf"<!-- (?:/|(?:{kinds}):)", QUOTE.sub("", text))
    # A comment at the beginning of a line begins a block of HTML, in which Markdown is not read.
    assert not re.search(r"^<!-- value:", text, re.MULTILINE)
    # A bar in a comment would end a cell of a table that is not quoted as a whole.
    tables = re.sub(r"<!-- table:.*?-->", "", text, flags=re.DOTALL)
    assert not re.search(r"^\|.*<!-- value:[^>]*\|", tables, re.MULTILINE)


@pages
def test_text_on_an_archived_result_names_the_commit(page: Path) -> None:
    for quote in QUOTE.finditer(page.read_text(encoding="utf-8")):
        if quote["kind"] == "archived":
            assert f"`{manifest(quote['words'])['git']['commit'][:7]}`" in quote["text"]


@pages
def test_there_is_no_figure_outside_of_quotes(page: Path) -> None:
    """Figures that a comment in the page declares to be constants (settings, thresholds of the code) are allowed."""
    text = page.read_text(encoding="utf-8")
    declared = {figure for comment in DECLARED.findall(text) for figure in FIGURE.findall(comment)}
    text = FENCE.sub(lambda fence: fence[2] if fence[1] == "text" else "", QUOTE.sub("", text))
    for pattern in (DECLARED, INDENTED, CODE):
        text = pattern.sub("", text)
    figures = set(FIGURE.findall(text))
    assert figures - declared == set()
    assert declared - figures == set(), "declared, but not there"


def test_the_tutorials_outputs_are_those_of_its_commands() -> None:
    ran = [(row["step"], "\n".join(row["commands"])) for row in load(RESULTS / "tutorial.json")]
    written_ = [(title, commands.rstrip()) for title, commands in steps()]
    assert ran == written_, "python -m experiments.tutorial runs them"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("system=int4 rate=1 iteration_s 1e3 .0f", "100"),
        ("rate=1 iteration_s most .1f", "0.5"),
        ("rate>=2 count", "2"),
        ("system=ddp|int4 rate<=1 iteration_s mean .2f", "0.30"),
        ("system~t4 rate=2 iteration_s", None),
        ("system~t4 rate=2 iteration_s or why", "not | run"),
        ("rate=2 system=int4 iteration_s or not reached", "not reached"),
        ("rate=3 iteration_s or not reached", None),
        ("system=ddp rate=1 iteration_s / system=int4 .1f", "5.0"),
        ("system=int4 rate=1 iteration_s - system=ddp absolute 1e3 .0f", "400"),
        ("rate=1 system each", "ddp, int4"),
        ("iteration_s first", "0.5"),
    ],
)
def test_a_value_is_a_figure_of_the_rows_that_its_conditions_leave(words: str, text: str | None) -> None:
    assert value(words.split(), ROWS) == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("iteration_s .1f", "a quoted value must be one; got 0.5, 0.2, 0.1"),
        ("speed=1 iteration_s", "a condition of a quote must be on a column of its result; got speed=1"),
    ],
)
def test_a_value_of_several_rows_or_of_an_unknown_column_is_refused(words: str, message: str) -> None:
    with pytest.raises(UserInputError, match=f"^{re.escape(message)}$"):
        value(words.split(), ROWS)


def test_figures_are_changed_in_turn() -> None:
    assert written([-1.0, 3.0], ["absolute", "mean", "100", ".0f"]) == "200"
    assert written([1.0, 2.0, 3.0], ["median", "p95"]) == "2.0"


def test_a_table_has_a_line_for_every_group_and_no_cell_without_its_figures(tmp_path: Path) -> None:
    (tmp_path / "times.csv").write_text(
        "system,rate,iteration_s,why\nddp,1,0.5,\nddp,2,0.25,\nint4,1,0.1,\nint4,2,,not | run\n"
    )
    cells = "{rate=1 iteration_s 1e3 .0f}[[, {rate=2 iteration_s 1e3 .0f}]] | {rate=2 iteration_s 1e3 .0f} ms"
    made = table(f"times by system\n| | ms at {{rate=1 rate first}} | at 2 |\n| {{system}} | {cells} |", tmp_path)
    assert made.splitlines() == [
        "|  | ms at 1 | at 2 |",
        "|---|---|---|",
        "| ddp | 500, 250 | 250 ms |",
        "| int4 | 100 |  |",
    ]
    lines = "| {system=ddp}DDP |\n| {system=int4}ours | {rate=1 iteration_s} |"
    made = table(f"times\n| | s |\n{lines}", tmp_path)
    assert made.splitlines()[2:] == ["| DDP | 0.5 |", "| ours | 0.1 |"]
    assert table("times by why\n| what | why |\n| {system} | {why} |", tmp_path).splitlines()[2:] == [
        "| int4 | not \\| run |"
    ]


def test_cells_behind_a_question_are_what_the_planner_answers(capsys: pytest.CaptureFixture[str]) -> None:
    question = "timing-model plan --latency 100us --bandwidth 95Mbit/s --world-size 2 --compute 1s --model resnet50"
    head = "| case | question | DDP | no gradient late | choice |\n|---|---|---|---|---|\n"
    made = answered(f"{head}| home | `{question}` | 1 s | 2 s |\n\n")
    assert made == (
        f"{head}| home | `{question}` | 9.35 s | 1.54 s, 6.1x: int4, 16 buckets | 1.16 s, 8.0x: int4, width 2 |\n\n"
    )
    assert main_of_timing_model(question.split()[1:]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^ +ddp, no codec +9.35 s", said, re.MULTILINE)
    assert re.search(r"^ +synchronous, int4, ring, buckets 16 +1.54 s", said, re.MULTILINE)
    assert re.search(r"^\* +pipelined, width 2, int4, ring +1.16 s", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- number: one -->1<!-- /number -->", "a quote must be one of value, "),
        ("<!-- value: nothing {one} -->1<!-- /value -->", "a quote must name a table in results/; got nothing"),
        ("<!-- value: systems {system=ddp rate=3 rounds} -->1<!-- /value -->", "a quoted value must be one; got none"),
    ],
)
def test_a_quote_of_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserInputError, match=f"^{re.escape(message)}"):
        requoted(text)
