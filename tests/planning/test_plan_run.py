"""Options that are left to the planner: how they are written, and whole runs that plan."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from _plans import AUTOS, INSTANT, SLOW, SMALL, cluster
from _ranks import run_ranks

from pipesgd import Pipelined, keys
from pipesgd.calibration import training
from pipesgd.cli import as_toml, parse
from pipesgd.config import AUTO_OPTIONS
from pipesgd.errors import UserInputError
from pipesgd.membership.secret import job_secret
from pipesgd.planning import plan_run
from pipesgd.planning.drift import SETTLING, WINDOW, WINDOWS
from pipesgd.ranks import Ranks
from pipesgd.run.console import screen
from pipesgd.run.metrics import read_metrics, statistics
from pipesgd.sections import Wire
from pipesgd.train import train
from timing_model.params import LinkParams

pytestmark = pytest.mark.slow

SHORT = "--hidden-sizes 20 --batch-size 16 --iterations 12 --lr 0.05"
"""Options that train ``SMALL``."""
SEARCHED = AUTO_OPTIONS[:-1]
"""All that can be left open together; fragments are chosen alone."""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--width auot", "width must be auto, or a value that --help-all lists; got 'auot' (did you mean auto?)"),
        ("--codec=ato", "codec must be auto, or a value that --help-all lists; got 'ato' (did you mean auto?)"),
        (
            "--all_reduce Auto",
            "all-reduce must be auto, or a value that --help-all lists; got 'Auto' (did you mean auto?)",
        ),
        ("--width auto --width 2", "width must be given once; got it 2 times"),
        ("--auto width", "every option must be one that --help-all lists; got --auto"),
        (
            "--codec auto --codec-block 64",
            "codec-block must be left out with --codec auto, which chooses codecs as they are; got 64",
        ),
        ("--fragments aut", "fragments must be auto, or a value that --help-all lists; got 'aut' (did you mean auto?)"),
        ("--fragments two", "fragments must be a whole number or auto; got 'two'"),
    ],
)
def test_bad_words_get_one_line(words: str, message: str) -> None:
    with pytest.raises(UserInputError) as caught:
        parse(words.split())
    assert str(caught.value) == message


def test_what_is_auto_is_said_on_the_command_line_or_in_a_file_and_printed_so(tmp_path: Path) -> None:
    config = parse(
        ["--width=auto", "--all_reduce", "auto", "--segment-bytes", "auto", "--codec", "auto", "--buckets=auto"]
    )
    assert config.planning.auto == SEARCHED
    assert [config.options()[name] for name in AUTO_OPTIONS] == [*["auto"] * 5, 1]
    path = tmp_path / "run.toml"
    path.write_text(as_toml(config), encoding="utf-8")
    assert parse(["--config", str(path)]) == config
    assert parse(["--config", str(path), "--width", "3"]).planning.auto == SEARCHED[1:]
    chosen = config.with_choices(
        {"width": 3, "codec": "int8", "all-reduce": "ring", "segment-bytes": 4096, "buckets": "2"}
    )
    assert chosen == parse(["--width", "3", "--codec", "int8", "--segment-bytes", "4096", "--buckets", "2"])
    windows = parse(["--local-steps", "4", "--fragments", "auto"])
    path.write_text(as_toml(windows), encoding="utf-8")
    assert parse(["--config", str(path)]) == windows
    assert windows.with_choices({"fragments": 3}) == parse(["--local-steps", "4", "--fragments", "3"])


def _train(ranks: Ranks, words_of_ranks: list[str]) -> tuple[str, str]:
    """Run once, with a short calibration; return (text of the error, stdout)."""
    plan_run.CALIBRATION_SECONDS = 1.0
    words = words_of_ranks[min(ranks.rank, len(words_of_ranks) - 1)]
    out = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            train(words.split(), ranks, screen(ranks, out))
            error = ""
        except UserInputError as failure:
            error = str(failure)
    return error, out.getvalue()


def _calibrate(ranks: Ranks, key: str, words: str) -> tuple[str, set[tuple[Any, str]]]:
    """Run once; return (text of the error, all-reduce and transport of each training of the calibration)."""
    ranks.secret = job_secret(key)
    found: set[tuple[Any, str]] = set()

    def noted(*arguments: Any, wire: Wire, **others: Any) -> Pipelined:
        found.add((wire.all_reduce, str(wire.transport)))
        return Pipelined(*arguments, wire=wire, **others)

    training.Pipelined = noted  # type: ignore[assignment, misc]
    return _train(ranks, [words])[0], found


def run(world_size: int, *words_of_ranks: str) -> list[tuple[str, str]]:
    return run_ranks(world_size, _train, list(words_of_ranks), process_group=False)


def succeed(world_size: int, words: str, output: Path) -> tuple[dict[str, Any], str]:
    """Return (summary, output of rank 0) of a run without errors."""
    results = run(world_size, f"{words} --output {output}")
    assert [error for error, _ in results] == [""] * world_size
    assert [text for _, text in results[1:]] == [""] * (world_size - 1)
    return json.loads((output / "summary.json").read_text()), results[0][1]


def test_a_calibration_sends_no_gradient_in_clear_if_the_run_does_not(tmp_path: Path) -> None:
    key = tmp_path / "job.key"
    keys.make(key, certificate=True)
    words = f"{SHORT} --width auto --all-reduce auto --secret-file {key}"
    expected = {"--transport tls": {("ring", "tls")}, "": {("ring", "gloo"), ("native", "gloo")}}
    for number, (transport, trained) in enumerate(expected.items()):
        own = f"{words} {transport} --output {tmp_path / str(number)}"
        found = run_ranks(2, _calibrate, str(key), own, process_group=False)
        assert found == [("", trained)] * 2


def options_of(result: dict[str, Any]) -> str:
    return " ".join(f"--{name} {result['planned']['choices'][name]}" for name in AUTO_OPTIONS)


def test_a_run_does_what_the_plan_says_on_all_ranks_and_a_continued_one_has_the_same_plan(tmp_path: Path) -> None:
    slow, instant = tmp_path / "slow.toml", tmp_path / "instant.toml"
    cluster(LinkParams(alpha=1e-3, beta=1e-4, gamma=0.0, sync=0.0), SMALL).save(slow)
    cluster(INSTANT, SMALL).save(instant)
    words = f"{SHORT} {AUTOS} --checkpoint-iterations 5"
    result, text = succeed(2, f"{words} --cluster {slow}", tmp_path / "run")
    assert (result["width"], result["codec"]) == (2, "int8")
    assert [result["options"][name] for name in AUTO_OPTIONS] == [
        result["planned"]["choices"][name] for name in AUTO_OPTIONS
    ]
    assert result["planned"]["asked"] == ["width", "codec", "all-reduce", "buckets"]
    assert result["planned"]["measured_seconds"] == result["seconds"]["iteration"]["median"]
    assert result["planned"]["low"] <= result["planned"]["iteration_seconds"] <= result["planned"]["high"]
    assert result["replicas_identical"]
    assert "--width 2 --codec int8" in text
    assert f"predicted by {slow}: " in text
    assert "pipelined width 2" in text
    assert ", below the interval\n" in text

    same, _ = succeed(2, f"{SHORT} {options_of(result)}", tmp_path / "same")
    assert same["weights_sha256"] == result["weights_sha256"]

    # A resumed run has the same plan, whatever another cluster would suggest; a new run has another one.
    for more in (f"{AUTOS} --cluster {instant}", AUTOS, options_of(result)):
        (tmp_path / "run" / "summary.json").unlink()
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "iteration-12")
        resumed, text = succeed(2, f"{SHORT} --checkpoint-iterations 5 {more} --resume", tmp_path / "run")
        assert resumed["weights_sha256"] == result["weights_sha256"]
        for name in result["planned"].keys() - {"measured_seconds"}:
            assert resumed["planned"][name] == result["planned"][name]
        assert "planned when the run began: --width 2 --codec int8" in text
        assert "chosen of" not in text
        assert "continuing after iteration 10 of 12" in text
    error = "width must be that of the run to resume, 2; got 3"
    words_3 = f"{words.replace('--width auto', '--width 3')} --resume --output {tmp_path / 'run'}"
    assert {one for one, _ in run(2, words_3)} == {error}
    other, _ = succeed(2, f"{words} --cluster {instant} --overwrite", tmp_path / "run")
    assert (other["width"], other["codec"]) == (1, "fp32")
    cut, text = succeed(
        2, f"{SHORT} --width 1 --buckets auto --cluster {slow} --checkpoint-iterations 5", tmp_path / "cut"
    )
    assert cut["planned"]["choices"]["buckets"] == cut["options"]["buckets"] == "2"
    assert "buckets 2" in text


def test_iterations_of_a_warm_up_are_not_compared_with_the_prediction(tmp_path: Path) -> None:
    cluster(SLOW, SMALL).save(path := tmp_path / "slow.toml")
    result, _ = succeed(2, f"{SHORT} --width 2 --synchronous-start 8 --cluster {path}", tmp_path / "run")
    seconds = [line["seconds"]["iteration"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert result["planned"]["measured_seconds"] == statistics(seconds[8:])["median"]


def test_a_run_exchanges_as_many_fragments_as_a_window_hides_and_a_continued_one_does_so_whatever_the_link(
    tmp_path: Path,
) -> None:
    """An exchange of all weights takes 157 ms by the model, one of the largest parameter 134, and a window 145."""
    slow, instant = tmp_path / "slow.toml", tmp_path / "instant.toml"
    cluster(LinkParams(alpha=1e-3, beta=2.57e-5, gamma=0.0, sync=0.0), SMALL).save(slow)
    cluster(INSTANT, SMALL).save(instant)
    words = f"{SHORT} --local-steps 2 --codec fp32 --checkpoint-iterations 5"
    result, text = succeed(2, f"{words} --fragments auto --cluster {slow}", tmp_path / "run")
    assert "chosen: --fragments 2, the fewest of which each is exchanged while a window computes" in text
    assert "2 local steps, outer average, 2 fragments" in text
    assert "the median window took " in text
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())
    assert recorded["planned"]["choices"]["fragments"] == recorded["options"]["fragments"] == 2
    assert (recorded["planned"]["asked"], recorded["planned"]["window"]) == (["fragments"], 4)
    same, _ = succeed(2, f"{words} --fragments 2", tmp_path / "same")
    assert same["weights_sha256"] == result["weights_sha256"]

    for more in (f"--fragments auto --cluster {instant}", "--fragments auto", f"--fragments 2 --cluster {slow}"):
        (tmp_path / "run" / "summary.json").unlink()
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "iteration-12")
        resumed, text = succeed(2, f"{words} {more} --resume", tmp_path / "run")
        assert resumed["weights_sha256"] == result["weights_sha256"]
        assert resumed["planned"]["choices"] == result["planned"]["choices"]
        assert "planned when the run began: --width 2" in text
        assert "chosen: " not in text
    words_3 = f"{words} --fragments 3 --resume --output {tmp_path / 'run'}"
    assert {error for error, _ in run(2, words_3)} == {"fragments must be that of the run to resume, 2; got 3"}
    hopeless = f"{SHORT} --fragments auto --cluster {slow} --output {tmp_path / 'hopeless'}"
    assert {error for error, _ in run(2, hopeless)} == {
        "rank 0: local-steps must be at least 2 with --fragments auto, to hide the exchange of the largest parameter; "
        "got 1"
    }
    assert not (tmp_path / "hopeless").exists()


def test_a_run_that_had_no_plan_is_continued_as_it_was(tmp_path: Path) -> None:
    words = f"{SHORT} --checkpoint-iterations 5"
    first, _ = succeed(2, f"{words} --width 3 --codec int4", tmp_path)
    resumed, text = succeed(2, f"{words} {AUTOS} --resume", tmp_path)
    assert (resumed["width"], resumed["codec"], resumed["all_reduce"]) == (3, "int4", "ring")
    assert resumed["weights_sha256"] == first["weights_sha256"]
    assert "planned" not in resumed
    assert "calibrating" not in text


def test_without_a_cluster_it_calibrates_and_the_training_is_none_the_worse(tmp_path: Path) -> None:
    result, text = succeed(2, f"{SHORT} --width auto --all-reduce auto --check-replicas 3", tmp_path / "auto")
    assert "calibrating 2 ranks" in text
    assert "predicted by a calibration of 1 s: " in text
    assert result["replicas_identical"]
    assert result["planned"]["asked"] == ["width", "all-reduce", "buckets"]
    assert result["codec"] == "fp32"
    assert result["planned"]["iteration_seconds"] > 0
    same, _ = succeed(2, f"{SHORT} {options_of(result)}", tmp_path / "same")
    assert same["weights_sha256"] == result["weights_sha256"]


def test_a_chosen_width_of_1_goes_with_options_about_late_gradients_and_the_run_says_that_they_do_not_count(
    tmp_path: Path,
) -> None:
    cluster(INSTANT, SMALL).save(tmp_path / "cluster.toml")
    words = f"{SHORT} --width auto --cluster {tmp_path / 'cluster.toml'}"
    plain, text = succeed(2, words, tmp_path / "plain")
    assert (plain["width"], "count at widths" in text) == (1, False)
    result, text = succeed(2, f"{words} --guard --synchronous-start 3", tmp_path / "late")
    assert "--guard and --synchronous-start count at widths above 1 alone, since at width 1 no gradient is" in text
    assert (result["width"], result["weights_sha256"]) == (1, plain["weights_sha256"])


def test_one_rank_has_nothing_to_plan(tmp_path: Path) -> None:
    result, text = succeed(1, f"{SHORT} {AUTOS}", tmp_path)
    assert text.startswith(
        "one rank has no network, so there is nothing to plan: --width 2 --codec fp32 --all-reduce ring "
    )
    assert (result["width"], result["codec"], result["all_reduce"]) == (2, "fp32", "ring")
    assert "planned" not in result


def test_a_cluster_without_an_auto_predicts(tmp_path: Path) -> None:
    cluster(SLOW, SMALL).save(tmp_path / "cluster.toml")
    result, text = succeed(2, f"{SHORT} --width 1 --cluster {tmp_path / 'cluster.toml'}", tmp_path / "run")
    assert "predicted by" in text
    assert "chosen of" not in text
    assert result["width"] == 1
    assert result["planned"]["asked"] == []


def test_iterations_that_take_another_time_than_was_predicted_are_said_once(tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"  # two seconds per iteration
    cluster(LinkParams(alpha=1.0, beta=1e-3, gamma=0.0, sync=0.0), SMALL).save(slow)
    iterations = SETTLING + WINDOW * WINDOWS
    words = SHORT.replace("--iterations 12", f"--iterations {iterations}")
    _, text = succeed(2, f"{words} --cluster {slow}", tmp_path / "run")
    assert text.count("the cluster is faster than the calibration found it") == 1


def test_rank_0s_cluster_counts_and_it_says_who_has_another_one(tmp_path: Path) -> None:
    own, other, none = tmp_path / "own.toml", tmp_path / "other.toml", tmp_path / "none.toml"
    cluster(LinkParams(alpha=1e-3, beta=1e-4, gamma=0.0, sync=0.0), SMALL).save(own)
    cluster(INSTANT, SMALL).save(other)
    words = f"{SHORT} {AUTOS} --output {tmp_path / 'run'}"
    results = run(3, *(f"{words} --cluster {path}" for path in (own, other, none)))
    assert [error for error, _ in results] == [""] * 3
    assert f"rank 0's {own} counts: there is none on rank 2 and another one on rank 1\n" in results[0][1]
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (result["width"], result["codec"], result["replicas_identical"]) == (2, "int8", True)
    results = run(2, f"{words} --overwrite", f"{words} --overwrite --cluster {own}")
    assert {error for error, _ in results} == {
        "cluster must be given to rank 0, whose file counts; got it on rank 1 only"
    }


def _file(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    if name != "missing.toml":
        cluster(SLOW, SMALL).save(path)
    if name == "truncated.toml":
        path.write_text(path.read_text()[:700])
    if name == "format.toml":
        path.write_text(path.read_text().replace("format = 7", "format = 8"))
    if name == "binary.toml":
        path.write_bytes(bytes(range(256)))
    return path


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("missing.toml", "", "rank 0: cluster must be a file that pipesgd.calibrate wrote: {} must be a file to read"),
        ("truncated.toml", "", "rank 0: cluster must be a file that pipesgd.calibrate wrote: truncated.toml"),
        ("binary.toml", "", "rank 0: cluster must be a file that pipesgd.calibrate wrote: binary.toml must be whole"),
        (
            "format.toml",
            "",
            "rank 0: cluster must be a file that pipesgd.calibrate wrote: format.toml: format must be 7",
        ),
        (
            "cluster.toml",
            "--batch-size 32",
            "rank 0: cluster must be of the model that is trained, mlp with 32 samples on each rank; got {} with mlp "
            "with 16",
        ),
        (
            "cluster.toml",
            "--batch-size 8 --accumulation 2",
            "rank 0: cluster must be of the model that is trained, mlp with 2 x 8 samples on each rank; got {} with "
            "mlp with 16",
        ),
        (
            "cluster.toml",
            "--batch-size 16 --hidden-sizes 30",
            "rank 0: cluster must be of the model that is trained, mlp with 2,260 parameters; got {} with one of 1,510",
        ),
        (
            "cluster.toml",
            "--batch-size 16 --model convnet",
            "rank 0: cluster must be of the model that is trained, convnet with 16 samples on each rank; got {} with "
            "mlp with 16",
        ),
    ],
)
def test_a_cluster_that_does_not_fit_is_said_before_anything_is_written(
    tmp_path: Path, name: str, words: str, message: str
) -> None:
    path = _file(tmp_path, name)
    words = words or "--batch-size 16 --hidden-sizes 20"
    if "mlp" not in words and "--model" not in words and "--hidden" not in words:
        words += " --hidden-sizes 20"
    results = run(2, f"--iterations 3 {words} --width auto --cluster {path} --output {tmp_path / 'run'}")
    expected = message.format(path)
    assert all(error.startswith(expected) for error, _ in results), results
    assert all("\n" not in error for error, _ in results)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_somebody_else_is_refused_before_the_calibration(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("two years of work")
    for error, text in run(2, f"{SHORT} --width auto --output {tmp_path}"):
        assert "output must be new, empty, or a run's own" in error
        assert [line for line in text.splitlines() if not line.startswith("network: ")] == []


def test_a_plan_that_is_no_plan_is_not_continued(tmp_path: Path) -> None:
    cluster(SLOW, SMALL).save(tmp_path / "cluster.toml")
    words = f"{SHORT} {AUTOS} --cluster {tmp_path / 'cluster.toml'}"
    succeed(2, words, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    earlier = json.loads(path.read_text())
    path.write_text(json.dumps(earlier | {"planned": {"width": 2}}))
    for error, _ in run(2, f"{words} --resume --output {tmp_path / 'run'}"):
        assert error.startswith("the run to resume must record its choices; got TypeError(")


def test_low_rank_is_planned_with_the_factors_that_a_calibration_measured(tmp_path: Path) -> None:
    result, text = succeed(2, f"{SHORT} --width auto --codec powersgd", tmp_path / "run")
    assert result["planned"]["choices"]["codec"] == "powersgd"
    assert "predicted by a calibration" in text
    words = f"{SHORT} --width auto --codec powersgd --cluster {tmp_path / 'c.toml'}"
    cluster(compute=SMALL).save(tmp_path / "c.toml")
    [(error, _), _] = run(2, f"{words} --output {tmp_path / 'other'}")
    reason = "codec must be another one where the factors of the model's matrices were not measured"
    assert error.startswith(f"rank 0: cluster must allow a prediction of this run; got {reason}")
