"""The analytical timing model: what a job will cost. numpy only; knows neither torch nor pipesgd."""

from timing_model.collectives import ring_all_reduce_bytes, ring_all_reduce_time
from timing_model.iteration import pipelined_iteration_time
from timing_model.params import LinkParams

__all__ = ["LinkParams", "pipelined_iteration_time", "ring_all_reduce_bytes", "ring_all_reduce_time"]
