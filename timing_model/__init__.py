"""The analytical timing model: what a job will cost. numpy only; knows neither torch nor pipesgd."""

from timing_model.all_reduce import ALL_REDUCES, CollectiveTime, all_reduce_time, gather_time
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
from timing_model.simulate import simulate_iterations

__version__ = "0.1.0.dev0"

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
