"""Distance of a job from what was measured on its cluster."""

from __future__ import annotations

from typing import NamedTuple

from timing_model.job import DDP_CODECS, Job
from timing_model.measured import UNCOMPRESSED
from timing_model.parameter_server import Servers
from timing_model.presets import HOST
from timing_model.units import format_bytes

BF16_HOOK = "torch accepts DDP's bf16 hook only in a build for CUDA with NCCL"
CHECKED_CV = 0.6
"""Largest cv of the computation for which ``jitter.steady_state_period`` was checked against the simulator."""
REACH = 8.0
"""Factor above or below the measured range up to which a job is extrapolated; further away it is outside."""
FAST = (
    "a core sends and receives bytes more slowly than {link} carries them: the CPU time of a byte, {host:.2g} ns, "
    "{origin}; copies from a GPU are left out, and ddp is torch's over gloo, not NCCL"
)
ISLANDS = (
    "no prediction of islands was compared with a measurement: the collectives inside of them are taken not to overlap "
    "with the computation, and to be rings of one message a step"
)
GIVEN, MEASURED, INTERPOLATED, EXTRAPOLATED, OUTSIDE = (
    "as given",
    "measured",
    "interpolated",
    "extrapolated",
    "outside",
)
SUPPORTS = (GIVEN, MEASURED, INTERPOLATED, EXTRAPOLATED, OUTSIDE)


class Support(NamedTuple):
    """Distance of a job from what was measured."""

    kind: str
    """Kind of support, one of ``SUPPORTS``."""
    reasons: tuple[str, ...]
    """Reasons, in words, why the job is not interpolated; the worst first."""


def _capped(job: Job) -> list[str]:
    """Return a sentence on every CPU time of a byte that makes a link slower than it is."""
    placed = [one.link for one in job.cluster.placed]
    links = [] if job.world_size == 1 else placed or [job.cluster.link.params()]
    return [
        FAST.format(
            link="one of the links" if placed else "this link",
            host=1e9 * host,
            origin="is a default that was not measured here" if host == HOST else "is as given",
        )
        for host in sorted({one.host for one in links if one.beta < one.host})
    ]


def support_of(job: Job) -> Support:
    """Return whether the job is within what was measured, near it, or outside.

    Measured: this very configuration was, in an audition. Interpolated: world size and bytes are within what was
    measured, and all that has a name was measured. Extrapolated: numbers are up to ``REACH`` times beyond, or a world
    size was not measured where ranks share cores, or an all-reduce was not measured and has the ring's link, or there
    are islands, or the computation is as given. Outside: numbers are further beyond, or a codec or servers never ran,
    or the cv of the computation is above ``CHECKED_CV``.
    """
    if job.measured is not None:
        return Support(MEASURED, (f"{job.measured.iterations} iterations were timed in an audition",))
    cluster, ranges = job.cluster, job.cluster.calibrated
    reasons: list[tuple[str, str]] = []
    if job.compute.cv > CHECKED_CV:
        checked = f"cv {job.compute.cv:g}; the formulas were checked up to {CHECKED_CV:g}"
        reasons.append((OUTSIDE, f"{checked} (timing-model simulate needs no formula)"))
    if job.compute.comm_cv.value > CHECKED_CV:
        checked = f"a cv of the all-reduce of {job.compute.comm_cv.value:g}; the formulas were checked up to"
        reasons.append((EXTRAPOLATED, f"{checked} {CHECKED_CV:g}"))
    if job.strategy == "ddp" and job.codec not in DDP_CODECS:
        reasons.append((INTERPOLATED if ranges.world_sizes else GIVEN, BF16_HOOK))
    if job.islands.members > 1:
        reasons.append((EXTRAPOLATED if ranges.world_sizes else GIVEN, ISLANDS))
    if not ranges.world_sizes:
        reasons += [(GIVEN, one) for one in _capped(job)]
        return Support(reasons[0][0] if reasons else GIVEN, tuple(reason for _, reason in reasons))

    def beyond(value: float, low: float, high: float, what: str, measured: str) -> None:
        if not low <= value <= high:
            near = low / REACH <= value <= high * REACH
            reasons.append((EXTRAPOLATED if near else OUTSIDE, f"{what}; measured: {measured}"))

    if job.world_size > 1:
        sizes = ", ".join(map(str, ranges.world_sizes))
        what = f"{job.world_size} ranks"
        least, most = min(ranges.world_sizes), max(ranges.world_sizes)
        beyond(job.world_size, least, most, what, sizes)
        if ranges.ranks_per_core > 1 and least < job.world_size < most and job.world_size not in ranges.world_sizes:
            reasons.append((EXTRAPOLATED, f"{what} on shared cores; measured: {sizes}"))
        limits = ranges.smallest_bytes, ranges.largest_bytes
        measured = " to ".join(dict.fromkeys(map(format_bytes, limits)))
        if job.low_rank is None:
            beyond(job.nbytes, *limits, f"a gradient of {format_bytes(job.nbytes)}", measured)
        else:
            beyond(job.wire_bytes, *limits, f"factors of {format_bytes(job.wire_bytes)}", measured)
        if job.low_rank is None and job.codec != UNCOMPRESSED and job.codec not in cluster.codecs:
            reasons.append((OUTSIDE, f"codec {job.codec} was not measured; its costs are typical ones"))
        if job.all_reduce is not None and job.all_reduce not in ranges.all_reduces:
            own = "" if job.all_reduce in cluster.links else "; its link is taken to be the ring's"
            reasons.append((EXTRAPOLATED, f"all-reduce {job.all_reduce} was not measured{own}"))
        if job.parts:
            reasons.append((EXTRAPOLATED, "parts of gradients are gathered; measured: sums of whole gradients"))
        if job.strategy == "ps-sync" and cluster.sharing is None:
            reasons.append((OUTSIDE, "parameter servers were not measured"))
        elif job.strategy == "ps-sync" and job.servers != Servers():
            reasons.append((EXTRAPOLATED, "measured: one parameter server, next to a worker"))
    batches = [one.batch_size for one in cluster.compute if one.model == job.compute.model]
    if not batches:
        reasons.append((EXTRAPOLATED, "the computation is as given; it was not measured"))
    elif job.compute.batch_size not in batches:
        what = f"a batch of {job.compute.batch_size}"
        beyond(job.compute.batch_size, min(batches), max(batches), what, ", ".join(map(str, sorted(batches))))
    reasons.sort(key=lambda one: SUPPORTS.index(one[0]), reverse=True)
    return Support(reasons[0][0] if reasons else INTERPOLATED, tuple(reason for _, reason in reasons))
