"""Timeline of a few iterations: who computes and who communicates, from when to when."""

from __future__ import annotations

from dataclasses import dataclass

from timing_model.checks import check_at_least, check_count, check_one_of
from timing_model.params import ComputeTimes, Noise
from timing_model.simulate import Draws, collective_draws

STRATEGIES = ("parameter-server", "synchronous", "pipelined")
COMPUTATION, UPDATE, ALL_REDUCE, GRADIENT, WEIGHTS = (
    "forward and backward",
    "update",
    "all-reduce",
    "gradient",
    "weights",
)
COMMUNICATION = (ALL_REDUCE, GRADIENT, WEIGHTS)
SERVER = "server"


@dataclass(frozen=True, slots=True)
class Span:
    """Activity of one rank, or of the server, in one iteration."""

    who: str
    """Name of the rank or the server: "rank 0", or "server"."""
    what: str
    iteration: int
    start: float
    """Seconds since the first iteration began."""
    end: float


def timeline(
    strategy: str,
    times: ComputeTimes,
    t_comm: float,
    *,
    world_size: int,
    iterations: int,
    width: int = 2,
    noise: Noise | None = None,
    seed: int = 0,
) -> list[Span]:
    """Return the activities of all ranks, and of the server, in the first iterations, in the order of iterations.

    Args:
        strategy: one of ``STRATEGIES``. With the parameter server, gradients come in and weights go out one after the
            other; the server applies the mean when all gradients are there.
        times: computation times; an update follows the arrival of a sum, so there is none before the first sum.
        t_comm: time of one all-reduce, of one gradient's way to the server, or of the weights' way back, in s.
        world_size: number of ranks; with the parameter server, all of them are workers.
        iterations: number of iterations.
        width: width of the pipeline.
        noise: variation of forward and backward, and of the all-reduce; its slow ranks are the first.
        seed: seed of the noise.

    Raises:
        ValueError: a value is out of range.

    >>> times = ComputeTimes(update=1.0, forward=1.0, backward=2.0)
    >>> for span in timeline("synchronous", times, 2.0, world_size=1, iterations=2):
    ...     print(span.what, span.start, span.end)
    forward and backward 0.0 3.0
    all-reduce 3.0 5.0
    update 5.0 6.0
    forward and backward 6.0 9.0
    all-reduce 9.0 11.0
    """
    check_one_of("strategy", strategy, STRATEGIES)
    for name, value in (("world_size", world_size), ("iterations", iterations), ("width", width)):
        check_count(name, value)
    check_at_least("t_comm", t_comm, 0)
    noise = noise or Noise()
    draws = Draws(times.forward + times.backward, noise, world_size, seed)
    if strategy == "parameter-server":
        return _with_server(draws, times.update, t_comm, world_size, iterations)
    collectives = collective_draws(t_comm, noise, seed)
    width = 1 if strategy == "synchronous" else width
    return _pipelined(draws, collectives, times.update, world_size, iterations, width)


def _pipelined(
    draws: Draws, collectives: Draws, t_update: float, world_size: int, iterations: int, width: int
) -> list[Span]:
    spans: list[Span] = []
    free = [0.0] * world_size
    arrived: list[float] = []
    for iteration in range(iterations):
        for rank, t_compute in enumerate(draws.next().tolist()):
            who = f"rank {rank}"
            if iteration >= width:
                start = max(free[rank], arrived[iteration - width])
                free[rank] = start + t_update
                spans.append(Span(who, UPDATE, iteration, start, free[rank]))
            spans.append(Span(who, COMPUTATION, iteration, free[rank], free[rank] + t_compute))
            free[rank] += t_compute
        start = max(max(free), arrived[-1] if arrived else 0.0)
        arrived.append(start + float(collectives.next()[0]))
        spans += [Span(f"rank {rank}", ALL_REDUCE, iteration, start, arrived[-1]) for rank in range(world_size)]
    return spans


def _with_server(draws: Draws, t_update: float, t_comm: float, world_size: int, iterations: int) -> list[Span]:
    spans: list[Span] = []
    free = [0.0] * world_size
    for iteration in range(iterations):
        for rank, t_compute in enumerate(draws.next().tolist()):
            spans.append(Span(f"rank {rank}", COMPUTATION, iteration, free[rank], free[rank] + t_compute))
            free[rank] += t_compute
        received = 0.0
        for rank in sorted(range(world_size), key=lambda one: free[one]):
            start = max(free[rank], received)
            received = start + t_comm
            spans += [Span(who, GRADIENT, iteration, start, received) for who in (f"rank {rank}", SERVER)]
        sent = received + t_update
        spans.append(Span(SERVER, UPDATE, iteration, received, sent))
        for rank in range(world_size):
            spans += [Span(who, WEIGHTS, iteration, sent, sent + t_comm) for who in (f"rank {rank}", SERVER)]
            sent += t_comm
            free[rank] = sent
    return spans
