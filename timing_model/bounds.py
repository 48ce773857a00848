"""What no collective of a question can take less than, in closed form: it rules out most of a search."""

from __future__ import annotations

from timing_model.costs import Costs
from timing_model.question import Question


def least_collective_time(question: Question, costs: Costs) -> float:
    r"""A lower bound of ``costs.collective_time``, in s, for any segment size.

    .. math:: T \ge \max(k \alpha,\; \alpha + w \beta,\; W) + S

    k are the messages of which each waits for another one, w the bytes that the busiest rank sends, and W the work of
    the one that has the least of it. Hierarchical is bound by S alone.
    """
    p, link, codec = question.world_size, costs.link, costs.codec
    if p == 1:
        return 0.0
    numel, steps = question.compute.numel, p.bit_length() - 1
    others = (p - 1) / p
    added = min(codec.add, codec.hop)
    messages, sent, work = 2, 2 * others, others * (added + codec.decode)  # all-to-all
    if question.gathered:
        messages, sent, work = 1, p - 1.0, codec.encode + p * codec.add
    elif question.all_reduce == "hierarchical":
        messages, sent, work = 0, 0.0, 0.0
    elif question.all_reduce == "native":
        work = 0.0
    elif question.all_reduce == "ring":
        messages, work = 2 * (p - 1), codec.encode / p + others * (codec.hop + codec.decode)
    elif question.all_reduce == "halving-doubling":
        folds = p != 1 << steps
        messages, sent = 2 * steps, 2 * (1 - 2.0**-steps) + folds
        work = (1 - 2.0**-steps) * (added + codec.decode)
    elif question.all_reduce == "recursive-doubling":
        messages, sent, work = steps, steps + (p != 1 << steps), steps * added
    wire = min(messages, 1) * link.alpha + sent * codec.wire_bytes(numel) * link.beta
    return max(messages * link.alpha, wire, work * numel) + link.sync
