"""Kinds of input to fuzz, and the outcome of one case: accepted, refused in a line, or a failure."""

from __future__ import annotations

import contextlib
import math
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

DEADLINE_SECONDS = 30.0
"""Seconds after which a case counts as hung."""

LONGEST_LINE = 2000
"""Most characters of a message; a longer one is no help."""


@dataclass(frozen=True)
class Target:
    """One kind of input.

    ``make`` draws a case, which may write files into the folder; ``attempt`` reads it as users' commands do, and
    returns what is absurd about what was accepted, or None. ``refusals`` are the errors that users see as one line.
    """

    name: str
    cases: int
    """Number of cases in a full run."""
    make: Callable[[random.Random, Path], Any]
    attempt: Callable[[Any, Path], str | None]
    refusals: tuple[type[Exception], ...]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case."""

    outcome: str
    """One of accepted, refused, absurd, traceback and hang, of which the last three are failures."""
    why: str
    seconds: float


class _HangError(BaseException):
    """Raised when the deadline has passed; code that catches ``Exception`` does not stop it."""


def draw(target: Target, seed: int, index: int, folder: Path) -> Any:
    """Draw case ``index`` of ``target``: the same one for the same seed, whatever else runs."""
    return target.make(random.Random(f"{seed}/{target.name}/{index}"), folder)


def judge(target: Target, case: Any, folder: Path, seconds: float = DEADLINE_SECONDS) -> Verdict:
    """Try ``case``, in the main thread, for at most this many ``seconds``."""
    begin = time.perf_counter()
    try:
        with _deadline(seconds):
            complaint = target.attempt(case, folder)
        outcome, why = ("accepted", "") if complaint is None else ("absurd", complaint)
    except _HangError:
        outcome, why = "hang", f"no answer within {seconds:g} s"
    except target.refusals as refusal:
        complaint = complaint_about_line(str(refusal))
        outcome, why = ("refused", str(refusal)) if complaint is None else ("absurd", complaint)
    except Exception as error:  # noqa: BLE001 (what is looked for)
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome, why = "traceback", f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"
    return Verdict(outcome, why, time.perf_counter() - begin)


def complaint_about_line(line: str) -> str | None:
    """Return what is wrong with the text of an error, which should be one helpful line; None if nothing is."""
    if not line.strip() or "\n" in line:
        return f"an error must be one line; got {line[:200]!r}"
    if len(line) > LONGEST_LINE:
        return f"an error must have at most {LONGEST_LINE} characters; got {len(line)}: {line[:200]!r}"
    return None


def absurd_number(value: Any, most: float) -> Any:
    """Return a number in nested lists and mappings that is not from 0 to ``most``; None if there is none."""
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return next((found for found in (absurd_number(one, most) for one in inner) if found is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if math.isfinite(value) and 0 <= value <= most else value


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)  # perhaps a test's own deadline
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)
