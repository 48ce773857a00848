"""Quantities with units: those understood, those refused and the message, and none ever guessed."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from timing_model.units import (
    BYTES_PER_SECOND,
    COUNT,
    NBYTES,
    SECONDS,
    format_bandwidth,
    format_bytes_up,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_seconds,
)

PARSERS = ((parse_seconds, SECONDS), (parse_bandwidth, BYTES_PER_SECOND), (parse_count, COUNT), (parse_bytes, NBYTES))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10Gbit/s", 1.25e9),
        ("1.25 GB/s", 1.25e9),
        ("200Mbit/s", 25e6),
        ("200mbit", 25e6),
        ("1KiB/s", 1024),
        ("1e-3Gbit/s", 125e3),
    ],
)
def test_bandwidths(text: str, value: float) -> None:
    assert parse_bandwidth("bandwidth", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10Gb", r"bandwidth must have a unit such as 10Gbit/s; got '10Gb' \(did you mean 10Gbit/s or 10GB/s\?\)"),
        ("10Gb/s", r"did you mean 10Gbit/s or 10GB/s\?"),
        ("10GB", r"got '10GB' \(did you mean 10GB/s\?\)"),
        ("200Mbit", r"did you mean 200Mbit/s\?"),
        ("10Gbps", r"did you mean 10Gbit/s\?"),
        ("10 gbit/s", r"did you mean 10Gbit/s\?"),
        ("10", "bandwidth must have a unit such as 10Gbit/s; got '10'"),
        ("fast", "bandwidth must be a number with a unit such as 10Gbit/s; got 'fast'"),
        ("0Gbit/s", "bandwidth must be above 0; got '0Gbit/s'"),
        ("-1Gbit/s", r"bandwidth must be from 0 to 1e\+18; got '-1Gbit/s'"),
        ("9" * 400 + "bit/s", r"bandwidth must be from 0 to 1e\+18"),
        ("1e300GB/s", r"bandwidth must be from 0 to 1e\+18"),
        ("\u0663Gbit/s", "bandwidth must be a number with a unit"),
        ("1\uff12Gbit/s", "bandwidth must be a number with a unit|bandwidth must have a unit"),
        ("1e999Gbit/s", r"bandwidth must be from 0 to 1e\+18"),
        ("nan Gbit/s", "bandwidth must be a number"),
        ("", "bandwidth must be a number"),
    ],
)
def test_bandwidths_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_bandwidth("bandwidth", text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("50", "latency must have a unit such as 50us, 50ms or 50s; got '50'"),
        ("50µs", r"did you mean 50us\?"),
        ("5 sec", r"did you mean 5s\?"),
        ("5MS", r"did you mean 5ms\?"),
        ("1e-9999999999999999999s", "latency must be a number with a unit such as 50us; got "),
    ],
)
def test_times_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_seconds("latency", text)


def test_counts_have_a_letter_that_says_how_many() -> None:
    assert parse_count("parameters", "25.6M") == 25.6e6
    assert parse_count("parameters", "1000") == 1000
    with pytest.raises(ValueError, match=r"parameters .* got '1B' \(did you mean 1G\?\)"):
        parse_count("parameters", "1B")
    with pytest.raises(ValueError, match=r"did you mean 3M\?"):
        parse_count("parameters", "3m")


@given(st.text(max_size=12) | st.from_regex(r"[0-9.e+-]{1,6} ?[kKMGTibBs/p]{0,6}", fullmatch=True))
def test_any_text_is_a_finite_number_or_one_line(text: str) -> None:
    for parse, _ in PARSERS:
        value, refusal = 0.0, "name must be none"
        try:
            value = parse("name", text)
        except ValueError as error:
            refusal = str(error)
        assert math.isfinite(value)
        assert value >= 0
        assert refusal.startswith("name must ")
        assert len(refusal.splitlines()) == 1


@given(st.floats(1e-3, 1e6, allow_nan=False))
def test_every_unit_is_read_as_what_it_is(number: float) -> None:
    for parse, units in PARSERS:
        for unit, factor in units.items():
            assert parse("name", f"{number!r}{unit}") == pytest.approx(number * factor)


@given(st.floats(1e-7, 1e5))
def test_what_people_are_shown_can_be_read_back_to_three_digits(value: float) -> None:
    assert parse_seconds("time", format_seconds(value)) == pytest.approx(value, rel=0.01, abs=1e-8)
    assert parse_bandwidth("rate", format_bandwidth(1e9 * value)) == pytest.approx(1e9 * value, rel=0.01)


@given(st.integers(1, 10**15))
@example(2030)
def test_bytes_rounded_up_are_enough_and_at_most_a_hundredth_more(nbytes: int) -> None:
    assert nbytes <= parse_bytes("memory", format_bytes_up(nbytes)) <= 1.01 * nbytes
