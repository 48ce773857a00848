"""Rounds of a synchronous parameter server, over sizes and numbers of ranks: gradients to it, and weights back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from pipesgd.calibration.groups import Placement, groups_to_measure
from pipesgd.calibration.options import LEAST_LARGEST_BYTES
from pipesgd.calibration.sweep import GROWTH, Cell
from pipesgd.guests import guest
from pipesgd.ranks import Ranks
from timing_model.measured import PARAMETER_SERVER

SIZES = 5
"""Approximate number of sizes, among which the available time is divided."""
LEAST_BLOCKS, MOST_BLOCKS, MOST_ROUNDS = 3, 6, 20
"""Fewest and most blocks of a cell, and most rounds of a block: workers served in turn find their pace within it."""


def world_sizes(where: Sequence[Placement]) -> list[int]:
    """Return the measured numbers of ranks: sizes of the groups of the first ranks, which can have a server alone."""
    return [len(group) for group in groups_to_measure(where) if group == list(range(len(group)))]


def measure(
    ranks: Ranks,
    where: Sequence[Placement],
    *,
    largest_bytes: int,
    seconds: float,
    timeout: float,
    advance: Callable[[float], None],
) -> list[Cell]:
    """Measure every cell, the same on all ranks, with one server next to the first worker. Collective.

    It starts torch's process groups and ends them: there must be none yet. The time of the server's optimizer does not
    show in any cell that counts, since a plain SGD step is nothing compared with the wire.

    Args:
        ranks: ranks that take part.
        where: place of every rank.
        largest_bytes: bytes of the largest gradient; less on a slow link.
        seconds: approximate time for all of it.
        timeout: seconds that a rank waits for another one.
        advance: called with the share that is done.
    """
    cells: list[Cell] = []
    sizes = world_sizes(where)
    # Ranks outside the group wait; cap each measurement so that they never hit the timeout.
    share = min(seconds / len(sizes), timeout / 2) / SIZES
    for number, world_size in enumerate(sizes):
        own: list[tuple[int, list[float]]] = []
        if ranks.rank < world_size:
            own = _cells(ranks.first(world_size), largest_bytes, share, timeout)
        for nbytes, times in ranks.all_gather_object("times of a parameter server", own)[0]:
            cell = Cell(all_reduce=PARAMETER_SERVER, world_size=world_size, nbytes=nbytes, seconds=np.array(times))
            cells.append(cell)
        advance((number + 1) / len(sizes))
    return cells


def _cells(ranks: Ranks, largest_bytes: int, share: float, timeout: float) -> list[tuple[int, list[float]]]:
    """Return (bytes, seconds of a round in each block) of these ranks, from small sizes on as long as there is time."""
    found = []
    nbytes = min(LEAST_LARGEST_BYTES, largest_bytes)
    while True:
        times = _rounds(ranks, nbytes, share, timeout)
        found.append((nbytes, times))
        larger = min(GROWTH * nbytes, largest_bytes)
        if larger == nbytes or larger / nbytes * float(np.median(times)) * (LEAST_BLOCKS + 2) > 2 * share:
            return found
        nbytes = larger


def _rounds(ranks: Ranks, nbytes: int, share: float, timeout: float) -> list[float]:
    """Return the seconds of a round, the median rank's, in each block; no other strategy has connections meanwhile."""
    ranks.start_process_group("cpu", timeout)
    weights = nn.Parameter(torch.zeros(nbytes // 4, dtype=torch.float32))
    gradient = torch.zeros_like(weights)
    model = nn.ParameterList([weights])
    servers = guest("parameter servers")(
        model, torch.optim.SGD([weights], lr=0.0), staleness_bound=0, timeout=timeout, ranks=ranks
    )

    def block(rounds: int) -> float:
        begin = time.perf_counter()
        for _ in range(rounds):
            weights.grad = gradient
            servers.step()
        return (time.perf_counter() - begin) / rounds

    with contextlib.closing(servers):
        block(1)  # makes the connections
        once = max(ranks.all_gather_object("a round", block(1)))
        blocks = int(np.clip(share / once, LEAST_BLOCKS, MOST_BLOCKS))
        rounds = int(np.clip(share / once / blocks, 1, MOST_ROUNDS))
        times = [block(rounds) for _ in range(blocks)]
    everybody = ranks.all_gather_object("rounds", times)
    ranks.leave()
    return [float(one) for one in np.median(everybody, axis=0)]
