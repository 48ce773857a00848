"""The paper's models and data sets, and each rank's share of the samples."""

from pipesgd.workloads.datasets import DATASETS, DataSplits, load_dataset
from pipesgd.workloads.loading import ShardedBatches, evaluation_batches
from pipesgd.workloads.models import MODELS, build_model

__all__ = [
    "DATASETS",
    "MODELS",
    "DataSplits",
    "ShardedBatches",
    "build_model",
    "evaluation_batches",
    "load_dataset",
]
