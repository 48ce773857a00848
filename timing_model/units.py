"""Quantities with units, parsed and formatted as people write them: ``50us``, ``10Gbit/s``, ``61.1M``.

A unit is never guessed: 10Gb may be bits or bytes, an eightfold difference, so it is refused.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from decimal import Decimal

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES_PER_SECOND = {
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{f"{prefix}B/s": factor for prefix, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{f"{prefix}iB/s": factor for prefix, factor in (("K", 2.0**10), ("M", 2.0**20), ("G", 2.0**30))},
    **{f"{prefix}bit": factor / 8 for prefix, factor in (("k", 1e3), ("m", 1e6), ("g", 1e9))},  # as in Linux's tc
}
COUNT = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
NBYTES = {
    "B": 1.0,
    **{f"{prefix}B": factor for prefix, factor in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{f"{prefix}iB": factor for prefix, factor in (("K", 2.0**10), ("M", 2.0**20), ("G", 2.0**30))},
}
PER_SECOND = {f"/{unit}": 1 / SECONDS[unit] for unit in ("s", "min", "h")} | {"/d": 1 / 86400}
MOST = 1e18
"""Largest quantity, in its base unit: a larger one is a mistake and could overflow."""
_NUMBER = re.compile(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]{1,9})?)\s*(\D*?)\s*", re.IGNORECASE)
_MISSPELT = {
    **{f"{prefix}bit": f"{prefix}bit/s" for prefix in "MGT"},
    "µs": "us",
    "sec": "s",
    "B": "G",
    "b": "G",
    "K": "k",
    "m": "M",
}
"""Units that people write, and those that they may mean; listed by name, since no similarity measure finds them."""


def parse_seconds(name: str, text: str) -> float:
    """Parse a time of at least 0 into seconds. Raises ``ValueError`` in one line that begins with ``name``.

    >>> parse_seconds("latency", "5ms")
    0.005
    """
    return _parse(name, text, SECONDS, "50us")


def parse_bandwidth(name: str, text: str) -> float:
    """Parse a bandwidth above 0 into bytes per second. Raises ``ValueError`` in one line that begins with ``name``.

    >>> parse_bandwidth("bandwidth", "10Gbit/s") == parse_bandwidth("bandwidth", "1.25GB/s") == 1.25e9
    True
    >>> parse_bandwidth("bandwidth", "10Gb")
    Traceback (most recent call last):
    ValueError: bandwidth must have a unit such as 10Gbit/s; got '10Gb' (did you mean 10Gbit/s or 10GB/s?)
    """
    value = _parse(name, text, BYTES_PER_SECOND, "10Gbit/s")
    if value <= 0:
        raise ValueError(f"{name} must be above 0; got {text!r}")
    return value


def parse_count(name: str, text: str) -> float:
    """Parse a count of at least 0, such as ``61.1M``. Raises ``ValueError`` in one line that begins with ``name``.

    >>> parse_count("parameters", "61.1M")
    61100000.0
    """
    return _parse(name, text, COUNT, "61.1M")


def parse_bytes(name: str, text: str) -> float:
    """Parse a size of at least 0 bytes, such as ``25MiB``. Raises ``ValueError`` in one line that begins with ``name``.

    >>> parse_bytes("bucket", "25MiB")
    26214400.0
    """
    return _parse(name, text, NBYTES, "25MiB")


def parse_price(name: str, text: str) -> float:
    """Parse a price for a time, in any currency, into one per second. Raises ``ValueError`` in one line that begins
    with ``name``.

    >>> parse_price("price", "1.20/h") * 3600
    1.2
    >>> parse_price("price", "1.20")
    Traceback (most recent call last):
    ValueError: price must have a unit such as 1.20/h; got '1.20' (did you mean 1.20/h?)
    """
    return _parse(name, text, PER_SECOND, "1.20/h")


def format_seconds(seconds: float) -> str:
    """Format a time for people, with three digits.

    >>> [format_seconds(value) for value in (0, 3.2e-5, 0.0421, 1.5, 600, 93600)]
    ['0 s', '32.0 us', '42.1 ms', '1.50 s', '10.0 min', '26.0 h']
    """
    if seconds == 0:
        return "0 s"
    for unit, limit in (("us", 1e-3), ("ms", 1.0), ("s", 180.0), ("min", 3 * 3600.0)):
        if abs(seconds) < limit:
            return f"{_three_digits(seconds / SECONDS[unit])} {unit}"
    return f"{_three_digits(seconds / SECONDS['h'])} h"


def format_bandwidth(bytes_per_second: float) -> str:
    """Format a bandwidth for people, in bits, as networks are sold.

    >>> [format_bandwidth(value) for value in (1.25e9, 25e6, 7e3)]
    ['10.0 Gbit/s', '200 Mbit/s', '56.0 kbit/s']
    """
    return _scaled(8 * bytes_per_second, "bit/s")


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes for people, in powers of ten.

    >>> format_bytes(7.184e6)
    '7.18 MB'
    """
    return _scaled(nbytes, "B")


def format_bytes_up(nbytes: float) -> str:
    """Format a number of bytes that is the least to give: rounded up, so that what people read is enough.

    >>> format_bytes(49.44e9), format_bytes_up(49.44e9), format_bytes_up(49.4e9)
    ('49.4 GB', '49.5 GB', '49.4 GB')
    """
    last_digit = 10.0 ** (math.floor(math.log10(nbytes)) - 2)
    return format_bytes(math.ceil(nbytes / last_digit) * last_digit)


def format_count(count: float) -> str:
    """Format a count for people.

    >>> format_count(61.1e6)
    '61.1 M'
    """
    return _scaled(count, "").strip()


def format_cost(cost: float) -> str:
    """Format an amount of money for people, without a currency.

    >>> [format_cost(value) for value in (0, 0.001234, 1.5, 12345.678)]
    ['0.00', '0.00123', '1.50', '12,345.68']
    """
    return f"{cost:,.2f}" if cost == 0 or cost >= 1 else f"{cost:.3g}"


def _scaled(value: float, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{_three_digits(value / factor)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def _parse(name: str, text: str, units: Mapping[str, float], example: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{name} must be a number with a unit such as {example}; got {text!r}")
    number, unit = match.groups()
    if unit not in units:
        if not unit and "us" in units:  # seconds are so different that no example fits all
            example = f"{number}us, {number}ms or {number}s"
        raise ValueError(f"{name} must have a unit such as {example}; got {text!r}{_did_you_mean(number, unit, units)}")
    value = float(number) * units[unit]
    if not 0 <= value <= MOST:
        raise ValueError(f"{name} must be from 0 to {MOST:g}; got {text!r}")
    return float(Decimal(number) * Decimal(units[unit]))  # rounded once, so that 2.03 kB are 2030 bytes and no less


def _did_you_mean(number: str, unit: str, units: Mapping[str, float]) -> str:
    if "bit/s" in units and (match := re.fullmatch(r"([kKmMgGtT]?)(b|B|b/s|bps)", unit)):
        prefix = match[1].upper().replace("K", "k")
        of = {"b": ("bit/s", "B/s"), "B": ("B/s",), "b/s": ("bit/s", "B/s"), "bps": ("bit/s",)}[match[2]]
        likely = [prefix + rest for rest in of]
    elif not unit and "/h" in units:
        likely = ["/h"]
    elif unit in _MISSPELT:
        likely = [_MISSPELT[unit]]
    else:
        by_lower = {known.lower(): known for known in units}
        likely = [by_lower[near] for near in difflib.get_close_matches(unit.lower(), by_lower, n=1)]
    likely = [known for known in likely if known in units]
    return f" (did you mean {' or '.join(number + known for known in likely)}?)" if likely else ""
