"""The end of a rank: one line that says why, and an exit code, whatever happened."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rich.console import Console

from pipesgd.cli import HelpRequested, secret_file
from pipesgd.errors import (
    CommunicationError,
    DeadlineExceeded,
    DisagreementError,
    LeftBehind,
    NotEnoughMembers,
    PeerFailed,
    PipesgdError,
    RunError,
    StoppedBySignal,
    UserInputError,
    named,
)
from pipesgd.membership.farewell import Farewell
from pipesgd.membership.heartbeat import no_word_from
from pipesgd.membership.secret import job_secret
from pipesgd.membership.watcher import ENDED_SECONDS
from pipesgd.process import (
    accept_all_text,
    answer,
    begin,
    claim_the_end,
    end_if_orphan,
    is_terminal,
    let_go,
    restarts_left,
    say,
    write_error_file,
    write_to_stderr,
)
from pipesgd.ranks import Ranks, join
from pipesgd.run.console import Screen, screen

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_TRY_AGAIN = 1, 2, 75

SIGNAL_NAMES: dict[int, str] = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP",
    signal.SIGQUIT: "SIGQUIT",
}
"""Signals that ask a rank to stop; it ends with 128 and the signal's number, as shells say."""

SWALLOWED_SECONDS = 0.01
"""Seconds after which a signal whose exception Python has swallowed is sent again."""

SAME_SIGNAL_SECONDS = 2.0
"""Seconds in which another signal counts as the first: torchrun forwards to ranks what a terminal sent them already."""

STORE_BEFORE_AGENT_SECONDS = 0.3
"""Longest time in seconds between the loss of a dead agent's store and the moment when its death can be seen."""

END_SECONDS = 10.0
"""Seconds that the main thread waits for another thread to say why this process ends, and to end it."""


class Terminated(BaseException):
    """A signal arrived that asks to stop. Like KeyboardInterrupt, it is not an error of the program."""

    def __init__(self, number: int = signal.SIGTERM):
        self.number = number
        super().__init__(number)


class _Signals:
    """Handlers of the signals that ask to stop. The first one decides how this rank ends, whatever it leads to.

    Code that unwinds may fail in turn and hide the signal: an interrupted torch.save raises a RuntimeError. And
    torchrun forwards Ctrl-C to ranks that already have it from the terminal.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.ignored = False
        self.farewell = Farewell()
        self._noted = 0.0
        self._terminals = [stream for stream in (sys.stdout, sys.stderr) if is_terminal(stream)]
        for number in SIGNAL_NAMES:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup has asked for that
                signal.signal(number, self._raise)
        self._report = sys.unraisablehook
        sys.unraisablehook = self._raise_again

    def exception(self) -> BaseException | None:
        """Return what the first signal has raised; None if there was none."""
        if self.first is None:
            return None
        return KeyboardInterrupt() if self.first == signal.SIGINT else Terminated(self.first)

    def _raise(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            for stream in self._terminals:
                if not is_terminal(stream):  # it has hung up: what a model prints would fail
                    let_go(stream)
        if self.ignored or self._is_noted(number):
            return
        self.first = self.first or number
        exception = self.exception()
        assert exception is not None
        raise exception

    def _raise_again(self, unraisable: Any) -> None:
        """Send the signal again if Python has swallowed its exception.

        It does so wherever nobody could catch one: in a destructor, or a callback of a weak reference.
        """
        if self.ignored or self.first is None or unraisable.exc_type is not type(self.exception()):
            self._report(unraisable)
            return
        threading.Timer(SWALLOWED_SECONDS, os.kill, (os.getpid(), self.first)).start()

    def _is_noted(self, number: int) -> bool:
        """Return True if the training loop will end with a checkpoint. Takes no lock, since the loop may hold it."""
        farewell, now = self.farewell, time.monotonic()
        if not farewell.is_open:
            return False
        if farewell.requested is None or not self._noted:
            farewell.requested = farewell.requested or SIGNAL_NAMES[number]
            self._noted = now
        return now - self._noted < SAME_SIGNAL_SECONDS


def run_and_exit(command: Callable[[Sequence[str], Ranks, Screen], None], argv: Sequence[str]) -> NoReturn:
    """Join the ranks, run ``command``, and exit.

    Exit codes: 0 done, 141 done without a reader (``process.let_go``), 2 the input was wrong, 1 the run failed, 75 too
    few members are left of an elastic run, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 131 SIGQUIT.
    """
    accept_all_text()
    code, unread = _run(command, argv, _Signals()), _flush()
    code = code or unread
    if code:
        # The other ranks may be gone: a normal exit would wait for the communication thread and for
        # torch's groups, which wait for them.
        os._exit(code)
    sys.exit(0)


def _run(command: Callable[[Sequence[str], Ranks, Screen], None], argv: Sequence[str], signals: _Signals) -> int:
    ranks: Ranks | None = None
    watching = contextlib.ExitStack()
    begin()  # if the command's module has not done so, as when a user's own program calls it
    try:
        ranks = join(job_secret(secret_file(argv)))
        signals.farewell = ranks.standing.farewell
        console = screen(ranks)
        # If the main thread is in a wait of gloo's, which nothing can end, the watcher's thread ends this process.
        watching.callback(ranks.watch(lambda error: _end(error, ranks, console), even_alone=True))
        command(argv, ranks, console)
        ranks.need_not_speak()
        watching.close()
        ranks.leave()
    except HelpRequested as request:
        watching.close()  # an interpreter that ends while the watcher's thread is in torch's store may be aborted
        return answer(str(request)) if ranks is None or ranks.rank == 0 else 0
    except BaseException as failure:  # noqa: BLE001 (distinguished and reported below)
        signals.ignored = True  # one end is enough; an assignment, since a signal could arrive within a call
        _end_if_orphan(failure)
        if not claim_the_end():
            threading.Event().wait(END_SECONDS)  # another thread reports why this process ends, and ends it
            os._exit(EXIT_FAILED)
        return _explain(signals.exception() or failure, ranks)
    return console.exit_code


def _end(error: RunError, ranks: Ranks, console: Console) -> None:
    """End this process because of ``error``, whatever its main thread waits for, unless it is ending already."""
    _end_if_orphan(error)
    if not claim_the_end():
        return
    code = EXIT_FAILED
    try:
        if console.is_terminal:
            with contextlib.suppress(Exception):  # the terminal may be gone
                console.show_cursor()  # a progress bar has hidden it
        code = _explain(error, ranks)
        _flush()
    finally:
        os._exit(code)  # the main thread waits for this


def _flush() -> int:
    """Write out what was printed, and return the exit code of a process whose standard output is that."""
    codes = {}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            try:
                stream.flush()
            except BrokenPipeError:  # as of what a model has printed; Python would try again at its end, and fail
                codes[stream] = let_go(stream)
    return codes.get(sys.stdout, 0)


def _end_if_orphan(failure: BaseException) -> None:
    """End this process if torchrun's agent has died; its sockets close first, so that may be how the store was lost."""
    store_lost = isinstance(failure, CommunicationError) and failure.peer is None
    end_if_orphan(within=STORE_BEFORE_AGENT_SECONDS if store_lost else 0.0)


def reason_of(failure: BaseException, ranks: Ranks | None) -> str:
    """Return the reason why this rank ends, in one line that begins with its number."""
    text = str(failure) if isinstance(failure, PipesgdError) else repr(failure)
    if isinstance(failure, KeyboardInterrupt):
        text = f"interrupted by Ctrl-C{_where(ranks)}"
    if isinstance(failure, Terminated):
        name = SIGNAL_NAMES[failure.number]
        text = f"told to stop ({name}){_where(ranks)}: another rank has failed, or somebody has stopped the job"
    return text if text.startswith("rank ") else f"rank {0 if ranks is None else ranks.number(ranks.rank)}: {text}"


def _where(ranks: Ranks | None) -> str:
    return "" if ranks is None or ranks.iteration is None else f" in iteration {ranks.iteration}"


def _explain(failure: BaseException, ranks: Ranks | None) -> int:
    """Report in one line why this rank ends, and return the exit code; the others need not miss it then."""
    try:
        return _explained(failure, ranks)
    finally:
        if ranks is not None:
            ranks.say_goodbye()


def _explained(failure: BaseException, ranks: Ranks | None) -> int:
    rank = 0 if ranks is None else ranks.rank
    if isinstance(failure, KeyboardInterrupt):
        where = _where(ranks)
        if rank == 0:
            say(f"interrupted{where}" + ("; --resume continues from the last checkpoint" if where else ""))
        _leave_word(ranks, f"interrupted{where}")
        return 128 + signal.SIGINT
    if isinstance(failure, StoppedBySignal):
        # A parameter server on a rank of its own writes no checkpoint, and knows of none.
        serves = ranks is not None and 0 < ranks.standing.farewell.members <= rank
        if rank == 0 or (failure.without is not None and not serves):
            left = restarts_left()
            more = f". torchrun restarts all ranks unless it was stopped itself (restarts left: {left})"
            say(f"{failure}{more if left else ''}")
        write_error_file(str(failure), "", cause=not serves)
        _leave_word(ranks, str(failure))
        if ranks is not None:
            ranks.wait_until_all_have_spoken()
        return 128 + next((number for number, name in SIGNAL_NAMES.items() if name == failure.signal), signal.SIGTERM)
    if isinstance(failure, NotEnoughMembers | LeftBehind):
        asked = None if ranks is None else ranks.standing.farewell.requested
        say(str(failure) if asked is None else f"{failure} ({asked})")
        _leave_word(ranks, str(failure))
        if isinstance(failure, NotEnoughMembers):
            return EXIT_TRY_AGAIN
        codes = (128 + number for number, name in SIGNAL_NAMES.items() if name == asked)
        return next(codes, EXIT_FAILED)
    if isinstance(failure, UserInputError) and (ranks is None or failure.known_to_all):
        if rank == 0 or isinstance(failure, DisagreementError):
            say(f"error: {failure}")
        _leave_word(ranks, str(failure))
        if ranks is not None:
            ranks.wait_until_all_have_spoken()
        return EXIT_BAD_INPUT
    trace = ""
    if not isinstance(failure, PipesgdError | Terminated):
        trace = "".join(traceback.format_exception(failure))
        write_to_stderr(trace)  # a bug of ours: the line alone would not help to fix it
    text = reason_of(failure, ranks)
    silent = {} if ranks is None else ranks.silent()
    if ranks is not None and silent and not isinstance(failure, PeerFailed) and "no heartbeat from" not in text:
        why = no_word_from(silent, ranks.job_size)
        if isinstance(failure, DeadlineExceeded) and failure.peer not in silent:  # its peer waits for them, too
            text = str(
                DeadlineExceeded(
                    rank=failure.rank, peer=None, operation=failure.operation, reason=why, iteration=failure.iteration
                )
            )
        else:
            text += f"; {why}"
    names_nobody = isinstance(failure, CommunicationError) and failure.peer is None
    if ranks is not None and names_nobody and (ended := ranks.ended(within=ENDED_SECONDS)):
        text += f"; the process of {named(ended)} has ended without a word"
    say(f"error: {text}")  # before asking the store, which may hang
    write_error_file(text, trace, cause=not isinstance(failure, CommunicationError | Terminated))
    if ranks is not None:
        _hear_the_others(ranks, text, failure, known=list(silent))
    _leave_word(ranks, text)
    if isinstance(failure, Terminated):
        return 128 + failure.number
    return EXIT_BAD_INPUT if isinstance(failure, UserInputError) else EXIT_FAILED


def _leave_word(ranks: Ranks | None, text: str) -> None:
    """Give the line that says why this rank ends to whoever keeps it."""
    if ranks is not None and ranks.standing.last_words is not None:
        ranks.standing.last_words(text)


def _hear_the_others(ranks: Ranks, text: str, failure: BaseException, *, known: list[int]) -> None:
    """Tell the other ranks, give them a moment to report why they end, and name those that do not."""
    is_victim = isinstance(failure, PeerFailed)
    peer = failure.peer if isinstance(failure, CommunicationError) else None
    try:
        reason = failure.reason if isinstance(failure, CommunicationError) else ""
        silent = ranks.report_and_wait("" if is_victim else text, peer, reason)
    except RuntimeError:
        say(f"error: rank {ranks.rank}: nobody can be told (the store that the ranks share is gone or hangs)")
        return
    if silent and not is_victim and silent != known:
        say(f"error: rank {ranks.rank}: no heartbeat from {named(silent)}")
