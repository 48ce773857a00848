"""Charts as inline SVG: curves over an axis, and bars of shares. Each is drawn twice, for a page and for a phone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipesgd.report.html import COLOURS, Html, join, tag

Numbers = np.ndarray[Any, np.dtype[np.float64]]

WIDTHS = {"wide": 720, "narrow": 340}
"""Width in px of the drawing for a page, and of that for a phone, by the class that shows it."""
HEIGHT = 250
BAR_HEIGHT = 34
MOST_POINTS = 200
"""Points of a curve above which neighbours are drawn as their mean, with the range of their values."""
LOG_RATIO = 50.0
"""Ratio of the largest value to the median from which an axis is logarithmic."""
LARGEST = 1e100
"""Largest value that is drawn, in place of larger ones: sums and differences of these are finite."""
LETTER = 7.5
"""Mean width of a letter in px, at most."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values over an axis, of one colour."""

    name: str
    x: Numbers
    y: Numbers
    """Values; NaN where there is none, which leaves a gap."""
    colour: int = 0
    dots: bool = False
    """True to draw a dot for each value, which stand far apart."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Name of an axis, with its unit, and the notation of its values."""

    name: str
    notation: Callable[[float], str] = "{:g}".format
    whole: bool = False
    """True if only whole numbers are marked."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line at a value of the horizontal axis, with a short text."""

    x: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A range of the vertical axis, such as that of a prediction."""

    low: float
    high: float
    name: str
    colour: int = 1


def curves(
    shown: Sequence[Curve],
    *,
    description: str,
    x: Axis,
    y: Axis,
    marks: Sequence[Mark] = (),
    interval: Interval | None = None,
    legend: bool = True,
) -> Html:
    """Return a drawing of these curves; its vertical axis is logarithmic if single values are far above the others.

    Args:
        shown: curves, each with at least one value that is not NaN.
        description: text for readers who do not see it.
        x: horizontal axis.
        y: vertical axis.
        marks: vertical lines.
        interval: range of the vertical axis that is shaded.
        legend: false if the page says elsewhere which colour is which curve.
    """
    draw = functools.partial(
        _curves, shown, description=description, x=x, y=y, marks=marks, interval=interval, legend=legend
    )
    return join(*(draw(width, class_) for class_, width in WIDTHS.items()))


def shares(parts: Sequence[tuple[str, float, int]], *, description: str) -> Html:
    """Return a bar of parts, each a name, a value of at least 0, and a colour; it has at least one value above 0."""
    return join(*(_shares(parts, description, width, class_) for class_, width in WIDTHS.items()))


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most ``most`` + 1 round values from ``low`` to ``high``, in equal steps.

    >>> ticks(0, 10, 5), ticks(0.98, 1.03, 3), ticks(0, 1, 5, whole=True)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.98, 1.0, 1.02], [0.0, 1.0])
    """
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= most)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)]


class _Scale:
    """Mapping of values to px."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False):
        self.low, self.high, self._start, self._end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        place = (math.log10(value) if self.log else value) - low
        return round(self._start + place / (high - low) * (self._end - self._start), 1)

    def ticks(self, most: int, *, whole: bool = False) -> list[float]:
        if not self.log:
            return ticks(self.low, self.high, most, whole=whole)
        powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        every = max(1, math.ceil(len(powers) / most))
        return [10.0**power for power in powers[::every]]


def _curves(
    shown: Sequence[Curve],
    width: int,
    class_: str,
    *,
    description: str,
    x: Axis,
    y: Axis,
    marks: Sequence[Mark],
    interval: Interval | None,
    legend: bool,
) -> Html:
    thinned = [_thin(curve, MOST_POINTS if class_ == "wide" else MOST_POINTS // 2) for curve in shown]
    lows = np.concatenate([low for _, _, low, _ in thinned])
    highs = np.concatenate([high for _, _, _, high in thinned])
    bounds = [float(np.nanmin(lows)), float(np.nanmax(highs))]
    if interval is not None:
        bounds += [interval.low, interval.high]
    typical = float(np.nanmedian(np.concatenate([middle for _, middle, _, _ in thinned])))
    log = min(bounds) > 0 and max(bounds) > LOG_RATIO * typical
    low, high = _room(min(bounds), max(bounds), log=log)
    side = [(value, y.notation(value)) for value in _Scale(low, high, 0, 1, log=log).ticks(5)]
    left = 12 + LETTER * max((len(text) for _, text in side), default=0)
    top, bottom, right = 62 if marks else 44, HEIGHT - 44, width - 12
    xs = np.concatenate([curve.x for curve in shown])
    first, last = float(xs.min()), float(xs.max())
    across = _Scale(*(first, last) if last > first else (first - 0.5, first + 0.5), left, right)
    up = _Scale(low, high, bottom, top, log=log)

    parts: list[Html] = []
    if interval is not None:
        ends = up(interval.high), up(interval.low)
        box = {
            "x": left,
            "y": ends[0],
            "width": round(right - left, 1),
            "height": max(1.0, round(ends[1] - ends[0], 1)),
        }
        parts.append(tag("rect", class_=f"f{interval.colour} spread", **box))
    for value, text in side:
        parts.append(tag("line", class_="grid", x1=left, x2=right, y1=up(value), y2=up(value)))
        parts.append(_text(left - 6, up(value) + 4, text, anchor="end", soft=True))
    below = across.ticks(4 if class_ == "narrow" else 8, whole=x.whole)
    parts += [_text(across(value), bottom + 18, x.notation(value), anchor="middle", soft=True) for value in below]
    parts.append(_text(right, bottom + 36, x.name, anchor="end", soft=True))
    parts.append(_text(2, 14, f"{y.name}{', logarithmic' if log else ''}", soft=True))
    for mark in marks:
        place = across(min(max(mark.x, across.low), across.high))
        parts.append(tag("line", class_="mark", x1=place, x2=place, y1=top - 14, y2=bottom))
        is_late = place > right - 80
        next_to = place - 4 if is_late else place + 4
        parts.append(_text(next_to, top - 5, mark.text, anchor="end" if is_late else "start", soft=True))
    parts += [part for curve, points in zip(shown, thinned, strict=True) for part in _drawn(curve, points, across, up)]
    names = [(curve.name, curve.colour) for curve in shown]
    names += [(interval.name, interval.colour)] if interval is not None else []
    if legend and len(names) > 1:
        parts += _legend(names, left)
    return _svg(class_, width, HEIGHT, description, parts)


def _drawn(curve: Curve, points: tuple[Numbers, ...], across: _Scale, up: _Scale) -> list[Html]:
    """Return the shapes of a curve: the range of its values, its line, and dots."""
    at, middle, low, high = points
    shapes: list[Html] = []
    known = ~np.isnan(middle)
    for start, end in _stretches(known):
        xs = [across(value) for value in at[start:end]]
        lines = [[up(value) for value in values[start:end]] for values in (middle, low, high)]
        if len(xs) > 1 and lines[1] != lines[2]:
            outline = [*zip(xs, lines[2], strict=True), *zip(xs[::-1], lines[1][::-1], strict=True)]
            shapes.append(tag("path", class_=f"f{curve.colour} spread", d=f"M{_path(outline)}Z"))
        if len(xs) > 1:
            path = _path(list(zip(xs, lines[0], strict=True)))
            shapes.append(tag("path", class_=f"curve c{curve.colour}", d=f"M{path}"))
        if len(xs) == 1 or curve.dots:
            spots = zip(xs, lines[0], strict=True)
            shapes += [tag("circle", class_=f"f{curve.colour}", cx=spot, cy=height, r=3.5) for spot, height in spots]
    return shapes


def _thin(curve: Curve, most: int) -> tuple[Numbers, ...]:
    """Return x, mean, minimum and maximum of at most ``most`` groups of neighbours of the curve."""
    number = len(curve.x)
    values = np.clip(curve.y, -LARGEST, LARGEST)
    if number <= most:
        return curve.x, values, values, values
    edges = np.linspace(0, number, most + 1).astype(int)
    columns: list[list[float]] = [[], [], [], []]
    for start, end in itertools.pairwise(edges):
        known = values[start:end][~np.isnan(values[start:end])]
        of_group = (known.mean(), known.min(), known.max()) if known.size else (math.nan,) * 3
        for column, value in zip(columns, (curve.x[start:end].mean(), *of_group), strict=True):
            column.append(float(value))
    x, middle, low, high = (np.array(column) for column in columns)
    return x, middle, low, high


def _stretches(known: np.ndarray[Any, np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    """Return (start, end) of the stretches in which ``known`` is true."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(int)))
    return [(int(start), int(end)) for start, end in zip(changes[::2], changes[1::2], strict=True)]


def _room(low: float, high: float, *, log: bool) -> tuple[float, float]:
    """Return the ends of an axis for values from ``low`` to ``high``: with room, and from 0 if it is not far away."""
    if log:
        return low / 1.3, high * 1.3
    if high > 0 and (0 <= low <= 0.6 * high or low == high):
        return 0.0, high * 1.05
    span = max(high - low, 1e-3 * abs(high)) or 1.0  # values next to ticks are told apart
    return low - 0.05 * span, high + 0.05 * span


def _shares(parts: Sequence[tuple[str, float, int]], description: str, width: int, class_: str) -> Html:
    total = sum(value for _, value, _ in parts)
    place = 0.0
    shapes = []
    for _, value, colour in parts:
        long = width * value / total
        shapes.append(
            tag(
                "rect",
                class_=f"f{colour}",
                x=round(place, 1),
                y=0,
                width=round(max(0.0, long - 2), 1),
                height=BAR_HEIGHT,
            )
        )
        place += long
    return _svg(class_, width, BAR_HEIGHT, description, shapes)


def _legend(names: Sequence[tuple[str, int]], left: float) -> list[Html]:
    """Return the names of curves with their colours, in the line above a drawing that begins at ``left``."""
    parts = []
    for name, colour in names:
        parts.append(tag("rect", class_=f"f{colour % COLOURS}", x=round(left, 1), y=24, width=11, height=11))
        parts.append(_text(left + 16, 34, name, soft=True))
        left += 16 + LETTER * len(name) + 10
    return parts


def _svg(class_: str, width: int, height: int, description: str, parts: Sequence[Html]) -> Html:
    box = f"0 0 {width} {height}"
    return tag("svg", tag("title", description), *parts, class_=class_, viewBox=box, role="img")


def _text(x: float, y: float, text: str, *, anchor: str = "start", soft: bool = False) -> Html:
    return tag("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_="soft" if soft else None)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:g} {y:g}" for x, y in points)
