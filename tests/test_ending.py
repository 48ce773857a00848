"""How a rank ends when it is told to, and its way out fails in turn."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

INTERRUPTED = (130, "interrupted\n")
TERMINATED = (143, "error: rank 0: told to stop (SIGTERM): another rank has failed, or somebody has stopped the job\n")


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
    ],
)
def test_the_first_signal_says_how_a_rank_ends(
    told: str, on_the_way_out: str, end: tuple[int, str], tmp_path: Path
) -> None:
    script = f"""
        import os, signal
        from pipesgd.ending import run_and_exit

        def command(words, ranks, console):
            try:
                os.kill(os.getpid(), signal.{told})
            finally:
                {on_the_way_out}

        run_and_exit(command, [])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == end
