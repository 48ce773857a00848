"""Lower bound on the time of a collective, in closed form; it rules out most of a search."""

from __future__ import annotations

from typing import NamedTuple

from timing_model.costs import Costs
from timing_model.job import Job
from timing_model.params import CodecCost


class _Traffic(NamedTuple):
    """Lower bounds for a collective: messages and bytes of the rank that sends most, work of the one with the least."""

    messages: int
    """Number of messages of which each waits for another one."""
    sent: float
    """Bytes that the busiest rank sends."""
    work: float
    """Time of codec and sums, in s."""


def _traffic(job: Job, codec: CodecCost) -> _Traffic:
    """Return the traffic of the job's all-reduce; zeros for one that is not known here, and for hierarchical."""
    p = job.world_size
    numel, steps = job.compute.numel, p.bit_length() - 1
    others = (p - 1) / p
    added = min(codec.add, codec.hop)
    messages, sent, work = 0, 0.0, 0.0
    if job.gathered:
        messages, sent, work = 1, p - 1.0, codec.encode + p * codec.add
    elif job.all_reduce == "all-to-all":
        messages, sent, work = 2, 2 * others, others * (added + codec.decode)
    elif job.all_reduce == "native":
        messages, sent = 2, 2 * others
    elif job.all_reduce == "ring":
        messages, sent, work = 2 * (p - 1), 2 * others, codec.encode / p + others * (codec.hop + codec.decode)
    elif job.all_reduce == "halving-doubling":
        folds = p != 1 << steps
        messages, sent = 2 * steps, 2 * (1 - 2.0**-steps) + folds
        work = (1 - 2.0**-steps) * (added + codec.decode)
    elif job.all_reduce == "recursive-doubling":
        messages, sent, work = steps, steps + (p != 1 << steps), steps * added
    return _Traffic(messages, sent * codec.wire_bytes(numel), work * numel)


def least_collective_time(job: Job, costs: Costs) -> float:
    r"""Lower bound on ``costs.collective_time``, in s, for any segment size.

    .. math:: T \ge \max(k \alpha,\; \alpha + w \beta,\; W) + S

    k is the number of messages of which each waits for another one, w the bytes that the busiest rank sends, and W the
    work of the rank that has the least of it. Hierarchical is bounded by S alone.
    """
    if job.world_size == 1:
        return 0.0
    link, least = costs.link, _traffic(job, costs.codec)
    wire = min(least.messages, 1) * link.alpha + least.sent * link.beta
    return max(least.messages * link.alpha, wire, least.work) + link.sync
