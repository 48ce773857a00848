"""The command as a user starts it: torchrun, real processes, and their behaviour when they are killed or stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _ranks import run_as_ranks, run_module, run_ranks
from _runs import succeed, summary, train_as_a_rank
from _started import Started, wait_until_gone
from _waiting import wait_until
from conftest import REPOSITORY
from PIL import Image

from experiments.command import torchrun
from pipesgd.config import DataConfig
from pipesgd.ranks import Ranks
from pipesgd.run.attempts import read_attempts

pytestmark = pytest.mark.slow

LONG = "--hidden-sizes 300 300 --batch-size 32 --iterations 100000 --checkpoint-iterations 20"
"""Options of a run that is longer than any test, and that a test must end."""


class Job(Started):
    """A training that torchrun has started."""

    def __init__(self, folder: Path, words: str, *, ranks: int = 3, torchrun: str = ""):
        self.output = folder / "run"
        own = ["--nproc-per-node", str(ranks), *torchrun.split()]
        command = ["-m", "pipesgd.train", *words.split(), "--output", str(self.output)]
        super().__init__(folder, "torch.distributed.run", *own, *command)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    jobs: list[Job] = []

    def start(words: str, **options: Any) -> Job:
        jobs.append(Job(tmp_path, words, **options))
        return jobs[-1]

    yield start
    for one in jobs:
        one.end()


def errors_of(job: Job) -> list[str]:
    return [line for line in job.lines if line.startswith("error: ")]


def farewells_of(job: Job) -> list[str]:
    """Return the lines of ranks that torchrun told to stop, and that could not meet the others for a checkpoint."""
    return [line for line in job.lines if line.startswith("stopped by SIGTERM in iteration ")]


def silent_ranks(job: Job) -> set[str]:
    """Return the ranks that any other rank's last line calls silent."""
    said = " ".join([*errors_of(job), *farewells_of(job)])
    return set(re.findall(r"no heartbeat from (ranks? [\d, ]*\d)", said))


def newest_checkpoint(job: Job) -> int:
    found = (job.output / "checkpoints").glob("iteration-*")
    return max((int(path.name.partition("-")[2]) for path in found), default=0)


def test_a_killed_rank_ends_the_job_and_is_named(job: Any) -> None:
    running = job(LONG)
    wait_until(lambda: newest_checkpoint(running) > 0, 60)  # all ranks are well under way
    pids = running.rank_pids()
    os.kill(pids[1], signal.SIGKILL)
    assert running.finish() == 1
    # Both remaining ranks say where they were and who is missing: in an error, or, if torchrun's SIGTERM comes before
    # they have noticed that rank 1 is gone, in the line about a farewell that failed.
    errors, farewells = errors_of(running), farewells_of(running)
    assert silent_ranks(running) == {"rank 1"}, running.lines
    ends = {line[len("error: ") :].split(":")[0] for line in errors if re.search(r" in iteration \d+", line)}
    assert ends <= {"rank 0", "rank 2"}, running.lines
    assert len(ends) + len(farewells) == 2, running.lines
    last = max(map(running.lines.index, [*errors, *farewells]))
    assert not any("Traceback" in line for line in running.lines[:last])
    wait_until_gone(list(pids.values()))


def test_a_healthy_rank_is_not_accused_when_one_is_told_to_stop(job: Any) -> None:
    running = job(f"{LONG} --farewell-seconds 0")
    wait_until(lambda: newest_checkpoint(running) > 0, 60)  # all ranks are well under way
    os.kill(running.rank_pids()[1], signal.SIGTERM)
    assert running.finish() == 1
    errors = errors_of(running)
    assert silent_ranks(running) == set(), errors
    assert sum("rank 1 has failed: rank 1: told to stop (SIGTERM)" in line for line in errors) == 2, errors
    # torchrun's own report names the cause too.
    causes = [line for line in running.lines if "told to stop (SIGTERM)" in line and "error: " not in line]
    assert causes, running.lines


@pytest.mark.parametrize("all_reduce", ["ring", "native"])
def test_a_rank_that_hangs_ends_the_job_within_the_deadline(job: Any, all_reduce: str) -> None:
    running = job(f"{LONG} --timeout 3 --all-reduce {all_reduce}")
    wait_until(lambda: newest_checkpoint(running) > 0, 60)  # all ranks are well under way
    pids = running.rank_pids()
    os.kill(pids[2], signal.SIGSTOP)
    begin = time.monotonic()
    running.wait_for("no heartbeat from rank 2")
    assert time.monotonic() - begin < 15
    os.kill(pids[2], signal.SIGCONT)  # torchrun's SIGTERM takes effect; its SIGKILL would come after 30 s
    assert running.finish() == 1
    assert silent_ranks(running) == {"rank 2"}, errors_of(running)
    wait_until_gone(list(pids.values()))


def test_a_killed_rank_with_a_restart_gives_the_same_weights(job: Any, tmp_path: Path) -> None:
    words = "--hidden-sizes 300 300 --batch-size 32 --iterations 400 --checkpoint-iterations 20 --width 3"
    expected = succeed(2, words, tmp_path / "undisturbed")

    running = job(words, ranks=2, torchrun="--max-restarts 1")
    wait_until(lambda: newest_checkpoint(running) >= 20, 60)
    os.kill(running.rank_pids()[0], signal.SIGKILL)
    assert running.finish() == 0, running.lines
    assert any("continuing after iteration" in line for line in running.lines)
    result = json.loads((running.output / "summary.json").read_text())
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert result["final"] == expected["final"]
    killed, last = read_attempts(running.output / "attempts.jsonl")
    assert (killed.start, killed.ended, last.why) == (0, None, None)
    assert last.start >= 20
    assert "rank 0 ended without a word" in (running.output / "report.html").read_text()


def test_ranks_do_not_outlive_torchrun_not_even_a_stopped_one(job: Any) -> None:
    running = job(LONG, ranks=2)
    wait_until(lambda: newest_checkpoint(running) > 0, 60)  # all ranks are well under way
    pids = running.rank_pids()
    os.kill(pids[1], signal.SIGSTOP)
    running.process.kill()
    wait_until_gone(list(pids.values()))
    running.wait_for("has died")


def test_ranks_that_are_still_importing_torch_do_not_outlive_torchrun(job: Any) -> None:
    running = job(LONG, ranks=2)
    wait_until(lambda: len(running.rank_pids()) == 2, 60)
    running.wait_for("starting rank 0 of 2")  # printed before torch is imported
    pids = list(running.rank_pids().values())
    running.process.kill()
    wait_until_gone(pids)


def test_a_store_that_hangs_ends_all_ranks_within_the_deadline(job: Any) -> None:
    running = job(f"{LONG} --timeout 3", ranks=2)
    wait_until(lambda: newest_checkpoint(running) > 0, 60)  # all ranks are well under way
    pids = list(running.rank_pids().values())
    os.kill(running.pid, signal.SIGSTOP)  # torchrun's agent holds the store
    begin = time.monotonic()
    running.wait_for("rank 0's machine) has not answered within 3 s")
    assert time.monotonic() - begin < 15
    wait_until_gone(pids)
    running.process.kill()


def interrupt(job: Job) -> None:
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does: to torchrun and all its ranks


def terminate(job: Job) -> None:
    job.process.terminate()  # torchrun passes it on to all ranks


def hang_up(job: Job) -> None:
    os.kill(job.pid, signal.SIGHUP)  # as an SSH session that is closed does; torchrun passes it on to all ranks


def quit_all(job: Job) -> None:
    os.killpg(job.pid, signal.SIGQUIT)


def terminate_one(job: Job) -> None:
    os.kill(job.rank_pids()[1], signal.SIGTERM)


@pytest.mark.parametrize(
    ("end", "name", "words"),
    [
        (interrupt, "Ctrl-C", f"{LONG} --loader-workers 1"),  # processes that get the signal, too
        (terminate, "SIGTERM", LONG),
        (hang_up, "SIGHUP", f"{LONG} --loader-workers 1"),
        (quit_all, "SIGQUIT", f"{LONG} --loader-workers 1"),
        (terminate_one, "SIGTERM", LONG),
    ],
)
def test_a_signal_writes_a_checkpoint_on_all_ranks_and_says_one_line(
    job: Any, end: Callable[[Job], None], name: str, words: str
) -> None:
    running = job(words, ranks=2)
    wait_until(lambda: newest_checkpoint(running) > 0, 60)  # all ranks are well under way
    pids = list(running.rank_pids().values())
    end(running)
    assert running.finish() != 0
    line = running.wait_for("; --resume continues from its checkpoint")
    found = re.match(f"stopped by {name} after iteration (\\d+); --resume", line)
    assert found, line
    assert newest_checkpoint(running) == int(found[1])
    assert [str(one.why) in line for one in read_attempts(running.output / "attempts.jsonl")] == [True]
    assert not errors_of(running), running.lines
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--width 0", "error: width must be at least 1; got 0"),
        (
            "--codec int8 --codec-block 1872 --rate-limit 1mbit",
            "error: codec-block must encode to at most 1875 bytes, a message's at this rate-limit; got 1872 values",
        ),
    ],
)
def test_bad_input_is_said_once_with_exit_code_2(job: Any, words: str, message: str) -> None:
    running = job(words, ranks=2)
    assert running.finish() == 1, "torchrun's own code for a rank that ended with another than 0"
    assert [line[: len(message)] for line in errors_of(running)] == [message]
    assert any(re.search(r"exitcode\s*: 2 ", line) for line in running.lines)
    assert not running.output.exists()


def test_without_torchrun_the_exit_code_is_2(tmp_path: Path) -> None:
    done = run_module("pipesgd.train", "--width", "0", folder=tmp_path, deadline=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: width must be at least 1; got 0\n")


def test_the_readmes_loop_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    loop = next(block for block in blocks if "pipesgd.Pipelined" in block)
    # One write a rank, so that the ranks' lines cannot mix.
    (tmp_path / "loop.py").write_text(loop + "\nprint(f'loss {loss.item()}\\n', end='', flush=True)\n")
    losses = [float(text) for text in re.findall(r"loss (\S+)", run_as_ranks(2, tmp_path / "loop.py", tmp_path))]
    assert len(losses) == 2
    assert all(loss < 1.0 for loss in losses)


def ended(loop: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Return a job of two ranks that run this program in a folder, once it has ended well."""
    (folder / "loop.py").write_text(loop)
    done = run_module(*torchrun(2, "loop.py")[2:], folder=folder, deadline=90)
    assert done.returncode == 0, done.stderr
    return done


def test_a_loop_that_does_not_close_its_pipeline_ends_with_a_line_that_says_so(tmp_path: Path) -> None:
    done = ended(
        "import torch, pipesgd\n"
        "model = torch.nn.Linear(20, 1)\n"
        "pipeline = pipesgd.Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.05))\n"
        "for batch in torch.randn(256, 20).split(16):\n"
        "    model(batch).square().mean().backward()\n"
        "    pipeline.step()\n",
        tmp_path,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("warning: a pipeline was not closed")]
    assert len(said) == 2


def test_a_compressed_loop_that_does_not_close_leaves_no_thread_at_its_end(tmp_path: Path) -> None:
    """Such a program was aborted now and then, after its training."""
    done = ended(
        "import atexit, threading, torch, pipesgd.ddp\n"
        "torch.distributed.init_process_group('gloo')\n"
        "names = lambda: ' '.join(one.name for one in threading.enumerate() if one.name.startswith('pipesgd'))\n"
        "atexit.register(lambda: print(f'at the end: {names()!r}\\n', end='', flush=True))\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 1))\n"
        "state = pipesgd.ddp.compress(model)\n"
        "model(torch.randn(16, 20)).square().mean().backward()\n",
        tmp_path,
    )
    assert done.stdout == "at the end: ''\n" * 2


def _decode(ranks: Ranks, words: list[str]) -> tuple[str, list[str]]:
    """Return the command's error, and the processes that it has left."""
    multiprocessing.current_process().daemon = False  # a daemon may have no loader workers
    error, _, _ = train_as_a_rank(ranks, words)
    return error, [child.name for child in multiprocessing.active_children()]


def test_folders_of_images_are_decoded_beside_the_computation(tmp_path: Path) -> None:
    """A convnet learns red against blue pictures; the processes that decode end with the run."""
    for split, count in (("train", 24), ("test", 8)):
        for name, colour in (("blue", (20, 20, 200)), ("red", (200, 20, 20))):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (20 + i, 24), colour).save(tmp_path / split / name / f"{i}.jpg")
    words = f"--dataset images --data-dir {tmp_path} --image-size 16 --model convnet --batch-size 6 --iterations 12"
    words += f" --lr 0.01 --output {tmp_path / 'run'}"
    assert run_ranks(1, _decode, words.split(), process_group=False) == [("", [])]
    result = summary(tmp_path / "run")
    assert result["final"]["test_accuracy"] == 1.0
    assert result["options"]["loader-workers"] is None
    assert DataConfig(dataset="images").workers == 2
    assert DataConfig(dataset="digits").workers == 0
