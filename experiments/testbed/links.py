"""Links, and the notation for their rate, latency and loss: ``200mbit``, ``5ms``, ``0.1%``."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InvalidInputError

RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
"""Units of a rate, in bit/s."""
LATENCY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LOWEST_RATE, HIGHEST_RATE = 1e3, 1e12
"""Bounds of a rate in bit/s. At the lowest, a full packet takes 12 s; no machine comes near the highest."""
LONGEST_LATENCY = 10.0

MTU, ETHERNET = 1500, 14
"""Bytes of the largest IP packet, and of the header in front of it."""
PAYLOAD_SHARE = (MTU - 20 - 20 - 12) / (MTU + ETHERNET)
"""Share of a link's rate that is left for TCP's payload in full packets; the 12 bytes are TCP's timestamps."""

BURST_SECONDS, SMALLEST_BURST, LARGEST_BURST = 1e-3, 3100, 1 << 17
"""Burst with which a link catches up on a pause of a millisecond: two packets at least, the kernel's needs at most.

With it, one TCP stream, or three into one node, get 95.6 % of the rate as payload, which is all that headers leave,
at 10, 200 and 1000 Mbit/s, with cubic and with bbr. A larger burst at 10 Mbit/s (5000 to 20000 bytes) is no faster,
but small messages notice it.
"""
QUEUE_SECONDS, SMALLEST_QUEUE, LARGEST_QUEUE = 0.1, 1 << 20, 1 << 30
"""Queue at a link before packets are lost, in seconds of its rate, and its bounds in bytes.

With 128 KiB at 10 Mbit/s, bbr lost so much at its start that nothing arrived for half a second; 256 KiB were enough.
"""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The cable between a node and the switch, the same in both directions."""

    rate: float
    """Rate in bit/s, headers included."""
    latency: float = 0.0
    """Seconds that every packet takes longer from one node to another, in one direction."""
    loss: float = 0.0
    """Probability that a packet of the node is lost."""

    def __post_init__(self) -> None:
        if not self.rate >= LOWEST_RATE:
            raise InvalidInputError(f"rate must be at least 1kbit; got {self.rate:g} bit/s")
        if self.rate > HIGHEST_RATE:
            raise InvalidInputError(f"rate must be at most 1000gbit; got {self.rate:g} bit/s")
        if not 0 <= self.latency <= LONGEST_LATENCY:
            raise InvalidInputError(f"latency must be from 0 to {LONGEST_LATENCY:g} s; got {self.latency:g} s")
        if not 0 <= self.loss <= 1:
            raise InvalidInputError(f"loss must be a probability from 0 to 1; got {self.loss:g}")

    @property
    def delays(self) -> bool:
        """True if a token bucket alone does not make this link, since it has latency or loss."""
        return self.latency > 0 or self.loss > 0


def burst(rate: float) -> int:
    """Return the bytes that a link may send at once after a pause."""
    return round(min(max(rate / 8 * BURST_SECONDS, SMALLEST_BURST), LARGEST_BURST))


def token_bucket(rate: float) -> str:
    """Return the arguments of ``tc`` that limit what an interface sends to ``rate`` bit/s."""
    queue = min(max(rate / 8 * QUEUE_SECONDS, SMALLEST_QUEUE), LARGEST_QUEUE)
    return f"tbf rate {rate:.0f}bit burst {burst(rate)} limit {queue:.0f}"


def packets_at_once(rate: float) -> int:
    """Return how many packets TCP may hand over in one piece: half a burst.

    A piece larger than the burst is cut, which costs a lot of time. A piece as large as the burst needs a full bucket,
    and the tokens that flow into a full bucket until the kernel's timer fires are lost: 1 to 2 % of the rate.
    """
    return burst(rate) // 2 // (MTU + ETHERNET)


MOST = 1e18
"""Largest rate in bit/s, or latency in seconds; anything larger is a mistake."""


def parse_rate(text: str) -> float:
    """Return the rate in bit/s, from ``200mbit``. Raises ``InvalidInputError``."""
    value = _quantity("rate", text.lower().removesuffix("/s"), RATE_UNITS, "200mbit", text)
    if value <= 0:
        raise InvalidInputError(f"rate must be above 0, e.g. 200mbit; got {text!r}")
    return value


def parse_latency(text: str) -> float:
    """Return the latency in seconds, from ``5ms``. Raises ``InvalidInputError``."""
    return _quantity("latency", text.lower(), LATENCY_UNITS, "5ms", text)


def parse_loss(text: str) -> float:
    """Return a probability, from ``0.1%`` or ``0.001``. Raises ``InvalidInputError``."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*(%?)", text.strip())
    value = math.nan if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= value <= 1:
        raise InvalidInputError(f"loss must be a percentage or a probability, e.g. 0.1% or 0.001; got {text!r}")
    return value


def parse_slow_node(text: str) -> tuple[int, float]:
    """Return a node's number and its link's rate in bit/s, from ``3:100mbit``. Raises ``InvalidInputError``."""
    node, colon, rate = text.partition(":")
    if not colon or not (node.isascii() and node.isdecimal()):
        raise InvalidInputError(f"slow-node must be the number of a node and a rate, e.g. 3:100mbit; got {text!r}")
    return int(node), parse_rate(rate)


def _quantity(name: str, text: str, units: Mapping[str, float], example: str, given: str) -> float:
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-z]*)", text.strip())
    if match is None or match[2] not in units:
        *others, last = units
        near = [] if match is None else difflib.get_close_matches(match[2], list(units), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidInputError(
            f"{name} must be a number and a unit, {', '.join(others)} or {last}, e.g. {example}; got {given!r}{hint}"
        )
    value = float(match[1]) * units[match[2]]
    if value > MOST:
        raise InvalidInputError(f"{name} must be at most {MOST:g} in its base unit; got {given!r}")
    return value


def rate_text(rate: float) -> str:
    """Return ``rate`` in bit/s as a text for people: "200 Mbit/s"."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if rate >= size:
            return f"{rate / size:.4g} {unit}"
    return f"{rate / 1e3:.4g} kbit/s"


def rate_name(rate: float) -> str:
    """Return ``rate`` in bit/s as ``parse_rate`` reads it, for options and file names: "200mbit"."""
    return rate_text(rate).lower().removesuffix("/s").replace(" ", "")


def time_text(seconds: float) -> str:
    """Return ``seconds`` as a text for people: "5.12 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
