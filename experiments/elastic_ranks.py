"""Elastic runs of ``pipesgd.train`` whose ranks are forked from this process, and are killed or stopped while they run.

Unlike those of ``forked_ranks``, the others are left alone when one has ended: whether they continue is measured.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.forked_ranks import fork_rank, store, trained
from experiments.rank_notes import Notes, begin_notes
from experiments.watched_ranks import WatchedRanks
from pipesgd.comm.tcp import TcpLinks
from pipesgd.elastic.control import ControlConnections
from pipesgd.elastic.units import Units
from pipesgd.pipeline.pipeline import Pipeline
from pipesgd.run.checkpoint import Checkpoints

training: Any = importlib.import_module("pipesgd.training")

COMPUTING, EVALUATION, CHECKPOINT = "computing", "evaluation", "checkpoint"
CALLS: dict[str, tuple[Any, str]] = {
    COMPUTING: (training, "forward_backward"),
    "hop": (TcpLinks, "finish"),
    "arrival": (Pipeline, "apply_oldest"),
    EVALUATION: (training, "evaluate"),
    CHECKPOINT: (Checkpoints, "save"),
}
"""Functions in whose calls a rank can be killed, by the name of the phase."""
LAST_SEND = "last send"
"""Phase before a rank sends the last part of a sum: the next rank lacks it then, which all others have."""
OTHERS_SECONDS = 0.03
"""Seconds before a kill in that phase, in which the others get what they can."""
MESSAGES = ("Prepare", "Promise", "Level", "Fetch", "Results", "Accept", "Accepted", "Decided")
"""Messages of a change, at whose sending a rank can be killed."""
HANGS_SECONDS = 100.0
"""Seconds after which a rank writes what its threads do into the log."""
DEADLINE_SECONDS = 120.0
"""Seconds after which a run counts as hung."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The kill of a rank."""

    rank: int
    phase: str
    """Key of ``CALLS``, ``LAST_SEND``, or one of ``MESSAGES``."""
    call: int
    """Number of the call of the phase's function, from 0, of the sum, or of the message among its kind."""
    seconds: float = 0.0
    """Seconds from the begin of the call to the kill."""
    stop: bool = False
    """True if the rank is only stopped, at the begin of the call."""


@dataclass
class Ended:
    """The end of a run."""

    codes: dict[int, int] = field(default_factory=dict)
    """Exit code of each rank, negative for a signal."""
    times: dict[int, float] = field(default_factory=dict)
    """Time at which each process had ended, in seconds of ``time.monotonic``."""
    notes: dict[int, Notes] = field(default_factory=dict)
    """Notes of each rank."""
    hung: bool = False

    @property
    def was_killed(self) -> set[int]:
        """Ranks whose own kill has ended them."""
        kills = (-signal.SIGKILL, -signal.SIGALRM)
        return {rank for rank, code in self.codes.items() if code in kills and self.notes[rank].kills}


def run(
    words: str,
    world_size: int,
    folder: Path,
    kills: Sequence[Kill] = (),
    *,
    meanwhile: Callable[[Mapping[int, int]], None] = lambda pids: None,
    deadline: float = DEADLINE_SECONDS,
) -> Ended:
    """Run ``words`` on forked ranks; output goes to ``folder/log``, files to ``folder/run``.

    ``meanwhile`` is called again and again with the processes that still run, by rank.
    """
    with (
        store() as port,
        WatchedRanks(folder, world_size, lambda rank: fork(words, rank, world_size, folder, port, kills)) as ranks,
    ):
        until, hung = time.monotonic() + deadline, False
        while ranks.pids and not hung:
            ranks.look()
            meanwhile(ranks.pids)
            hung = bool(ranks.pids) and time.monotonic() >= until
    notes = {rank: Notes(folder, rank) for rank in sorted(ranks.codes)}
    for one in notes.values():
        one.refresh()
    return Ended(ranks.codes, ranks.ends, notes, hung)


def fork(words: str, rank: int, world_size: int, folder: Path, port: int, kills: Sequence[Kill]) -> int:
    """Fork a rank of a run, which is killed as ``kills`` say, and return its process id."""

    def train_here() -> object:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # of the process that has forked this one
        faulthandler.dump_traceback_later(HANGS_SECONDS, file=sys.stderr)
        write = begin_notes(folder, rank)
        for kill in kills:
            if kill.rank == rank:
                _arm(kill, write)
        return trained(words, folder)

    return fork_rank(train_here, rank, world_size, folder, port)


def _arm(kill: Kill, write: Callable[[Any], None]) -> None:
    """Let this process be killed as ``kill`` says; the kernel's timer kills it, as abruptly as SIGKILL."""
    calls = itertools.count()

    def look() -> None:
        if next(calls) == kill.call:
            write(kill.phase)
            if kill.phase == LAST_SEND:
                time.sleep(OTHERS_SECONDS)
            if kill.stop:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif kill.seconds > 0:
                signal.setitimer(signal.ITIMER_REAL, kill.seconds)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    if kill.phase in MESSAGES:
        send = ControlConnections.send

        def sending(self: ControlConnections, rank: int, letter: Any) -> None:
            if type(letter).__name__ == kill.phase:
                look()
            send(self, rank, letter)

        ControlConnections.send = sending  # type: ignore[method-assign]
        return
    if kill.phase == LAST_SEND:
        _before_last_sends(look)
        return
    owner, name = CALLS[kill.phase]
    function = getattr(owner, name)

    def called(*arguments: Any, **named: Any) -> Any:
        look()
        return function(*arguments, **named)

    setattr(owner, name, called)


def _before_last_sends(look: Callable[[], None]) -> None:
    """Call ``look`` before the last message that this process sends in a sum, as far as the one before tells it."""
    run, begin = Units._run, TcpLinks.begin
    sent = before = 0
    is_sum = False

    def running(self: Units, unit: Any) -> Any:
        nonlocal sent, before, is_sum
        before = sent if is_sum else before
        sent, is_sum = 0, unit.settles is not None
        return run(self, unit)

    def beginning(self: TcpLinks, *arguments: Any, outgoing: bool, **named: Any) -> Any:
        nonlocal sent
        sent += outgoing
        if outgoing and is_sum and sent == before:
            look()
        return begin(self, *arguments, outgoing=outgoing, **named)

    Units._run = running  # type: ignore[method-assign]
    TcpLinks.begin = beginning  # type: ignore[method-assign]
