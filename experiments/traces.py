"""Record of what ranks did and when, from the trace of a run of pipesgd.train with --trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

PARTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "update": ("pack", "update", "predict"),
    "waiting": ("wait",),
}
"""Parts of an iteration, with the names of their spans; "communication" runs alongside them."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A span of one rank; times are in s since the first span of all."""

    rank: int
    what: str
    iteration: int
    start: float
    seconds: float


def read_trace(path: Path) -> list[Traced]:
    """Return the spans in a file of Chrome's trace format."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Traced(
            rank=event["pid"],
            what=event["name"],
            iteration=event["args"]["iteration"],
            start=event["ts"] / 1e6,
            seconds=event["dur"] / 1e6,
        )
        for event in events
        if event["ph"] == "X"
    ]


def breakdown(spans: Sequence[Traced], iterations: range) -> dict[str, float]:
    """Return the mean seconds of an iteration's parts over ranks and ``iterations``; they sum to "iteration".

    "other" is time outside these parts, such as loading data and recording metrics; "communication" is in no sum. An
    iteration of a rank lasts from one batch of data to the next. A wait belongs to the iteration that waits, not to
    that of the gradient waited for, so spans are sorted by their start. A wait within another part, such as that for
    buckets at the end of a backward pass, does not count as time of that part.
    """
    found: dict[str, list[float]] = {name: [] for name in (*PARTS, "communication", "iteration")}
    for rank in sorted({span.rank for span in spans}):
        own = [span for span in spans if span.rank == rank]
        begins = {span.iteration: span.start for span in own if span.what == "data"}
        for iteration in iterations:
            begin, end = begins[iteration], begins[iteration + 1]
            inside = [span for span in own if begin <= span.start < end]
            waits = [span for span in inside if span.what in PARTS["waiting"]]
            for name, kinds in PARTS.items():
                of_part = [span for span in inside if span.what in kinds]
                seconds = sum(span.seconds for span in of_part)
                if name != "waiting":
                    seconds -= sum(_shared(span, wait) for span in of_part for wait in waits)
                found[name].append(seconds)
            exchange = [span.seconds for span in own if (span.what, span.iteration) == ("communication", iteration)]
            found["communication"].append(sum(exchange))
            found["iteration"].append(end - begin)
    means = {name: fmean(values) for name, values in found.items()}
    return means | {"other": means["iteration"] - sum(means[name] for name in PARTS)}


def _shared(one: Traced, other: Traced) -> float:
    """Return the seconds that both spans share."""
    ends = min(one.start + one.seconds, other.start + other.seconds)
    return max(0.0, ends - max(one.start, other.start))
