"""Ranks of an elastic run, each forked into a machine of a testbed of its own, and what they note while they train.

The ranks share this machine's clock, cores and files; the network between them is emulated. A rank notes each iteration
and generation in a file at once, so that those of a rank that is killed are there, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from experiments.forked_ranks import fork_rank, trained
from experiments.testbed import Testbed
from experiments.testbed.namespaces import join_network
from experiments.watched_ranks import LOOK_SECONDS, WatchedRanks
from pipesgd.elastic.members import Members
from pipesgd.elastic.run import ElasticRun, in_summary
from pipesgd.membership.generation import Record
from pipesgd.process import variables_of_rank

PORT = 29500


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
    """Notes of one rank, read as it writes them."""

    def __init__(self, path: Path):
        self._path = path
        self._read = 0
        self.iterations: list[Iteration] = []
        self.generations: list[dict[str, Any]] = []
        """Generations that the rank has entered, as in summary.json, but for one of a rank without a majority."""

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
                else:
                    self.generations.append(note)


class RanksOnLinks(WatchedRanks):
    """The ranks of a run of ``pipesgd.train``, one on each node of ``testbed``, until the end of the context.

    Args:
        testbed: as many nodes as there are ranks. This process must be root.
        words: options of the run, whose files go to ``folder/run`` and whose output to ``folder/log``.
        folder: folder that is there.
    """

    def __init__(self, testbed: Testbed, words: str, folder: Path):
        self.notes = {rank: Notes(_notes_of(folder, rank)) for rank in range(testbed.nodes)}
        networks = [testbed.network(node) for node in range(testbed.nodes)]
        super().__init__(folder, testbed.nodes, lambda rank: _fork(rank, networks, words, folder))

    def look(self, seconds: float = LOOK_SECONDS) -> None:
        super().look(seconds)
        for notes in self.notes.values():
            notes.refresh()

    def done_between(self, rank: int, begin: float, end: float) -> int:
        """Return the number of iterations that a rank has completed between two times."""
        return sum(begin < one.time < end for one in reversed(self.notes[rank].iterations))

    def have_done(self, ranks: Iterable[int], iterations: int, after: float = 0.0) -> bool:
        """Return True if each of ``ranks`` has completed this many iterations after a time."""
        return all(self.done_between(rank, after, float("inf")) >= iterations for rank in ranks)


def _notes_of(folder: Path, rank: int) -> Path:
    return folder / f"notes-{rank}.jsonl"


def _fork(rank: int, networks: Sequence[str], words: str, folder: Path) -> int:
    def train_here() -> object:
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]  # there is no agent: rank 0 has the store
        host = Testbed.address(0)
        own = variables_of_rank(rank, len(networks), local_rank=0, local_world_size=1, host=host, port=PORT)
        os.environ.update(own, GLOO_SOCKET_IFNAME="eth0")  # the name of this machine stands for its loopback
        join_network(networks[rank])
        with _notes_of(folder, rank).open("ab", buffering=0) as file:
            _note(file.write)
            return trained(words, folder)

    return fork_rank(train_here, rank, len(networks), folder, PORT)


def _note(write: Callable[[bytes], object]) -> None:
    """Note the iterations and generations of this process from now on."""
    iterate, next_record = ElasticRun._iterate, Members.next_record

    def noted_iteration(self: ElasticRun, iteration: int, *others: Any) -> Any:
        assert self._span is not None
        taken = self._span.slice_of(iteration, self._ranks.members.me)
        found = iterate(self, iteration, *others)
        with self.strategy.true_weights():
            weights = checksum(self.job.model.parameters())
        write(json.dumps([iteration, time.monotonic(), weights, taken]).encode() + b"\n")
        return found

    def noted_generation(self: Members, *others: Any) -> Record:
        record = next_record(self, *others)
        if self.why_alone is None:
            write(json.dumps(in_summary(record) | {"time": time.monotonic()}).encode() + b"\n")
        return record

    ElasticRun._iterate = noted_iteration  # type: ignore[method-assign, assignment]
    Members.next_record = noted_generation  # type: ignore[method-assign, assignment]


def checksum(parameters: Iterable[Tensor]) -> int:
    """Return a checksum of the parameters of a model."""
    found = 0
    for parameter in parameters:
        found = zlib.crc32(parameter.detach().contiguous().view(-1).numpy().data, found)
    return found
