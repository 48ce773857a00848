"""Costs of a question's parts, and the iteration time that they give: the formula of each strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from timing_model.all_reduce import CollectiveTime, all_reduce_time, chunks_of, gather_time
from timing_model.cluster_profile import UNCOMPRESSED
from timing_model.iteration import (
    IterationTime,
    ddp_buckets,
    layerwise_iteration_time,
    pipelined_iteration_time,
    server_iteration_time,
)
from timing_model.job import Question
from timing_model.measured import LINK, CodecProfile, Estimate, LinkProfile
from timing_model.parameter_server import parameter_server_time
from timing_model.params import FLOAT_BYTES, CodecCost, ComputeTimes, LinkParams, uncompressed
from timing_model.schedules import segments_of

DEFAULT_SHARING = 0.5
"""Sharing of servers that were not measured: between both bounds, as it was on this project's testbed."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of everything in one question."""

    link: LinkParams
    inner: LinkParams | None
    codec: CodecCost
    """Costs of the codec. The times of fp32 are 0, since its sums cost ``link.gamma`` instead."""
    times: ComputeTimes
    sharing: float


def costs_of(question: Question) -> Costs:
    """Return the costs of everything in ``question``, from the values of its estimates."""
    cluster, link = question.cluster, _link(question).params()
    correction = correction_of(question)
    if correction is not None:
        link = link.times(correction[0])
    profile = question.codec_profile
    codec = uncompressed(0.0) if profile is None else profile.cost(question.codec, _message_values(question, profile))
    return Costs(
        link=link,
        inner=None if cluster.inner is None else cluster.inner.params(),
        codec=codec,
        times=question.compute.times(question.width, question.all_reduce, question.codec),
        sharing=DEFAULT_SHARING if cluster.sharing is None else cluster.sharing.value,
    )


def iteration_time(question: Question, costs: Costs) -> tuple[IterationTime, CollectiveTime]:
    """Return the time of one iteration, and that of all its communication, hidden or not."""
    if question.strategy == "ps-sync":
        traffic = parameter_server_time(
            costs.link,
            question.nbytes,
            question.world_size,
            servers=question.servers,
            placement=question.placement,
            sharing=costs.sharing,
        )
        iteration = server_iteration_time(costs.times, traffic, world_size=question.workers, noise=question.noise)
        return iteration, traffic
    if question.strategy == "ddp":
        cut = ddp_buckets([FLOAT_BYTES * numel for numel in question.compute.tensors])
        buckets = [(share, collective_time(question, costs, nbytes / FLOAT_BYTES)) for share, nbytes in cut]
        whole = CollectiveTime(*[sum(parts) for parts in zip(*[one for _, one in buckets], strict=True)])
        noise = question.noise
        return layerwise_iteration_time(costs.times, buckets, world_size=question.workers, noise=noise), whole
    whole = collective_time(question, costs, question.compute.numel)
    return pipelined_time(question, costs, whole), whole


def pipelined_time(question: Question, costs: Costs, collective: CollectiveTime) -> IterationTime:
    """Return the time of one iteration of the pipeline, given the time of its collective."""
    return pipelined_iteration_time(
        costs.times, collective, question.width, world_size=question.workers, noise=question.noise
    )


def collective_time(question: Question, costs: Costs, numel: float) -> CollectiveTime:
    """Return the time of one collective of ``numel`` values."""
    codec = None if question.codec == UNCOMPRESSED else costs.codec
    segment_bytes = question.segment_bytes
    if question.gathered:
        return gather_time(costs.link, numel, question.world_size, codec=costs.codec, segment_bytes=segment_bytes)
    return all_reduce_time(
        str(question.all_reduce),
        costs.link,
        numel,
        question.world_size,
        codec=codec,
        segment_bytes=segment_bytes,
        inner=costs.inner,
        ranks_per_node=question.ranks_per_node,
        nics=question.nics,
    )


def _link(question: Question) -> LinkProfile:
    return question.cluster.link_of(question.measured_as)


def correction_of(question: Question) -> tuple[float, float] | None:
    """Return the factor on the formula's time of the collective, and the share by which it may be off; None if this
    all-reduce, or parameter server, was not measured among this many ranks."""
    corrections = question.cluster.corrections_of(question.measured_as)
    if corrections is None or question.gathered:
        return None
    codec = question.codec_profile
    nbytes = question.nbytes if codec is None else codec.bits / 8 * question.compute.numel
    return corrections.at(question.world_size, nbytes)


def _message_values(question: Question, codec: CodecProfile) -> float:
    """Return the number of values in each message of this job."""
    values = float(question.compute.numel)
    if question.all_reduce not in (None, "native") and not question.gathered:
        chunk = values / chunks_of(question.all_reduce, question.world_size)
        values = chunk / segments_of(chunk * codec.bits / 8, question.segment_bytes)
    return values


def estimates_of(question: Question) -> Iterator[tuple[str, dict[str, Estimate]]]:
    """Yield the estimates that the answer depends on: the name of a part of ``Costs``, and estimates of its fields.

    Fields that come together are off together: a processor that is faster than it was is faster in all that it does.
    """
    if correction_of(question) is None:  # otherwise its own error is known
        yield from (("link", {name: getattr(_link(question), name)}) for name in LINK)
    if question.cluster.inner is not None and question.all_reduce == "hierarchical":
        yield from (("inner", {name: getattr(question.cluster.inner, name)}) for name in LINK)
    codec = question.codec_profile
    if codec is not None:
        rates = codec.rates_of(_message_values(question, codec))
        yield "codec", {one.name: getattr(rates, one.name) for one in dataclasses.fields(rates)}
        yield "codec", {"call": codec.call}
    compute = question.compute
    update = compute.update if question.width == 1 else compute.late_update
    yield "times", {"update": update, "forward": compute.forward, "backward": compute.backward}
    yield "times", {"compute_slowdown": compute.compute_slowdown_of(question.codec)}
    yield "times", {"comm_slowdown": compute.comm_slowdown_of(question.all_reduce)}
