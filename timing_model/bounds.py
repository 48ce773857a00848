"""What no collective of a question can take less than, in closed form: it rules out most of a search."""

from __future__ import annotations

from timing_model.costs import Costs
from timing_model.job import Question
from timing_model.traffic import traffic


def least_collective_time(question: Question, costs: Costs) -> float:
    r"""A lower bound of ``costs.collective_time``, in s, for any segment size.

    .. math:: T \ge \max(k \alpha,\; \alpha + w \beta,\; W) + S

    k are the messages of which each waits for another one, w the bytes that the busiest rank sends, and W the work of
    the one that has the least of it. Hierarchical is bound by S alone.
    """
    if question.world_size == 1:
        return 0.0
    link, least = costs.link, traffic(question, costs.codec)
    wire = min(least.messages, 1) * link.alpha + least.sent * link.beta
    return max(least.messages * link.alpha, wire, least.work) + link.sync
