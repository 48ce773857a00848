"""Expected and observed outcomes of runs that a fault hits, and where the two differ. Nothing is run here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from experiments.faults.observation import Observation
from experiments.faults.stage import Stage
from experiments.results import Row

SLACK_SECONDS = 3.0
"""Seconds after the run's deadline within which a permanent fault must be named."""
ACCUSED = re.compile(r"no heartbeat from ranks? ([\d, ]*\d)")
"""Pattern for the ranks that a line takes for dead or hung."""
RANK_EXIT = re.compile(r"exitcode\s*: (-?\d+)")
"""Pattern of a rank's exit code in torchrun's report."""
OUR_FRAME = re.compile(r'^\s*File ".*/pipesgd/\w[^"]*", line \d+')
"""Pattern of a line in a traceback through the trainer; torchrun prints tracebacks of its own."""
SPOKEN = re.compile(r"^(\[rank\d+\]: ?)?(error|warning|interrupted|terminated)\b")
"""Pattern of a line in which the trainer says that something is wrong."""
LONGEST_LINE = 240
"""Characters of a line that are kept in the table."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A fault, how it is injected, and the outcome that it must have."""

    id: str
    fault: str
    """The fault in a few words, for the table."""
    play: Callable[[Stage], None]
    """Function that starts the run, injects the fault, and waits for the outcome."""
    says: str = ""
    """Pattern of the line that must appear; without one, no error and no warning may appear."""
    within: float | None = None
    """Seconds from the fault to that line; by default the run's deadline and ``SLACK_SECONDS``."""
    names: tuple[int, ...] = ()
    """Ranks that must be named as silent; no other may be."""
    goes_on: bool = False
    """True if the run must survive the fault; else it must end."""
    exit_code: int | None = None
    """Exit code of every rank that torchrun reports; by default any."""
    lost: int | None = None
    """Most iterations that may be lost; by default they are not checked."""
    traceback: bool = False
    """True if the trainer may print a traceback, since the fault is an error in the user's own code."""
    testbed: bool = False
    """True if the fault is one of the network, which only a testbed has."""
    root: bool = False
    """True if the fault needs a file system that only root can mount."""


def found_line(scenario: Scenario, seen: Observation) -> tuple[float, str] | None:
    """Return the first line from the fault on that the scenario asks for; the first complaint if it asks for none."""
    if scenario.says:
        return next((line for line in seen.after() if re.search(scenario.says, line[1])), None)
    return next((line for line in seen.after() if SPOKEN.match(line[1])), None)


def accused(seen: Observation) -> set[int]:
    """Return the ranks that a line from the fault on takes for dead or hung."""
    return {int(rank) for _, text in seen.after() for found in ACCUSED.finditer(text) for rank in found[1].split(",")}


def misses(scenario: Scenario, seen: Observation) -> list[str]:
    """Return what was expected and not observed, or observed and not expected; empty if all is well."""
    if seen.problem:
        return [seen.problem]
    return [
        *_misses_of_words(scenario, seen),
        *_misses_of_ends(scenario, seen),
        *_misses_of_losses(scenario, seen),
    ]


def _misses_of_words(scenario: Scenario, seen: Observation) -> Iterator[str]:
    line, within = found_line(scenario, seen), scenario.within or seen.deadline + SLACK_SECONDS
    if scenario.says and line is None:
        yield "the expected line did not appear"
    elif scenario.says and line is not None and line[0] > within:
        yield f"the line came after {line[0]:.1f} s instead of {within:g}"
    elif not scenario.says and line is not None and not _is_own_stop(line[1]):
        yield "an error or a warning appeared"
    if (named := accused(seen)) != set(scenario.names):
        yield f"named as silent: {_ranks(named)} instead of {_ranks(set(scenario.names))}"
    if not scenario.traceback and any(OUR_FRAME.match(text) for _, text in seen.after()):
        yield "a traceback appeared"


def _misses_of_ends(scenario: Scenario, seen: Observation) -> Iterator[str]:
    if scenario.goes_on and not seen.went_on:
        yield "the run did not continue"
    if seen.ended is None:
        yield "the run did not end"
    if seen.orphans:
        yield f"{seen.orphans} processes were left"
    codes = {int(found[1]) for _, text in seen.after() if (found := RANK_EXIT.search(text))}
    if scenario.exit_code is not None and codes != {scenario.exit_code}:
        yield f"exit codes of ranks: {sorted(codes)} instead of {scenario.exit_code}"


def _misses_of_losses(scenario: Scenario, seen: Observation) -> Iterator[str]:
    if scenario.lost is not None and seen.iterations_lost is None:
        yield "no checkpoint was left"
    elif scenario.lost is not None and seen.iterations_lost is not None and seen.iterations_lost > scenario.lost:
        yield f"{seen.iterations_lost} iterations were lost instead of at most {scenario.lost}"
    if seen.files_lost:
        yield f"checkpoint files were lost: {', '.join(seen.files_lost)}"


def _is_own_stop(text: str) -> bool:
    """Return True if a line only says that the run was stopped, as every run is that has survived."""
    return "SIGTERM" in text


def _ranks(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks))) or "nobody"


def row(scenario: Scenario, seen: Observation) -> Row:
    """Return a row of the table of results."""
    line = found_line(scenario, seen)
    if line is not None and not scenario.says and _is_own_stop(line[1]):
        line = None
    return {
        "scenario": scenario.id,
        "fault": scenario.fault,
        "line": "" if line is None else without_folders(line[1])[:LONGEST_LINE],
        "seconds": None if line is None else round(line[0], 1),
        "named_silent": _ranks(accused(seen)),
        "expected_silent": _ranks(set(scenario.names)),
        "goes_on": seen.went_on,
        "iterations_lost": seen.iterations_lost,
        "files_lost": len(seen.files_lost),
        "orphans": seen.orphans,
        "deadline_s": seen.deadline,
        "missed": "; ".join(misses(scenario, seen)),
    }


def without_folders(text: str) -> str:
    """Return ``text`` without the folders of this machine, since it goes into a result file.

    >>> without_folders("error: cannot write /tmp/x/run/model.pt: no")
    'error: cannot write model.pt: no'
    """
    return re.sub(r"(^|[\s\"'=(])/(?:[^\s/\"']+/)+", r"\1", text)
