"""The cost of collectives: one function an equation."""

from __future__ import annotations

from timing_model.params import LinkParams


def ring_all_reduce_bytes(nbytes: float, world_size: int) -> float:
    """Bytes that each rank sends, and receives, in one ring all-reduce: 2 (p-1)/p n, the least possible.

    Raises ``ValueError`` if ``world_size < 1`` or ``nbytes < 0``.
    Source: Patarasuk & Yuan, 2009.

    >>> ring_all_reduce_bytes(100.0, world_size=4)
    150.0
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1; got {world_size}")
    if nbytes < 0:
        raise ValueError(f"nbytes must be at least 0; got {nbytes}")
    return 2 * (world_size - 1) / world_size * nbytes


def ring_all_reduce_time(link: LinkParams, nbytes: float, world_size: int) -> float:
    r"""Time of one ring all-reduce, in seconds.

    .. math:: T = 2(p-1)\alpha + 2\frac{p-1}{p} n \beta + \frac{p-1}{p} n \gamma + S

    p is ``world_size``, n is ``nbytes``; the rest are fields of ``link``. One rank takes 0 s.
    Raises ``ValueError`` if ``world_size < 1`` or ``nbytes < 0``.

    >>> ring_all_reduce_time(LinkParams(alpha=1.0, beta=0.0, gamma=0.0, sync=0.0), nbytes=8, world_size=4)
    6.0
    """
    transferred = ring_all_reduce_bytes(nbytes, world_size)
    if world_size == 1:
        return 0.0
    return 2 * (world_size - 1) * link.alpha + transferred * (link.beta + link.gamma / 2) + link.sync
