"""Notes of the ranks of an elastic run, which each writes while it trains, and whether they agree.

A rank notes each iteration and generation in a file at once, so that those of a rank that is killed are there, too.
A launcher starts ranks that do so by ``-m experiments.rank_notes FOLDER``, followed by options of ``pipesgd.train``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from experiments.forked_ranks import trained
from experiments.integer_sums import rest, slice_of, span_at, spans_of, summed_by
from pipesgd.elastic.members import Members
from pipesgd.elastic.run import ElasticRun, in_summary
from pipesgd.membership.generation import Record


class Wrong(Exception):  # noqa: N818 (what a run is)
    """A run has not gone as it must; the text says why."""


class Iteration(NamedTuple):
    """Iteration that a rank has completed."""

    number: int
    time: float
    """Time of its end, in seconds of ``time.monotonic``."""
    checksum: int
    """Checksum of the weights that it has left."""
    slice: int
    """Number of the slice of samples that the rank has taken."""


class Notes:
    """Notes of one rank, read as it writes them. Those of a rank without a majority end where that continues alone."""

    def __init__(self, folder: Path, rank: int):
        self._path = _path(folder, rank)
        self._read = 0
        self.iterations: list[Iteration] = []
        self.generations: list[dict[str, Any]] = []
        """Generations that the rank has entered, as in summary.json."""
        self.pid: int | None = None
        """Process of the rank; None before it notes anything."""
        self.kills: list[str] = []
        """Phases in which the rank was about to be killed."""

    def refresh(self) -> None:
        """Read what has come."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._read += len(whole + newline)
            for line in whole.splitlines():
                note = json.loads(line)
                if isinstance(note, list):
                    self.iterations.append(Iteration(*note))
                elif isinstance(note, str):
                    self.kills.append(note)
                elif isinstance(note, int):
                    self.pid = note
                else:
                    self.generations.append(note)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"notes-{rank}.jsonl"


def begin_notes(folder: Path, rank: int) -> Callable[[Any], None]:
    """Note the iterations and generations of this process from now on; return what writes a note of another kind."""
    file = io.FileIO(_path(folder, rank), "w")
    iterate, next_record = ElasticRun._iterate, Members.next_record

    def write(note: Any) -> None:
        file.write(json.dumps(note).encode() + b"\n")

    def noted_iteration(self: ElasticRun, iteration: int, *others: Any) -> Any:
        assert self._span is not None
        taken = self._span.slice_of(iteration, self._ranks.members.me)
        found = iterate(self, iteration, *others)
        if self._ranks.members.why_alone is None:
            with self.strategy.true_weights():
                weights = checksum(self.job.model.parameters())
            write([iteration, time.monotonic(), weights, taken])
        return found

    def noted_generation(self: Members, *others: Any) -> Record:
        record = next_record(self, *others)
        if self.why_alone is None:
            write(in_summary(record) | {"time": time.monotonic()})
        return record

    write(os.getpid())
    ElasticRun._iterate = noted_iteration  # type: ignore[method-assign, assignment]
    Members.next_record = noted_generation  # type: ignore[method-assign, assignment]
    return write


def checksum(parameters: Iterable[Tensor]) -> int:
    """Return a checksum of the parameters of a model."""
    found = 0
    for parameter in parameters:
        found = zlib.crc32(parameter.detach().contiguous().view(-1).numpy().data, found)
    return found


# ---- Whether they agree


def check_notes(notes: Mapping[int, Notes], lost: Collection[int], width: int) -> dict[int, int]:
    """Check the generations, weights and slices that ranks have noted, some of which were ``lost``.

    All have the same weights after an iteration. Only the last one of a rank that was lost may hold a mean that those
    who continue have summed without it; those who were lost with it, and have it, too, hold the same.

    Returns the checksum of the weights after each iteration. Raises ``Wrong``.
    """
    generations = generations_of(notes)
    spans = spans_of(generations)
    agreed: dict[int, tuple[int, int]] = {}
    dropped: dict[tuple[int, int], int] = {}
    for rank, own in notes.items():
        without = next((one for one in generations if rank not in one["members"]), None) if rank in lost else None
        last = float("inf") if without is None else without["iterations_done"] + width - 1
        for done in own.iterations:
            if done.number > last:
                raise Wrong(f"rank {rank} completed iteration {done.number} of those who continued without it")
            if done.number == last and without is not None:
                if dropped.setdefault((without["number"], done.number), done.checksum) != done.checksum:
                    raise Wrong(f"lost ranks have different weights after iteration {done.number}")
            elif (found := agreed.setdefault(done.number, (done.checksum, rank)))[0] != done.checksum:
                raise Wrong(f"ranks {found[1]} and {rank} have different weights after iteration {done.number}")
            if rank in span_at(spans, done.number)[1] and slice_of(spans, done.number, rank) != done.slice:
                raise Wrong(f"rank {rank} took slice {done.slice} in iteration {done.number}")
    return {number: weights for number, (weights, _) in agreed.items()}


def generations_of(notes: Mapping[int, Notes]) -> list[dict[str, Any]]:
    """Return the generations that ranks have noted, which must be the same. Raises ``Wrong``."""
    known: dict[int, dict[str, Any]] = {}
    for rank, own in notes.items():
        for one in own.generations:
            told = {name: value for name, value in one.items() if name != "time"}
            if known.setdefault(told["number"], told) != told:
                raise Wrong(f"rank {rank} is in a generation of its own: {told}")
    first = {"number": 0, "members": [*notes], "first_iteration": 0, "iterations_done": 0, "lost": []}
    return [first, *(known[number] for number in sorted(known))]


def check_summed(notes: Mapping[int, Notes], iterations: int) -> None:
    """Check that each slice of samples was summed once, as ``check_slices`` does, by what ranks have noted."""
    taken = {(one.number, rank): one.slice for rank, own in notes.items() for one in own.iterations}
    check_slices(generations_of(notes), iterations, taken)


def check_slices(
    generations: Sequence[Mapping[str, Any]], iterations: int, taken: Mapping[tuple[int, int], int]
) -> None:
    """Check that each slice of samples was summed once in some iterations, or waits to be given out. Raises ``Wrong``.

    Args:
        generations: those of a run, as in summary.json.
        iterations: iterations whose means were applied, by those who were members when they were summed.
        taken: slices that ranks have noted, by iteration and rank; others are computed.
    """
    spans = spans_of(generations)
    used = Counter(
        taken[iteration, member] if (iteration, member) in taken else slice_of(spans, iteration, member)
        for iteration in range(iterations)
        for member in summed_by(generations, iteration)
    )
    waiting, end = rest(spans[-1], iterations)
    used.update(waiting)
    if wrong := [number for number in range(max([end, *used]) + 1) if used[number] != (number < end)]:
        raise Wrong(f"slices {wrong[:5]} were used {[used[one] for one in wrong[:5]]} times")


if __name__ == "__main__":
    begin_notes(Path(sys.argv[1]), int(os.environ["RANK"]))
    raise SystemExit(trained(" ".join(sys.argv[2:]), Path(sys.argv[1])))
