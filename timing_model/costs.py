"""Costs of a job's parts, and the iteration time that they give: the formula of each strategy."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from timing_model.all_reduce import CollectiveTime, all_reduce_time, gather_time, parts_time
from timing_model.buckets import completed
from timing_model.inside import InsideTime, inside_time
from timing_model.iteration import (
    IterationTime,
    ddp_buckets,
    layerwise_iteration_time,
    loaded_iteration_time,
    local_steps_iteration_time,
    server_iteration_time,
)
from timing_model.job import Job
from timing_model.measured import LINK, Estimate, LinkProfile
from timing_model.parameter_server import Servers, parameter_server_time
from timing_model.params import (
    FLOAT_BYTES,
    CodecCost,
    ComputeTimes,
    Factors,
    LinkParams,
    Noise,
    Parts,
    PlacedLink,
    uncompressed,
)

DEFAULT_SHARING = 0.5
"""Sharing of servers that were not measured: between both bounds, as it was on this project's testbed."""

HIDDEN = 0.01
"""Share of an iteration up to which waiting counts as nothing."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of everything in one job."""

    link: LinkParams
    placed: tuple[PlacedLink, ...]
    """Links of single ranks, in place of ``link``."""
    inner: LinkParams | None
    """Link inside a node."""
    codec: CodecCost
    """Costs of the codec. The times of fp32 are 0, since its sums cost ``link.gamma`` instead."""
    factors: Factors | None
    """Factors that are summed in place of the gradient; None if there are none."""
    times: ComputeTimes
    """Times of the computation, without collectives inside an island (``times_of``)."""
    noise: Noise
    parts: tuple[Parts, ...]
    """Gradients whose parts are gathered."""
    sharing: float


def costs_of(job: Job) -> Costs:
    """Return the costs of everything in ``job``, from the values of its estimates."""
    cluster, link = job.cluster, _link(job).params()
    correction = correction_of(job)
    if correction is not None:
        link = link.times(correction[0])
    profile, low = job.codec_profile, job.low_rank
    codec = uncompressed(0.0) if profile is None else profile.cost(job.codec)
    return Costs(
        link=link,
        placed=cluster.placed,
        inner=None if cluster.inner is None else cluster.inner.params(),
        codec=codec,
        factors=None if low is None else Factors(left=low.left, right=low.right, work=low.work.value),
        times=dataclasses.replace(
            job.accumulated.times(job.width, job.all_reduce, job.codec, job.local_steps),
            compute_slowdown=job.compute.compute_slowdown_of(job.codec).value,
        ),
        noise=job.noise,
        parts=job.parts,
        sharing=DEFAULT_SHARING if cluster.sharing is None else cluster.sharing.value,
    )


def iteration_time(job: Job, costs: Costs) -> tuple[IterationTime, CollectiveTime]:
    """Return the time of one iteration, and that of all its communication, hidden or not."""
    iteration, communication = ITERATIONS[job.strategy](job, costs)
    return loaded_time(job, costs, iteration), communication


Iteration = Callable[[ComputeTimes], IterationTime]
"""Time of an iteration without the loading of its batch, given the times of the computation."""


Buckets = list[tuple[float, CollectiveTime]]
"""Share of the backward pass after which each bucket is complete, and its collective."""


def _pipelined(job: Job, costs: Costs) -> tuple[Iteration, CollectiveTime]:
    buckets = buckets_of(job, costs)
    return partial(_pipelined_iteration, job, costs.noise, buckets), whole(buckets)


def _pipelined_iteration(job: Job, noise: Noise, buckets: Buckets, times: ComputeTimes) -> IterationTime:
    """Return the time of an iteration of a pipeline.

    At width 1, buckets are reduced during the backward pass of the last micro-batch. At larger ones the collective has
    a whole iteration, and to begin earlier gains nothing.
    """
    if job.width > 1 or buckets[0][0] == 1:
        return local_steps_iteration_time(
            times, whole(buckets), job.width, job.local_steps, world_size=job.workers, noise=noise
        )
    late = _in_last_micro_batch(job, buckets)
    share, last = late[-1]
    if last.total > 0:  # earlier ones are handed over during the backward pass
        late[-1] = share, last._replace(total=last.total + times.handover, wire=last.wire + times.handover)
    return layerwise_iteration_time(times, late, world_size=job.workers, noise=noise)


def _in_last_micro_batch(job: Job, buckets: Buckets) -> Buckets:
    """Return buckets that are complete in the backward pass of the last micro-batch, with shares of all of them."""
    before = job.micro_batches - 1
    return [((before + share) / job.micro_batches, collective) for share, collective in buckets]


def _ddp(job: Job, costs: Costs) -> tuple[Iteration, CollectiveTime]:
    cut = ddp_buckets([FLOAT_BYTES * numel for numel in job.compute.tensors], released=job.compute.released)
    buckets = [(share, collective_time(job, costs, nbytes / FLOAT_BYTES)) for share, nbytes in cut]
    late = _in_last_micro_batch(job, buckets)
    return partial(layerwise_iteration_time, buckets=late, world_size=job.workers, noise=costs.noise), whole(buckets)


def _servers(job: Job, costs: Costs) -> tuple[Iteration, CollectiveTime]:
    traffic = parameter_server_time(
        costs.link,
        job.nbytes,
        job.world_size,
        servers=job.servers,
        sharing=costs.sharing,
    )
    return partial(server_iteration_time, traffic=traffic, world_size=job.workers, noise=costs.noise), traffic


ITERATIONS: dict[str, Callable[[Job, Costs], tuple[Iteration, CollectiveTime]]] = {
    "pipelined": _pipelined,
    "ddp": _ddp,
    "ps-sync": _servers,
}
"""Cost of each strategy: functions that return the time of its iteration, and of all its communication."""


def as_measured(job: Job, iteration: IterationTime) -> IterationTime:
    """Return the predicted time of an iteration of ``job``; if it was measured, with parts that add up to that."""
    if job.measured is None or iteration.total <= 0:
        return iteration
    return iteration.times(job.measured.iteration.value / iteration.total)


def pipelined_time(job: Job, costs: Costs, buckets: Buckets) -> IterationTime:
    """Return the time of one iteration of the pipeline, given its buckets."""
    return loaded_time(job, costs, partial(_pipelined_iteration, job, costs.noise, buckets))


def loaded_time(job: Job, costs: Costs, iteration: Iteration) -> IterationTime:
    """Return the time of one iteration with the loading of its batch, given the time without."""
    loaded = loaded_iteration_time(iteration, times_of(job, costs), job.loader_workers, cores_used=job.cores_used)
    inside = inside_of(job, costs).total
    return loaded._replace(compute=loaded.compute - inside, inside=inside)


def inside_of(job: Job, costs: Costs) -> InsideTime:
    """Return the time of the collectives inside an island in an iteration; none of it without islands."""
    link = (costs.inner if job.mesh.within_node else None) or costs.link
    once = inside_time(job.mesh, job.compute.tensors, link, costs.placed)
    return InsideTime(*[job.micro_batches * seconds for seconds in once])


def times_of(job: Job, costs: Costs) -> ComputeTimes:
    """Return the times of the computation with the collectives inside an island, for which its passes wait.

    Where these use the links between islands, a pipeline's all-reduce takes longer by as much, since both are on their
    way at the same time.
    """
    inside, times = inside_of(job, costs), costs.times
    late = inside.total if inside.total > 0 and job.width > 1 and _share_links(job) else 0.0
    return dataclasses.replace(
        times,
        forward=times.forward + inside.forward,
        backward=times.backward + inside.backward,
        handover=times.handover + late,
    )


def _share_links(job: Job) -> bool:
    """Return True if members of an island use links on which it exchanges gradients with other islands."""
    members, placed = job.islands.members, job.cluster.placed
    if not placed:
        return not job.mesh.within_node

    def link(sender: int, receiver: int) -> int:
        return max((number for number, one in enumerate(placed) if one.connects(sender, receiver)), default=-1)

    to_members = (link(rank, rank // members * members + (rank + 1) % members) for rank in range(job.world_size))
    to_islands = (link(rank, (rank + members) % job.world_size) for rank in range(job.world_size))
    return any(map(operator.eq, to_members, to_islands))


def workers_that_hide(job: Job) -> int | None:
    """Return the smallest number of loader workers with which loading takes no time; None if cores or nothing do."""
    costs = costs_of(job)
    iteration = iteration_time(job, costs)[0]
    without = iteration.total - iteration.loading
    if costs.times.loading == 0 or without == 0:
        return None
    workers = math.ceil(costs.times.loading / without)
    hidden = iteration_time(job.changed(loader_workers=workers), costs)[0]
    return workers if hidden.loading <= HIDDEN * hidden.total else None


def buckets_of(job: Job, costs: Costs) -> Buckets:
    """Return the buckets of a pipeline; one, complete at the end of the backward pass, if the gradient is not cut.

    Those of which parts are gathered are the last ones.
    """
    apart = {tensor for one in costs.parts for tensor in one.tensors}
    compute = job.compute
    cut = completed(job.cut, [FLOAT_BYTES * numel for numel in compute.tensors], apart, compute.released)
    gather = partial(parts_time, costs.link, world_size=job.world_size, segment_bytes=job.segment_bytes)
    return [
        *((share, collective_time(job, costs, nbytes / FLOAT_BYTES)) for share, nbytes in cut),
        *((1.0, gather(parts=one)) for one in costs.parts),
    ]


def whole(buckets: Buckets) -> CollectiveTime:
    """Return the time of the collectives of all buckets."""
    return _together([one for _, one in buckets])


def _together(collectives: Iterable[CollectiveTime]) -> CollectiveTime:
    """Return the time of collectives that run one after the other."""
    return CollectiveTime(*[sum(parts) for parts in zip(CollectiveTime(0.0, 0.0, 0.0), *collectives, strict=True)])


def collective_time(job: Job, costs: Costs, numel: float) -> CollectiveTime:
    """Return the time of the all-reduce of ``numel`` values of the model, between islands if there are any."""
    if costs.factors is not None:
        factors = costs.factors.share(numel / job.compute.numel)
        work = CollectiveTime(factors.work, 0.0, factors.work)
        return _together([*(_sum_time(job, costs, one) for one in (factors.left, factors.right)), work])
    return _sum_time(job, costs, numel)


def _sum_time(job: Job, costs: Costs, numel: float) -> CollectiveTime:
    """Return the time in which ``numel`` values are summed as they are, or with the job's codec."""
    codec = None if job.codec_profile is None else costs.codec
    if job.gathered:
        return gather_time(costs.link, numel, job.world_size, codec=costs.codec, segment_bytes=job.segment_bytes)
    mesh = job.mesh
    one_time = partial(
        all_reduce_time,
        str(job.all_reduce),
        dataclasses.replace(costs.link, beta=mesh.sharing * costs.link.beta),
        world_size=mesh.number,
        codec=codec,
        segment_bytes=job.segment_bytes,
        inner=costs.inner,
        ranks_per_node=job.nodes.ranks_per_node,
        nics=job.nodes.nics,
        placed=costs.placed,
        members=mesh.islands.members,
    )
    return _together(one_time(values) for values in mesh.buffers(numel))


def _link(job: Job) -> LinkProfile:
    return job.cluster.link_of(job.measured_as)


def correction_of(job: Job) -> tuple[float, float] | None:
    """Return the factor on the formula's time of the collective, and the share by which it may be off; None if this
    all-reduce, or parameter server, was not measured among this many ranks, or there are islands."""
    corrections = job.cluster.corrections_of(job.measured_as)
    unmeasured = job.strategy == "ps-sync" and job.servers != Servers()  # one server, next to a worker, is measured
    if corrections is None or job.gathered or job.islands.members > 1 or unmeasured:
        return None
    sums = 1 if job.low_rank is None else 2
    return corrections.at(job.world_size, job.wire_bytes / sums)


def estimates_of(job: Job) -> Iterator[tuple[str, dict[str, Estimate]]]:
    """Yield the estimates that the answer depends on: the name of a part of ``Costs``, and estimates of its fields.

    Fields that come together are off together: a processor that is faster than it was is faster in all that it does.
    """
    if correction_of(job) is None:  # otherwise its own error is known
        yield from (("link", {name: getattr(_link(job), name)}) for name in LINK)
    if job.cluster.inner is not None and (job.all_reduce == "hierarchical" or job.mesh.within_node):
        yield from (("inner", {name: getattr(job.cluster.inner, name)}) for name in LINK)
    codec = job.codec_profile
    if codec is not None:
        yield "codec", {one.name: getattr(codec.rates, one.name) for one in dataclasses.fields(codec.rates)}
        yield "codec", {"call": codec.call}
    if job.low_rank is not None:
        yield "factors", {"work": job.low_rank.work}
    compute = job.accumulated
    passes = {"forward": compute.forward, "backward": compute.backward}
    yield "times", compute.updates(job.width, job.local_steps) | passes
    yield "times", {"loading": compute.loading}
    yield "times", {"handover": compute.handover_of(job.width, job.all_reduce)}
    yield "times", {"compute_slowdown": compute.compute_slowdown_of(job.codec)}
    yield "noise", {"persistence": compute.persistence}
    yield "noise", {"comm_cv": compute.comm_cv}
