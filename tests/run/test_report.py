"""The report of a run: every fact of its folder, whole or not, as a page that is safe to open and easy to read."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _ranks import run_ranks
from _reports import Page, line, page_of, read, write_run
from _runs import SHORT, run, succeed
from conftest import REPOSITORY

from experiments.browser import BROWSER, boxes, picture
from pipesgd import exit as exit_module
from pipesgd.errors import PeerFailed, RunError, StoppedBySignal, UserInputError
from pipesgd.membership.heartbeat import Standing
from pipesgd.ranks import Ranks, alone
from pipesgd.report import commands
from pipesgd.report.charts import WIDTHS, Axis, Curve, Interval, curves
from pipesgd.report.compare import compare, lines
from pipesgd.report.folder import read_run
from pipesgd.report.html import COLOURS, STYLE, tag
from pipesgd.report.page import SECTIONS, report
from pipesgd.run.attempts import Attempts, read_attempts
from pipesgd.run.console import screen
from pipesgd.train import train

# ---- Real runs


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [400, 1280])
def test_a_report_fits_on_a_screen(tmp_path: Path, width: int) -> None:
    write_run(tmp_path / "a", [line(n) for n in range(40)])
    (tmp_path / "report.html").write_text(report(read_run(tmp_path / "a")), encoding="utf-8")
    found = boxes(tmp_path, "report.html", width, 900, {"page": "html", "title": "h1"})
    assert found["page"]["scrolls"] <= width
    assert picture(tmp_path, "report.html", width).width == width


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ranks", "told"),
    [
        ("--width 2 --codec int8 --evaluate-iterations 4", 2, "Pipelined, width 2, int8 on 2 ranks: mlp on digits"),
        ("--strategy ddp", 2, "DDP on 2 ranks: mlp on digits"),
        ("--local-steps 3 --width 2", 2, "Pipelined, width 2, fp32, 3 local steps on 2 ranks"),
        ("--width 1", 1, "Pipelined, width 1, fp32 on 1 rank"),
    ],
)
def test_a_run_leaves_its_report(tmp_path: Path, words: str, ranks: int, told: str) -> None:
    iterations = 12 if ranks > 1 else 1
    done = succeed(ranks, f"{SHORT} {words}".replace("--iterations 12", f"--iterations {iterations}"), tmp_path)
    page = read(tmp_path)
    assert told in page.text
    assert f"{tmp_path} " in page.text
    assert "Finished" in page.texts
    assert f"{done['final']['test_accuracy']:.2%}" in page.texts
    assert f"{done['iterations']}" in page.texts
    assert all(title in page.texts for title in SECTIONS)
    assert f"torch {done['versions']['torch']}" in page.text
    assert [one.why for one in read_attempts(tmp_path / "attempts.jsonl")] == [None]
    assert ("One rank has nobody to communicate with." in page.texts) == (ranks == 1)
    assert ("Late gradients: 12 of 12 iterations." in page.texts) == ("int8" in words)
    assert (page.text.count("test accuracy, %") == len(WIDTHS)) == ("--evaluate-iterations" in words)


FAULTY = """
from pathlib import Path
from torch import nn

calls = [0]

def loss(outputs, targets):
    calls[0] += 1
    mean = nn.functional.cross_entropy(outputs, targets)
    return mean * float("nan") if calls[0] == 10 and not Path(__file__).with_name("mended").exists() else mean
"""


def _train_and_explain(ranks: Ranks, folder: str, words: list[str]) -> int:
    """Train as ``run_and_exit`` does, with modules in ``folder``, and return the exit code."""
    sys.path.insert(0, folder)
    try:
        train(words, ranks, screen(ranks, io.StringIO()))
    except RunError as failure:
        return exit_module._explain(failure, ranks)
    return 0


@pytest.mark.slow
def test_a_run_that_failed_and_was_resumed_shows_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    folder = tmp_path / "run"
    words = f"{SHORT} --loss faulty:loss --checkpoint-iterations 5 --output {folder}".split()
    assert run_ranks(2, _train_and_explain, str(tmp_path), words, process_group=False) == [1, 1]
    assert not (folder / "report.html").exists()
    assert commands.report(["report", str(folder)], program="pipesgd") == 0
    assert any("the averaged gradient of iteration 7 holds a NaN" in text for text in read(folder).texts)
    (tmp_path / "mended").touch()
    assert run_ranks(2, _train_and_explain, str(tmp_path), [*words, "--resume"], process_group=False) == [0, 0]
    first, second = read_attempts(folder / "attempts.jsonl")
    assert (first.start, first.iteration, second.start, second.iteration, second.why) == (0, 8, 5, 11, None)
    page = read(folder)
    assert first.why is not None
    assert first.why in page.text
    assert "Finished, in attempt 2" in page.texts
    assert "attempt 2" in page.texts
    assert "3 iterations after a checkpoint were run again" in page.text
    capsys.readouterr()


@pytest.mark.slow
def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path: Path) -> None:
    succeed(1, SHORT, tmp_path)
    before = (tmp_path / "summary.json").read_text()
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    [(error, _, warned)] = run(1, f"{SHORT} --resume", tmp_path)
    assert error == ""
    assert f"warning: the report could not be written ({tmp_path}/report.html: Is a directory" in warned
    assert json.loads((tmp_path / "summary.json").read_text())["final"] == json.loads(before)["final"]


# ---- Attempts


@pytest.mark.parametrize(
    ("failure", "code", "why"),
    [
        (RunError("the disk is gone"), 1, "rank 0: the disk is gone"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (StoppedBySignal("SIGTERM", iteration=7, newest=7), 143, "stopped by SIGTERM after iteration 7; --resume"),
        (UserInputError.on_all_ranks("width must be odd; got 2"), 2, "width must be odd; got 2"),
        (
            PeerFailed(rank=0, peer=1, operation="all-reduce", reason="it was killed", iteration=7),
            1,
            "rank 0: stopped in all-reduce in iteration 7: rank 1 has failed: it was killed",
        ),
    ],
)
def test_the_line_with_which_a_rank_ends_is_kept(tmp_path: Path, failure: BaseException, code: int, why: str) -> None:
    ranks = alone()
    attempts = Attempts(tmp_path / "attempts.jsonl", ranks.standing)
    attempts.begin(start=3, world_size=1, run_again=2, versions={"torch": "2"})
    ranks.standing.iteration = 7
    assert exit_module._explain(failure, ranks) == code
    [found] = read_attempts(tmp_path / "attempts.jsonl")
    assert (found.start, found.run_again, found.versions, found.iteration) == (3, 2, {"torch": "2"}, 7)
    assert found.why is not None
    assert found.why.startswith(why)
    assert found.ended is not None
    assert found.ended >= found.begun


def test_damaged_lines_of_attempts_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "attempts.jsonl"
    assert read_attempts(path) == []
    attempts = Attempts(path, Standing())
    attempts.begin(start=0, world_size=2, run_again=0, versions={})
    attempts.finish()
    begun, ended = path.read_text().splitlines()
    cut = [begun[:-9], "[]", "[" * 100_000, begun.replace("2", '"2"'), ended.replace('"why": null', '"why": 7')]
    path.write_text("\n".join([ended, begun, *cut, ended]) + "\n")
    [found] = read_attempts(path)
    assert found.ended is not None
    assert capsys.readouterr().err == f"warning: 5 damaged lines of {path} left out\n"


# ---- Folders that lack something


def test_a_run_that_wrote_nothing_but_its_options_has_a_report(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path))
    assert "Not finished" in page.texts
    assert "No iteration is recorded." in page.texts
    assert all(title in page.texts for title in SECTIONS)


def test_of_lines_of_one_iteration_the_last_counts(tmp_path: Path) -> None:
    again = [line(index, loss=float(loss)) for index, loss in ((0, 9), (1, 8), (2, 7), (1, 6), (2, 5), (3, 4))]
    iterations = read_run(write_run(tmp_path, again)).iterations
    assert iterations["loss"].tolist() == [9, 6, 5, 4]
    assert iterations.elapsed.tolist() == [0.5, 1.0, 1.5, 2.0]
    assert iterations.samples.tolist() == [64, 128, 192, 256]


def test_one_iteration_is_enough(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, [line(0)]))
    assert sum(name == "circle" for name, _ in page.elements) == len(WIDTHS)
    assert [text for text in page.texts if text == "50%"][:2] == ["50%", "50%"], "half of 300 ms was exposed"


@pytest.mark.parametrize("number", [3, 1000])
def test_losses_that_are_not_finite_are_gaps_and_counted(tmp_path: Path, number: int) -> None:
    lines = [line(iteration, loss=None if iteration >= 1 else 2.0) for iteration in range(number)]
    page = page_of(write_run(tmp_path, lines))
    assert f"{number - 1:,} of {number:,} losses were not finite." in page.texts
    none = page_of(write_run(tmp_path, lines[1:]))
    assert "No iteration has a loss that is a number." in none.texts
    drawn = "".join(value or "" for _, attributes in (*page.elements, *none.elements) for value in attributes.values())
    assert "nan" not in drawn.lower()


@pytest.mark.parametrize("losses", [(1.0, 1.7e308, -1.7e308), (1.0, 2.0, 1e300), (-3.0, -4.0, -3.5), (0.0, 0.0, 0.0)])
def test_any_loss_is_drawn(tmp_path: Path, losses: tuple[float, ...]) -> None:
    page = page_of(write_run(tmp_path, [line(index, loss=loss) for index, loss in enumerate(losses)]))
    places = [
        float(value) for _, shape in page.elements for name in ("cx", "cy", "x1", "y2") if (value := shape.get(name))
    ]
    assert places
    assert all(0 <= place <= max(WIDTHS.values()) for place in places)


def test_updates_that_were_left_out_and_their_ranks_are_told(tmp_path: Path) -> None:
    lines = [
        line(0, skipped=1, nonfinite_ranks=[1]),
        line(1, skipped=2, nonfinite_ranks=[1, 0]),
        line(2, fell_back=True),
    ]
    page = page_of(write_run(tmp_path, lines))
    assert "3 updates were left out; gradients not finite: rank 0: 1, rank 1: 2." in page.texts
    assert "The guard found that staleness hurts, and went back to width 1, in iteration 2." in page.texts


def test_ranks_that_were_lost_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [line(iteration) for iteration in range(10)])
    (folder / "summary.json").write_text(json.dumps({"generations": GENERATIONS}))
    page = page_of(folder)
    assert "rank 2: its process has ended; rank 1: it was silent for 3.1 s" in page.texts
    assert {"the others began with iteration", "ranks left", "1 rank"} <= set(page.texts)


GENERATIONS = [
    {"number": 0, "members": [0, 1, 2], "first_iteration": 0, "lost": []},
    {"number": 1, "members": [0], "first_iteration": 4, "lost": [
        {"rank": 2, "why": "its process has ended"}, {"rank": 1, "why": "it was silent for 3.1 s"},
    ]},
]  # fmt: skip
PLANNED = {
    "asked": ["width"], "choices": {"width": 2}, "source": "a calibration", "iteration_seconds": 0.4, "low": 0.3,
    "high": 0.6, "job_seconds": 4.0, "support": "interpolated", "reasons": [], "why": ["<width 2>"], "iterations": 10,
}  # fmt: skip


def test_the_prediction_is_next_to_what_was_measured(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [line(iteration) for iteration in range(10)])
    described = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(described | {"planned": PLANNED}))
    page = page_of(folder)
    said = "The median iteration took 500 ms, predicted 400 ms (300 ms to 600 ms): +25.0%, inside the interval."
    assert said in page.texts
    assert "<width 2>" in page.texts
    assert "predicted median" in page.texts
    (folder / "run.json").write_text(json.dumps(described | {"planned": {"of": "another version"}}))
    assert "the plan of the run is damaged or of another version, and is left out" in page_of(folder).texts


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, '{"final": 3, "versions": [], "compute_seconds_of_ranks": "x"}']
)
def test_a_damaged_summary_leaves_the_rest(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path, [line(0)])
    (folder / "summary.json").write_text(text)
    page = page_of(folder)
    assert ("summary.json is damaged, and is left out" in page.texts) == (not text.startswith("{"))
    assert all(title in page.texts for title in SECTIONS)


SUMMARY = {
    "network": ["127.0.0.1 (lo)"], "late_iterations": 2, "wall_seconds": 3.5, "iteration_seconds_of_ranks": [0.5, None],
    "compute_seconds_of_ranks": [0.2, 0.4], "loading_share_of_ranks": [0.1, 0.2], "wire_bytes_per_iteration": 1000,
    "skipped_updates": 1, "final": {"train_loss": 1.5, "test_accuracy": 0.5, "test_loss": 1.25},
    "replicas_identical": True, "generations": GENERATIONS,
    "versions": {"torch": "2.13"}, "planned": PLANNED | {"measured_seconds": 0.5},
}  # fmt: skip
"""A summary with every entry that a report reads."""
OPTIONAL = {"loss": 1.0, "test_accuracy": 0.5, "test_loss": 0.5, "prediction_cosine": 0.5, "nonfinite_ranks": [1]}
JUNK = (None, "x", -1, 10**400, [None], {"a": [1]})


def damaged(value: Any) -> Iterator[Any]:
    """Yield copies of ``value``, in each of which one part is another thing, or is not there."""
    yield from JUNK
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        rest = value.copy()
        del rest[name]
        yield rest
        for other in damaged(part):
            changed = value.copy()
            changed[name] = other
            yield changed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.json", "summary.json", "metrics.jsonl", "attempts.jsonl"])
def test_whatever_is_damaged_there_is_a_report_or_one_line(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path, [line(index, **OPTIONAL) for index in range(3)])
    attempts = Attempts(folder / "attempts.jsonl", Standing())
    attempts.begin(start=0, world_size=2, run_again=0, versions={"torch": "2.13"})
    attempts.fail("rank 0: the network is gone")
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    described = json.loads((folder / "run.json").read_text()) | {"planned": PLANNED}
    described["options"] = {key: described["options"][key] for key in ("model", "strategy", "width", "local-steps")}
    (folder / "run.json").write_text(json.dumps(described))
    first, *others = (folder / name).read_text().splitlines()
    reports, refusals = 0, []
    for other in damaged(json.loads((folder / name).read_text() if not others else first)):
        (folder / name).write_text("\n".join([json.dumps(other), *(others if name.endswith("l") else [])]) + "\n")
        try:
            run = read_run(folder)
        except UserInputError as refused:
            refusals.append(str(refused))
            continue
        Page(report(run))
        assert lines(compare([run, run]))
        reports += 1
    assert reports > 20
    assert not [text for text in refusals if "\n" in text or name != "run.json"]
    assert bool(refusals) == (name == "run.json")


# ---- Safe, readable


HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)>&amp;'</style>"


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>", [line(0)], dataset=HOSTILE, model=HOSTILE, codec=HOSTILE, **{HOSTILE: HOSTILE})
    attempts = Attempts(folder / "attempts.jsonl", Standing())
    attempts.begin(start=0, world_size=2, run_again=0, versions={HOSTILE: HOSTILE})
    attempts.fail(HOSTILE)
    (folder / "summary.json").write_text(json.dumps({"planned": PLANNED | {"why": [HOSTILE], "source": HOSTILE}}))
    page = page_of(folder)  # refuses elements that it does not know
    assert page.text.count(HOSTILE) >= 8
    assert str(tmp_path / "<b>") in page.texts


def test_texts_and_attributes_are_escaped_unless_they_are_html() -> None:
    assert tag("p", "<b>", tag("b", 1), title='"') == '<p title="&quot;">&lt;b&gt;<b>1</b></p>'


def test_a_folder_whose_name_is_no_utf8_has_a_report(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    folder = write_run(tmp_path / os.fsdecode(b"d\xe4ta"), [line(0)], output=os.fsdecode(b"d\xe4ta"))
    assert commands.report(["report", str(folder)], program="pipesgd") == 0
    # Taken here, since pytest's workers send UTF-8 alone.
    assert capfdbinary.readouterr().out == os.fsencode(f"wrote {folder}/report.html\n")
    assert f"{tmp_path}/d\\udce4ta" in read(folder).texts


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    source = report(read_run(write_run(tmp_path, [line(0), line(1)])))
    assert "default-src 'none'" in source
    assert not re.search(r"https?:|url\(|@import|src=|href=", source)


def theme(text: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#\w+);", text))


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, as WCAG 2 defines it."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("block", re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL))
def test_every_theme_can_be_read(block: str) -> None:
    colours = theme(block)
    assert len(colours) == COLOURS + 6
    for name in ("ink", "soft", "bad"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
        assert contrast(colours[name], colours["tile"]) >= 4.5, name
    for name in (f"c{index}" for index in range(COLOURS)):
        assert contrast(colours[name], colours["paper"]) >= 3, name


def test_no_text_of_a_chart_is_below_9_px() -> None:
    sizes = [float(size) for size in re.findall(r"svg text[^}]*?(?:font: |font-size: )(\d+)px", STYLE)]
    assert len(sizes) == 2
    [turn] = map(int, re.findall(r"max-width: (\d+)px", STYLE))
    margins = 2 * 16
    for width, shown in ((WIDTHS["wide"], turn + 1), (WIDTHS["narrow"], 320)):
        assert min(sizes) * min(1.0, (shown - margins) / width) >= 9


# ---- Charts


def shapes(source: str, class_: str) -> list[list[tuple[float, float]]]:
    """Return the points of the paths of this class in the wide drawing."""
    wide = source.partition('class="narrow"')[0]
    paths = re.findall(rf'<path class="{class_}" d="M([^"]*?)Z?">', wide)
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)] for path in paths]


def draw(values: list[float], **options: Any) -> str:
    curve = Curve(name="a", x=np.arange(float(len(values))), y=np.array(values))
    return curves([curve], description="d", x=Axis(name="x"), y=Axis(name="y"), **options)


def test_a_curve_goes_through_its_values_and_has_gaps() -> None:
    [left, right] = shapes(draw([1.0, 3.0, math.nan, 2.0, 2.0]), "curve c0")
    assert [x for x, _ in left] == pytest.approx([left[0][0], left[1][0]])
    steps = np.diff([x for x, _ in (*left, *right)])
    assert steps == pytest.approx([steps[0], 2 * steps[0], steps[0]], abs=0.11)
    (_, one), (_, three), (_, two), (_, again) = *left, *right
    assert one - two == pytest.approx(two - three, abs=0.11)
    assert one > three
    assert two == again


def test_many_values_are_drawn_as_their_mean_and_their_range() -> None:
    values = [1.0, 3.0] * 1000
    [mean] = shapes(draw(values), "curve c0")
    [outline] = shapes(draw(values), "f0 spread")
    assert len(mean) == 200
    heights = {y for _, y in outline}
    assert len(heights) == 2
    assert [y for _, y in mean] == pytest.approx([sum(heights) / 2] * 200, abs=0.06)


def test_a_value_far_above_the_others_makes_the_axis_logarithmic() -> None:
    assert "y, logarithmic" in draw([1.0, 1.0, 1.0, 100.0])
    assert "logarithmic" not in draw([1.0, 1.0, 1.0, 40.0])
    assert "logarithmic" not in draw([1.0, -1.0, 1.0, 100.0])
    [(ten, _), (hundred, _), (thousand, _)] = [
        (y, x) for x, y in shapes(draw([1.0] * 3 + [10.0, 100.0, 1000.0]), "curve c0")[0][-3:]
    ]
    assert ten - hundred == pytest.approx(hundred - thousand, abs=0.11)


def test_an_interval_that_no_value_is_in_is_drawn_too() -> None:
    source = draw([5.0, 5.0], interval=Interval(low=1.0, high=2.0, name="i"))
    heights = [float(y) for y in re.findall(r'<rect class="f1 spread" [^>]*?y="([\d.]+)"', source)]
    assert len(heights) == len(WIDTHS)
    assert all(height > shapes(source, "curve c0")[0][0][1] for height in heights)


# ---- The command


def test_the_command_writes_the_report_of_a_run_that_has_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", [line(0)])
    assert commands.report(["report", str(folder)], program="pipesgd") == 0
    assert capsys.readouterr().out == f"wrote {folder}/report.html\n"
    assert "Not finished" in read(folder).texts
    assert commands.report(["report", str(folder), "--output", str(tmp_path / "page.html")], program="pipesgd") == 0
    assert (tmp_path / "page.html").read_text() == (folder / "report.html").read_text()


def test_what_is_no_run_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("[]")
    kept = tmp_path / "model.pt"
    kept.write_text("weights")
    of_train = "run must be a folder that pipesgd.train has written; got"
    for words, told in {
        (
            str(tmp_path),
        ): f"{of_train} {tmp_path}, which has no run.json (there are runs in it: {tmp_path}/a, {tmp_path}/b)",
        (str(tmp_path / "c"),): f"{of_train} {tmp_path}/c, which is no folder",
        (str(tmp_path / "b"),): f"{of_train} {tmp_path}/b, whose run.json describes no run",
        (str(tmp_path / "a"), "--output", f"{tmp_path}/c/d.html"): (
            f"output must be a file that can be written; got {tmp_path}/c/d.html: No such file or directory"
        ),
        (str(tmp_path / "a"), "--output", ""): "output must be a file of HTML, such as page.html; got ''",
        (
            str(tmp_path / "a"),
            "--output",
            str(kept),
        ): "output must be a file of HTML, such as model.html; got 'model.pt'",
        (str(tmp_path / "a"), "--output", f"{tmp_path}/losses.png"): (
            "output must be a file of HTML, such as losses.html; got 'losses.png'"
        ),
        (): "the following arguments are required: run (see pipesgd report --help)",
        ("a", "--outptu"): "unrecognized arguments: --outptu (see pipesgd report --help)",
    }.items():
        assert commands.report(["report", *words], program="pipesgd") == 2
        assert capsys.readouterr().err == f"error: {told}\n"
    assert not (tmp_path / "c").exists()
    assert kept.read_text() == "weights"


@pytest.mark.slow
def test_the_command_loads_no_torch() -> None:
    program = "import sys, pipesgd.report.commands; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
