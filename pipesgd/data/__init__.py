"""The paper's models and data sets, and each rank's share of the samples."""

from pipesgd.data.datasets import DataSplits, load_dataset
from pipesgd.data.loading import ShardedBatches, evaluation_batches
from pipesgd.data.make import make_workload
from pipesgd.data.models import build_model

__all__ = [
    "DataSplits",
    "ShardedBatches",
    "build_model",
    "evaluation_batches",
    "load_dataset",
    "make_workload",
]
