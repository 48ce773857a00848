"""The paper's models and data sets, those of the user's own, and each rank's share of the samples."""

from pipesgd.data.datasets import load_dataset
from pipesgd.data.loading import ShardedBatches, evaluation_batches
from pipesgd.data.losses import CROSS_ENTROPY, Loss, find_loss
from pipesgd.data.make import make_workload
from pipesgd.data.models import build_model
from pipesgd.data.samples import DataSplits

__all__ = [
    "CROSS_ENTROPY",
    "DataSplits",
    "Loss",
    "ShardedBatches",
    "build_model",
    "evaluation_batches",
    "find_loss",
    "load_dataset",
    "make_workload",
]
