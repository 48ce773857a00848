"""Data, this rank's batches of them, model, and own codec and all-reduce, checked before anything depends on them."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipesgd.comm.connections import check_block
from pipesgd.comm.own_all_reduce import agreed_schedule, ranks_per_node
from pipesgd.config import TrainConfig, dataset_kind
from pipesgd.data import DataSplits, ShardedBatches, find_loss, make_workload
from pipesgd.data.augmentation import Augmentation
from pipesgd.data.losses import Loss
from pipesgd.data.samples import on_tensors, outputs_of
from pipesgd.errors import DisagreementError, UserInputError
from pipesgd.functions import OWN, in_one_line, kind
from pipesgd.guests import guest
from pipesgd.membership.record import Record
from pipesgd.optim.build import check_model
from pipesgd.pipeline.buckets import bucket_indices
from pipesgd.pipeline.exchanges import Exchanges, Reduce
from pipesgd.pipeline.sameness import check_same_settings, describe_buffers, describe_parameters
from pipesgd.ranks import Ranks
from pipesgd.reducers.make import check_eligible, compiled_codec
from pipesgd.sections import AUTO, check_parts
from timing_model.buckets import WHOLE

TRIED = 2
"""Samples that an own model or loss is tried on: batch normalization needs two."""


def check_exchange(config: TrainConfig, ranks: Ranks) -> None:
    """Check codec and all-reduce before anything is written, and try those of the user's own. Collective.

    Raises:
        UserInputError: one of them cannot be made, or does not keep to its contract; the nodes are not those that the
            all-reduce requires; or the codec's blocks are too large for the rate limit.
        DisagreementError: one of them is not the same on all ranks.
    """
    if kind(config.compression.codec) == OWN:
        options = ranks.raise_together("codec", config.compression.chosen)
        compiled_codec(options, ranks, config.run.device)
    if kind(config.wire.all_reduce_name) == OWN:
        agreed_schedule(config.wire.all_reduce, ranks)
    if config.wire.all_reduce == "hierarchical":
        ranks_per_node(ranks)
    if config.wire.transport == "tls":
        from pipesgd.comm.tls import tls

        ranks.raise_together("certificate", lambda: tls(ranks.secret))
    if config.wire.rate_limit is not None:
        ranks.raise_together("blocks of the codec", functools.partial(_check_blocks, config))


def _check_blocks(config: TrainConfig) -> None:
    """Raise ``UserInputError`` if blocks of the codec are larger than messages may be at the rate limit."""
    options = config.compression.chosen()
    check_block(options.make(), config.wire.rate)


def load(config: TrainConfig, ranks: Ranks) -> tuple[DataSplits, ShardedBatches, nn.Module, torch.device]:
    """Return the data set, this rank's batches of it, the model, and its device.

    Raises:
        UserInputError: one of these cannot be made, or they do not go together.
    """
    if config.run.device == "cuda":
        _check_gpus(torch.cuda.device_count(), ranks.local_world_size)
    rank = min(ranks.rank, ranks.world_size - 1)  # a rank that is only a server draws no batch
    torch.manual_seed(config.optimization.seed)
    loss = find_loss(config.model.loss)
    data, model = make_workload(config, rank=rank, world_size=ranks.world_size)
    if OWN in (dataset_kind(config.data.dataset), kind(config.model.model), kind(config.model.loss)):
        check_fit(data, model, loss)
    batches = ShardedBatches(
        data.train,
        batch_size=config.samples_per_rank,
        rank=0 if data.sharded else rank,
        world_size=1 if data.sharded else ranks.world_size,
        seed=config.optimization.seed,
        loader_workers=config.data.workers,
        augmentation=augmentation_of(config, data),
    )
    check_model(config.optimization, model)
    if config.run.elastic is not None:
        _check_members(config.run.elastic, data, ranks.world_size)
    if config.pipeline.strategy == "pipelined":
        check_cut(config, model, reduce_of(config, data, model, ranks.world_size))
    torch.manual_seed(config.optimization.seed * ranks.world_size + ranks.rank)  # from here on, ranks differ
    return data, batches, model, torch.device(config.run.device)


def _check_members(least: int, data: DataSplits, world_size: int) -> None:
    """Raise ``UserInputError`` unless there are as many ranks as must train, with samples that others can take over."""
    if least > world_size:
        raise UserInputError(f"elastic must be at most the number of ranks, {world_size}; got {least}")
    if data.sharded:
        raise UserInputError(
            "the data set must be the same on all ranks with --elastic, since a lost rank's samples are given to "
            "others; got one in which each rank has its own"
        )


def _check_gpus(gpus: int, ranks: int) -> None:
    """Raise ``UserInputError`` unless this machine has a GPU for each of its ranks."""
    if not gpus:
        raise UserInputError("device must be cpu where torch finds no GPU; got cuda")
    if ranks > gpus:
        raise UserInputError(
            f"nproc-per-node must be at most the number of GPUs, {gpus}, with device cuda; got {ranks}"
        )


def reduce_of(config: TrainConfig, data: DataSplits, model: nn.Module, world_size: int) -> Reduce:
    """Return the exchange of gradients that ``--reduce`` asks for, of each parameter if that is auto.

    Where samples are made of symbols, as texts are, a layer has a row of input for each symbol; otherwise for each
    sample.
    """
    if config.wire.reduce != AUTO:
        return config.wire.reduce
    inputs, _ = data.train[torch.arange(1)]
    symbols = [1]
    on_tensors(lambda one: None if one.is_floating_point() else symbols.append(one.numel()), inputs)
    rows = config.samples_per_rank * max(symbols)
    codec = config.compression.chosen().make()
    chosen: Reduce = guest("fewest bytes")(model, rows, codec, world_size)
    return chosen


def check_cut(config: TrainConfig, model: nn.Module, reduce: Reduce) -> None:
    """Raise ``UserInputError`` unless the model has the parameters for exchange, fragments and buckets asked for."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(reduce, str):
        check_eligible(reduce, model, trained)
    if config.windows.fragments > 1:
        check_parts(config.windows.fragments, len(trained))
    if config.wire.cut != WHOLE:
        apart = Exchanges(model, reduce).apart()
        bucket_indices(model, trained, str(config.wire.buckets), apart)


def augmentation_of(config: TrainConfig, data: DataSplits) -> Augmentation | None:
    """Return what changes the training images at random; None if nothing does.

    Raises:
        UserInputError: more would be cut off than the images have.
    """
    crop, mirror = config.data.random_crop, config.data.mirror
    if not (crop or mirror):
        return None
    assert data.sample_shape is not None, "images have a size"
    side = min(data.sample_shape[1:])
    if crop >= side:
        raise UserInputError(f"random-crop must be below {side}, the side of an image in pixels; got {crop}")
    return Augmentation(crop=crop, mirror=mirror, seed=config.optimization.seed)


def check_fit(data: DataSplits, model: nn.Module, loss: Loss) -> None:
    """Try ``model`` and ``loss`` on a few samples, as evaluation and training will use them.

    Weights and buffers stay as they are; random numbers are drawn. Those that only a forward pass makes, as in torch's
    lazy modules, are there afterwards.

    Raises:
        UserInputError: the model does not take the inputs, or the loss is not a scalar that has a gradient.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for split, training in ((data.test, False), (data.train, True)):
        batch = split[torch.arange(min(TRIED, len(split)))]
        inputs, targets = on_tensors(lambda tensor: tensor, batch)  # of the types that training will see
        model.train(training)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if not is_lazy(buffer)}
        with torch.set_grad_enabled(training):
            with in_one_line("model must accept the inputs of the data set"):
                outputs = outputs_of(model, inputs)
            with in_one_line("loss must accept the model's outputs and the targets"):
                mean = loss(outputs, targets)
        if not (isinstance(mean, torch.Tensor) and mean.dim() == 0):
            got = f"shape {tuple(mean.shape)}" if isinstance(mean, torch.Tensor) else type(mean).__name__
            raise UserInputError(f"loss must return a scalar tensor, the mean of a batch; got {got}")
        if training:
            with in_one_line("loss must have a gradient"):
                torch.autograd.grad(mean, parameters, allow_unused=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])


def agree_on_workload(
    config: TrainConfig, data: DataSplits, batches: ShardedBatches, model: nn.Module, ranks: Ranks
) -> int:
    """Check that all ranks train the same model on the same data, and return the samples that an epoch draws from.

    Machines have folders of their own, and a function of the user's own may return anything. Where every rank has
    samples of its own, ``batches`` get as many iterations an epoch as the rank with the fewest has. Collective.

    Raises:
        DisagreementError: data or models differ.
    """
    everybody = ranks.all_gather_object(
        "size of the data", [data.describe(), len(data.train), batches.iterations_per_epoch]
    )
    described, lengths, iterations = zip(*everybody, strict=True)
    remedy = ""
    if dataset_kind(config.data.dataset) == OWN:
        remedy = f" (sharded = True on {config.data.dataset} lets them differ)"
    for rank, other in enumerate(described):
        if other != described[0]:
            raise DisagreementError(
                f"data must be the same on all ranks; got {described[0]} on rank 0, {other} on rank {rank}{remedy}"
            )
    check_same_settings(
        ranks,
        {},
        {"parameters": describe_parameters(model, model.parameters()), "buffers": describe_buffers(model)},
    )
    if data.sharded:
        batches.record = Record.begun(min(iterations), 1)
    samples: int = min(lengths) * (len(lengths) if data.sharded else 1)
    return samples
