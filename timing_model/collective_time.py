r"""Cost of collectives in closed form: one function per equation.

n is the number of bytes, p that of ranks, and the other letters are those of ``LinkParams``; an overhead o counts once
per message, like alpha. The times are those of a program that runs step by step: all that a rank sends to another in
one step is one message, and is added up when all of it has arrived. The ring runs this way as long as a chunk is one
segment. Otherwise the code overlaps more and is faster; but where ranks fold in, their messages meet those of others,
which do not wait for them. ``all_reduce.all_reduce_time`` gives the time that the code takes, with codecs and segments.

All functions raise ``ValueError`` if ``world_size < 1`` or ``nbytes < 0``, and return 0 s for one rank.
"""

from __future__ import annotations

import dataclasses
import math

from timing_model.checks import check_at_least, check_count
from timing_model.params import LinkParams


def ring_all_reduce_bytes(nbytes: float, world_size: int) -> float:
    """Bytes that each rank sends, and receives, in one ring all-reduce: 2 (p-1)/p n, the least possible.

    Raises ``ValueError`` if ``world_size < 1`` or ``nbytes < 0``.
    Source: Patarasuk & Yuan, 2009.

    >>> ring_all_reduce_bytes(100.0, world_size=4)
    150.0
    """
    _check(nbytes, world_size)
    return 2 * (world_size - 1) / world_size * nbytes


def lower_bound_time(link: LinkParams, nbytes: float, world_size: int) -> float:
    r"""Lower bound on an all-reduce by one message at a time, in s: its terms may overlap, but none can be smaller.

    .. math:: T \ge \max(\lceil \log_2 p \rceil \alpha,\; 2\frac{p-1}{p} n \beta,\; \frac{p-1}{p} n \gamma)

    An algorithm that sends to several ranks at once, such as all-to-all, needs only 2 alpha.
    Source: Patarasuk & Yuan, 2009; Chan et al., 2007.

    >>> lower_bound_time(LinkParams(alpha=1.0, beta=1.0, gamma=0.0, sync=0.0), 8.0, 4)
    12.0
    """
    transferred = ring_all_reduce_bytes(nbytes, world_size)
    return max(
        math.ceil(math.log2(world_size)) * link.alpha, transferred * link.byte_seconds(), transferred / 2 * link.gamma
    )


def ring_all_reduce_time(link: LinkParams, nbytes: float, world_size: int) -> float:
    r"""Time of one ring all-reduce, in s.

    .. math:: T = 2(p-1)(\alpha + o) + 2\frac{p-1}{p} n \beta + \frac{p-1}{p} n \gamma + S

    Source: Patarasuk & Yuan, 2009.

    >>> ring_all_reduce_time(LinkParams(alpha=1.0, beta=0.0, gamma=0.0, sync=0.0), nbytes=8, world_size=4)
    6.0
    """
    transferred = ring_all_reduce_bytes(nbytes, world_size)
    return _sum(link, 2 * (world_size - 1), transferred, transferred / 2, world_size)


def recursive_doubling_time(link: LinkParams, nbytes: float, world_size: int) -> float:
    r"""Time of one all-reduce by recursive doubling, in s.

    .. math:: T = \log_2 p\,(\alpha + o + n \beta + n \gamma) + S

    If p is not a power of two, the ranks above the largest one below p fold in first and get the result at the end:
    the logarithm is :math:`\lfloor \log_2 p \rfloor`, and two messages of n bytes and one sum of n are added.
    Source: Thakur, Rabenseifner & Gropp, 2005.

    >>> [recursive_doubling_time(LinkParams(alpha=1.0, beta=0.0, gamma=0.0, sync=0.0), 8, p) for p in (1, 2, 4, 5)]
    [0.0, 1.0, 2.0, 4.0]
    """
    _check(nbytes, world_size)
    steps, folds = _doublings(world_size)
    return _sum(link, steps + 2 * folds, (steps + 2 * folds) * nbytes, (steps + folds) * nbytes, world_size)


def halving_doubling_time(link: LinkParams, nbytes: float, world_size: int) -> float:
    r"""Time of one all-reduce by recursive halving and doubling, in s.

    .. math:: T = 2 \log_2 p\,(\alpha + o) + 2\frac{p-1}{p} n \beta + \frac{p-1}{p} n \gamma + S

    If p is not a power of two, q is the largest one below it, and the ranks above q fold in first:

    .. math:: T = (2 \log_2 q + 2)(\alpha + o) + (2\frac{q-1}{q} + 2) n \beta + (\frac{q-1}{q} + 1) n \gamma + S

    (timing.md has p for q in the fractions, which counts more than is sent.)
    Source: Rabenseifner, 2004; Thakur, Rabenseifner & Gropp, 2005.

    >>> [halving_doubling_time(LinkParams(alpha=0.0, beta=1.0, gamma=0.0, sync=0.0), 8, p) for p in (1, 2, 4, 5)]
    [0.0, 8.0, 12.0, 28.0]
    """
    _check(nbytes, world_size)
    steps, folds = _doublings(world_size)
    scattered = (1 - 2.0**-steps) * nbytes
    return _sum(link, 2 * (steps + folds), 2 * (scattered + folds * nbytes), scattered + folds * nbytes, world_size)


def all_to_all_time(link: LinkParams, nbytes: float, world_size: int) -> float:
    r"""Time of an all-to-all, a sum and an all-gather, each rank with all others at once, in s.

    .. math:: T = 2 \alpha + 2(p-1) o + 2\frac{p-1}{p} n \beta + \frac{p-1}{p} n \gamma + S

    Messages are posted together, so their latencies overlap; p-1 senders meet at every NIC, which costs more than this
    where a switch is short of buffers.
    Source: Ma, Mao & Taylor, 2016 (Theano-MPI's ASA).

    >>> all_to_all_time(LinkParams(alpha=1.0, beta=1.0, gamma=0.0, sync=0.0), 8, 4)
    14.0
    """
    transferred = ring_all_reduce_bytes(nbytes, world_size)
    posted = (2 * (world_size - 1) - 2) * link.overhead if world_size > 1 else 0.0
    return posted + _sum(link, 2, transferred, transferred / 2, world_size)


def hierarchical_time(
    inner: LinkParams, link: LinkParams, nbytes: float, *, nodes: int, ranks_per_node: int, nics: int = 1
) -> float:
    r"""Time of three rings, inside nodes, between them, and inside again, in s. N ``nodes`` have g ranks and r NICs.

    .. math::

        T = 2(g-1)(\alpha_i + o_i) + 2\frac{g-1}{g} n \beta_i + \frac{g-1}{g} n \gamma_i
          + 2(N-1)(\alpha_e + o_e) + 2\frac{N-1}{N} \frac{n}{\min(r, g)} \beta_e
          + \frac{N-1}{N} \frac{n}{g} \gamma_e + S_e

    i is ``inner``, e is ``link``. The g ranks of a node share its NICs; a single rank can use only one of them.
    Source: timing.md; Thakur & Gropp, 2003, for the composition.

    >>> one = LinkParams(alpha=1.0, beta=0.0, gamma=0.0, sync=0.0)
    >>> hierarchical_time(one, one, 8.0, nodes=4, ranks_per_node=2)
    8.0
    """
    for name, value in (("nodes", nodes), ("ranks_per_node", ranks_per_node), ("nics", nics)):
        check_count(name, value)
    inside = ring_all_reduce_time(inner, nbytes, ranks_per_node) - (inner.sync if ranks_per_node > 1 else 0.0)
    share = nbytes / ranks_per_node
    sharing = max(1.0, ranks_per_node / nics)  # ranks at each NIC
    shared = dataclasses.replace(link, beta=sharing * link.beta)
    outside = ring_all_reduce_time(shared, share, nodes)
    return inside + outside + (link.sync if nodes == 1 < ranks_per_node else 0.0)


def _check(nbytes: float, world_size: int) -> None:
    check_count("world_size", world_size)
    check_at_least("nbytes", nbytes, 0)


def _doublings(world_size: int) -> tuple[int, int]:
    """Return floor(log2 p), and 1 if p is not a power of two, else 0."""
    steps = world_size.bit_length() - 1
    return steps, int(world_size != 1 << steps)


def _sum(link: LinkParams, messages: int, transferred: float, added: float, world_size: int) -> float:
    if world_size == 1:
        return 0.0
    return messages * (link.alpha + link.overhead) + transferred * link.byte_seconds() + added * link.gamma + link.sync
