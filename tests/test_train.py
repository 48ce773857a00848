"""Whole runs of the command, in forked ranks: the files they write, how they continue, and the options they refuse."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _runs import (
    SHORT,
    contents,
    evaluations,
    lose_the_last_checkpoint,
    run,
    run_in,
    succeed,
    succeed_in,
    summary,
    train_as_a_rank,
)
from _waiting import wait_until

from pipesgd import training as train_module
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.errors import DisagreementError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run import checkpoint_files
from pipesgd.run.console import screen
from pipesgd.run.forward_backward import forward_backward
from pipesgd.run.metrics import MetricsWriter, read_metrics
from pipesgd.run.summary import OF_THIS_ATTEMPT, measured_before
from pipesgd.strategy import Strategy
from pipesgd.train import train

pytestmark = pytest.mark.slow


def test_the_learning_rate_of_a_single_rank_is_multiplied_by_their_number(tmp_path: Path) -> None:
    words = f"{SHORT} --width 1 --schedule one-cycle"
    scaled = succeed(2, f"{words} --lr-scaling linear", tmp_path / "scaled")
    given = succeed(2, words.replace("--lr 0.05", "--lr 0.1"), tmp_path / "given")
    assert scaled["weights_sha256"] == given["weights_sha256"]


def _train_on_a_node_each(ranks: Ranks, words: list[str]) -> tuple[str, str, str]:
    ranks.local_rank = 0
    return train_as_a_rank(ranks, words)


def test_nodes_without_a_second_rank_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    words = [*f"{SHORT} --all-reduce hierarchical".split(), "--output", str(tmp_path / "run")]
    for error, _, _ in run_ranks(2, _train_on_a_node_each, words, process_group=False):
        assert error.startswith("UserInputError: all-reduce must not be hierarchical with one rank on each node")
    assert not (tmp_path / "run").exists()


def test_a_codecs_bytes_are_counted(tmp_path: Path) -> None:
    """64-20-10 has 1510 parameters, of which each of two ranks sends half twice: 755, in three blocks of up to 256."""
    result = succeed(2, f"{SHORT} --codec int4 --width 2", tmp_path)
    assert result["codec"] == "int4"
    assert result["wire_bytes_per_iteration"] == 2 * (3 * 4 + 128 + 128 + 122)
    assert result["final"]["test_accuracy"] > 0.3
    assert result["replicas_identical"]


def test_the_bytes_of_an_iteration_are_a_mean_over_all_fragments(tmp_path: Path) -> None:
    """Each of two ranks sends half of 1510 parameters twice in 4 windows of 2 iterations."""
    result = succeed(2, f"{SHORT} --local-steps 2 --fragments 4", tmp_path)
    assert result["wire_bytes_per_iteration"] == 4 * 1510 // (4 * 2)


def test_one_rank_is_the_same_path(tmp_path: Path) -> None:
    result = succeed(1, SHORT, tmp_path)
    assert result["world_size"] == 1
    assert result["wire_bytes_per_iteration"] == 0


NORMALIZED = """
from torch import nn

def model(num_classes):
    layers = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 8 * 8, num_classes))
"""


@pytest.mark.parametrize(
    "words",
    [
        "--width 2",
        "--width 2 --random-crop 2 --mirror",
        "--width 3 --synchronous-start 4 --optimizer adamw --schedule one-cycle",
        "--width 3 --optimizer muon --schedule one-cycle",
        "--width 2 --codec int4",
        "--width 1 --buckets 3 --codec int4 --accumulation 2 --clip-norm 1 --check-replicas 1",
        "--width 2 --local-steps 4 --codec int4 --optimizer adamw --schedule one-cycle --check-replicas 1",
        "--width 2 --local-steps 2 --outer elastic --check-replicas 1",
        "--width 2 --codec int8 --rounding stochastic --error-feedback on --codec-block 100",
        "--model normalized:model --width 2",
        "--width 1 --all-reduce native --schedule cosine",
        "--strategy ddp --schedule cosine --model convnet",
        "--strategy ddp --ddp-hook fp16 --accumulation 2 --precision fp16",
        "--strategy ps-sync --servers 2 --optimizer adamw --schedule one-cycle",
        "--strategy local",
    ],
)
def test_a_continued_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, words: str) -> None:
    """An interruption is imitated literally: later iterations' files are deleted, and the run is started again."""
    world_size = 3 if "--strategy ddp" in words else 2  # two values have one sum, in whichever order torch adds them
    words = f"{SHORT} {words} --checkpoint-iterations 5"
    if "--model" in words:
        (tmp_path / "normalized.py").write_text(NORMALIZED)
        words = words.replace("--hidden-sizes 20 ", "")
    whole = succeed_in(tmp_path, world_size, words, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    (tmp_path / "cut" / "model.pt").unlink()
    lose_the_last_checkpoint(tmp_path / "cut")
    results = run_in(tmp_path, world_size, words + " --resume", tmp_path / "cut")
    assert "continuing after iteration" in results[0][1]
    resumed = summary(tmp_path / "cut")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["final"] == whole["final"]
    for name in ("whole", "cut"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["iteration"] for line in lines] == list(range(whole["iterations"]))
    weights = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_same_command_gives_the_same_weights(tmp_path: Path) -> None:
    words = f"{SHORT} --width 3 --codec int4 --rounding stochastic --error-feedback on --random-crop 2 --mirror"
    one, other = (succeed(2, words, tmp_path / name) for name in ("one", "other"))
    assert one["weights_sha256"] == other["weights_sha256"]


def test_a_corrupt_checkpoint_is_named_and_the_one_before_it_taken(tmp_path: Path) -> None:
    words = f"{SHORT} --checkpoint-iterations 3"
    whole = succeed(2, words, tmp_path)
    lose_the_last_checkpoint(tmp_path)
    path = tmp_path / "checkpoints" / "iteration-9" / "rank-1.pt"
    path.write_bytes(path.read_bytes()[:-100])
    results = run(2, words + " --resume", tmp_path)
    assert [error for error, _, _ in results] == ["", ""]
    assert "continuing after iteration 6 of 12" in results[0][1]
    assert f"warning: rank 1: checkpoint skipped, since {path} is truncated or corrupt" in results[1][2]
    assert summary(tmp_path)["weights_sha256"] == whole["weights_sha256"]


def _train_as_ranks_that_meet(ranks: Ranks, words: list[str]) -> str:
    """Train; rank 0 reads its earlier metrics until it has heard where rank 1 waits. Return the error."""

    class Reader(MetricsWriter):
        def __init__(self, output: Path, *, start: int):
            def waits() -> bool:
                beat = ranks._beats([1]).get(1)
                return beat is not None and beat.phase == "exchange of start of training"

            wait_until(waits)
            super().__init__(output, start=start)

    train_module.MetricsWriter = Reader  # type: ignore[misc]
    return train_as_a_rank(ranks, words)[0]


def test_ranks_wait_with_patience_while_rank_0_reads_the_metrics_of_days(tmp_path: Path) -> None:
    """In an exchange through the store, that is, and not in the first all-reduce, which has a plain deadline."""
    words = [*shlex.split(SHORT), "--output", str(tmp_path)]
    assert run_ranks(2, _train_as_ranks_that_meet, words, process_group=False) == ["", ""]


def test_torchruns_restart_continues_without_being_asked(tmp_path: Path) -> None:
    words = f"{SHORT} --checkpoint-iterations 5"
    whole = succeed(2, words, tmp_path)
    lose_the_last_checkpoint(tmp_path)
    results = run(2, words, tmp_path, restart_count=1)
    assert "continuing after iteration 10 of 12" in results[0][1]
    assert summary(tmp_path)["weights_sha256"] == whole["weights_sha256"]


def test_a_finished_run_that_is_resumed_does_its_end_again(tmp_path: Path) -> None:
    """The state is that after a full disk: the last checkpoint has the weights, but model.pt could not be written."""
    whole = succeed(2, f"{SHORT} --width 2", tmp_path)
    (tmp_path / "model.pt").unlink()
    (tmp_path / "summary.json").unlink()
    results = run(2, f"{SHORT} --width 2 --resume", tmp_path)
    assert [error for error, _, _ in results] == ["", ""]
    assert "all 12 iterations are done: evaluating, and writing the results again" in results[0][1]
    resumed = summary(tmp_path)
    assert resumed["final"] == whole["final"]
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert evaluations(tmp_path) == [(12, pytest.approx(whole["final"]["test_accuracy"]))]
    assert (tmp_path / "model.pt").exists()


def test_a_finished_run_that_is_resumed_keeps_its_trace_and_the_times_of_its_ranks(tmp_path: Path) -> None:
    words = f"{SHORT} --width 2 --trace"
    whole = succeed(2, words, tmp_path)
    trace = (tmp_path / "trace.json").read_bytes()
    assert None not in [one for name in OF_THIS_ATTEMPT for one in whole[name]]
    resumed = succeed(2, f"{words} --resume", tmp_path)
    changed = {"wall_seconds", "options"}  # --resume is an option
    assert {name: resumed[name] for name in resumed.keys() - changed} == {
        name: whole[name] for name in whole.keys() - changed
    }
    assert (tmp_path / "trace.json").read_bytes() == trace


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '"text"', None])
def test_a_damaged_summary_has_no_times_of_ranks(tmp_path: Path, text: str | None) -> None:
    path, good = tmp_path / "summary.json", {name: [0.5, None] for name in OF_THIS_ATTEMPT}
    path.write_text(json.dumps(good))
    assert (measured_before(path, 2), measured_before(path, 3)) == (good, {})
    for other in (3, "ab", [0.5], [0.5, "a"]):
        path.write_text(json.dumps(good | {OF_THIS_ATTEMPT[0]: other}))
        assert measured_before(path, 2) == {}
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert measured_before(path, 2) == {}


def test_trained_weights_that_cannot_be_written_are_in_the_last_checkpoint(tmp_path: Path) -> None:
    whole = succeed(1, SHORT, tmp_path)
    (tmp_path / "model.pt").unlink()
    (tmp_path / "model.pt").mkdir()  # at this moment, as good as a full disk
    assert run(1, f"{SHORT} --resume", tmp_path)[0][0] == (
        f"RunError: rank 0: training is done, but {tmp_path / 'model.pt'} could not be written: Is a directory. "
        "The newest checkpoint is that of iteration 12 of 12: --resume finishes it once there is room"
    )
    (tmp_path / "model.pt").rmdir()
    assert succeed(1, f"{SHORT} --resume", tmp_path)["weights_sha256"] == whole["weights_sha256"]


def _train_on_a_machine_of_its_own(ranks: Ranks, words: str, output: str) -> str:
    """Train as the first rank of a machine; of ``model.pt`` and its checksum, rank 0 has the last, if they race."""
    ranks.local_rank = 0
    weights, checksum = Path(output, "model.pt"), Path(output, "model.pt.sha256")
    write, write_text = checkpoint_files.write_atomically, checkpoint_files.write_text_atomically

    def after_rank_1(path: Path, fill: Callable[[Any], object]) -> None:
        if path == weights and ranks.rank == 0:
            wait_until(weights.exists)
        write(path, fill)

    def after_rank_0(path: Path, text: str) -> None:
        if path == checksum and ranks.rank == 1:
            with contextlib.suppress(AssertionError):
                wait_until(checksum.exists, 2)
        write_text(path, text)

    checkpoint_files.write_atomically, checkpoint_files.write_text_atomically = after_rank_1, after_rank_0
    return train_as_a_rank(ranks, [*words.split(), "--output", output])[0]


def test_machines_with_a_common_disk_leave_rank_0s_weights_and_their_checksum(tmp_path: Path) -> None:
    words = f"{SHORT} --strategy local"  # each rank has weights of its own
    assert run_ranks(2, _train_on_a_machine_of_its_own, words, str(tmp_path), process_group=False) == ["", ""]
    named = f"{hashlib.sha256((tmp_path / 'model.pt').read_bytes()).hexdigest()}  model.pt\n"
    assert (tmp_path / "model.pt.sha256").read_text() == named
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    own = torch.load(tmp_path / "checkpoints" / "iteration-12" / "rank-0.pt", weights_only=True)["state"]
    assert all(torch.equal(weights[name], value) for name, value in own["parameters"].items())


def test_resume_without_a_checkpoint_starts_from_the_beginning_and_says_so(tmp_path: Path) -> None:
    results = run(2, SHORT + " --resume", tmp_path)
    assert "no checkpoint yet: starting from the beginning" in results[0][1]
    # It has finished. Without its checkpoints it would have to begin again, and its results would be lost.
    shutil.rmtree(tmp_path / "checkpoints")
    before = contents(tmp_path)
    for result in ("summary.json", "model.pt"):
        results = run(2, SHORT + " --resume", tmp_path)
        assert {error for error, _, _ in results} == {
            f"UserInputError: a finished run must have its checkpoints to be resumed; got {tmp_path}, which has "
            f"{result} and no checkpoint: bring the checkpoints back, or begin again with --overwrite"
        }
        assert contents(tmp_path) | {".lock": before[".lock"]} == before
        del before[result]
        (tmp_path / result).unlink()
    results = run(2, SHORT + " --resume", tmp_path)
    assert "no checkpoint yet: starting from the beginning" in results[0][1]
    assert "holds only iterations that are run again; it is kept as metrics.jsonl.aside-1" in results[0][2]
    assert (tmp_path / "metrics.jsonl.aside-1").read_bytes() == before["metrics.jsonl"]


def test_another_run_is_not_touched_unless_asked_to(tmp_path: Path) -> None:
    succeed(2, SHORT + " --checkpoint-iterations 4", tmp_path)
    before = contents(tmp_path)
    for words, message in [
        (
            "",
            "output must not hold another run; got {} (--resume continues it, --overwrite deletes it, another --output "
            "keeps it)",
        ),
        ("--resume --lr 0.1", "lr must be that of the run to resume, 0.05; got 0.1"),
        ("--resume --hidden-sizes 30", "hidden-sizes must be that of the run to resume, [20]; got [30]"),
        ("--resume --width 3", "width must be that of the run to resume, 2; got 3"),
        ("--overwrite --fragments 5", "fragments must be at most 4, the number of parameters; got 5"),
        ("--overwrite --buckets 5", "buckets must be at most the number of parameters, 4; got 5"),
        ("--overwrite --elastic 3 --transport tcp", "elastic must be at most the number of ranks, 2; got 3"),
        (
            "--overwrite --codec int8 --codec-block 1872 --rate-limit 1mbit",
            "codec-block must encode to at most 1875 bytes, a message's at this rate-limit; got 1872 values, "
            "1876 bytes",
        ),
    ]:
        base = SHORT
        for option in ("--lr 0.05", "--hidden-sizes 20"):
            if option.split()[0] in words:
                base = base.replace(option, "")
        results = run(2, f"{base} {words}", tmp_path)
        assert {error.partition(": ")[2] for error, _, _ in results} == {message.format(tmp_path)}
        assert contents(tmp_path) == before

    succeed(2, SHORT + " --overwrite", tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iteration-12"]


def test_a_folder_of_somebody_else_is_never_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("two years of work")
    for words in ("", "--overwrite", "--resume"):
        for error, _, _ in run(2, f"{SHORT} {words}", tmp_path):
            assert "output must be new, empty, or a run's own" in error
            assert "which holds thesis.tex but no run.json" in error
    assert contents(tmp_path) == {"thesis.tex": b"two years of work"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--width 0", "UserInputError: width must be at least 1; got 0"),
        ("--dataset mnist", "UserInputError: mnist must be in the folder --data-dir"),
        (
            "--batch-size 32 --accumulation 100",
            "UserInputError: --batch-size times --accumulation must be at most 748: 2 ranks share 1497 samples; "
            "got 3200",
        ),
        ("--device cuda", "UserInputError: device must be cpu where torch finds no GPU; got cuda"),
        ("--outer elastic --moving-rate 0.6", "UserInputError: moving-rate must be at most 1/2 with 2 ranks"),
        ("--strategy ps-sync --servers 3", "UserInputError: servers must be at most 2 on 2 ranks"),
        ("--strategy ddp --ddp-hook bf16", "UserInputError: ddp-hook must be one that torch accepts here; got bf16: "),
        ("--model resnet18 --optimizer muon", "UserInputError: model must have a weight matrix (2-D, neither"),
        ("--model convnet --dataset digits --lr -1", "UserInputError: lr must be above 0; got -1.0"),
        ("--model transformer", "UserInputError: model must be one of mlp, convnet, resnet18, alexnet for images"),
        ("--dataset text:nowhere", "UserInputError: text:PATH must name a text file or a folder of them; got nowhere"),
    ],
)
def test_bad_input_is_said_before_anything_is_written(tmp_path: Path, words: str, message: str) -> None:
    results = run(2, words, tmp_path / "run")
    assert all(error.startswith(message) for error, _, _ in results)
    assert not (tmp_path / "run").exists()


def _train_with_own_words(ranks: Ranks, words_of_ranks: list[str], output: str) -> str:
    out = io.StringIO()
    try:
        train([*words_of_ranks[ranks.rank].split(), "--output", output], ranks, screen(ranks, out))
    except UserInputError as failure:
        return f"{type(failure).__name__}: {failure}"
    return ""


def test_ranks_with_different_options_all_say_which_one_differs(tmp_path: Path) -> None:
    words = [SHORT, SHORT + " --width 3", SHORT]
    results = run_ranks(3, _train_with_own_words, words, str(tmp_path / "run"), process_group=False)
    message = "DisagreementError: --width must be the same on all ranks; got 2 on rank 0, 3 on rank 1"
    assert issubclass(DisagreementError, UserInputError)
    assert results == [message] * 3
    assert not (tmp_path / "run").exists()


def test_ranks_with_different_data_all_say_so(tmp_path: Path) -> None:
    from PIL import Image

    for folder, count in (("a", 40), ("b", 41)):
        for split in ("train", "test"):
            for name in ("x", "y"):
                path = tmp_path / folder / split / name
                path.mkdir(parents=True)
                for i in range(count if (split, name) == ("train", "x") else 20):
                    Image.new("RGB", (8, 8), (i, i, i)).save(path / f"{i}.png")
    words = [f"{SHORT} --dataset images --image-size 8 --data-dir {tmp_path / folder}" for folder in ("a", "b")]
    results = run_ranks(2, _train_with_own_words, words, str(tmp_path / "run"), process_group=False)
    for text in results:
        assert text.startswith("DisagreementError: data must be the same on all ranks; got 60 training samples")
        assert "61 training samples" in text


def _train_in_own_folder(ranks: Ranks, folder: str, words: str) -> str:
    os.chdir(Path(folder) / str(ranks.rank))
    return train_as_a_rank(ranks, words.split())[0]


def test_ranks_with_different_texts_of_one_size_all_say_so(tmp_path: Path) -> None:
    for rank, text in enumerate(("one ", "two ")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "book").write_text(text * 500)
    words = f"--model transformer --dataset text:book --batch-size 4 --output {tmp_path / 'run'}"
    for text in run_ranks(2, _train_in_own_folder, str(tmp_path), words, process_group=False):
        assert text.startswith("DisagreementError: data must be the same on all ranks; got 27 training samples")
        assert text.count("256 classes, 64, 1800 and 200 bytes of text with the SHA-256 ") == 2
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_the_configuration_and_writes_nothing(tmp_path: Path) -> None:
    results = run(2, "--dry-run --width 5", tmp_path / "run")
    assert "width = 5\n" in results[0][1]
    assert results[1][1] == ""
    assert not (tmp_path / "run").exists()


def test_a_diverging_run_stops_everywhere_and_says_what_to_do(tmp_path: Path) -> None:
    results = run(2, "--hidden-sizes 50 --iterations 60 --lr 1e15", tmp_path)
    texts = {error for error, _, _ in results}
    assert len(texts) == 1
    assert "holds a NaN or an infinity: so does every rank's own gradient, so training has diverged" in texts.pop()


def test_a_diverging_run_can_skip(tmp_path: Path) -> None:
    result = succeed(2, "--hidden-sizes 50 --iterations 20 --lr 1e15 --on-nonfinite skip", tmp_path)
    assert result["skipped_updates"] > 0
    assert set(result["nonfinite_gradients_of_ranks"]) == {"0", "1"}
    assert result["final"]["train_loss"] is None or math.isfinite(result["final"]["train_loss"])
    assert result["final"]["test_loss"] is None or math.isfinite(result["final"]["test_loss"])
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)


def _train_with_infinities(
    ranks: Ranks, words: list[str], bad: tuple[int, ...], value: float = math.inf, on: tuple[int, ...] = (1,)
) -> tuple[str, str, str]:
    """Train with a loss and gradients of this value, by default not finite on rank 1, in ``bad`` iterations."""

    def poisoned(strategy: Strategy, *others: Any) -> Any:
        loss, spans = forward_backward(strategy, *others)
        gradient = next(strategy.module.parameters()).grad
        if ranks.rank in on and others[-1] in bad:
            assert gradient is not None
            gradient.fill_(loss := value)
        return loss, spans

    pytest.MonkeyPatch().setattr("pipesgd.training.forward_backward", poisoned)
    return train_as_a_rank(ranks, words)


@pytest.mark.parametrize("way", ["--width 2", "--local-steps 3"])
def test_gradients_that_are_not_finite_are_counted_and_said_although_only_their_rank_knows(
    tmp_path: Path, way: str
) -> None:
    words = [*f"{SHORT} {way} --on-nonfinite skip".split(), "--output", str(tmp_path)]
    results = run_ranks(2, _train_with_infinities, words, (2, 5), process_group=False)
    assert [error for error, _, _ in results] == ["", ""]
    assert summary(tmp_path)["nonfinite_gradients_of_ranks"] == {"1": 2}
    final = summary(tmp_path)["final"]
    assert final["train_losses_left_out"] == 2
    said = "".join(out + err for _, out, err in results)
    assert f"{final['train_loss']:.4f}, without 2 not finite" in said
    assert said.count("warning: the gradient of iteration 2 is not finite on rank 1") == 1
    assert re.search(r"^skipped updates +2 *$", said, re.MULTILINE)


def test_the_loss_of_the_last_epoch_is_that_of_the_ranks_that_have_one(tmp_path: Path) -> None:
    words = [*f"{SHORT} --on-nonfinite skip".split(), "--output", str(tmp_path)]
    results = run_ranks(2, _train_with_infinities, words, tuple(range(12)), process_group=False)
    assert [error for error, _, _ in results] == ["", ""]
    final = summary(tmp_path)["final"]
    assert final["train_losses_left_out"] == 12
    losses = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert final["train_loss"] == pytest.approx(sum(losses) / 12)


def test_sums_of_finite_gradients_that_overflow_are_said(tmp_path: Path) -> None:
    """No rank is to blame, so the warning that names ranks said nothing of a run that applied no update at all."""
    words = [*f"{SHORT} --width 1 --codec fp16 --on-nonfinite skip".split(), "--output", str(tmp_path)]
    results = run_ranks(2, _train_with_infinities, words, tuple(range(12)), 6e4, (0, 1), process_group=False)
    assert [error for error, _, _ in results] == ["", ""]
    assert (summary(tmp_path)["skipped_updates"], summary(tmp_path)["nonfinite_gradients_of_ranks"]) == (12, {})
    said = "".join(out + err for _, out, err in results)
    assert said.count("warning: ") == 1
    assert (
        "warning: the gradient of iteration 0 is not finite, although every rank's own is, so their sum overflows "
        "(lower --lr, or use --codec bf16): the update is skipped (--on-nonfinite skip); summary.json counts them"
    ) in said
    assert re.search(r"^skipped updates +12 *$", said, re.MULTILINE)


@pytest.mark.parametrize("way", ["--width 2", "--local-steps 3"])
def test_a_loss_scale_that_falls_below_one_is_said_with_the_rank_that_causes_it(tmp_path: Path, way: str) -> None:
    """It would fall to 0 without a line: some overflows are to be expected, until the scale has been found."""
    words = [*f"{SHORT} {way} --precision fp16 --loss-scale 4".split(), "--output", str(tmp_path)]
    results = run_ranks(2, _train_with_infinities, words, (2, 3), process_group=False)
    assert [error for error, _, _ in results] == ["", ""]
    assert "warning: " not in "".join(out + err for _, out, err in results)
    results = run_ranks(2, _train_with_infinities, [*words, "--overwrite"], tuple(range(12)), process_group=False)
    assert [error for error, _, _ in results] == ["", ""]
    said = "".join(out + err for _, out, err in results)
    assert said.count("warning: ") == 1
    assert (
        " is not finite on rank 1: the update is skipped (--precision fp16, whose loss scale has fallen to 0.5)" in said
    )


def test_updates_that_are_left_out_at_the_end_are_counted_and_said(tmp_path: Path) -> None:
    words = [*f"{SHORT} --width 3 --on-nonfinite skip --trace".split(), "--output", str(tmp_path)]
    results = run_ranks(2, _train_with_infinities, words, (10, 11), process_group=False)
    assert [error for error, _, _ in results] == ["", ""]
    assert summary(tmp_path)["nonfinite_gradients_of_ranks"] == {"1": 2}
    assert summary(tmp_path)["skipped_updates"] == 2
    said = "".join(out + err for _, out, err in results)
    assert said.count("warning: the gradient of iteration 10 is not finite on rank 1") == 1


def _train_with_a_faulty_ring(ranks: Ranks, output: str) -> str:
    """Train with a ring that corrupts one weight's gradient on rank 1 in every all-reduce."""
    if ranks.rank == 1:
        right = ScheduledAllReduce.__call__

        def wrong(self: ScheduledAllReduce, flat: torch.Tensor, *others: Any) -> None:
            right(self, flat, *others)
            flat[7] += 1e-3

        ScheduledAllReduce.__call__ = wrong  # type: ignore[method-assign]
    return train_as_a_rank(ranks, [*SHORT.split(), "--check-replicas", "4", "--output", output])[0]


def test_replicas_that_differ_end_the_run(tmp_path: Path) -> None:
    for error in run_ranks(2, _train_with_a_faulty_ring, str(tmp_path), process_group=False):
        assert "ReplicasDivergedError: weights must be the same on all ranks after iteration 4; got rank 0: " in error


def test_messages_are_logged_on_demand(tmp_path: Path) -> None:
    results = run(2, "--hidden-sizes 5 --iterations 1 --log-messages", tmp_path)
    assert "r0 | send -> 1 chunk 0 segment 0 at step 0, 768 B" in results[0][2]
