"""The analytical timing model: what a job will cost. numpy only; knows neither torch nor pipesgd."""

from timing_model.all_reduce import ALL_REDUCES, CollectiveTime, all_reduce_time, gather_time
from timing_model.collectives import ring_all_reduce_bytes, ring_all_reduce_time
from timing_model.iteration import pipelined_iteration_time
from timing_model.params import CodecCost, ComputeTimes, LinkParams, Noise, uncompressed

__all__ = [
    "ALL_REDUCES",
    "CodecCost",
    "CollectiveTime",
    "ComputeTimes",
    "LinkParams",
    "Noise",
    "all_reduce_time",
    "gather_time",
    "pipelined_iteration_time",
    "ring_all_reduce_bytes",
    "ring_all_reduce_time",
    "uncompressed",
]
