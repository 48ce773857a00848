"""Ranks of an elastic run, each forked into a machine of a testbed of its own.

The ranks share this machine's clock, cores and files; the network between them is emulated.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.forked_ranks import fork_rank, trained
from experiments.rank_notes import Notes, begin_notes
from experiments.testbed import Testbed
from experiments.testbed.namespaces import join_network
from experiments.watched_ranks import LOOK_SECONDS, WatchedRanks
from pipesgd import launch
from pipesgd.process import variables_of_rank

PORT = 29500


class RanksOnLinks(WatchedRanks):
    """The ranks of a run of ``pipesgd.train``, one on each node of ``testbed``, until the end of the context.

    Args:
        testbed: as many nodes as there are ranks. This process must be root.
        words: options of the run, whose files go to ``folder/run`` and whose output to ``folder/log``.
        folder: folder that is there.
        launched: True if each is started by ``pipesgd.launch``, whose process is then the one that is watched.
    """

    def __init__(self, testbed: Testbed, words: str, folder: Path, *, launched: bool = False):
        self.notes = {rank: Notes(folder, rank) for rank in range(testbed.nodes)}
        networks = [testbed.network(node) for node in range(testbed.nodes)]
        super().__init__(folder, testbed.nodes, lambda rank: _fork(rank, networks, words, folder, launched))

    def look(self, seconds: float = LOOK_SECONDS) -> None:
        super().look(seconds)
        for notes in self.notes.values():
            notes.refresh()

    def kill(self, rank: int) -> None:
        """Kill a rank, but no launcher."""
        if (pid := self.notes[rank].pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for rank in [*self.pids]:
            self.kill(rank)
        super().close()

    def done_between(self, rank: int, begin: float, end: float) -> int:
        """Return the number of iterations that a rank has completed between two times."""
        return sum(begin < one.time < end for one in reversed(self.notes[rank].iterations))

    def have_done(self, ranks: Iterable[int], iterations: int, after: float = 0.0) -> bool:
        """Return True if each of ``ranks`` has completed this many iterations after a time."""
        return all(self.done_between(rank, after, float("inf")) >= iterations for rank in ranks)


def _fork(rank: int, networks: Sequence[str], words: str, folder: Path, launched: bool) -> int:
    def train_here() -> object:
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]  # there is no agent: rank 0 has the store
        host = Testbed.address(0)
        own = variables_of_rank(rank, len(networks), local_rank=0, local_world_size=1, host=host, port=PORT)
        os.environ.update(
            own, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="eth0"
        )  # the name of this machine stands for its loopback
        join_network(networks[rank])
        if launched:
            place = f"--nnodes {len(networks)} --node-rank {rank} --master-addr {host} --master-port {PORT}"
            program = f"-m experiments.rank_notes {folder} {words}"
            return launch.main(f"--nproc-per-node 1 {place} --elastic {program}".split())
        begin_notes(folder, rank)
        return trained(words, folder)

    return fork_rank(train_here, rank, len(networks), folder, PORT)
