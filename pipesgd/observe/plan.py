"""A plan for a training program that there is: ``pipesgd plan --from train.py``.

    pipesgd plan --from train.py --network 1GbE --world-size 4 -- arguments of train.py

The program runs for some iterations as one of the ranks, on this machine and unchanged, with others that only seem to
be there (``program.py``). What it does in an iteration takes the place of --model, --parameters, --compute and
--update.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pipesgd.errors import UserInputError, warn
from pipesgd.process import say, variables_of_first
from timing_model.cli import check_plan, refused
from timing_model.cli import main as answer
from timing_model.units import format_bytes, format_seconds

FROM, LINK, END = "--from", "--link", "--"
FOUND = ("model", "parameters", "tensors", "compute", "update", "accumulation")
"""Options of a plan that the program says."""
LEAST_STEPS = 6
UNSTEADY = 1.5
"""Ratio of the longest and the shortest computation of an iteration above which a warning says so."""
LAST_LINES = 5
"""Lines of a program that failed which are shown."""


def split(words: Sequence[str]) -> tuple[list[str], Path, list[Path], list[str]]:
    """Return the options of the plan, the program, what to link into its folder, and its arguments.

    Raises:
        UserInputError: there is no such program, or an option is one that the program says.
    """
    own = list(words[: words.index(END)] if END in words else words)
    arguments = list(words[words.index(END) + 1 :] if END in words else ())
    given: dict[str, list[str]] = {FROM: [], LINK: []}
    rest: list[str] = []
    reading = iter(own)
    for word in reading:
        name, equals, value = word.partition("=")
        if name not in given:
            rest.append(word)
            continue
        value = value if equals else next(reading, "")
        if not value or value.startswith("-"):
            raise UserInputError(f"{name[2:]} must be a path; got {value or 'nothing'}")
        given[name].append(value)
    if len(given[FROM]) != 1:
        raise UserInputError(f"from must be given once; got it {len(given[FROM])} times")
    program = Path(given[FROM][0]).absolute()
    if not program.is_file():
        raise UserInputError(f"from must be a Python program; got {given[FROM][0]}, which is no file")
    for name in FOUND:
        if any(word.partition("=")[0].replace("_", "-") == f"--{name}" for word in rest):
            raise UserInputError(f"{name} must be left out with --from, since the program says it; got it")
    links = [Path(one).absolute() for one in given[LINK]]
    for one in links:
        if not one.exists():
            raise UserInputError(f"link must be a file or folder that the program reads; got {one.name}, which is none")
        if one.name in ("", "..") or sum(one.name == other.name for other in links) > 1:
            raise UserInputError(f"link must have a name of its own in the program's folder; got {one.name or one}")
    return rest, program, links, arguments


def world_size_of(words: Sequence[str]) -> int:
    """Return the number of ranks among the options of a plan.

    Raises:
        UserInputError: it is missing, or no number of at least 2.
    """
    values = [
        word.partition("=")[2] or (words[index + 1] if index + 1 < len(words) else "")
        for index, word in enumerate(words)
        if word.partition("=")[0].replace("_", "-") == "--world-size"
    ]
    text = values[-1] if values else "none"
    if not (text.isascii() and text.isdecimal()) or int(text) < 2:
        raise UserInputError(f"world-size must be a whole number of at least 2 with --from; got {text}")
    return int(text)


def observe(program: Path, links: Sequence[Path], arguments: Sequence[str], world_size: int) -> dict[str, Any]:
    """Return what the program does in an iteration, as ``program.Observed`` has it.

    It runs in a temporary folder, which is deleted afterwards, with all processes that it has started.

    Raises:
        UserInputError: the program failed, or ended before it was observed.
    """
    environment = {**os.environ, **variables_of_first(world_size), "WANDB_MODE": "disabled"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", errors="replace") as output:
        for one in links:
            Path(folder, one.name).symlink_to(one)
        reader, writer = os.pipe()
        words = ["-m", "pipesgd.observe.program", str(writer), str(world_size), str(program), *arguments]
        with os.fdopen(reader, encoding="utf-8") as told:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                start_new_session=True,  # so that what it starts can be ended with it
            )
            os.close(writer)
            try:
                last = _follow(told)
                code = process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if "observed" in last:
            found: dict[str, Any] = last["observed"]
            return found
        if code:
            output.seek(0)
            lines = deque((line.rstrip() for line in output if line.strip()), maxlen=LAST_LINES)
            shown = "\n  ".join(lines)
            raise UserInputError(
                "from must be a program that runs (its arguments follow --; --link names files and folders that it "
                f"reads); got exit code {code} after\n  {shown}"
            )
    steps = last.get("steps", 0)
    raise UserInputError(
        f"from must be a program with at least {LEAST_STEPS} steps of an optimizer of torch's; got {steps}"
    )


def _follow(told: Any) -> dict[str, Any]:
    """Return the last of the messages, and show the steps on a terminal."""
    last: dict[str, Any] = {}
    shows = sys.stderr.isatty()
    for line in told:
        last = json.loads(line)
        if shows and "step" in last:
            print(f"\r{last['step']} iterations ", end="", file=sys.stderr, flush=True)
    if shows:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return last


def describe(program: Path, found: dict[str, Any]) -> str:
    """Describe in a line what a program does in an iteration."""
    numel, tensors, passes, buckets = sum(found["tensors"]), len(found["tensors"]), found["passes"], found["buckets"]
    sums = _many(buckets, "bucket") + " of DistributedDataParallel" if found["in_ddp"] else _many(buckets, "sum")
    low, high = found["compute_range_s"]
    if high > UNSTEADY * low:
        warn(
            f"an iteration computed for {format_seconds(low)} to {format_seconds(high)}, by the median for "
            f"{format_seconds(found['compute_s'])}: on a machine that does nothing else, the answer is more certain"
        )
    return (
        f"{program.name}: {numel / 1e6:.2f} M parameters ({format_bytes(4 * numel)}) in {_many(tensors, 'tensor')}; "
        f"{_many(passes, 'backward pass', 'es')} and {sums} in an iteration, which on this machine computes for "
        f"{format_seconds(found['compute_s'])} and updates weights for {format_seconds(found['update_s'])}"
    )


def _many(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}{ending if number != 1 else ''}"


@contextlib.contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process by an exception, so that the program and its folder do not remain."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    heard = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def main(argv: Sequence[str], program: str) -> int:
    """Answer ``pipesgd plan --from``; return the exit code."""
    if {"-h", "--help"} & set(argv[: argv.index(END)] if END in argv else argv):
        return answer(["plan", "--help"], program=program)
    try:
        words, path, links, arguments = split(argv[1:])
        world_size = world_size_of(words)
        check_plan([*words, "--model", path.name, "--tensors", "1", "--compute", "1s"], program=program)
        say(
            f"running {path.name} as rank 0 of {world_size} for some iterations, in a temporary folder; what it writes "
            "to absolute paths is not held back"
        )
        with _signals_as_exits():
            found = observe(path, links, arguments, world_size)
    except ValueError as error:
        return refused(error)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    print(describe(path, found), file=sys.stderr if "--json" in words else sys.stdout, flush=True)
    more = ["--model", path.name, "--tensors", *map(str, found["tensors"])]
    more += ["--compute", f"{found['compute_s'] / found['passes']}s", "--update", f"{found['update_s']}s"]
    more += ["--accumulation", str(found["passes"])] if found["passes"] > 1 else []
    return answer(["plan", *words, *more], program=program)
