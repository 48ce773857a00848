"""Tables of the notebooks: the Pipe-SGD paper (Li et al., NeurIPS 2018) next to our values, from the results.

Only the abstract of the paper is at hand. What its figures show is known from readers' accounts, and none of its other
numbers is quoted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from experiments import fig01_schedules, fig05_timing_model, fig08_codecs
from experiments.figures import PaperFigure
from experiments.results import Row, grouped
from experiments.systems import pictures
from experiments.systems.table import BASELINE
from experiments.systems.workloads import ACCELERATOR

NOT_AT_HAND = "the paper's body is not at hand"
HEAD = ("the paper's figure", "the paper's value", "ours", "substituted", "agrees?")
EMULATED = "four emulated nodes at 200 Mbit/s, with emulated accelerators, for four nodes with GPUs"
SMALL = "an MLP, a convnet, AlexNet for small images and a transformer for the paper's models"
UNKNOWN = "not known"

Cells = tuple[str, str, str, str, str]


def compared(theme: str) -> str:
    """Return the table of a notebook, in Markdown: ``theme`` is one of ``THEMES``."""
    lines = [HEAD, ("---",) * len(HEAD), *THEMES[theme]()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def said(figure: PaperFigure) -> str:
    """Return the message of a figure."""
    return figure.message([row for row in figure.table() if figure.has(row)])


def _method() -> list[Cells]:
    rows = fig05_timing_model.FIGURE.table()
    widths = {row["x"]: row["y"] for row in rows if (row["panel"], row["series"]) == ("width", "no jitter")}
    gained = 1 - min(widths.values()) / widths[2]
    return [
        (
            "timelines of a parameter server, of synchronous all-reduces and of the pipeline",
            NOT_AT_HAND,
            said(fig01_schedules.FIGURE),
            "four emulated nodes at 200 Mbit/s, an MLP",
            UNKNOWN,
        ),
        (
            '"a width of two combines the best of both" (abstract)',
            "2",
            f"where times do not vary, wider pipelines gain {gained:.0%} over width 2",
            "formulas and simulated iterations",
            "yes",
        ),
        _speed(),
    ]


def _speed() -> Cells:
    rows = [row for row in pictures.SPEEDUPS.table() if (row["rate"], row["computes"]) == ("200mbit", ACCELERATOR)]
    servers, ddp = (max(_ratios(rows, "pipe-sgd-q", base)) for base in ("ps-sync", BASELINE))
    return (
        "wall-clock time (abstract)",
        '"up to 5.4x compared to conventional approaches"',
        f"Pipe-SGD with 8 bits: up to {servers:.1f}x a parameter server, up to {ddp:.1f}x DDP",
        f"{EMULATED}; {SMALL}",
        "in kind; models and clusters differ",
    )


def _ratios(rows: Iterable[Row], system: str, base: str) -> list[float]:
    """Return how many times as fast as ``base`` a system's iteration is, for each workload."""
    seconds = {key: own[0]["iteration_s"] for key, own in grouped(rows, "workload", "system").items()}
    return [seconds[workload, base] / one for (workload, name), one in seconds.items() if name == system]


def _timing_model() -> list[Cells]:
    asked = '"timing models which include network latency, bandwidth, cluster size and compute time" (abstract)'
    substituted = "formulas of this code's messages, checked on emulated clusters"
    return [(asked, NOT_AT_HAND, said(fig05_timing_model.FIGURE), substituted, UNKNOWN)]


def _convergence() -> list[Cells]:
    accuracy = "accuracy over iterations and over time"
    substituted = f"{EMULATED}; {SMALL}; no warm-up, since its length is not known"
    return [(accuracy, NOT_AT_HAND, said(pictures.CONVERGENCE), substituted, UNKNOWN), _speed()]


def _compression() -> list[Cells]:
    rows = [row for row in fig08_codecs.FIGURE.table() if row["panel"].startswith(fig08_codecs.BY_ACCURACY)]
    parts = []
    for codec in ("truncate16", "int8"):
        ends = [row["y"] for row in rows if row["variant"] == codec]
        parts.append(f"{codec} ends {min(ends):+.2f} to {max(ends):+.2f} points from fp32")
    substituted = "simulated ranks; an MLP and a convnet for the paper's models"
    return [("accuracy with 16 bits and with 8 bits", NOT_AT_HAND, "; ".join(parts), substituted, UNKNOWN), _speed()]


def _plan() -> list[Cells]:
    return [("choice of width and codec for a cluster", NOT_AT_HAND, "the plan below", "your numbers", UNKNOWN)]


THEMES: dict[str, Callable[[], list[Cells]]] = {
    "the method": _method,
    "the timing model": _timing_model,
    "convergence": _convergence,
    "compression": _compression,
    "plan your own job": _plan,
}
"""Tables by the names of the notebooks."""
