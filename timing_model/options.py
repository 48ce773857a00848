"""Arguments of the ``timing-model`` command, and the job that they describe."""

from __future__ import annotations

import argparse
import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

from timing_model.arguments import Parser, number_of, quantity, whole
from timing_model.checks import check_one_of
from timing_model.cluster_profile import Profile
from timing_model.job import OWN_ALL_REDUCE, STRATEGIES, Job, compute_of
from timing_model.measured import MOST, UNCOMPRESSED, Calibrated, ComputeProfile, Estimate, LinkProfile
from timing_model.mesh import SPLITS
from timing_model.parameter_server import COLOCATED
from timing_model.params import LinkParams
from timing_model.presets import MODELS, NETWORKS, ethernet
from timing_model.schedules import ALL_REDUCES, SEGMENT_BYTES
from timing_model.units import format_seconds, parse_bandwidth, parse_bytes, parse_count, parse_price, parse_seconds

LAYERS = 50
"""Layers assumed for a model of which only the size is known: ddp reduces it in this many equal parts."""
NOTHING = Calibrated.nothing()


def add_job(options: Parser) -> None:
    """Add the options for cluster, model and job, which all commands have."""
    cluster = options.add_argument_group("cluster: a measured one, or numbers you type in")
    cluster.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="profile written by pipesgd.calibrate, or [[link]] tables of your own",
    )
    cluster.add_argument("--network", metavar="NAME", help=f"typical network: {', '.join(NETWORKS)}")
    cluster.add_argument(
        "--latency", type=quantity(parse_seconds, "latency"), metavar="50us", help="latency of a message"
    )
    cluster.add_argument(
        "--bandwidth",
        type=quantity(parse_bandwidth, "bandwidth"),
        metavar="10Gbit/s",
        help="rate of each rank's link, packet headers included",
    )
    cluster.add_argument("--world-size", type=whole(), required=True, metavar="P", help="number of ranks")
    group = options.add_argument_group("model and job")
    group.add_argument("--model", metavar="NAME", help=f"model of the profile, or a known size: {', '.join(MODELS)}")
    group.add_argument(
        "--parameters", type=quantity(parse_count, "parameters"), metavar="61.1M", help="number of parameters"
    )
    group.add_argument(
        "--compute",
        type=quantity(parse_seconds, "compute"),
        metavar="0.3s",
        help="time of a forward and a backward pass",
    )
    group.add_argument(
        "--update", type=quantity(parse_seconds, "update"), metavar="5ms", help="time of the optimizer (0s)"
    )
    group.add_argument(
        "--loading", type=quantity(parse_seconds, "loading"), metavar="20ms", help="time of loading a batch (0s)"
    )
    group.add_argument(
        "--loader-workers", type=whole(0), default=0, metavar="W", help="processes of a rank that load batches (0)"
    )
    group.add_argument("--batch-size", type=whole(), metavar="B", help="samples of a rank in an iteration")
    group.add_argument(
        "--accumulation",
        type=whole(),
        default=1,
        metavar="A",
        help="micro-batches of --batch-size, and of --compute, whose gradients are exchanged once (1)",
    )
    group.add_argument("--samples", type=whole(), metavar="N", help="samples of the data set")
    group.add_argument("--epochs", type=whole(), metavar="N", help="length of the job in epochs")
    group.add_argument("--iterations", type=whole(), metavar="N", help="length of the job in iterations, instead")
    group.add_argument(
        "--price", type=quantity(parse_price, "price"), metavar="1.20/h", help="price of a rank, in any currency"
    )
    group.add_argument(
        "--cv",
        type=number_of(0),
        help="spread of a rank's computation: standard deviation divided by mean (0, or as measured)",
    )
    group.add_argument(
        "--persistence",
        type=number_of(0, below=1),
        metavar="R",
        help="correlation of a rank's deviation with that of its iteration before (0, or as measured)",
    )
    group.add_argument(
        "--comm-cv",
        type=number_of(0),
        metavar="CV",
        help="spread of an all-reduce's time between iterations: its cv, as above (0, or as measured)",
    )
    group.add_argument(
        "--slow-ranks", type=number_of(1), nargs="+", metavar="F", help="slowdown factors of ranks that are always slow"
    )
    _add_split(options)
    options.add_argument("--extrapolate", action="store_true", help="also answer far outside of what was measured")
    options.add_argument("--json", action="store_true", help="print JSON; times in s, sizes in bytes")
    options.add_argument("--plot", type=Path, metavar="FILE", help="also save a picture (needs matplotlib)")


def _add_split(options: Parser) -> None:
    group = options.add_argument_group("islands: ranks that hold the model together")
    group.add_argument(
        "--split", metavar="NAME", help=f"how members of an island hold a model: {', '.join(SPLITS)} (no islands)"
    )
    group.add_argument(
        "--split-share",
        type=number_of(0),
        default=1.0,
        metavar="SHARE",
        help="share of the model that --split tensor splits, of its values and of its computation (1)",
    )
    group.add_argument(
        "--activations",
        type=quantity(parse_bytes, "activations"),
        metavar="8MiB",
        help="bytes that --split tensor sums over an island in an iteration, for the samples of one rank",
    )
    group.add_argument(
        "--memory",
        type=quantity(parse_bytes, "memory"),
        metavar="16GiB",
        help="memory of a rank, for weights, gradients and what optimizer and pipeline hold; no activations",
    )
    group.add_argument(
        "--optimizer-state",
        type=number_of(0),
        default=2.0,
        metavar="S",
        help="values that the optimizer keeps for a weight: 0 with SGD, 1 with momentum, 2 with Adam and AdamW (2)",
    )


def add_configuration(options: Parser) -> None:
    """Add the options for one way to run the job."""
    one = options.add_argument_group("configuration: options of pipesgd.train")
    one.add_argument("--strategy", default="pipelined", help=f"{', '.join(STRATEGIES)} (pipelined)")
    one.add_argument("--width", type=whole(), metavar="K", help="iterations in flight (2); 1 is synchronous")
    one.add_argument(
        "--local-steps",
        type=whole(),
        default=1,
        metavar="H",
        help="iterations that each rank trains by itself before the ranks exchange their movements (1)",
    )
    one.add_argument("--codec", default=UNCOMPRESSED, help="codec, one of the profile's (fp32)")
    one.add_argument(
        "--all-reduce", metavar="NAME", help=f"{', '.join(ALL_REDUCES)}, module:function (ring; native with ddp)"
    )
    one.add_argument(
        "--segment-bytes", type=whole(), default=SEGMENT_BYTES, metavar="N", help="bytes of the largest message (1 MiB)"
    )
    one.add_argument(
        "--buckets",
        default="1",
        metavar="N|SIZE",
        help="buckets in which gradients leave during the backward pass: a number, or the largest size of one (1)",
    )
    one.add_argument(
        "--members", type=whole(), metavar="M", help="ranks of an island, with --split (1, without islands)"
    )
    one.add_argument("--servers", type=whole(), default=1, metavar="S", help="number of servers of ps-sync (1)")
    one.add_argument(
        "--server-placement",
        default=COLOCATED,
        help="placement of the servers: colocated with workers, or dedicated (colocated)",
    )
    add_nodes(one)


def add_nodes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ranks-per-node",
        type=whole(),
        default=1,
        metavar="G",
        help="ranks that share a node, for hierarchical and islands; no effect on ring and native without islands (1)",
    )
    group.add_argument(
        "--nics", type=whole(), default=1, metavar="R", help="NICs of a node, for hierarchical and islands (1)"
    )
    group.add_argument(
        "--inner-latency",
        type=quantity(parse_seconds, "inner-latency"),
        metavar="10us",
        help="time that a message inside a node takes in addition to its bytes, for hierarchical and islands",
    )
    group.add_argument(
        "--inner-bandwidth",
        type=quantity(parse_bandwidth, "inner-bandwidth"),
        metavar="50GB/s",
        help="rate at which each rank sends inside a node, sums included, for hierarchical and islands",
    )


def base_of(given: Namespace, **configuration: Any) -> Job:
    """Return the job that the options of ``add_job`` name, with these fields of a ``Job``. Raises ``ValueError``."""
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
    return Job(
        cluster=cluster,
        compute=_compute(given, cluster),
        world_size=given.world_size,
        ranks_per_node=given.ranks_per_node,
        nics=given.nics,
        accumulation=given.accumulation,
        loader_workers=given.loader_workers,
        iterations=given.iterations,
        epochs=given.epochs,
        price=given.price,
        split=given.split,
        split_share=given.split_share,
        activations=given.activations,
        memory=given.memory,
        optimizer_state=given.optimizer_state,
        **configuration,
    )


def job_of(given: Namespace) -> Job:
    """Return the job that the options of ``add_job`` and ``add_configuration`` describe. Raises ``ValueError``."""
    check_one_of("strategy", given.strategy, STRATEGIES)
    if given.split is not None and given.members is None:
        raise ValueError(f"members must be given with --split {given.split}; got none")
    for name, value, default in (
        ("servers", given.servers, 1),
        ("server_placement", given.server_placement, COLOCATED),
    ):
        if value != default and given.strategy != "ps-sync":
            raise ValueError(f"{name} must be left out with strategy {given.strategy}, which has none; got {value}")
    return base_of(
        given,
        strategy=given.strategy,
        width=given.width or (2 if given.strategy == "pipelined" else 1),
        local_steps=given.local_steps,
        codec=given.codec,
        all_reduce=given.all_reduce or OWN_ALL_REDUCE[given.strategy],
        segment_bytes=given.segment_bytes,
        buckets=given.buckets,
        members=given.members or 1,
        servers=given.servers,
        placement=given.server_placement,
    )


def _cluster(given: Namespace) -> Profile:
    if given.cluster is not None:
        for name in ("network", "latency", "bandwidth"):
            if getattr(given, name) is not None:
                raise ValueError(f"{name} must be left out with --cluster, which says it; got {getattr(given, name)}")
        return Profile.load(given.cluster)
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
    if given.ranks_per_node == 1:
        raise ValueError(f"inner_latency must be left out with one rank on each node (--ranks-per-node); got {got}")
    link = LinkParams(alpha=latency, beta=1 / bandwidth, gamma=0.0, sync=0.0)
    return dataclasses.replace(cluster, inner=LinkProfile.exact(link))


def _compute(given: Namespace, cluster: Profile) -> ComputeProfile:
    if given.compute is not None:
        return _by_hand(given)
    for name in ("update", "parameters"):
        if getattr(given, name) is not None:
            raise ValueError(f"{name} must be left out without --compute; got {getattr(given, name):g}")
    if not cluster.compute:
        raise ValueError("compute must be given: the time of a forward and a backward pass; got none")
    if given.model is None:
        models = ", ".join(sorted({one.model for one in cluster.compute}))
        raise ValueError(f"model must be given, one of {models}, or --compute and --parameters; got none")
    return _changed(given, compute_of(cluster, given.model, given.batch_size))


def _by_hand(given: Namespace) -> ComputeProfile:
    if given.parameters is None and given.model is None:
        raise ValueError("parameters must be given with --compute, or --model; got none")
    if given.parameters is None:
        check_one_of("model", given.model, list(MODELS))
    elif given.model in MODELS:
        raise ValueError(f"parameters must be left out with --model {given.model}; got {given.parameters:g}")
    parameters = round(MODELS[given.model] if given.parameters is None else given.parameters)
    if not 1 <= parameters <= 1e13:
        raise ValueError(f"parameters must be from 1 to 1e13; got {parameters}")
    compute = computation_of(
        given.model or "given",
        parameters,
        given.compute,
        batch_size=given.batch_size or 0,
        update=given.update or 0.0,
    )
    return _changed(given, compute)


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
    changed = dataclasses.replace(compute, **present)
    if given.persistence and changed.cv == 0:
        raise ValueError(f"persistence must come with a cv above 0; got {given.persistence:g} without one")
    return changed
