"""Follow docs/tutorial.md to the letter: ``python -m experiments.tutorial``.

In a fresh clone of the last commit, with nothing from this environment, one shell runs every block of commands that has
a title. The result is the output of each block, which the tutorial quotes. Emulating the machines needs root.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import command
from experiments.results import REPOSITORY, Row, save
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

PAGE = REPOSITORY / "docs" / "tutorial.md"
STEP = re.compile(r'^```sh title="(.+?)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
KEPT = ("PATH", "HOME", "TERM")
"""Variables of this environment that the shell gets."""
LEFT_OUT = re.compile(
    "WARNING: Location '"
    r"|\[W\d{4} .*TCPStore\.cpp|Exception raised from|frame #\d+: |<omitting python frames>"
    r"|E\d{4} .*elastic/agent/server/api\.py"
)
"""Pattern of lines that are left out: pip's about places where it looks for packages, and torchrun's trace of a race at
its end, which the page on troubleshooting names."""
COLUMNS = "110"
"""Columns of text that the shell has."""


def compute(folder: Path, console: Console) -> list[Row]:
    """Run all steps in a clone in ``folder``; return a row for each."""
    clone = folder / "pipesgd"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    pipe = subprocess.PIPE
    with subprocess.Popen(["bash"], cwd=clone, env=environment(), stdin=pipe, stdout=pipe, text=True) as shell:
        return [step(shell, title, commands, folder, console) for title, commands in steps()]


def steps() -> list[tuple[str, str]]:
    """Return the titles and the commands below them."""
    return STEP.findall(PAGE.read_text(encoding="utf-8"))


def step(shell: subprocess.Popen[str], title: str, commands: str, folder: Path, console: Console) -> Row:
    """Run ``commands`` in ``shell``; the row's ``load`` is how many processes wanted a core when they began."""
    assert shell.stdin is not None
    assert shell.stdout is not None
    output = folder / "output"
    load, begin = os.getloadavg()[0], time.perf_counter()
    # Not in a subshell, so that an activated environment stays active; without a terminal, as in a log.
    shell.stdin.write(f"{{ {commands}\n}} > {output} 2>&1 < /dev/null; echo $?\n")
    shell.stdin.flush()
    code = shell.stdout.readline().strip() or f"{shell.wait()}, of the shell itself"
    seconds = time.perf_counter() - begin
    lines = [line.rstrip() for line in output.read_text(encoding="utf-8").splitlines() if not LEFT_OUT.match(line)]
    say(console, f"{title}: {seconds:.0f} s")
    if code != "0":
        say(console, *lines)
        raise RunError(f"step {title} of the tutorial ended with exit code {code}")
    return {
        "step": title,
        "commands": commands.splitlines(),
        "output": lines,
        "load": load,
    }


def environment() -> dict[str, str]:
    """Return the environment of a user who has just logged in."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    own = str(Path(sys.prefix) / "bin")
    kept["PATH"] = os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if part != own)
    return kept | {"COLUMNS": COLUMNS}


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the whole command."""
    command.Parser(prog="python -m experiments.tutorial", description=__doc__).parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        rows = compute(Path(folder), console)
    say(console, f"wrote {save('tutorial', rows)}")


if __name__ == "__main__":
    command.run(main)
