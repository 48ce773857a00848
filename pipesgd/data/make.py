"""Construction of the workload that a configuration names."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from pipesgd.config import TrainConfig, dataset_kind
from pipesgd.data.datasets import dataset_function, load_dataset
from pipesgd.data.models import build_model, model_function
from pipesgd.data.samples import DataSplits
from pipesgd.functions import OWN, check_used, kind


def make_workload(config: TrainConfig, *, rank: int = 0, world_size: int = 1) -> tuple[DataSplits, nn.Module]:
    """Load the data set, and build the model for it with weights from torch's global generator.

    Raises:
        UserInputError: the data set or the model is unknown, or they do not go together.
        DatasetError: files are missing, truncated or not what they should be.
    """
    if dataset_kind(config.data.dataset) == OWN:
        used = _chosen(config.data, "data_dir", "image_size", "context")
        check_used("dataset", config.data.dataset, dataset_function(config.data.dataset), used)
    if kind(config.model.model) == OWN:
        used = _chosen(config.model, "hidden_sizes", "layers", "heads", "embedding")
        check_used("model", config.model.model, model_function(config.model.model), used)
    seed = config.optimization.seed
    with torch.random.fork_rng(devices=[]):  # whatever the data draw, the same seed gives the same weights
        data = load_dataset(
            config.data.dataset,
            config.data.data_dir,
            image_size=config.data.image_size,
            context=config.data.context,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
    model = build_model(
        config.model.model,
        sample_shape=data.sample_shape,
        num_classes=data.num_classes,
        hidden_sizes=config.model.hidden_sizes,
        layers=config.model.layers,
        heads=config.model.heads,
        embedding=config.model.embedding,
        seed=seed,
        rank=rank,
        world_size=world_size,
    )
    return data, model


def _chosen(section: Any, *names: str) -> dict[str, Any]:
    """Return those of the options ``names`` that have another value than by default."""
    defaults = {item.name: item.default for item in dataclasses.fields(section)}
    return {name: value for name in names if (value := getattr(section, name)) != defaults[name]}
