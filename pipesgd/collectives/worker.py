"""The communication thread: runs jobs one after the other beside the computation."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")

CLOSE_SECONDS = 1.0


class CommunicationThread:
    """One thread that runs the jobs submitted to it in order, until one of them fails.

    After a failure the ranks no longer agree on what travels, so nothing more is run: every later job
    gets the same failure. It is a daemon thread, so that a process whose peers are gone can exit while
    the thread still waits for them.

    For CUDA tensors it has a stream of its own. A job begins when the submitter's current stream has done what it was
    given before, and a future is done when this thread's stream is: no stream waits for another one.

    concurrent.futures' own executor would go on after a failure and would hold up the exit.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pipesgd-communication", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Have ``job`` run after those submitted before; the future holds its result or failure."""
        future: Future[T] = Future()
        self._jobs.put((self._in_order(job), future))
        return future

    def close(self) -> None:
        """End the thread after the jobs submitted so far; do not wait long for a job that waits for a lost peer."""
        self._jobs.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _in_order(self, job: Callable[[], T]) -> Callable[[], T]:
        """``job``, begun when the GPU has done what it was given so far, and done when what the job gave it is."""
        if self._device.type != "cuda":
            return job
        given = torch.cuda.Event(blocking=True)
        given.record(torch.cuda.current_stream(self._device))

        def run() -> T:
            given.synchronize()  # here and not on the stream: a job that measures itself measures no computation
            result = job()
            torch.cuda.current_stream(self._device).synchronize()
            return result

        return run

    def _run(self) -> None:
        if self._device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                self._run_jobs()
        else:
            self._run_jobs()

    def _run_jobs(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            if self._failure is None:
                try:
                    future.set_result(job())
                    continue
                except BaseException as failure:  # noqa: BLE001 (whoever waits for the future gets it)
                    self._failure = failure
            future.set_exception(self._failure)
