"""Links of former formats of ``cluster.toml``, with two more parameters: a message's CPU time, a collective's S."""

from __future__ import annotations

import dataclasses

from timing_model.all_reduce import all_reduce_time
from timing_model.measured import PARAMETER_SERVER, Estimate, LinkProfile
from timing_model.parameter_server import parameter_server_time
from timing_model.params import FLOAT_BYTES, LinkParams
from timing_model.presets import OVERHEAD

MOST_RANKS, MOST_BYTES = 64, 1 << 30
"""Most ranks, and bytes, of a correction that is converted: with more, a simulation would take long."""


def with_one_latency(name: str, link: LinkProfile, *, overhead: Estimate, sync: float, sharing: float) -> LinkProfile:
    """Return the link of an all-reduce, or of ``PARAMETER_SERVER``, with one latency for each message.

    Corrections are changed by as much as the formula: where something was measured, predictions stay as they were.

    Args:
        name: name of the all-reduce.
        link: link as it was fitted together with the following.
        overhead: CPU time of a message, in s.
        sync: fixed cost of a collective, in s.
        sharing: ``sharing`` of parameter servers.
    """
    sums = (getattr(link.alpha, end) + getattr(overhead, end) - OVERHEAD for end in ("value", "low", "high"))
    changed = dataclasses.replace(link, alpha=Estimate(*(max(0.0, one) for one in sums)))
    if link.corrections is None or name == "hierarchical":  # whose inner link is not known here
        return changed
    before = dataclasses.replace(link.params(), overhead=overhead.value)

    def rescaled(world_size: int, nbytes: int, factor: float) -> float:
        if world_size > MOST_RANKS or nbytes > MOST_BYTES:
            return factor
        old, new = (_time(name, one, nbytes, world_size, sharing) for one in (before, changed.params()))
        return factor * (old + sync) / new

    known = link.corrections
    cells = zip(known.world_sizes, known.nbytes, known.factors, strict=True)
    corrections = dataclasses.replace(known, factors=tuple(rescaled(*cell) for cell in cells))
    return dataclasses.replace(changed, corrections=corrections)


def _time(name: str, link: LinkParams, nbytes: int, world_size: int, sharing: float) -> float:
    if name == PARAMETER_SERVER:
        return parameter_server_time(link, nbytes, world_size, sharing=sharing).total
    return all_reduce_time(name, link, nbytes / FLOAT_BYTES, world_size).total
