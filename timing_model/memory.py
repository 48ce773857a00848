"""Memory of a rank: weights, gradients, the optimizer's state, and what a pipeline holds next to them."""

from __future__ import annotations

from timing_model.job import Job
from timing_model.units import format_bytes, format_bytes_up

FEW_BITS, DRAWN = 8, ("ternary", "qsgd")
"""Bits of a value on the wire below which a codec keeps a residual by default, and codecs that draw instead."""


def rank_memory(job: Job) -> float | None:
    r"""Bytes that each rank holds during a backward pass, activations left out; None where that is not known.

    .. math::

        M_1 = \left(\frac{s}{\mu} + 1 - s\right) n\,(q + 3 + z), \qquad
        M_K = \left(\frac{s}{\mu} + 1 - s\right) n\,(2 q + 2 K + 4 + z)

    n are the bytes of the whole model, of which a share s is split over the mu members of an island (0 without any); q
    is ``optimizer_state``, and z is b/32 with a codec of b bits, whose bytes are kept next to the gradient that they
    encode, and 1 more if it keeps a residual; without a codec it is 0. These are the weights, the
    optimizer's state, gradients on their way and the one that the backward pass computes, and in a pipeline what its
    prediction needs: the most of what docs/method.md lists. Weights that FSDP2 has gathered, and a second residual with
    ``--on-nonfinite skip``, are left out, too. Parameter servers and local steps are not known.

    >>> from timing_model.options import computation_of
    >>> from timing_model.cluster_profile import Profile
    >>> from timing_model.measured import Calibrated, LinkProfile
    >>> from timing_model.presets import NETWORKS
    >>> cluster = Profile(calibrated=Calibrated.nothing(), link=LinkProfile.exact(NETWORKS["10GbE"]))
    >>> job = Job(cluster=cluster, compute=computation_of("model", 1000, 1.0), world_size=4, width=2)
    >>> rank_memory(job) / 4000
    12.0
    """
    if job.strategy == "ps-sync" or job.local_steps > 1:
        return None
    codec = job.codec_profile
    copies = job.islands.optimizer_state + 3 if job.width == 1 else 2 * (job.islands.optimizer_state + job.width + 2)
    copies += job.low_rank is not None
    if codec is not None and not codec.gathered:
        copies += codec.bits / 32 + (codec.bits < FEW_BITS and job.codec not in DRAWN)
    return job.mesh.held * job.nbytes * copies


def fits(job: Job) -> bool:
    """Return True if ``Islands.memory`` is enough, as far as that is known, or there is no limit."""
    needed = rank_memory(job)
    return job.islands.memory is None or (needed is not None and needed <= job.islands.memory)


def check_memory(job: Job) -> None:
    """Raise ``ValueError`` if the job does not fit into ``Islands.memory``."""
    if fits(job):
        return
    assert job.islands.memory is not None
    needed = rank_memory(job)
    if needed is None:
        what = "strategy ps-sync" if job.strategy == "ps-sync" else "local_steps"
        got = format_bytes(job.islands.memory)
        raise ValueError(f"memory must be left out with {what}, of which it is not known; got {got}")
    raise ValueError(
        f"memory must be at least {format_bytes_up(needed)} for width {job.width}, codec {job.codec} and islands of "
        f"{job.islands.members}, activations left out; got {format_bytes(job.islands.memory)}"
    )
