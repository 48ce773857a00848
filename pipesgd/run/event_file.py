"""TensorBoard's event files, written in a thread of their own, so that a full disk ends neither thread nor run.

torch's SummaryWriter prints a traceback and raises in the training loop when its thread cannot write.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipesgd.run.files import Appender

EVENT_FILE = re.compile(r"events\.out\.tfevents\.([0-9]+)\..*\.[0-9]+\.0")
"""Pattern of the names of event files, with their number: TensorBoard reads files in the order of their names."""


class EventFile:
    """Scalars by name and iteration in a new file in ``folder``; it voids those of earlier files from ``start`` on."""

    def __init__(self, folder: Path, *, start: int):
        # Imported here, since it takes a second and only rank 0 writes.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        number = max(int(time.time()), _newest(folder) + 1)  # the clock may have been set back
        self._file = Appender(folder / f"events.out.tfevents.{number}.{platform.node()}.{os.getpid()}.0")
        self._records = RecordWriter(self._file)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pipesgd events")
        self._records.write(Event(step=start, file_version="brain.Event:2").SerializeToString())
        restart = Event(step=start, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        self._records.write(restart.SerializeToString())

    def add(self, iteration: int, scalars: dict[str, float]) -> None:
        """Queue these values of ``iteration`` for writing."""
        self._thread.submit(self._write, iteration, time.time(), scalars)

    def flush(self) -> None:
        """Write everything to the disk, if possible."""
        self._thread.submit(self._file.flush).result()

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        self._thread.shutdown()
        self._file.close()

    def _write(self, iteration: int, when: float, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = self._event(step=iteration, wall_time=when, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())


def _newest(folder: Path) -> int:
    """Return the highest number of an event file in ``folder``; 0 if there is none, or the folder cannot be read."""
    with contextlib.suppress(OSError):
        names = (EVENT_FILE.fullmatch(path.name) for path in folder.iterdir())
        return max((int(name[1]) for name in names if name), default=0)
    return 0
