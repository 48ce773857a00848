"""Summary of measured cells for readers: a row for every contender, its ratios and limits, a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from experiments import command
from experiments.cells import Cell
from experiments.contenders import Contender
from experiments.limits import SLOW_LINK, Cluster, ring_limit, server_time, textbook_server_time
from experiments.paired import Ratio, interquartile_range, median, paired_ratio, ratio_columns
from experiments.results import Row
from experiments.style import VERMILLION, method_styles
from timing_model.collective_time import ring_all_reduce_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGETS_SLOW_LINK = {"fp32": 1.06, "int8": 1.12, "int4": 1.25, "ternary": 1.25}
TARGETS_LINK = {"fp32": 1.15}
"""Largest ratio to its limit that an iteration of width 2 with a codec may take, over links up to ``SLOW_LINK`` and
over faster links, where the two cores that serve all ranks count too."""


def summarize(contenders: Sequence[Contender], cells: Sequence[Cell], cluster: Cluster, nbytes: int) -> list[Row]:
    """Return a row for every contender; ``nbytes`` is the size of its gradient, uncompressed.

    Ratios are to the cells of the same round. They leave out rounds in which one of the two failed, and the table
    leaves out ratios to a contender that is missing. The limit of an iteration is the time of "local" or of the
    wire, whichever is longer. The wire's time is that of a ring, uncompressed or, for a contender of ours with a
    codec, reduced in proportion to the bytes that it sends. Others that send less may be below the limit.
    """
    of = {one.name: {cell.index: cell for cell in cells if cell.contender == one.name} for one in contenders}
    times = {name: {i: cell.iteration_s for i, cell in some.items() if cell.iteration_s} for name, some in of.items()}
    rows = []
    for one in contenders:
        row: Row = {"contender": one.name, "method": one.method, **_figures(list(of[one.name].values()))}
        if "local" in times:
            row |= _ratio("local", times[one.name], times["local"])
        if "ddp" in times:
            row |= _ratio("ddp", times[one.name], times["ddp"])
        wire = row["wire_limit_s"] = _wire_limit(one, row["wire_bytes"], cluster, nbytes)
        if "local" in times:
            limit = {index: max(seconds, wire) for index, seconds in times["local"].items()}
            row |= {"limit_median_s": median(list(limit.values())) if limit else None}
            row |= _ratio("limit", times[one.name], limit)
            row |= _verdict(one, cluster, row["ratio_to_limit_median"])
        row |= _server_times(one, cluster, nbytes)
        row["failures"] = "; ".join(f"round {i}: {cell.failure}" for i, cell in of[one.name].items() if cell.failure)
        rows.append(row)
    return rows


def _wire_limit(contender: Contender, wire_bytes: float | None, cluster: Cluster, nbytes: int) -> float:
    """Return the least seconds that the wire takes, for an uncompressed ring or for the bytes that our codec sends."""
    uncompressed = ring_limit(cluster, nbytes)
    if contender.codec == "fp32" or wire_bytes is None:
        return uncompressed
    return uncompressed * wire_bytes / ring_all_reduce_bytes(nbytes, cluster.ranks)


def _figures(cells: Sequence[Cell]) -> Row:
    """Summarize the rounds that did not fail; the figures are None if all did."""
    good = [cell for cell in cells if cell.iteration_s is not None]
    iterations = [seconds for cell in good for seconds in cell.iterations_s]

    def over(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    return {
        "rounds": len(good),
        "rounds_failed": len(cells) - len(good),
        "iteration_median_s": over([cell.iteration_s for cell in good]),
        "iteration_iqr_s": interquartile_range(iterations) if iterations else None,
        "iteration_mean_s": float(np.mean(iterations)) if iterations else None,
        **{
            f"{name}_median_s": over([cell.medians_s[name] for cell in good])
            for name in ("compute", "update", "exposed", "communication")
        },
        "wire_bytes": over([cell.wire_bytes for cell in good]),
        "train_loss": over([cell.loss for cell in good]),
    }


def _ratio(name: str, seconds: dict[int, float], baseline: dict[int, float]) -> Row:
    both = sorted(seconds.keys() & baseline.keys())
    ratio = paired_ratio([seconds[i] for i in both], [baseline[i] for i in both]) if both else None
    return ratio_columns(f"ratio_to_{name}", ratio)


def _verdict(contender: Contender, cluster: Cluster, ratio: float | None) -> Row:
    pipeline = contender.config.pipeline
    target = None
    if pipeline.strategy == "pipelined" and pipeline.width == 2 and cluster.uniform:
        targets = TARGETS_SLOW_LINK if cluster.link.rate <= SLOW_LINK else TARGETS_LINK
        target = targets.get(contender.codec)
    return {
        "target_ratio_to_limit": target,
        "target_met": None if target is None or ratio is None else ratio <= target,
    }


def _server_times(contender: Contender, cluster: Cluster, nbytes: int) -> Row:
    """Return the formulas' times for the communication of a synchronous parameter server; None for others."""
    pipeline = contender.config.pipeline
    synchronous = pipeline.strategy == "ps-sync" or pipeline.staleness_bound == 0
    times: Row = {"server_time_s": None, "textbook_server_time_s": None}
    if synchronous:
        colocated = pipeline.server_placement == "colocated"
        times["server_time_s"] = server_time(cluster, nbytes, servers=pipeline.servers, colocated=colocated)
        times["textbook_server_time_s"] = textbook_server_time(cluster, nbytes, servers=pipeline.servers)
    return times


def against_servers(rows: Sequence[Row], cells: Sequence[Cell]) -> list[Row]:
    """Compare every synchronous parameter server with every width 2: the measured ratio, and that of the formulas.

    The formulas give (c + m_server) / max(c, m_ring), where c is the measured iteration of "local".
    """
    times: dict[str, dict[int, float]] = {}
    for cell in cells:
        if cell.iteration_s is not None:
            times.setdefault(cell.contender, {})[cell.index] = cell.iteration_s
    local = times.get("local")
    found = []
    for server in (row for row in rows if row["server_time_s"] is not None):
        for other in (row for row in rows if row["method"] == "width 2"):
            ratio = _ratio("width_2", times.get(server["contender"], {}), times.get(other["contender"], {}))
            found.append({"server": server["contender"], "width_2": other["contender"], **ratio})
            if local:
                alone = median(list(local.values()))
                found[-1]["formula"] = (alone + server["server_time_s"]) / max(alone, server["wire_limit_s"])
    return found


def plot(rows: Sequence[Row], axes: Axes, title: str) -> Axes:
    """Plot a bar for every contender: computation and update of rank 0, then its wait; a dot marks the slowest rank."""
    styles = method_styles([row["method"] for row in rows])
    places = range(len(rows))
    known = [(place, row) for place, row in enumerate(rows) if row["iteration_median_s"] is not None]
    colours = [styles[row["method"]]["color"] for _, row in known]
    y = [place for place, _ in known]
    computed = [1e3 * (row["compute_median_s"] + row["update_median_s"]) for _, row in known]
    exposed = [1e3 * row["exposed_median_s"] for _, row in known]
    medians = [1e3 * row["iteration_median_s"] for _, row in known]
    spread = [1e3 * row["iteration_iqr_s"] / 2 for _, row in known]
    axes.barh(y, computed, color=colours, label="computation and update")
    axes.barh(y, exposed, left=computed, color=colours, alpha=0.4, hatch="//", label="exposed communication")
    axes.errorbar(
        medians, y, xerr=spread, fmt="o", ms=4, color="black", capsize=3, label="iteration, slowest rank; IQR"
    )
    write = partial(axes.annotate, xytext=(6, 0), textcoords="offset points", va="center")
    for (place, row), time, half in zip(known, medians, spread, strict=True):
        text = _number(time) + (f", {row['rounds_failed']} failed" if row["rounds_failed"] else "")
        write(text, (time + half, place))
    for place in set(places) - set(y):
        write("failed", (0, place), color=VERMILLION)
    limits = [row.get("limit_median_s") or row["wire_limit_s"] for row in rows]
    what = "the longer of local and the wire" if rows[0].get("limit_median_s") else "the wire"
    axes.plot(
        [1e3 * limit for limit in limits for _ in range(3)],
        [y for place in places for y in (place - 0.45, place + 0.45, float("nan"))],
        *("k--",),
        linewidth=1,
        label=f"limit: {what}",
    )
    limit = max(limits)
    axes.set_yticks(places, [row["contender"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max([1e3 * limit, *(m + s for m, s in zip(medians, spread, strict=True))]))
    axes.set(title=title, xlabel="time of an iteration, median (ms)")
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return axes


def show(rows: Sequence[Row], title: str) -> None:
    """Print the rows as a table for people. A ratio is shown as its median and its interval over the rounds."""
    texts = []
    for row in rows:
        text = {
            "contender": row["contender"],
            "ms": _ms(row["iteration_median_s"]) or "failed",
            "IQR": _ms(row["iteration_iqr_s"]),
            "exposed": _ms(row["exposed_median_s"]),
            "MB": "" if row["wire_bytes"] is None else f"{row['wire_bytes'] / 1e6:.2f}",
        }
        for name, digits in (("local", 2), ("ddp", 2), ("limit", 3)):
            if f"ratio_to_{name}_median" in row:
                text[f"/ {name}"] = _interval(row, name, digits)
        if any(other.get("target_ratio_to_limit") for other in rows):
            text["target"] = {None: "", True: "met", False: "MISSED"}[row["target_met"]]
        texts.append(text)
    command.show(title, texts)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else _number(1e3 * seconds)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _interval(row: Row, name: str, digits: int) -> str:
    parts = [row[f"ratio_to_{name}_{field}"] for field in ("median", "low", "high")]
    if parts[0] is None:
        return ""
    ratio = Ratio(*parts)
    digits = digits if ratio.median < 10 else 1
    return f"{ratio.median:.{digits}f} {ratio.low:.{digits}f}-{ratio.high:.{digits}f}"


def notes(rows: Sequence[Row], cells: Sequence[Cell], cluster: Cluster) -> list[str]:
    """Return what the table leaves out, a line each: limits, targets, formulas, failures."""
    lines = []
    for wire, limit in dict.fromkeys((row["wire_limit_s"], row.get("limit_median_s")) for row in rows):
        names = ", ".join(row["contender"] for row in rows if row["wire_limit_s"] == wire)
        lines.append(
            f"wire limit, headers counted: {_ms(wire)} ms"
            + ("" if limit is None else f"; limit, the longer of it and local: {_ms(limit)} ms")
            + f" ({names})"
        )
    lines += [
        f"target: {row['contender']} at most {row['target_ratio_to_limit']:.2f} of its limit at {cluster.describe()}"
        for row in rows
        if row.get("target_ratio_to_limit")
    ]
    for server in rows:
        if server["server_time_s"] is None or server["exposed_median_s"] is None:
            continue
        lines.append(
            f"{server['contender']}: {_ms(server['iteration_median_s'])} ms, of which rank 0 waited "
            f"{_ms(server['exposed_median_s'])}; all gradients, then all weights, take {_ms(server['server_time_s'])} "
            f"through the busiest NIC; timing.md's 2 p n beta, with servers apart from p workers: "
            f"{_ms(server['textbook_server_time_s'])}"
        )
    for pair in against_servers(rows, cells):
        if pair["ratio_to_width_2_median"] is not None:
            formula = f"; formulas: {pair['formula']:.2f}" if "formula" in pair else ""
            names = f"{pair['server']} / {pair['width_2']}"
            lines.append(f"{names}: {_interval(pair, 'width_2', 2)}{formula}")
    lines += [f"{other['contender']} failed, {other['failures']}" for other in rows if other["failures"]]
    return lines
