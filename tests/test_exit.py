"""The end of a rank: a normal one, and one after a signal whose handling fails in turn."""

import json
import os
import pty
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist
from _ranks import run_module

import pipesgd.exit
from pipesgd.errors import DeadlineExceeded, PeerFailed, RunError, StoppedBySignal
from pipesgd.membership.watcher import report_key
from pipesgd.ranks import Ranks
from pipesgd.train import reporting_failure

pytestmark = pytest.mark.slow

INTERRUPTED = (130, "interrupted\n")
TERMINATED, HUNG_UP, QUIT = (
    (code, f"error: rank 0: told to stop ({name}): another rank has failed, or somebody has stopped the job\n")
    for name, code in (("SIGTERM", 143), ("SIGHUP", 129), ("SIGQUIT", 131))
)


@pytest.mark.parametrize(
    ("told", "on_the_way_out", "end"),
    [
        ("SIGINT", "pass", INTERRUPTED),
        ("SIGINT", "raise RuntimeError('unexpected pos 64 vs 0')", INTERRUPTED),  # as torch.save does
        ("SIGINT", "os.kill(os.getpid(), signal.SIGINT)", INTERRUPTED),  # torchrun passes it on
        ("SIGINT", "os.kill(os.getpid(), signal.SIGTERM)", INTERRUPTED),
        ("SIGTERM", "pass", TERMINATED),
        ("SIGTERM", "raise RuntimeError('unexpected pos 64 vs 0')", TERMINATED),
        ("SIGTERM", "os.kill(os.getpid(), signal.SIGINT)", TERMINATED),
        ("SIGHUP", "pass", HUNG_UP),
        ("SIGHUP", "os.kill(os.getpid(), signal.SIGTERM)", HUNG_UP),  # systemd sends both
        ("SIGQUIT", "raise RuntimeError('unexpected pos 64 vs 0')", QUIT),
        ("SIGTERM", "os.kill(os.getpid(), signal.SIGHUP)", TERMINATED),
    ],
)
def test_the_first_signal_says_how_a_rank_ends(
    told: str, on_the_way_out: str, end: tuple[int, str], tmp_path: Path
) -> None:
    script = f"""
        import os, signal
        from pipesgd.exit import run_and_exit

        def command(words, ranks, console):
            try:
                os.kill(os.getpid(), signal.{told})
            finally:
                {on_the_way_out}

        run_and_exit(command, [])
    """
    assert _run(script, tmp_path) == end


@pytest.mark.parametrize(("told", "end"), [("SIGINT", INTERRUPTED), ("SIGTERM", TERMINATED), ("SIGHUP", HUNG_UP)])
def test_a_signal_whose_exception_python_swallows_ends_a_rank_all_the_same(
    told: str, end: tuple[int, str], tmp_path: Path
) -> None:
    script = f"""
        import os, signal, time
        from pipesgd.exit import run_and_exit

        class Dropped:
            def __del__(self):
                os.kill(os.getpid(), signal.{told})

        def command(words, ranks, console):
            dropped = Dropped()
            del dropped
            time.sleep(60)

        run_and_exit(command, [])
    """
    assert _run(script, tmp_path) == end


@pytest.mark.parametrize(("told", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGQUIT", 131)])
def test_a_single_rank_says_what_a_signal_does_and_ends_when_the_farewell_takes_too_long(
    told: str, code: int, tmp_path: Path
) -> None:
    """The first signal used to be without effect until the next iteration, and without a word."""
    script = f"""
        import os, signal, threading
        from pipesgd.exit import run_and_exit

        def command(words, ranks, console):
            ranks.standing.farewell.open(members=1, start=0, seconds=0.2)
            os.kill(os.getpid(), signal.{told})
            threading.Event().wait(60)

        run_and_exit(command, [])
    """
    said = (
        f"{told}: all ranks write a checkpoint and stop; a second one ends them at once\n"
        f"stopped by {told} without a farewell checkpoint, since 0.2 s were not enough for it; "
        "there is no checkpoint yet\n"
    )
    assert _run(script, tmp_path) == (code, said)


def test_a_hang_up_that_nohup_has_asked_to_ignore_stays_ignored(tmp_path: Path) -> None:
    script = """
        import os, signal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        from pipesgd.exit import run_and_exit

        def command(words, ranks, console):
            os.kill(os.getpid(), signal.SIGHUP)

        run_and_exit(command, [])
    """
    assert _run(script, tmp_path) == (0, "")


def test_a_terminal_that_hangs_up_leaves_a_checkpoint(tmp_path: Path) -> None:
    """The kernel sends SIGHUP then, and whatever is written to the terminal fails, the progress bar included."""
    words = ["--hidden-sizes", "8", "--iterations", "1000000", "--output", "run"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "pipesgd.train", *words])
    shown = b""
    try:
        while b"loss " not in shown:
            shown += os.read(terminal, 4096)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129, shown.decode()
    [checkpoint] = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name.startswith("iteration-")


def test_a_run_continues_when_its_output_cannot_be_written(tmp_path: Path) -> None:
    script = """
        import os
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        from pathlib import Path
        from pipesgd.exit import run_and_exit
        from pipesgd.run.console import say

        def command(words, ranks, console):
            say(console, "one", "another")
            Path("done").touch()

        run_and_exit(command, [])
    """
    warning = "warning: standard output cannot be written any more (No space left on device): the run continues"
    assert _run(script, tmp_path) == (141, f"{warning} without it\n")
    assert (tmp_path / "done").exists()


def test_a_rank_whose_terminal_is_gone_says_its_error_and_ends(tmp_path: Path) -> None:
    script = """
        import io, sys, threading
        from rich.console import Console
        import pipesgd.exit
        from pipesgd.errors import PeerFailed

        class Gone(io.StringIO):
            def write(self, text):
                raise OSError(5, "Input/output error")

            def flush(self):
                raise OSError(5, "Input/output error")

        def command(words, ranks, console):
            error = PeerFailed(rank=0, peer=1, operation="all-reduce", reason="rank 1: died")
            sys.stdout = Gone()
            screen = Console(file=Gone(), force_terminal=True)
            threading.Thread(target=pipesgd.exit._end, args=(error, ranks, screen)).start()
            threading.Event().wait()

        pipesgd.exit.run_and_exit(command, [])
    """
    code, said = _run(script, tmp_path)
    assert (code, said.count("rank 1 has failed: rank 1: died"), "Traceback" in said) == (1, 1, False)


def test_a_rank_does_not_wait_for_ever_for_the_thread_that_ends_it(tmp_path: Path) -> None:
    script = """
        import pipesgd.exit
        from pipesgd import process

        def command(words, ranks, console):
            process.claim_the_end()
            raise KeyError("the thread that claimed the end is gone")

        pipesgd.exit.END_SECONDS = 0.1
        pipesgd.exit.run_and_exit(command, [])
    """
    assert _run(script, tmp_path) == (1, "")


UNREAD = (
    "import os, sys; here, there = os.pipe(); os.close(here); os.dup2(there, {stream}); "
    "setattr(sys, [None, 'stdout', 'stderr'][{stream}], open({stream}, 'w', closefd=False))"
)
"""Line of a script whose output on a stream nobody reads any more; a pipe's stream knows that it cannot seek."""
NOBODY_READS = "warning: nobody reads standard output any more: the run continues without it\n"
STARTED = [({}, 141), ({"TORCHELASTIC_RUN_ID": "none"}, 0)]
"""Environments of a process without and with torchrun, and its exit code if nobody reads its standard output."""


@pytest.mark.parametrize(("environment", "code"), STARTED)
@pytest.mark.parametrize(
    ("stream", "work", "warning"),
    [
        (1, "say(console, 'one', 'another')", NOBODY_READS),
        (1, "sys.stdout.reconfigure(write_through=False); print('what a model prints')", ""),
        (2, "warn('something')", ""),
    ],
)
def test_a_run_continues_when_nobody_reads_what_it_prints(
    stream: int, work: str, warning: str, environment: dict[str, str], code: int, tmp_path: Path
) -> None:
    script = f"""
        {UNREAD.format(stream=stream)}
        import sys
        from pathlib import Path
        from pipesgd.errors import warn
        from pipesgd.exit import run_and_exit
        from pipesgd.run.console import say

        def command(words, ranks, console):
            {work}
            Path("done").touch()

        run_and_exit(command, [])
    """
    assert _run(script, tmp_path, environment) == (code if stream == 1 else 0, warning)
    assert (tmp_path / "done").exists()


def test_a_training_writes_its_files_when_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    script = f"""
        {UNREAD.format(stream=1)}
        from pipesgd.exit import run_and_exit
        from pipesgd.train import train

        run_and_exit(train, "--iterations 3 --hidden-sizes 8 --output run".split())
    """
    assert _run(script, tmp_path) == (141, NOBODY_READS)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["iterations"] == 3


@pytest.mark.parametrize(("environment", "code"), STARTED)
@pytest.mark.parametrize(
    "ask",
    [
        "pipesgd.cli.answer_questions(pipesgd.cli.parse, ['--help-all'])",
        "pipesgd.exit.run_and_exit(pipesgd.train.train, ['--help'])",
        "pipesgd.exit.run_and_exit(pipesgd.train.train, ['--dry-run'])",
        "runpy.run_module('pipesgd', run_name='__main__')",
    ],
)
def test_an_answer_that_nobody_reads_to_its_end_ends_quietly(
    ask: str, environment: dict[str, str], code: int, tmp_path: Path
) -> None:
    script = f"""
        {UNREAD.format(stream=1)}
        import runpy
        import pipesgd.cli, pipesgd.exit, pipesgd.train

        {ask}
    """
    assert _run(script, tmp_path, environment) == (code, "")


def test_no_thread_watches_when_a_help_was_asked_for_and_the_interpreter_ends(tmp_path: Path) -> None:
    """Python used to be aborted there at times, while the thread was in a call of torch's store."""
    script = """
        import sys, threading
        from pipesgd.cli import HelpRequested
        from pipesgd.exit import run_and_exit

        def command(words, ranks, console):
            raise HelpRequested("a help")

        try:
            run_and_exit(command, [])
        finally:
            print([one.name for one in threading.enumerate() if "watcher" in one.name], file=sys.stderr)
    """
    assert _run(script, tmp_path) == (0, "[]\n")


def _run(script: str, folder: Path, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a Python script; return its exit code and what it writes to stderr."""
    (folder / "script.py").write_text(textwrap.dedent(script), encoding="utf-8")
    done = run_module("script", folder=folder, environment={**os.environ, **(environment or {})})
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("restarts", "told"),
    [("0", ""), ("1", ""), ("3", ". torchrun restarts all ranks unless it was stopped itself (restarts left: 2)")],
)
def test_a_signal_to_a_rank_alone_is_said_to_end_no_job_that_is_restarted(
    restarts: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert pipesgd.exit._explain(StoppedBySignal("SIGTERM", iteration=5, newest=5), None) == 143
    stopped = "stopped by SIGTERM after iteration 5; --resume continues from its checkpoint"
    assert capsys.readouterr().err == f"{stopped}{told}\n"


def test_a_server_says_nothing_about_checkpoints_that_it_does_not_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to say that there is no checkpoint yet, while the workers named theirs."""
    monkeypatch.setattr("pipesgd.ranks.SPEECH_SECONDS", 0.0)
    said = []
    for rank in range(3):
        ranks = Ranks(rank=rank, world_size=3, store=dist.HashStore())
        ranks.standing.farewell.open(members=2, start=0, seconds=20.0)
        failure = StoppedBySignal("SIGTERM", iteration=5, newest=3, without="20 s were not enough for it")
        assert pipesgd.exit._explain(failure, ranks) == 143
        said.append("without a farewell checkpoint" in capsys.readouterr().err)
    assert said == [True, True, False]


def test_nobody_waits_for_a_rank_that_has_ended_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter server on a dedicated rank ends like this when its workers are told to stop."""
    store = dist.HashStore()
    server, worker = (Ranks(rank=rank, world_size=2, store=store) for rank in (1, 0))
    monkeypatch.setattr("pipesgd.exit.join", lambda secret: server)
    monkeypatch.setattr("pipesgd.exit.begin", lambda: None)  # this process is pytest's
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert pipesgd.exit._run(lambda words, ranks, console: None, [], pipesgd.exit._Signals()) == 0
    monkeypatch.setattr("pipesgd.ranks.SPEECH_SECONDS", 1000.0)
    worker.wait_until_all_have_spoken()


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (
            pipesgd.exit.Terminated(),
            "rank 1: told to stop (SIGTERM) in iteration 7: another rank has failed, or somebody has stopped the job",
        ),
        (KeyboardInterrupt(), "rank 1: interrupted by Ctrl-C in iteration 7"),
        (OSError(28, "No space left on device"), "rank 1: OSError(28, 'No space left on device')"),
        (RunError("rank 1: the disk is full"), "rank 1: the disk is full"),
        (PeerFailed(rank=1, peer=0, operation="all-reduce", reason="rank 0: out of memory"), ""),
    ],
)
def test_what_a_rank_reports_on_its_way_out_says_why(failure: BaseException, reason: str) -> None:
    """Other ranks quote the reason: one that was told to stop used to fail because of "Terminated()"."""
    ranks = Ranks(rank=1, world_size=2, store=dist.HashStore())
    ranks.iteration = 7
    with pytest.raises(type(failure)), reporting_failure(ranks):
        raise failure
    assert json.loads(ranks.store.get(report_key(1)))[0] == reason


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (0, "rank 1: receive of chunk 2 in iteration 19 failed: no heartbeat from rank 2 for 5 s"),
        (
            2,
            "rank 1: receive of chunk 2 with rank 2 in iteration 19 failed: no answer within 5 s; "
            "no heartbeat from rank 2 for 5 s",
        ),
    ],
)
def test_a_rank_that_waits_for_a_silent_one_itself_is_not_named(
    peer: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Ranks, "silent", lambda ranks: {2: 5.2})
    monkeypatch.setattr(pipesgd.exit, "_hear_the_others", lambda *given, **known: None)
    failure = DeadlineExceeded(
        rank=1, peer=peer, operation="receive of chunk 2", reason="no answer within 5 s", iteration=19
    )
    assert pipesgd.exit._explained(failure, Ranks(rank=1, world_size=3, store=dist.HashStore())) == 1
    assert capsys.readouterr().err == f"error: {said}\n"
