"""Tables of the staleness matrix that README and documentation quote."""

from __future__ import annotations

import itertools

from experiments import lateness, local_steps_accuracy, local_steps_time
from experiments.markdown import table
from experiments.results import RESULTS, Row, grouped, load
from experiments.staleness_runs import BASELINE, METHODS, WORKLOADS

TITLES = {
    "sync": "synchronous, fp32",
    "stale": "width 2, no prediction",
    "stale, warm-up": "the same, the first tenth at width 1",
    "local": "width 2, `--prediction local`",
    "eager": "**width 2** (`eager`, the default)",
    "eager, int8": "the same with int8",
    "eager, int4": "the same with int4",
    "eager, width 3": "width 3",
}
LEARNED = {"sgd": "SGD", "adamw": "AdamW", "adagrad": "Adagrad", "muon": "Muon"}
HEADLINES = {"mlp": ("MLP", "sgd"), "convnet": ("convnet", "sgd"), "transformer": ("transformer", "adamw")}
SHORT = {
    "short-mlp": "MLP",
    "short-convnet": "convnet",
    "short-resnet18": "resnet18",
    "short-transformer": "transformer (loss)",
}


def accuracies() -> str:
    """Return the cost of staleness in full trainings, and how much of it predictions remove."""
    rows = staleness()
    heads = ["test accuracy, %", *(f"{title}, {LEARNED[optimizer]}" for title, optimizer in HEADLINES.values()), "loss"]
    lines = []
    for method, title in TITLES.items():
        cells = [title]
        for workload, (_, optimizer) in HEADLINES.items():
            cells.append(with_change(rows.get((workload, optimizer, method)), by_loss=False))
        lines.append([*cells, with_change(rows.get(("transformer", "adamw", method)), by_loss=True)])
    return table(heads, lines)


def short_accuracies() -> str:
    """Return only the change, for short trainings with several optimizers."""
    rows = staleness()
    cells = [cell for cell in itertools.product(SHORT, LEARNED) if (*cell, BASELINE) in rows]
    heads = ["", *(f"{SHORT[workload]}, {LEARNED[optimizer]}" for workload, optimizer in cells)]
    lines = []
    for method in METHODS:
        if method != BASELINE:
            name = f"**{method}**" if method == "eager" else method
            lines.append([name, *(only_change(rows.get((*cell, method))) for cell in cells)])
    return table(heads, lines)


def late_layers() -> str:
    """Return what late gradients cost, and how much of each model may be late, from some layer on, at no such cost."""
    lines = []
    for workload, rows in grouped(load(RESULTS / f"{lateness.NAME}_summary.csv"), "workload").items():
        onwards = [row for row in rows if row["late"] == lateness.ONWARDS]
        # From the last layer on: a set does not count if fewer layers were no longer as good.
        as_good = list(itertools.takewhile(lambda row: row["as_good"] == "yes", reversed(onwards)))
        good = as_good[-1] if as_good else None
        lines.append(
            [
                workload,
                _cost(onwards[0]),
                "none"
                if good is None
                else f"`{good['layer']}` and all after it, {good['late_share']:.0%} of the values",
                "" if good is None else _cost(good),
            ]
        )
    return table(["", "cost if all are late", "may be late", "cost then"], lines)


def local_steps() -> str:
    """Return what local steps, weight streaming and others cost, by iterations between two exchanges of a weight."""
    rows = [
        row
        for row in load(RESULTS / f"{local_steps_accuracy.NAME}_summary.csv")
        if row["method"] != local_steps_accuracy.SYNCHRONOUS
    ]
    steps = sorted({row["local_steps"] for row in rows})
    lines = []
    for (workload, *way), own in grouped(rows, "workload", "method", "width", "codec").items():
        by_loss = WORKLOADS[workload].judged_by_loss
        name = local_steps_accuracy.label_of(*way)
        cells = {
            row["local_steps"]: "diverges" if row["diverged"] else change(row, by_loss=by_loss, digits=1) for row in own
        }
        lines.append([HEADLINES[workload][0], name, *(cells.get(one, "") for one in steps)])
    return table(["", "change from synchronous training", *(f"H {one}" for one in steps)], lines)


def local_steps_times() -> str:
    """Return the minutes to an accuracy, by accelerator and rate, with the local steps that reach it first."""
    rows = load(RESULTS / f"{local_steps_time.NAME}.csv")
    names = list(dict.fromkeys(row["contender"] for row in rows))
    tables = []
    for accelerator, own in grouped(local_steps_time.best_of(rows), "accelerator").items():
        rates = sorted({row["mbit_per_s"] for row in own})
        best = {(row["contender"], row["mbit_per_s"]): row for row in own}
        head = f"minutes, H, times as fast as DDP (interval of times); {accelerator} accelerators (all emulated)"
        lines = [[name, *(_arrival(best.get((name, rate))) for rate in rates)] for name in names]
        tables.append(table([head, *(f"{rate:g} Mbit/s" for rate in rates)], lines))
    return "\n\n".join(tables)


def _arrival(row: Row | None) -> str:
    if row is None:
        return f"not within {max(local_steps_time.LENGTHS):g} times the length"
    steps = f", H {row['local_steps']}" if row["local_steps"] > 1 else ""
    faster = f"{row['times_as_fast_as_ddp']:.1f}x ({row['low']:.1f} to {row['high']:.1f})"
    return f"{row['seconds_to_accuracy'] / 60:.1f}{steps}, {faster}"


def local_steps_hidden() -> str:
    """Return the share of pipesgd's communication that was hidden, and in brackets the one that was predicted."""
    rows = [
        row
        for row in load(RESULTS / f"{local_steps_time.NAME}.csv")
        if row["contender"].startswith(local_steps_time.OURS)
    ]
    steps = sorted({row["local_steps"] for row in rows})
    lines = []
    for (accelerator, rate, name), own in grouped(rows, "accelerator", "mbit_per_s", "contender").items():
        planned = own[0]["planned_local_steps"]
        cells = {row["local_steps"]: f"{row['hidden']:.0%} ({row['predicted_hidden']:.0%})" for row in own}
        of_planner = "" if planned is None else f"{planned}"
        lines.append([f"{accelerator}, {rate:g} Mbit/s, {name}", of_planner, *(cells.get(one, "") for one in steps)])
    return table(["share hidden (predicted)", "the planner's H", *(f"H {one}" for one in steps)], lines)


def _cost(row: Row) -> str:
    cost = lateness.cost_of(row)
    if cost is None:
        return "diverges"
    return f"{cost:+.1f} %" if lateness.WORKLOADS[row["workload"]].judged_by_loss else f"{cost:+.2f} points"


def staleness() -> dict[tuple[str, str, str], Row]:
    """Return the rows of the summary by workload, optimizer and method."""
    summary = load(RESULTS / "staleness_summary.csv")
    return {(row["workload"], row["optimizer"], row["method"]): row for row in summary}


def with_change(row: Row | None, *, by_loss: bool) -> str:
    """Return a mean over seeds, with its change from synchronous training in brackets; "" if it was not tried."""
    if row is None:
        return ""
    mean = row["test_loss_mean"] if by_loss else row["accuracy_mean"]
    if mean is None:
        return "diverges"
    value = f"{mean:.3f}" if by_loss else f"{100 * mean:.2f}"
    return value if row["method"] == BASELINE else f"{value} ({change(row, by_loss=by_loss, digits=2)})"


def only_change(row: Row | None) -> str:
    """Return the change in the measure that the workload is judged by; "" if it was not tried."""
    if row is None:
        return ""
    by_loss = WORKLOADS[row["workload"]].judged_by_loss
    return "diverges" if row["accuracy_mean"] is None else change(row, by_loss=by_loss, digits=1)


def change(row: Row, *, by_loss: bool, digits: int) -> str:
    """Return the change in % of the loss, with this many ``digits``, or in points of accuracy."""
    return f"{row['loss_to_sync_percent']:+.{digits}f} %" if by_loss else f"{row['accuracy_to_sync_points']:+.2f}"
