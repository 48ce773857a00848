"""Probes between every two ranks, which find the network's properties and the links that stand out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipesgd.calibration.groups import Placement
from pipesgd.calibration.robust_fit import Floats
from pipesgd.comm.transport import TorchTransport
from pipesgd.ranks import Ranks

Links = NDArray[np.bool_]
"""Mask of links (p, p), from the row's rank to the column's."""

PINGS, LEAST_PINGS = 20, 3
PAYLOAD_BYTES = 512 << 10
REPETITIONS = 4
ENOUGH_SECONDS = 0.05
"""Seconds of the fewest messages of a kind from which on there are no more of them."""
SLOW = 0.7
"""Share of the good links' rate below which a link is slow."""
GOOD = 0.75
"""Quantile of the rates, and the same share of the latencies: one slow rank among four touches half of all links."""
LATE, LATE_SECONDS = 2.0, 200e-6
"""Multiple of the good links' latency, and seconds above it: a link beyond both is late."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Results of the probes (p, p), from the row's rank to the column's; NaN where there is none."""

    latency: Floats
    """Seconds one way, half of the shortest round trip: a rank's wait for its core is no property of the link."""
    rate: Floats
    """Bytes per second."""

    def middle(self, name: str) -> float:
        """Return the median over all pairs."""
        return float(np.nanmedian(getattr(self, name)))


def rounds_of_pairs(world_size: int) -> list[list[tuple[int, int]]]:
    """Return rounds that pair every two ranks once, with no rank in two pairs of a round (the circle method).

    >>> rounds_of_pairs(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats = world_size + world_size % 2
    rounds = []
    for turn in range(seats - 1):
        circle = [0, *(1 + (k - turn) % (seats - 1) for k in range(seats - 1))]
        pairs = [sorted((circle[k], circle[seats - 1 - k])) for k in range(seats // 2)]
        rounds.append(sorted((a, b) for a, b in pairs if b < world_size))
    return rounds


def probe(ranks: Ranks, transport: TorchTransport, advance: Callable[[float], None], *, brief: bool = False) -> Probes:
    """Probe the link between every two ranks, both ways. Collective.

    With ``brief``, each rank probes one other, or two if that leaves a rank out.
    """
    own: dict[int, tuple[float, float]] = {}
    rounds = rounds_of_pairs(ranks.world_size)
    if brief:
        rounds = rounds[: 1 + ranks.world_size % 2]
    for number, pairs in enumerate(rounds):
        ranks.all_gather_object("round of probes", None)
        for first, second in pairs:
            if ranks.rank in (first, second):
                peer = second if ranks.rank == first else first
                for sender in (first, second):
                    found = _probe_one_way(transport, peer, ranks.rank == sender)
                    if found is not None:
                        own[peer] = found
        advance((number + 1) / len(rounds))
    table = np.full((2, ranks.world_size, ranks.world_size), np.nan)
    for rank, found_by in enumerate(ranks.all_gather_object("probes", list(own.items()))):
        for peer, values in found_by:
            table[:, rank, peer] = values
    return Probes(latency=table[0], rate=table[1])


def _probe_one_way(transport: TorchTransport, peer: int, sends: bool) -> tuple[float, float] | None:
    """Return the latency and rate of messages to ``peer``, which answers; None on the side that answers."""

    def send_and_receive(message: torch.Tensor) -> float:
        answer = torch.zeros(1, dtype=torch.uint8)
        begin = time.perf_counter()
        if sends:
            back = transport.receive(answer, peer, "answer to a probe")
            transport.send(message, peer, "probe").wait()
            back.wait()
        else:
            transport.receive(message, peer, "probe").wait()
            transport.send(answer, peer, "answer to a probe").wait()
        return time.perf_counter() - begin

    def shortest(nbytes: int, least: int, most: int) -> float:
        """Return the time of the fastest of ``least`` to ``most`` messages; the sender tells if those were enough."""
        message = torch.zeros(nbytes, dtype=torch.uint8)
        times = [send_and_receive(message) for _ in range(least)]
        message[0] = sum(times) > ENOUGH_SECONDS
        times.append(send_and_receive(message))
        if not message[0]:
            times += [send_and_receive(message) for _ in range(most - least - 1)]
        return min(times)

    round_trip = shortest(1, LEAST_PINGS, PINGS)
    with_payload = shortest(PAYLOAD_BYTES, 1, REPETITIONS)
    if not sends:
        return None
    return round_trip / 2, PAYLOAD_BYTES / max(with_payload - round_trip, 1e-9)


class SlowLink(NamedTuple):
    """A link, or all links of a rank, that stand out."""

    rank: int | None
    """Rank whose links are all slow; None for a single link."""
    line: str
    """Message to the user."""


def slow_links(probes: Probes, where: Sequence[Placement]) -> list[SlowLink]:
    """Find every rank, or else link, that is much slower or later than the others of its kind.

    The kinds are links inside a node and links between nodes. With two ranks there is nothing to compare with except
    the other direction.
    """
    world_size = len(where)
    within = np.array([[a.node == b.node for b in where] for a in where])
    found = []
    for kind in (within, ~within):
        kind = kind & ~np.eye(world_size, dtype=bool) & ~np.isnan(probes.rate)
        if kind.sum() < 2:
            continue
        usual = float(np.quantile(probes.rate[kind], GOOD, method="higher"))
        round_trips = np.fmin(probes.latency, probes.latency.T)  # the same from both ends, except for waits for a core
        latency = float(np.quantile(round_trips[kind], 1 - GOOD, method="lower"))
        slow = kind & (probes.rate < SLOW * usual)
        late = kind & (round_trips > LATE * latency) & (round_trips > latency + LATE_SECONDS)
        for rank, who, links in _name(slow, kind):
            got = _mbit(float(np.median(probes.rate[links])))
            found.append(SlowLink(rank, f"slow link: {who}, {got}, where {_mbit(usual)} is usual here"))
        for rank, who, links in _name(late, kind):
            got = _ms(float(np.median(round_trips[links])))
            found.append(SlowLink(rank, f"slow link: {who}, {got} one way, where {_ms(latency)} is usual here"))
    return found


def _name(bad: Links, kind: Links) -> list[tuple[int | None, str, Links]]:
    """Return each rank whose links are all bad, and each bad link that is left over."""
    named: list[tuple[int | None, str, Links]] = []
    left = bad.copy()
    for rank in range(len(bad)):
        own = np.zeros_like(bad)
        own[rank, :] = own[:, rank] = True
        own &= kind
        if own.sum() > 2 and np.all(bad[own]):
            named.append((rank, f"that of rank {rank}", own))
            left &= ~own
    for sender, receiver in np.argwhere(left):
        one = np.zeros_like(bad)
        one[sender, receiver] = True
        named.append((None, f"from rank {sender} to rank {receiver}", one))
    return named


def _mbit(rate: float) -> str:
    return f"{8e-6 * rate:,.0f} Mbit/s"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
