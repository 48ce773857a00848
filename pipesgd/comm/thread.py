"""The communication thread, which runs jobs one after the other alongside the computation."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from pipesgd.errors import UserInputError

T = TypeVar("T")

CLOSE_SECONDS = 1.0
"""Seconds that ``close`` waits for the thread after a failure."""


class CommunicationThread:
    """One thread that runs the jobs submitted to it in order, until one of them fails or ``fail`` is called.

    After a failure the ranks no longer agree on the messages to send, so nothing more is run, and every later job
    gets the same failure. It is a daemon thread, so that a process whose peers are gone can exit while
    the thread still waits for them.

    For CUDA tensors it has a stream of its own. A job begins when the submitter's current stream has done its earlier
    work, and a future is done when this thread's stream is; no stream waits for another one.

    The executor of concurrent.futures would continue after a failure and would delay the exit.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal handler may call ``fail`` in the middle of ``submit``
        self._waiting: set[Future[Any]] = set()
        self._failure: BaseException | None = None
        self._closed = False
        self._at_the_end: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="pipesgd-communication", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that keeps the thread from running more jobs, if there is one.

        Raises:
            UserInputError: the thread was closed.
            BaseException: a job has failed, or ``fail`` was called: that error.
        """
        self._check_open()
        if self._failure is not None:
            raise self._failure

    @property
    def failed(self) -> bool:
        """True if a job has failed, or ``fail`` was called."""
        return self._failure is not None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Have ``job`` run after those submitted before; return a future that will hold its result or failure.

        Raises:
            UserInputError: the thread was closed.
        """
        future: Future[T] = Future()
        with self._lock:
            self._check_open()
            if self._failure is not None:
                future.set_exception(self._failure)
            else:
                self._waiting.add(future)
                self._jobs.put((self._in_order(job), future))
        return future

    def fail(self, error: BaseException) -> None:
        """End all waits with ``error`` at once: every future that is not done, and every later one, gets it.

        Any thread may call this, for example one that has learned of another rank's failure. A running job is not
        interrupted, but its result is dropped. After the first failure, further ones change nothing.
        """
        with self._lock:
            self._failure = self._failure or error
            waiting, self._waiting = self._waiting, set()
            for future in waiting:
                future.set_exception(self._failure)

    def close(self, at_the_end: Callable[[], None] = lambda: None, within: float | None = CLOSE_SECONDS) -> None:
        """End the thread after the jobs submitted so far, and wait for its end, but no longer than ``within`` seconds.

        A job may be waiting for a lost peer, so without a limit all jobs must be known to end. The thread's last action
        is to call ``at_the_end``, also after a failure.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._at_the_end = at_the_end
                self._jobs.put(None)
        self._thread.join(within)

    def _check_open(self) -> None:
        if self._closed:
            raise UserInputError("a strategy must not be used after close(); make a new one")

    def _in_order(self, job: Callable[[], T]) -> Callable[[], T]:
        """Return ``job``, made to start after the GPU's work so far, and to end after the work that the job adds."""
        if self._device.type != "cuda":
            return job
        given = torch.cuda.Event(blocking=True)
        given.record(torch.cuda.current_stream(self._device))

        def run() -> T:
            given.synchronize()  # here, not on the stream, so that a job that measures itself measures no computation
            result = job()
            torch.cuda.current_stream(self._device).synchronize()
            return result

        return run

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                if self._device.type == "cuda":
                    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self._device)))
            except BaseException as failure:  # noqa: BLE001 (as one of a job)
                self.fail(failure)
            self._run_jobs()

    def _run_jobs(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            if self._failure is not None:
                continue
            try:
                result = job()
            except BaseException as failure:  # noqa: BLE001 (whoever waits for the future gets it)
                self.fail(failure)
                continue
            with self._lock:
                if future in self._waiting:
                    self._waiting.remove(future)
                    future.set_result(result)
        self._at_the_end()
