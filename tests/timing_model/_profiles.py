"""A profile for the tests, of a made-up cluster."""

from __future__ import annotations

from typing import Any

from timing_model.cluster_profile import Profile
from timing_model.job import Job, in_groups
from timing_model.measured import (
    Calibrated,
    CodecProfile,
    CodecRates,
    ComputeProfile,
    Corrections,
    Estimate,
    LinkProfile,
    MeasuredIteration,
)
from timing_model.mesh import Mesh


def about(value: float) -> Estimate:
    return Estimate(value, 0.95 * value, 1.1 * value)


def rates(seconds: float) -> CodecRates:
    return CodecRates(encode=about(seconds), decode=about(seconds), add=about(seconds), hop=about(2 * seconds))


LINK = LinkProfile(
    alpha=about(5e-5),
    beta=about(8e-8),
    gamma=about(1e-10),
    sync=about(1e-4),
)

CORRECTIONS = Corrections(world_sizes=(2, 3), nbytes=(1024, 4096), factors=(1.1, 0.9), errors=(0.05, 0.02))

MLP = ComputeProfile(
    model="mlp",
    batch_size=512,
    tensors=(784_000, 1000, 1_000_000, 1000, 10_000, 10),
    samples=60_000,
    forward=about(0.02),
    backward=about(0.04),
    update=about(0.005),
    late_update=about(0.006),
    compute_slowdown=about(0.1),
    codec_compute_slowdown=about(0.15),
    processor_share=0.75,
    handover=about(0.001),
    late_handover=about(0.002),
    late_handovers={"halving-doubling": about(0.004)},
    cv=0.02,
    persistence=about(0.5),
    comm_cv=about(0.03),
    slow_ranks=(1.31,),
)

PROFILE = Profile(
    provenance={"created": "2026-11-22T05:20:00Z", "hosts": ["a", 'b "c"'], "cores_per_host": 2},
    calibrated=Calibrated(
        world_sizes=(2, 3, 4),
        smallest_bytes=1024,
        largest_bytes=1 << 25,
        residuals={"ring": 0.012, "halving-doubling": 0.03, "native": 0.02, "ps-sync": 0.04},
        ranks_per_core=1.0,
    ),
    link=LINK,
    links={"native": LINK, "ps-sync": LINK},
    codecs={
        "int8": CodecProfile(bits=8.25, call=about(2e-6), rates=rates(6e-10)),
        "topk": CodecProfile(bits=0.64, call=about(2e-6), rates=rates(5e-9), gathered=True),
    },
    sharing=about(0.5),
    compute=(MLP,),
)


def ran(**options: Any) -> MeasuredIteration:
    """Return an iteration of 9 s that was measured, as ``options`` say: four ranks at width 2 unless they differ."""
    defaults: dict[str, Any] = {
        "world_size": 4,
        "width": 2,
        "codec": "int8",
        "all_reduce": "ring",
        "segment_bytes": 1 << 20,
        "iteration": about(9.0),
        "iterations": 7,
        "loader_workers": 0,
    }
    return MeasuredIteration(**defaults | options)


def ask(**options: Any) -> Job:
    """Return a job for four ranks of ``PROFILE`` that train ``MLP``, unless ``options`` say otherwise."""
    defaults: dict[str, Any] = {"cluster": PROFILE, "compute": MLP, "world_size": 4}
    return Job(**in_groups(defaults | options))


def mesh(world_size: int, **options: Any) -> Mesh:
    """Return a mesh of this many ranks, with the ``options`` of its islands and nodes."""
    return Mesh(world_size=world_size, **in_groups(options))
