"""A trace like the one a run writes."""

from __future__ import annotations

from experiments.traces import Traced


def trace_of(iterations: int, wait: float) -> list[Traced]:
    """Return a trace of two ranks: 1 s forward, 2 s backward, 0.5 s to pack, a wait, and 0.5 s to update."""
    spans = []
    for rank in range(2):
        now = 0.1 * rank
        for iteration in range(iterations):
            exchange = Traced(rank=rank, what="communication", iteration=iteration, start=now + 3.5, seconds=wait)
            spans.append(exchange)
            parts = (("data", 0.0), ("forward", 1.0), ("backward", 2.0), ("pack", 0.5), ("wait", wait), ("update", 0.5))
            for what, seconds in parts:
                spans.append(Traced(rank=rank, what=what, iteration=iteration, start=now, seconds=seconds))
                now += seconds
            now += 0.25
    return spans
