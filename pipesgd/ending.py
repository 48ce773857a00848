"""How a rank ends: one line that says why, and an exit code, whatever happened."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn

from rich.console import Console

from pipesgd import launch
from pipesgd.command_line import HelpRequested
from pipesgd.errors import DisagreementError, PipesgdError, UserInputError
from pipesgd.launch import Ranks
from pipesgd.progress import screen

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt it is no error of the program's."""


class _Signals:
    """Ctrl-C and SIGTERM, of which the first one says how this rank ends, whatever comes of it.

    Whoever unwinds may fail in turn and hide it: torch.save, interrupted, raises a RuntimeError; and
    torchrun passes Ctrl-C on to ranks that have got it from the terminal.
    """

    _RAISES: ClassVar[dict[int, type[BaseException]]] = {
        signal.SIGINT: KeyboardInterrupt,
        signal.SIGTERM: Terminated,
    }

    def __init__(self) -> None:
        self.first: type[BaseException] | None = None
        self.ignored = False
        for number in self._RAISES:
            signal.signal(number, self._raise)

    def _raise(self, number: int, frame: object) -> None:
        if not self.ignored:
            self.first = self.first or self._RAISES[number]
            raise self.first


def run_and_exit(command: Callable[[Sequence[str], Ranks, Console], None], words: Sequence[str]) -> NoReturn:
    """Join the ranks, run ``command``, and exit.

    Exit codes: 0 done, 2 the input was wrong, 1 the run failed, 130 Ctrl-C, 143 SIGTERM.
    """
    code = _run(command, words, _Signals())
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # The other ranks may be gone: a normal exit would wait for the communication thread and for
        # torch's groups, which wait for them.
        os._exit(code)
    sys.exit(0)


def _run(command: Callable[[Sequence[str], Ranks, Console], None], words: Sequence[str], signals: _Signals) -> int:
    ranks: Ranks | None = None
    try:
        ranks = launch.join()
        if ranks.by_torchrun:
            launch.die_with_parent()
        command(words, ranks, screen(ranks))
        ranks.leave()
    except HelpRequested as request:
        if ranks is None or ranks.rank == 0:
            print(request)
    except BaseException as failure:  # noqa: BLE001 (told apart, and said, below)
        signals.ignored = True  # one end is enough; and no call, between whose instructions a signal could come
        return _explain(failure if signals.first is None else signals.first(), ranks)
    return 0


def _explain(failure: BaseException, ranks: Ranks | None) -> int:
    """Say in one line why this rank ends; the exit code."""
    rank = 0 if ranks is None else ranks.rank
    where = "" if ranks is None or ranks.iteration is None else f" in iteration {ranks.iteration}"
    if isinstance(failure, KeyboardInterrupt):
        if rank == 0:
            _say(f"interrupted{where}" + ("; --resume continues from the last checkpoint" if where else ""))
        return EXIT_INTERRUPTED
    if isinstance(failure, UserInputError) and (ranks is None or failure.known_to_all):
        if rank == 0 or isinstance(failure, DisagreementError):
            _say(f"error: {failure}")
        if ranks is not None:
            ranks.wait_until_all_have_spoken()
        return EXIT_BAD_INPUT
    if not isinstance(failure, PipesgdError | Terminated):
        traceback.print_exception(failure)  # a defect of ours: the line alone would not help to mend it
    text = str(failure) if isinstance(failure, PipesgdError) else repr(failure)
    if isinstance(failure, Terminated):
        text = f"told to stop (SIGTERM){where}: another rank has failed, or somebody has stopped the job"
    text = text if text.startswith("rank ") else f"rank {rank}: {text}"
    _say("error: " + (text if ranks is None else ranks.diagnose(text)))
    if isinstance(failure, Terminated):
        return EXIT_TERMINATED
    return EXIT_BAD_INPUT if isinstance(failure, UserInputError) else EXIT_FAILED


def _say(line: str) -> None:
    sys.stderr.write(line.replace("\n", " ") + "\n")  # in one piece: other ranks write to the same screen
    sys.stderr.flush()
