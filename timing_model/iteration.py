"""The time of one iteration."""

from __future__ import annotations

from typing import NamedTuple


class IterationTime(NamedTuple):
    """What one iteration takes in the steady state, and how much of that is waiting for communication, in s."""

    total: float
    exposed: float


def pipelined_iteration_time(t_compute: float, t_comm: float, width: int) -> IterationTime:
    r"""Iteration time of Pipe-SGD of width K without jitter, in seconds.

    .. math:: T = \max(c,\; m,\; (c + m) / K)

    c is ``t_compute`` (update, forward and backward), m is ``t_comm`` (one all-reduce), K is ``width``. Width 1
    is synchronous, c + m; width 2 is the smallest that reaches max(c, m).
    Raises ``ValueError`` if ``width < 1`` or a time is negative.

    >>> pipelined_iteration_time(3.0, 2.0, width=1)
    IterationTime(total=5.0, exposed=2.0)
    >>> pipelined_iteration_time(3.0, 4.0, width=2)
    IterationTime(total=4.0, exposed=1.0)
    """
    if width < 1:
        raise ValueError(f"width must be at least 1; got {width}")
    if t_compute < 0 or t_comm < 0:
        raise ValueError(f"times must be at least 0; got t_compute {t_compute} and t_comm {t_comm}")
    total = max(t_compute, t_comm, (t_compute + t_comm) / width)
    return IterationTime(total=total, exposed=total - t_compute)
