"""Analytical timing model: predicts what a job will cost. Needs numpy only; imports neither torch nor pipesgd."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from timing_model.all_reduce import CollectiveTime, all_reduce_time, gather_time
    from timing_model.collective_time import ring_all_reduce_bytes, ring_all_reduce_time
    from timing_model.iteration import (
        IterationTime,
        ddp_buckets,
        job_time,
        layerwise_iteration_time,
        pipelined_iteration_time,
        server_iteration_time,
    )
    from timing_model.jitter import expected_maximum, steady_state_bound, steady_state_period
    from timing_model.parameter_server import parameter_server_time
    from timing_model.params import CodecCost, ComputeTimes, LinkParams, Noise, uncompressed
    from timing_model.schedules import ALL_REDUCES
    from timing_model.simulate import simulate_iterations

__version__ = "0.2.0"

_HOMES = {
    "all_reduce": ("CollectiveTime", "all_reduce_time", "gather_time"),
    "collective_time": ("ring_all_reduce_bytes", "ring_all_reduce_time"),
    "iteration": (
        "IterationTime",
        "ddp_buckets",
        "job_time",
        "layerwise_iteration_time",
        "pipelined_iteration_time",
        "server_iteration_time",
    ),
    "jitter": ("expected_maximum", "steady_state_bound", "steady_state_period"),
    "parameter_server": ("parameter_server_time",),
    "params": ("CodecCost", "ComputeTimes", "LinkParams", "Noise", "uncompressed"),
    "schedules": ("ALL_REDUCES",),
    "simulate": ("simulate_iterations",),
}
"""Public names, by the module that defines them."""

__all__ = [
    "ALL_REDUCES",
    "CodecCost",
    "CollectiveTime",
    "ComputeTimes",
    "IterationTime",
    "LinkParams",
    "Noise",
    "all_reduce_time",
    "ddp_buckets",
    "expected_maximum",
    "gather_time",
    "job_time",
    "layerwise_iteration_time",
    "parameter_server_time",
    "pipelined_iteration_time",
    "ring_all_reduce_bytes",
    "ring_all_reduce_time",
    "server_iteration_time",
    "simulate_iterations",
    "steady_state_bound",
    "steady_state_period",
    "uncompressed",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: the trainer reads few modules alone."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"timing_model.{home}"), name)
    raise AttributeError(f"module 'timing_model' has no attribute {name!r}")
