"""Style of figures: the style file, and one colour for every method, codec and all-reduce, the same everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from PIL import Image

STYLE = Path(__file__).with_name("pipesgd.mplstyle")

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW, GREY, BLACK = "#E69F00", "#56B4E9", "#F0E442", "#999999", "#000000"
"""Grey, black, and the colours of Okabe and Ito, which the colour-blind can tell apart."""
INDIGO, WINE, OLIVE = "#332288", "#882255", "#999933"
"""Three colours of Paul Tol's."""
COLOURS = (GREY, VERMILLION, ORANGE, BLUE, GREEN, PURPLE, SKY, YELLOW, INDIGO, WINE, OLIVE)
"""Colours for things without a name, such as settings."""
STORED_COLOURS = 64
OVER_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 1}
"""Box of a text that may lie over lines."""

METHODS = {
    "local": GREY,
    "ps-sync": VERMILLION,
    "ps-async": WINE,
    "D-Sync": ORANGE,
    "ddp": PURPLE,
    "no prediction": SKY,
    "width 2": BLUE,
    "width 3": GREEN,
}
"""Colours of strategies and of widths of the pipeline."""
ALIASES = {"width 1": "D-Sync", "pipelined": "no prediction", "ours": "width 2"}
TITLES = {
    "d-sync": "pipesgd, width 1 (synchronous)",
    "ddp": "DDP",
    "ddp-fp16": "DDP, fp16 hook",
    "pipesgd": "pipesgd, no codec",
    "pipesgd-int8": "pipesgd, int8",
    "pipesgd-int4": "pipesgd, int4",
    "local": "no network at all",
    "ps-sync": "parameter server",
    "diloco": "DiLoCo",
    "pipe-sgd": "Pipe-SGD, no warm-up",
    "pipe-sgd-t": "Pipe-SGD, 16 bits",
    "pipe-sgd-q": "Pipe-SGD, 8 bits",
}
"""Systems (``experiments/systems``) as a user calls them; pipesgd is of width 2 where nothing else is said."""
METHOD_TITLES = {"ps-sync": "parameter server", "ddp": "DDP", "D-Sync": "width 1 (synchronous)"}
"""Methods of figures as a user calls them; others have their names there."""
MODELS = {"mlp": "MLP", "alexnet": "AlexNet", "resnet18": "ResNet-18"}
"""Models as people write them, where that differs from their names here."""
LOUD: dict[str, Any] = {"fontweight": "bold", "fontsize": "large", "color": BLUE}
"""Style of the one number of a picture that is set off."""
SPARE = (INDIGO, OLIVE, BLACK, YELLOW)
"""Colours for methods that somebody adds."""
CODEC_LINES: dict[str, tuple[Any, str]] = {
    "truncate16": ("--", "^"),
    "bf16": ("--", "^"),
    "fp16": ("--", "^"),
    "int8": (":", "s"),
    "int4": ("-.", "D"),
    "ternary": ((0, (1, 3)), "v"),
    "powersgd": ((0, (5, 1, 1, 1, 1, 1)), "P"),
}
"""Line style and marker of each codec; methods keep their colour. A solid line with dots means no compression."""
ANOTHER = "X<>*ph"
"""Markers for methods that would look like another one."""

CODECS = {
    "fp32": BLACK,
    "truncate16": GREY,
    "bf16": SKY,
    "fp16": PURPLE,
    "int8": BLUE,
    "int4": GREEN,
    "ternary": ORANGE,
    "qsgd": VERMILLION,
    "sign": WINE,
    "topk": OLIVE,
    "powersgd": INDIGO,
}
"""Colours of codecs where they are compared with each other."""
ALL_REDUCES = {
    "ring": VERMILLION,
    "halving-doubling": ORANGE,
    "recursive-doubling": GREEN,
    "all-to-all": PURPLE,
    "native": BLUE,
}
ALL_REDUCE_MARKERS = dict(zip(ALL_REDUCES, "s^vDo", strict=True))


def save_small(picture: Image.Image, file: Path | IO[bytes]) -> None:
    """Write a picture as PNG with ``STORED_COLOURS`` colours, which is a third of its size."""
    picture.quantize(STORED_COLOURS, dither=Image.Dither.NONE).save(file, "png", optimize=True)


def styled() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws in the project's style, whatever the user's own settings are."""
    import matplotlib

    return matplotlib.rc_context(fname=STYLE)


def method_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return each method's colour, line style and marker: "width 2, int8" has width 2's colour and int8's line.

    A method that would look like another one gets another marker; one that is not in ``METHODS`` gets a spare colour.

    >>> method_styles(["D-Sync, ring", "width 2, int8"])["width 2, int8"]
    {'color': '#0072B2', 'linestyle': ':', 'marker': 's'}
    """
    spare = itertools.cycle(SPARE)
    styles: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(names):
        words = name.replace(",", " ").split()
        known = method_of(name)
        colour = METHODS[known] if known else next(spare)
        line, marker = next((CODEC_LINES[word] for word in words if word in CODEC_LINES), ("-", "o"))
        alike = sum((one["color"], one["linestyle"]) == (colour, line) for one in styles.values())
        styles[name] = {"color": colour, "linestyle": line, "marker": (marker + ANOTHER)[alike % (1 + len(ANOTHER))]}
    return styles


def method_title(name: str) -> str:
    """Return what a user calls a method, with or without a codec.

    >>> method_title("D-Sync"), method_title("D-Sync, int8"), method_title("width 2, int8")
    ('width 1 (synchronous)', 'width 1, int8', 'width 2, int8')
    """
    method, comma, codec = name.partition(",")
    title = METHOD_TITLES.get(method, method)
    return title.split(" (")[0] + comma + codec if comma else title


def model_title(name: str) -> str:
    """Return how people write the name of a model."""
    return MODELS.get(name, name)


def method_of(name: str) -> str | None:
    """Return the one of ``METHODS`` that a contender's name begins with; None if it begins with none.

    >>> method_of("width 1, int8"), method_of("ddp fp16"), method_of("width 20")
    ('D-Sync', 'ddp', None)
    """
    words = name.replace(",", " ").split()
    for known in (*METHODS, *ALIASES):
        parts = known.split()
        if words[: len(parts)] == parts:
            return ALIASES.get(known, known)
    return None
