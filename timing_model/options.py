"""Options of the ``timing-model`` command, and the job that they describe.

Options of the job are the fields of ``Job`` and of its groups. Here are those of the cluster and of the model, of which
a profile and a computation are made, and those of an answer.
"""

from __future__ import annotations

import argparse
import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing_model.arguments import Parser, add_options, number_of, option, options_in, taken, whole
from timing_model.checks import check_one_of
from timing_model.cluster_profile import Profile
from timing_model.job import OWN_ALL_REDUCE, STRATEGIES, Job, Length, compute_of, in_groups
from timing_model.measured import MOST, Calibrated, ComputeProfile, Estimate, LinkProfile
from timing_model.mesh import Islands, Nodes
from timing_model.parameter_server import Servers
from timing_model.params import LinkParams
from timing_model.presets import MODELS, NETWORKS, ethernet
from timing_model.units import format_seconds, parse_bandwidth, parse_count, parse_seconds

LAYERS = 50
"""Layers assumed for a model of which only the size is known: ddp reduces it in this many equal parts."""
MOST_PARAMETERS = 1e13
"""Most parameters of a model."""
NOTHING = Calibrated.nothing()
CONFIGURATION = ("strategy", "width", "local_steps", "codec", "all_reduce", "segment_bytes", "buckets")
"""Fields of a ``Job`` that a plan searches, but for local steps."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Options of the cluster."""

    cluster: str | None = option(None, shown="FILE")
    """Profile written by pipesgd.calibrate, or [[link]] tables of your own."""
    network: str | None = option(None, choices=tuple(NETWORKS))
    """Typical network."""
    latency: float | None = option(None, parse_seconds, "50us")
    """Latency of a message."""
    bandwidth: float | None = option(None, parse_bandwidth, "10Gbit/s")
    """Rate of each rank's link, packet headers included: 1.05 times --rate-limit, which counts none."""
    world_size: int = option(dataclasses.MISSING, whole(), "P")
    """Number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Options of the link inside a node."""

    inner_latency: float | None = option(None, parse_seconds, "10us")
    """Time that a message inside a node takes in addition to its bytes, for hierarchical and islands."""
    inner_bandwidth: float | None = option(None, parse_bandwidth, "50GB/s")
    """Rate at which each rank sends inside a node, sums included, for hierarchical and islands."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Options of the model and its computation."""

    model: str | None = option(None, choices=tuple(MODELS))
    """Model of the profile, or a known size."""
    parameters: float | None = option(None, parse_count, "61.1M")
    """Number of parameters."""
    tensors: Sequence[int] | None = option(None, whole(), "N", several=True)
    """Values of each parameter, in the order of the forward pass, in place of --parameters."""
    compute: float | None = option(None, parse_seconds, "0.3s")
    """Time of a forward and a backward pass."""
    update: float | None = option(None, parse_seconds, "5ms")
    """Time of the optimizer; 0s without it."""
    loading: float | None = option(None, parse_seconds, "20ms")
    """Time of loading a batch; 0s without it, or as measured."""
    batch_size: int | None = option(None, whole(), "B")
    """Samples of a rank in an iteration."""
    samples: int | None = option(None, whole(), "N")
    """Samples of the data set."""
    cv: float | None = option(None, number_of(0), "CV")
    """Spread of a rank's computation, standard deviation divided by mean; 0 without it, or as measured."""
    persistence: float | None = option(None, number_of(0, below=1), "R")
    """Correlation of a rank's deviation with that of its iteration before; 0 without it, or as measured."""
    comm_cv: float | None = option(None, number_of(0), "CV")
    """Spread of an all-reduce's time between iterations, as --cv; 0 without it, or as measured."""
    slow_ranks: Sequence[float] | None = option(None, number_of(1), "F", several=True)
    """Slowdown factors of ranks that are always slow."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Options of the answer."""

    extrapolate: bool = option(False, None)
    """Answer far outside of what was measured, too."""
    json: bool = option(False, None)
    """Print JSON; times in s, sizes in bytes."""
    plot: str | None = option(None, shown="FILE")
    """File of a picture to save, too (needs matplotlib)."""


def add_job(options: Parser) -> None:
    """Add the options for cluster, model and job, which all commands have."""
    add_options(options.add_argument_group("cluster: a measured one, or numbers you type in"), Cluster)
    group = options.add_argument_group("model and job")
    add_options(group, Model)
    add_options(group, Job, without=CONFIGURATION)
    add_options(group, Length)
    group = options.add_argument_group("islands: ranks that hold the model together")
    add_options(group, Islands, without=("members",))
    add_options(options, Shown)


def add_configuration(options: Parser) -> None:
    """Add the options for one way to run the job."""
    group = options.add_argument_group("configuration: options of pipesgd.train")
    add_options(group, Job, without=("loader_workers", "accumulation"))
    add_options(group, Islands, without=[name for name, _ in options_in(Islands) if name != "members"])
    add_options(group, Servers)
    add_nodes(group)


def add_nodes(group: argparse._ArgumentGroup) -> None:
    """Add the options for nodes of several ranks."""
    add_options(group, Nodes)
    add_options(group, Inside)


def base_of(given: Namespace, **configuration: Any) -> Job:
    """Return the job of the options of ``add_job``, with these values of other options. Raises ``ValueError``."""
    for name in ("latency", "inner_latency", "compute", "update", "loading"):
        if (getattr(given, name) or 0.0) > MOST:
            raise ValueError(f"{name} must be at most {MOST:g} s; got {getattr(given, name):g} s")
    for name in ("bandwidth", "inner_bandwidth"):
        if (getattr(given, name) or 1.0) < 1 / MOST:
            raise ValueError(f"{name} must be at least {1 / MOST:g} bytes a second; got {getattr(given, name):g}")
    cluster = _with_inner(given, _cluster(given))
    if given.compute is not None:  # typed in, so not measured, whatever its model is called
        cluster = dataclasses.replace(cluster, compute=())
    if given.world_size > 1 and cluster.named_ranks > given.world_size:  # one rank alone needs no links
        raise ValueError(f"link must name ranks from 0 to {given.world_size - 1}; got {cluster.named_ranks - 1}")
    values = taken(given, Job, without=CONFIGURATION) | taken(given, Islands, without=("members",))
    values |= taken(given, Nodes) | taken(given, Length) | configuration
    compute = _compute(given, cluster)
    return Job(cluster=cluster, compute=compute, world_size=given.world_size, **in_groups(values))


def job_of(given: Namespace) -> Job:
    """Return the job that the options of ``add_job`` and ``add_configuration`` describe. Raises ``ValueError``."""
    asked = taken(given, Job)
    strategy = asked.get("strategy", "pipelined")
    check_one_of("strategy", strategy, STRATEGIES)
    if given.split is not None and given.members is None:
        raise ValueError(f"members must be given with --split {given.split}; got none")
    for name, item in options_in(Servers):
        value = getattr(given, name)
        if value not in (None, item.default) and strategy != "ps-sync":
            raise ValueError(f"{name} must be left out with strategy {strategy}, which has none; got {value}")
    usual = {"width": 2 if strategy == "pipelined" else 1, "all_reduce": OWN_ALL_REDUCE[strategy]}
    return base_of(given, **usual | asked | taken(given, Islands) | taken(given, Servers))


def _cluster(given: Namespace) -> Profile:
    if given.cluster is not None:
        for name in ("network", "latency", "bandwidth"):
            if getattr(given, name) is not None:
                raise ValueError(f"{name} must be left out with --cluster, which says it; got {getattr(given, name)}")
        return Profile.load(Path(given.cluster))
    if given.network is not None:
        check_one_of("network", given.network, list(NETWORKS))
        link = NETWORKS[given.network]
        if given.latency is not None:
            link = dataclasses.replace(link, alpha=given.latency)
        if given.bandwidth is not None:
            link = dataclasses.replace(link, beta=ethernet(given.bandwidth, 0.0).beta)
    elif given.latency is None and given.bandwidth is None:
        raise ValueError("cluster must be given, or --network, or --latency and --bandwidth; got none")
    else:
        for name in ("latency", "bandwidth"):
            if getattr(given, name) is None:
                raise ValueError(f"{name} must be given, too, without --cluster or --network; got none")
        link = ethernet(given.bandwidth, given.latency)
    return Profile(calibrated=NOTHING, link=LinkProfile.exact(link))


def _with_inner(given: Namespace, cluster: Profile) -> Profile:
    """Return the cluster with the link inside nodes that is given, if one is: latency and rate are all that counts."""
    latency, bandwidth = given.inner_latency, given.inner_bandwidth
    if latency is None and bandwidth is None:
        return cluster
    if latency is None or bandwidth is None:
        name = "inner_latency" if latency is None else "inner_bandwidth"
        raise ValueError(f"{name} must be given, too, for a link inside nodes; got none")
    got = format_seconds(latency)
    if cluster.inner is not None or cluster.placed:
        raise ValueError(f"inner_latency must be left out with --cluster {given.cluster}, which says it; got {got}")
    if given.ranks_per_node in (None, 1):
        raise ValueError(f"inner_latency must be left out with one rank on each node (--ranks-per-node); got {got}")
    link = LinkParams(alpha=latency, beta=1 / bandwidth, gamma=0.0, sync=0.0)
    return dataclasses.replace(cluster, inner=LinkProfile.exact(link))


def _compute(given: Namespace, cluster: Profile) -> ComputeProfile:
    if given.compute is not None:
        return _by_hand(given)
    for name in ("update", "parameters"):
        if getattr(given, name) is not None:
            raise ValueError(f"{name} must be left out without --compute; got {getattr(given, name):g}")
    if given.tensors is not None:
        raise ValueError(f"tensors must be left out without --compute; got {len(given.tensors)} of them")
    if not cluster.compute:
        raise ValueError("compute must be given: the time of a forward and a backward pass; got none")
    if given.model is None:
        models = ", ".join(sorted({one.model for one in cluster.compute}))
        raise ValueError(f"model must be given, one of {models}, or --compute and --parameters; got none")
    return _changed(given, compute_of(cluster, given.model, given.batch_size))


def _by_hand(given: Namespace) -> ComputeProfile:
    if given.tensors is not None:
        return _changed(given, _of_tensors(given))
    if given.parameters is None and given.model is None:
        raise ValueError("parameters must be given with --compute, or --model; got none")
    if given.parameters is None:
        check_one_of("model", given.model, list(MODELS))
    elif given.model in MODELS:
        raise ValueError(f"parameters must be left out with --model {given.model}; got {given.parameters:g}")
    parameters = round(MODELS[given.model] if given.parameters is None else given.parameters)
    if not 1 <= parameters <= MOST_PARAMETERS:
        raise ValueError(f"parameters must be from 1 to 1e13; got {parameters}")
    compute = computation_of(
        given.model or "given",
        parameters,
        given.compute,
        batch_size=given.batch_size or 0,
        update=given.update or 0.0,
    )
    return _changed(given, compute)


def _of_tensors(given: Namespace) -> ComputeProfile:
    if given.parameters is not None:
        raise ValueError(f"parameters must be left out with --tensors; got {given.parameters:g}")
    if given.model in MODELS:
        raise ValueError(f"tensors must be left out with --model {given.model}; got {len(given.tensors)} of them")
    if sum(given.tensors) > MOST_PARAMETERS:
        raise ValueError(f"tensors must have 1e13 values at most; got {sum(given.tensors)}")
    return ComputeProfile.exact(
        model=given.model or "given",
        batch_size=given.batch_size or 0,
        tensors=tuple(given.tensors),
        compute=given.compute,
        update=given.update or 0.0,
    )


def computation_of(
    model: str, parameters: int, seconds: float, *, batch_size: int = 0, update: float = 0.0
) -> ComputeProfile:
    """Return the computation of a model of which only size and times are known, in at most ``LAYERS`` equal layers.

    Args:
        model: name of the model.
        parameters: number of its parameters.
        seconds: time of a forward and a backward pass, in s.
        batch_size: samples of an iteration of a rank; 0 if not known.
        update: time of an update, in s.

    >>> computation_of("model", 3, 1.0).tensors
    (1, 1, 1)
    """
    layers = min(LAYERS, parameters)
    return ComputeProfile.exact(
        model=model,
        batch_size=batch_size,
        tensors=tuple(parameters // layers + (layer < parameters % layers) for layer in range(layers)),
        compute=seconds,
        update=update,
    )


def _changed(given: Namespace, compute: ComputeProfile) -> ComputeProfile:
    """Return the computation with the noise and the data set that are given."""
    changes = {"cv": given.cv, "samples": given.samples, "slow_ranks": given.slow_ranks and tuple(given.slow_ranks)}
    for name in ("loading", "persistence", "comm_cv"):
        changes[name] = None if getattr(given, name) is None else Estimate.exact(getattr(given, name))
    present = {name: value for name, value in changes.items() if value is not None}
    if "slow_ranks" in present and len(given.slow_ranks) > given.world_size:
        raise ValueError(f"slow_ranks must be at most {given.world_size}; got {len(given.slow_ranks)}")
    if present.keys() - {"samples"}:
        present["measured"] = ()  # with other noise, or another time of loading
    if given.samples is not None and compute.batch_size == 0:
        raise ValueError(f"samples must be left out without --batch-size; got {given.samples}")
    changed = dataclasses.replace(compute, **present)
    if given.persistence and changed.cv == 0:
        raise ValueError(f"persistence must come with a cv above 0; got {given.persistence:g} without one")
    return changed
