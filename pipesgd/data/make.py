"""Construction of the workload that a configuration names."""

from __future__ import annotations

from torch import nn

from pipesgd.config import TrainConfig
from pipesgd.data.datasets import DataSplits, load_dataset
from pipesgd.data.models import build_model


def make_workload(config: TrainConfig) -> tuple[DataSplits, nn.Module]:
    """Load the data set, and build the model for it with weights from torch's global generator.

    Raises:
        UserInputError: the data set or the model is unknown, or they do not go together.
        DatasetError: files are missing, truncated or not what they should be.
    """
    data = load_dataset(
        config.data.dataset,
        config.data.data_dir,
        image_size=config.data.image_size,
        context=config.data.context,
    )
    model = build_model(
        config.model.model,
        sample_shape=data.sample_shape,
        num_classes=data.num_classes,
        hidden_sizes=config.model.hidden_sizes,
        layers=config.model.layers,
        heads=config.model.heads,
        embedding=config.model.embedding,
    )
    return data, model
