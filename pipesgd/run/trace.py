"""Trace of a run: spans of computation and communication in Chrome's trace format.

Open the file in https://ui.perfetto.dev or chrome://tracing. It shows one process row per rank, with a row for the
computation above one for the communication, and below them one for each worker process that loads batches.
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipesgd.errors import warn
from pipesgd.ranks import Ranks
from pipesgd.run.files import reason, write_text_atomically
from pipesgd.strategy import Span

LAST_SPANS = 10_000
"""Number of spans kept per rank: those at the end of a long run, in a file that a browser can open."""

_COMPUTATION, _COMMUNICATION = (0, "computation"), (1, "communication")
_LOADER = "loader "


def _row(what: str) -> tuple[int, str]:
    if what.startswith(_LOADER):
        return int(what.removeprefix(_LOADER)) + 2, what
    return _COMMUNICATION if what == "communication" else _COMPUTATION


class Trace:
    """Collects this rank's spans, and writes those of all ranks into one file at the end."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._spans: collections.deque[Span] = collections.deque(maxlen=LAST_SPANS)

    def add(self, spans: Iterable[Span]) -> None:
        self._spans.extend(spans)

    def add_loading(self, worker: int, iteration: int, start: float, end: float) -> None:
        """Add the time in which a loader worker, whose spans have a row of their own, made a batch."""
        self.add([Span(f"{_LOADER}{worker}", iteration, start, end)])

    def write(self, path: Path) -> None:
        """Write the trace on rank 0. All ranks call this together.

        Clocks of different machines have different zeros: the moment at which all ranks have arrived here serves
        as the common zero, exact to some milliseconds.
        """
        self._ranks.all_gather_object("the end of the trace", None)
        zero = time.perf_counter()
        rows = [(span.what, span.iteration, span.start - zero, span.seconds) for span in self._spans]
        all_rows = self._ranks.all_gather_object("trace", rows)
        if self._ranks.rank == 0:
            try:
                write_text_atomically(path, json.dumps({"traceEvents": chrome_events(all_rows)}))
            except OSError as failure:
                warn(f"the trace could not be written ({reason(failure, path)})")


def chrome_events(rows_of_ranks: list[list[tuple[str, int, float, float]]]) -> list[dict[str, Any]]:
    """Return Chrome trace events of (what, iteration, start in s, duration in s) for each rank."""
    first = min((start for rows in rows_of_ranks for _, _, start, _ in rows), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, rows in enumerate(rows_of_ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for row, name in sorted({_COMPUTATION, _COMMUNICATION, *(_row(what) for what, *_ in rows)}):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})
        events += [
            {
                "ph": "X",
                "name": what,
                "cat": _row(what)[1],
                "pid": rank,
                "tid": _row(what)[0],
                "ts": (start - first) * 1e6,
                "dur": seconds * 1e6,
                "args": {"iteration": iteration},
            }
            for what, iteration, start, seconds in rows
        ]
    return events
