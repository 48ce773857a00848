"""Jobs that run to their end, on all nodes of a testbed or on this machine, and the reason if one fails."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments import command
from experiments.results import REPOSITORY
from experiments.testbed import Testbed
from pipesgd.errors import RunError

NEVER = 10**9
"""Iterations between checkpoints, more than a run has, so that no time includes one."""
LONGEST_WORDS = 200
"""Characters of an error that are kept; the log has them all."""
TRAINING_SECONDS = 3600.0
"""Seconds after which a training on this machine counts as hung."""
WRAPPED_BY_TORCH = "Got the following error when running the callback: RuntimeError: "
"""Prefix that torch adds once for every callback that an error went through."""


def run_job(testbed: Testbed, words: Sequence[str], log: Path, *, deadline: float) -> str | None:
    """Run torchrun with ``words`` on every node, for ``deadline`` seconds at most; the output goes to ``log``.

    Returns the reason if the job failed, else None.
    """
    with log.open("wb") as file:
        job = testbed.torchrun(words, stdout=file, stderr=subprocess.STDOUT)
        try:
            codes = job.wait(deadline)
        except subprocess.TimeoutExpired:
            return f"did not end within {deadline:.0f} s"
        finally:
            job.terminate()
    return last_words(log.read_text(encoding="utf-8", errors="replace")) if any(codes) else None


@contextlib.contextmanager
def trained(testbed: Testbed, words: str, *, deadline: float) -> Iterator[Path]:
    """Run ``pipesgd.train`` with ``words`` on all nodes; yield its folder, deleted afterwards.

    Raises:
        RunError: the training failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name) / "run", Path(name) / "log"
        job = ["-m", "pipesgd.train", *shlex.split(words), "--checkpoint-iterations", str(NEVER)]
        failure = run_job(testbed, [*job, "--output", str(folder)], log, deadline=deadline)
        if failure is not None:
            raise RunError(f"pipesgd.train {words} must succeed; got {failure}")
        yield folder


def run_training(words: Sequence[str], world_size: int) -> str | None:
    """Run ``pipesgd.train`` on ranks of this machine; return the reason if it failed, else None."""
    job = command.torchrun(world_size, "-m", "pipesgd.train", *words)
    try:
        done = subprocess.run(
            job,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TRAINING_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {TRAINING_SECONDS:.0f} s"
    return last_words(done.stdout) if done.returncode else None


def last_words(log: str) -> str:
    """Return the line of a failed run's ``log`` that says why it failed.

    A rank says "error: ..." in one line. The first such line is nearest to the cause; stopped ranks speak later.
    Folders of this machine are left out, since the line goes into result files.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ") and "SIGTERM" not in line]
    others = [
        line for line in lines if re.search(r"\w(?<!ChildFailed)(Error|Exception)\b|what\(\)|Signal (?!15)\d", line)
    ]
    words = (ours[:1] or others[-1:] or lines[-1:] or ["not a word"])[0]
    words = words.replace(WRAPPED_BY_TORCH, "")
    return re.sub(r"(^|[\s\"'=])/\S*/", r"\1", words)[:LONGEST_WORDS]
