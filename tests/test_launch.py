"""``python -m pipesgd.launch`` as a user starts it: exit codes, waiting for other machines, signals."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _ranks import run_module
from _started import Started, wait_until_gone
from _waiting import wait_until

from pipesgd.elastic import launch as elastic_launch
from pipesgd.elastic.launch import launch_elastic
from pipesgd.errors import UserInputError
from pipesgd.exit import EXIT_TRY_AGAIN
from pipesgd.launch import commands
from pipesgd.run.folder_lock import check_unused

pytestmark = pytest.mark.slow

TRAIN = "-m pipesgd.train --dataset digits --hidden-sizes 30 --batch-size 32 --output run"
LONG = f"{TRAIN} --iterations 100000 --checkpoint-iterations 20"
SLEEPS = "import time; print('asleep', flush=True); time.sleep(60)"

Start = Callable[[str], Started]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts the launcher with these words, in a folder of its own for temporary files."""
    jobs: list[Started] = []
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))

    def started(words: str) -> Started:
        jobs.append(Started(tmp_path, "pipesgd.launch", *shlex.split(words)))
        return jobs[-1]

    yield started
    for one in jobs:
        one.end()


@pytest.fixture
def place() -> str:
    """Return the options of a job of two machines on this one, at a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"--nnodes 2 --master-addr 127.0.0.1 --master-port {server.getsockname()[1]}"


def is_in_use(folder: Path) -> bool:
    """Return True if a job holds the lock of ``folder``."""
    try:
        check_unused(folder)
    except UserInputError:
        return True
    return False


def left_in(folder: Path) -> set[str]:
    """Return what is left in a folder of temporary files, but for what torch's compiler keeps there."""
    return {path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")}


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("os.kill(os.getpid(), 9)", 137, "error: the process of rank 1 was ended by SIGKILL\n"),
    ],
)
def test_it_exits_with_the_code_of_the_rank_that_failed_first(
    ends: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {ends}\nelif {code}: time.sleep(60)\n"
    (tmp_path / "program.py").write_text(program)
    done = run_module("pipesgd.launch", "--nproc-per-node", "2", "program.py", folder=tmp_path, deadline=90)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)
    assert left_in(tmp_path) == {"program.py"}


def test_a_rank_that_is_lost_is_started_again(tmp_path: Path) -> None:
    program = "import os, sys\nsys.exit(5 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))\n"
    (tmp_path / "program.py").write_text(program)
    for restarts, code in (("1", 0), ("0", 5)):
        done = run_module("pipesgd.launch", "--max-restarts", restarts, "program.py", folder=tmp_path, deadline=90)
        assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nodes 2 program.py", "unrecognized arguments: --nodes (did you mean --nnodes?)"),
        ("--nnodes 0 program.py", "nnodes must be a number, or the least and the most as 2:4; got '0'"),
        ("--nnodes 2 --node-rank 2 program.py", "node-rank must be from 0 to 1 with --nnodes 2; got 2"),
        ("--node-rank one program.py", "node-rank must be a whole number; got 'one'"),
        (
            "--nproc-per-node two program.py",
            "options must be such as torchrun takes; Unsupported nproc_per_node value: two",
        ),
        (
            "--elastic --max-restarts 3 program.py",
            "--max-restarts must be left out with --elastic, which does without torch's agent",
        ),
        ("--elastic --nnodes 2:4 program.py", "nnodes must be one number with --elastic; got 2:4"),
        (
            "--elastic --master-addr 192.0.2.1 --no-python ./absent",
            "program must be one that runs; got ./absent: No such file or directory",
        ),
    ],
)
def test_a_wrong_option_is_one_line(words: str, message: str, tmp_path: Path) -> None:
    done = run_module("pipesgd.launch", *words.split(), folder=tmp_path, deadline=90)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")


def test_a_ranks_own_error_is_all_that_is_said(start: Start) -> None:
    running = start(f"--nproc-per-node 2 {TRAIN} --width 0")
    assert running.finish() == 2
    assert running.lines[0].startswith("starting rank 0 of 2")
    assert running.lines[1:] == ["error: width must be at least 1; got 0"]


@pytest.mark.parametrize(
    ("end", "code", "name"),
    [
        (lambda job: os.killpg(job.pid, signal.SIGINT), 130, "Ctrl-C"),  # as a terminal does
        (lambda job: os.kill(job.pid, signal.SIGTERM), 143, "SIGTERM"),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_nothing_else(
    end: Callable[[Started], None], code: int, name: str, start: Start, tmp_path: Path
) -> None:
    running = start(f"--nproc-per-node 2 {LONG}")
    wait_until(lambda: list(tmp_path.glob("run/checkpoints/iteration-*")) != [], 90)
    pids = list(running.rank_pids().values())
    before = len(running.lines)
    end(running)
    assert running.finish() == code, running.lines
    first, last = [line for line in running.lines[before:] if not line.startswith("training: ")]
    assert first == f"{name}: all ranks write a checkpoint and stop; a second one ends them at once"
    assert last.startswith(f"stopped by {name} after iteration ")
    wait_until_gone(pids)
    assert left_in(tmp_path / "temporary") == set()


def test_the_first_machine_says_whom_it_waits_for_and_how_to_start_it(start: Start, place: str, tmp_path: Path) -> None:
    first = start(f"--node-rank 0 {place} {TRAIN} --iterations 20")
    port = place.split()[-1]
    assert first.wait_for("waiting") == f"waiting for 1 of 2 machines at 127.0.0.1:{port} (--node-rank 1)"
    command = first.wait_for("  python -m pipesgd.launch")
    second = start(command.removeprefix("  python -m pipesgd.launch "))
    assert (first.finish(), second.finish()) == (0, 0), second.lines
    assert second.lines[-1] == "machine 1 of 2: done", second.lines
    assert "rank 1: done; results are on 127.0.0.1 in run" in second.lines  # torch may write between them
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("number", [0, 1])
def test_a_machine_that_waits_can_be_stopped(number: int, start: Start, place: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SLEEPS)
    for sent, code, name in ((signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")):
        running = start(f"--node-rank {number} {place} program.py")
        running.wait_for("waiting for ")
        os.kill(running.pid, sent)
        assert running.finish(10) == code
        assert running.lines[-1] == f"stopped by {name} before the ranks started"


ELASTIC = (
    "-m pipesgd.train --dataset digits --hidden-sizes 30 --iterations 400 --transport tcp --elastic 1 "
    "--checkpoint-iterations 50"
)
"""Options of a training that may lose ranks."""


def wait_until_training(folder: Path) -> None:
    wait_until((folder / "checkpoints" / "iteration-50").exists, 60)


def test_an_elastic_job_continues_without_its_first_rank(start: Start, tmp_path: Path) -> None:
    """The next one says how the run ends, and holds the folder."""
    job = start(f"--nproc-per-node 3 --elastic {ELASTIC} --output run")
    wait_until_training(tmp_path / "run")
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    job.wait_for("the process of rank 0 was ended by SIGKILL")
    job.wait_for("rank 0 is lost: its process has ended. Generation 1: ranks 1, 2")
    wait_until(lambda: is_in_use(tmp_path / "run"))  # the lock is taken after that line is printed
    assert job.finish() == 0
    assert any("bit-identical" in line for line in job.lines)


def test_two_machines_of_an_elastic_job_outlive_the_first_one(start: Start, place: str, tmp_path: Path) -> None:
    words = f"{place} --elastic {ELASTIC}"
    first, second = (start(f"--node-rank {machine} {words} --output run-{machine}") for machine in range(2))
    wait_until_training(tmp_path / "run-0")
    first.end()
    second.wait_for("rank 0 is lost: its process has ended. Generation 1: rank 1")
    assert second.finish() == 0
    assert (tmp_path / "run-1" / "summary.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_an_elastic_job_forwards_signals_to_all_ranks(number: signal.Signals, start: Start, tmp_path: Path) -> None:
    job = start(f"--nproc-per-node 2 --elastic {ELASTIC} --output run")
    wait_until_training(tmp_path / "run")
    os.kill(job.pid, number)
    assert job.finish() == 128 + number
    assert any(line.startswith(f"stopped by {number.name} after iteration ") for line in job.lines)


def raise_at_each_start(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process get a signal whenever it has started another one."""

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            signal.raise_signal(number)

    monkeypatch.setattr(subprocess, "Popen", Popen)


PLACE: dict[str, Any] = {"machine": 0, "machines": 1, "host": "127.0.0.1", "port": None}


@pytest.mark.parametrize("under_nohup", [False, True])
def test_a_hang_up_ends_no_elastic_job_under_nohup(under_nohup: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_at_each_start(signal.SIGHUP, monkeypatch)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    try:
        code = launch_elastic("sh", ["-c", "sleep 1"], ranks=1, **PLACE)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == (0 if under_nohup else 128 + signal.SIGHUP)


def test_a_rank_that_still_works_when_another_one_has_ended_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(elastic_launch, "LEFT_SECONDS", 0.1)
    works = f"[ $RANK = 1 ] && sleep 1 && touch {shlex.quote(str(tmp_path / 'done'))}; exit 0"
    assert launch_elastic("sh", ["-c", works], ranks=2, **PLACE) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("code", [0, EXIT_TRY_AGAIN, 143])
def test_a_rank_that_was_left_behind_and_is_stopped_does_not_keep_the_job_waiting(
    code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic_launch, "LEFT_SECONDS", 0.5)
    assert launch_elastic("sh", ["-c", f"[ $RANK = 1 ] && kill -STOP $$; exit {code}"], ranks=3, **PLACE) == code
    said = capfd.readouterr().err
    assert "rank 1 is stopped 0.5 s after another one had ended: it is killed" in said
    assert "the process of rank 1 was ended by SIGKILL" in said


def test_a_rank_that_is_stopped_while_others_continue_after_a_loss_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(elastic_launch, "LEFT_SECONDS", 0.3)
    monkeypatch.chdir(tmp_path)
    stopped = "[ $RANK = 1 ] && { echo $$ > stopped; kill -STOP $$; touch done; exit 0; }"
    words = f"[ $RANK = 0 ] && exit 1; {stopped}; sleep 1; kill -CONT $(cat stopped); exit 0"
    assert launch_elastic("sh", ["-c", words], ranks=3, **PLACE) == 0
    assert (tmp_path / "done").exists()


def test_ranks_that_are_stopped_and_all_that_is_left_after_a_loss_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic_launch, "LEFT_SECONDS", 0.3)
    monkeypatch.chdir(tmp_path)
    resume = threading.Timer(1.5, lambda: os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT))
    resume.start()
    words = "[ $RANK = 1 ] && { echo $$ > stopped; kill -STOP $$; exit 3; }; exit 1"
    assert launch_elastic("sh", ["-c", words], ranks=3, **PLACE) == 3
    said = capfd.readouterr().err
    assert "all that is left on this machine is stopped (rank 1): continue or kill it" in said


def test_an_elastic_job_on_one_machine_meets_at_the_port_that_is_given() -> None:
    found = run_module(
        "pipesgd.launch", "--elastic", "--master-port", "12345", "--no-python", "printenv", "MASTER_PORT"
    )
    assert (found.returncode, found.stdout.strip()) == (0, "12345")


def test_one_that_is_stopped_long_after_another_one_has_left_does_not_either(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic_launch, "LEFT_SECONDS", 0.5)
    words = "[ $RANK = 0 ] && exit 143; sleep 1.5; [ $RANK = 1 ] && kill -STOP $$; exit 0"
    assert launch_elastic("sh", ["-c", words], ranks=3, **PLACE) == 0
    assert "rank 1 is stopped" in capfd.readouterr().err


def test_a_signal_while_ranks_are_being_started_reaches_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    kill = os.kill

    def count(pid: int, number: int) -> None:
        sent.append(pid)
        assert len(sent) < 10
        kill(pid, number)

    raise_at_each_start(signal.SIGTERM, monkeypatch)
    monkeypatch.setattr(os, "kill", count)
    assert launch_elastic("sleep", ["60"], ranks=2, **PLACE) == 128 + signal.SIGTERM
    assert len(sent) == 4  # two signals, two ranks


def test_a_rank_may_end_by_a_signal_without_a_name(capfd: pytest.CaptureFixture[str]) -> None:
    number = signal.SIGRTMIN + 2
    code = launch_elastic("sh", ["-c", f"[ $RANK = 0 ] && kill -{number} $$; sleep 1"], ranks=2, **PLACE)
    assert code == 0
    assert f"the process of rank 0 was ended by signal {number}" in capfd.readouterr().err


def test_two_machines_with_one_number_are_refused(start: Start, place: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SLEEPS)
    three = place.replace("--nnodes 2", "--nnodes 3")
    first = start(f"--node-rank 0 {three} program.py")
    first.wait_for("waiting for 2 of 3 machines")
    second = start(f"--node-rank 1 {three} program.py")
    first.wait_for("waiting for 1 of 3 machines")
    start(f"--node-rank 1 {three} program.py")
    assert second.finish() == 2
    assert second.lines[-1].startswith("error: node-rank must differ between machines; got 1 here and on ")


def test_a_machine_that_waits_hears_that_the_first_one_has_ended(start: Start, place: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SLEEPS)
    three = place.replace("--nnodes 2", "--nnodes 3")
    first = start(f"--node-rank 0 {three} program.py")
    second = start(f"--node-rank 1 {three} program.py")
    second.wait_for("waiting for 1 of 3 machines")
    first.end()
    assert second.finish() == 1
    assert second.lines[-1].startswith("error: the machine at 127.0.0.1:")
    assert second.lines[-1].endswith(" has ended the job, or cannot be reached any more")


def test_a_job_at_a_port_that_is_taken_says_so(start: Start, place: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SLEEPS)
    with socket.create_server(("", int(place.split()[-1]))):
        running = start(f"--node-rank 0 {place} program.py")
        assert running.finish() == 1
    [line] = running.lines
    assert line.startswith(
        f"error: the store at 127.0.0.1:{place.split()[-1]} cannot be opened (is another job there?)"
    )


@pytest.mark.parametrize(
    ("words", "machines", "command"),
    [
        (
            "--nnodes=2 --node-rank 0 --master-addr 10.0.0.1 -m pipesgd.train --output 'my run' --node-rank 7",
            2,
            "--node-rank 1 --nnodes=2 --master-addr 10.0.0.1 -m pipesgd.train --output 'my run' --node-rank 7",
        ),
        (
            "--node_rank=0 --local-addr 10.0.0.1 --nnodes 4 program.py",
            4,
            "--node-rank 1 --local-addr ITS_ADDRESS --nnodes 4 program.py",
        ),
    ],
)
def test_the_command_of_another_machine_differs_in_what_is_its_own(words: str, machines: int, command: str) -> None:
    argv = shlex.split(words)
    rest = argv[argv.index("pipesgd.train") + 1 :] if "pipesgd.train" in argv else []
    given = argparse.Namespace(training_script_args=rest, local_addr="10.0.0.1" if "--local-addr" in argv else None)
    lines = commands(given, argv, machines)
    assert lines[1] == f"  python -m pipesgd.launch {command}"
    assert ("--node-rank 2 to 3" in lines[0]) == (machines == 4)
