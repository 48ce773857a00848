"""Time of one iteration, by its parts, and of a whole job: one function per strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from timing_model.all_reduce import CollectiveTime
from timing_model.buckets import by_bytes
from timing_model.checks import check_at_least, check_count
from timing_model.jitter import expected_maximum, noise_over, steady_state_period
from timing_model.params import ComputeTimes, Noise

NO_NOISE = Noise()
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes at which torch's DistributedDataParallel closes its first bucket, and the others, by default."""

PRECISE = 1e-7
"""Relative precision of a search for a time."""


class IterationTime(NamedTuple):
    """Mean time of one iteration in the steady state, in s; its parts sum to the total."""

    total: float
    compute: float
    """Time of update, forward and backward on a rank that is not slow."""
    wire: float
    """Latency, transfer and synchronization that the computation waits for."""
    codec: float
    """Encoding, decoding and adding that the computation waits for, too."""
    jitter: float
    """Additional time because times differ between ranks and iterations."""
    loading: float = 0.0
    """Additional time because batches are loaded."""
    inside: float = 0.0
    """Time of the collectives inside an island, for which the passes wait."""

    @property
    def exposed(self) -> float:
        """Total time that the computation waits, in s."""
        return self.wire + self.codec + self.jitter + self.loading + self.inside

    def times(self, factor: float) -> IterationTime:
        """Return the time with every part ``factor`` times as long."""
        return IterationTime(*[factor * part for part in self])


def pipelined_iteration_time(
    times: ComputeTimes, collective: CollectiveTime, width: int, *, world_size: int = 1, noise: Noise = NO_NOISE
) -> IterationTime:
    r"""Iteration time of Pipe-SGD of width K.

    .. math:: T = \max(c,\; m,\; (c + m) / K)

    c is ``times.total``, slowed down by the collective if K > 1, and m is ``collective.total`` with its handover
    (``ComputeTimes.at_width``). Width 1 is synchronous and takes c + m. Width 2 is the smallest that reaches max(c, m).
    Noise replaces the maximum by ``jitter.steady_state_period``. Source: Li et al., NeurIPS 2018 (Pipe-SGD).

    Raises ``ValueError`` if ``width < 1``.

    >>> times = ComputeTimes(update=0.5, forward=1.0, backward=1.5)
    >>> pipelined_iteration_time(times, CollectiveTime(2.0, 2.0, 0.0), width=1)
    IterationTime(total=5.0, compute=3.0, wire=2.0, codec=0.0, jitter=0.0, loading=0.0, inside=0.0)
    >>> pipelined_iteration_time(times, CollectiveTime(5.0, 4.0, 1.0), width=2)
    IterationTime(total=5.0, compute=3.0, wire=1.0, codec=1.0, jitter=0.0, loading=0.0, inside=0.0)
    """
    check_count("width", width)

    def without_noise(t_comm: float) -> float:
        c, m = times.at_width(width, t_comm)
        return max(c, m, (c + m) / width)

    c, m = times.at_width(width, collective.total)
    total = steady_state_period(c, m, width, world_size, noise)
    return _parts(times.total, without_noise(collective.wire), without_noise(collective.total), total)


def local_steps_iteration_time(
    times: ComputeTimes,
    collective: CollectiveTime,
    width: int,
    local_steps: int,
    *,
    world_size: int = 1,
    noise: Noise = NO_NOISE,
) -> IterationTime:
    r"""Iteration time of local steps: ranks exchange what a window of H iterations has moved their weights.

    .. math:: T = \frac{1}{H} \max\left(H c + u,\; m,\; \frac{H c + u + m}{K}\right)

    u is ``times.outer_update``. The window takes the place of the iteration in ``pipelined_iteration_time``, and H = 1
    without an outer update is that. So a pipeline of width 2 hides the collective from H = m / c on, about; at width 1
    it adds m / H to each iteration. Slow iterations of a rank make up for fast ones in the same window: noise is that
    of a mean of H iterations.

    Raises ``ValueError`` if ``width < 1`` or ``local_steps < 1``.

    >>> times = ComputeTimes(update=0.5, forward=1.0, backward=1.5)
    >>> [local_steps_iteration_time(times, CollectiveTime(12.0, 12.0, 0.0), 2, steps).total for steps in (1, 2, 4, 8)]
    [12.0, 6.0, 3.0, 3.0]
    >>> local_steps_iteration_time(times, CollectiveTime(12.0, 12.0, 0.0), 1, 8).total
    4.5
    """
    check_count("local_steps", local_steps)
    window = times.window(local_steps)
    noise = noise_over(noise, local_steps)
    return pipelined_iteration_time(window, collective, width, world_size=world_size, noise=noise).times(
        1 / local_steps
    )


def loaded_iteration_time(
    iteration: Callable[[ComputeTimes], IterationTime], times: ComputeTimes, workers: int, *, cores_used: float = 0.0
) -> IterationTime:
    r"""Iteration time where batches are loaded, too: the longest of computing, communicating and loading.

    .. math::

        T = \max\left(T_0(c),\; \frac{l}{W},\; u (c + l)\right), \qquad T = T_0(c + l) \text{ if } W = 0

    T_0 is the time without loading and l is ``times.loading``. W worker processes of a rank load as many batches at the
    same time, and the computation finds the next one ready. Without workers the rank loads each batch before its
    forward pass. What takes a core takes it from the others: on a machine whose cores the ranks use to a share u of 1,
    loading lasts as long as without workers.

    Args:
        iteration: time without loading, given the times of the computation.
        times: the computation, and the loading of a batch by one process.
        workers: loader workers of a rank.
        cores_used: share of the machine's cores that the ranks use, at most 1; 0 if cores are no limit.

    Raises ``ValueError`` if ``workers < 0`` or ``cores_used`` is not from 0 to 1.

    >>> def synchronous(times: ComputeTimes) -> IterationTime:
    ...     return pipelined_iteration_time(times, CollectiveTime(1.0, 1.0, 0.0), width=1)
    >>> times = ComputeTimes(update=0.0, forward=1.0, backward=2.0, loading=6.0)
    >>> [loaded_iteration_time(synchronous, times, workers).total for workers in (0, 1, 2)]
    [10.0, 6.0, 4.0]
    >>> loaded_iteration_time(synchronous, times, 2, cores_used=0.5)
    IterationTime(total=4.5, compute=3.0, wire=1.0, codec=0.0, jitter=0.0, loading=0.5, inside=0.0)
    """
    without = iteration(times)
    computing, between = loaded(times, workers, cores_used)
    slowed = without if computing is times else iteration(computing)
    total = max(slowed.total, between)
    return without._replace(total=total, loading=total - without.total)


def loaded(times: ComputeTimes, workers: int, cores_used: float) -> tuple[ComputeTimes, float]:
    """Return the times of the computation, with the loading that the rank does itself, and the time between two batches
    of its loader workers, in s; 0 without any. The arguments are those of ``loaded_iteration_time``.

    >>> times = ComputeTimes(update=0.0, forward=1.0, backward=2.0, loading=6.0)
    >>> [loaded(times, workers, 0.5)[1] for workers in (0, 1, 2)]
    [0.0, 6.0, 4.5]
    """
    check_at_least("workers", workers, 0)
    if not 0 <= cores_used <= 1:
        raise ValueError(f"cores_used must be from 0 to 1; got {cores_used}")
    if times.loading == 0:
        return times, 0.0
    if workers == 0:
        return times.with_workers(0), 0.0
    return times, max(times.loading / workers, cores_used * (times.total + times.loading))


def collective_within(
    total: float, computation: float, width: int, *, world_size: int = 1, noise: Noise = NO_NOISE
) -> float:
    """Return the time of the collective, in s, if iterations of a pipeline take ``total``: the inverse of
    ``pipelined_iteration_time``, with both times as they are while they overlap. 0 if the computation needs all of it.

    >>> round(collective_within(5.0, 3.0, width=2), 6), collective_within(5.0, 5.0, width=2)
    (5.0, 0.0)
    """

    def period(collective: float) -> float:
        return steady_state_period(computation, collective, width, world_size, noise)

    least, most = 0.0, total
    if period(least) >= total:
        return 0.0
    while most - least > PRECISE * total:
        middle = (least + most) / 2
        least, most = (least, middle) if period(middle) > total else (middle, most)
    return (least + most) / 2


def layerwise_iteration_time(
    times: ComputeTimes,
    buckets: Sequence[tuple[float, CollectiveTime]],
    *,
    world_size: int = 1,
    noise: Noise = NO_NOISE,
) -> IterationTime:
    r"""Iteration time where buckets of gradients are reduced during the backward pass, as in torch's DDP.

    .. math::

        start_l = \max(ready_l, end_{l+1}), \qquad end_l = start_l + T_{coll}(n_l), \qquad
        T = \max(end_1, t_{forward} + t_{backward}) + t_{update}

    Args:
        times: the computation; the backward pass is slower while a collective runs.
        buckets: for each bucket, in the order of reduction, the share of the backward pass after which it is ready,
            which must not fall, and its collective.
        world_size: number of ranks; the slowest makes all wait, so computation times are the expected maximum's.
        noise: variation of the computation's time.

    Raises ``ValueError`` if a share is not between 0 and 1, or falls.

    >>> times = ComputeTimes(update=1.0, forward=1.0, backward=2.0)
    >>> layerwise_iteration_time(times, [(0.5, CollectiveTime(2.0, 2.0, 0.0)), (1.0, CollectiveTime(1.0, 1.0, 0.0))])
    IterationTime(total=6.0, compute=4.0, wire=2.0, codec=0.0, jitter=0.0, loading=0.0, inside=0.0)
    """
    before = 0.0
    for share, _ in buckets:
        if not before <= share <= 1:
            raise ValueError(
                f"shares of the backward pass must be from 0 to 1, and not fall; got {share} after {before}"
            )
        before = share

    def total(t_comms: Sequence[float], slower: float) -> float:
        backward = slower * times.slowed(times.backward, sum(t_comms))
        end = 0.0
        for (share, _), t_comm in zip(buckets, t_comms, strict=True):
            end = max(end, slower * times.forward + share * backward) + t_comm
        return max(end, slower * times.forward + backward) + slower * times.update

    wires = [collective.wire for _, collective in buckets]
    totals = [collective.total for _, collective in buckets]
    slowest = expected_maximum(noise, world_size)
    return _parts(times.total, total(wires, 1.0), total(totals, 1.0), total(totals, slowest))


def server_iteration_time(
    times: ComputeTimes, traffic: CollectiveTime, *, world_size: int = 1, noise: Noise = NO_NOISE
) -> IterationTime:
    r"""Iteration time with synchronous parameter servers: ``parameter_server_time`` after the slowest worker.

    .. math:: T = E[\max_i X_i] + T_{traffic}

    >>> times = ComputeTimes(update=0.5, forward=1.0, backward=1.5)
    >>> server_iteration_time(times, CollectiveTime(2.0, 1.5, 0.5)).total
    5.0
    """
    return pipelined_iteration_time(times, traffic, 1, world_size=world_size, noise=noise)


def job_time(iteration: IterationTime, iterations: int, t_comm: float = 0.0, *, missing: float = 0.0) -> float:
    r"""Time of a whole run, from the first iteration to the last result, in s.

    .. math::

        T_{job}(n) = (n - 1)\, t_{iteration} + \max(t_{iteration}, c + m), \qquad
        T = \max(T_{job}(n) - s,\; T_{job}(n - 1) + m)

    This is exact without noise for any width: the last collective, m, overlaps no computation, and follows the one
    before. n is the number of iterations, or of windows; ``t_comm`` is m for a pipeline, and 0 where nothing is in
    flight after an iteration; c contains loading and the collectives inside islands; s is ``missing``, the time by
    which the last one computes less than the others, in s.
    Raises ``ValueError`` if ``iterations < 1``, or another number is negative.

    >>> job_time(IterationTime(4.0, 3.0, 1.0, 0.0, 0.0), 10, t_comm=4.0)
    43.0
    >>> job_time(IterationTime(8.0, 8.0, 0.0, 0.0, 0.0), 1, t_comm=4.0, missing=6.0)
    6.0
    """
    check_count("iterations", iterations)
    check_at_least("t_comm", t_comm, 0)
    check_at_least("missing", missing, 0)
    last = max(iteration.total, iteration.compute + iteration.inside + iteration.loading + t_comm)
    before = (iterations - 2) * iteration.total + last + t_comm if iterations > 1 else t_comm
    return max((iterations - 1) * iteration.total + last - missing, before)


def ddp_buckets(
    nbytes: Sequence[float],
    *,
    first_bucket: float = FIRST_BUCKET,
    bucket: float = BUCKET,
    released: Sequence[float] = (),
) -> list[tuple[float, float]]:
    """Return the buckets of torch's DDP: the share of the backward pass after which each is ready, and its bytes.

    Args:
        nbytes: bytes of each parameter's gradient, in the order of the forward pass; the backward pass reverses it.
        first_bucket: bytes at which the first bucket is full; it takes the parameter that fills it.
        bucket: bytes at which each of the other buckets is full.
        released: share of the backward pass after which each gradient is complete; by default ``buckets.by_bytes``,
            which suits dense layers only.

    Raises ``ValueError`` if a number is negative.

    >>> ddp_buckets([10.0, 20.0, 10.0], first_bucket=5, bucket=25)
    [(0.25, 10.0), (1.0, 30.0)]
    """
    for size in nbytes:
        check_at_least("nbytes", size, 0)
    complete, held, limit = 0.0, 0.0, first_bucket
    buckets: list[tuple[float, float]] = []
    for size, share in zip(reversed(nbytes), reversed(released or by_bytes(nbytes)), strict=True):
        complete = max(complete, share)
        held += size
        if held >= limit:
            buckets.append((complete, held))
            held, limit = 0.0, bucket
    if held:
        buckets.append((complete, held))
    return buckets


def _parts(compute: float, with_wire: float, with_codec: float, total: float) -> IterationTime:
    """Return the parts of totals that each add one cost; the wire's part includes the computation's slowdown by it."""
    return IterationTime(total, compute, with_wire - compute, with_codec - with_wire, total - with_codec)
