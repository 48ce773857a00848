"""Quotes of what was timed on emulated links loop by loop, next to DDP and HSDP, and of what islands send and learn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean

from experiments import figures, local_steps_accuracy
from experiments.command import text_of
from experiments.markdown import table
from experiments.results import RESULTS, Row, grouped, load


def timed(name: str) -> str:
    """Return tables of the iterations of loops that were timed next to DDP (``experiments.loops_on_links``)."""
    heads = ["ms an iteration", "times as fast as DDP (interval)"]
    return _by_title(name, heads, lambda row: [row["contender"], f"{1e3 * row['median_s']:.0f}", _next_to_ddp(row)])


def _by_title(name: str, heads: Sequence[str], cells: Callable[[Row], list[str]]) -> str:
    """Return a table for every title of a result, with these ``cells`` for a row."""
    tables = grouped(load(RESULTS / f"{name}.csv"), "title")
    return "\n\n".join(table([title, *heads], map(cells, rows)) for title, rows in tables.items())


def _next_to_ddp(row: Row) -> str:
    return "{times_as_fast_as_ddp:.2f} ({low:.2f} to {high:.2f})".format(**row)


def island_bytes() -> str:
    """Return tables of the bytes of an iteration inside and between islands, and of the time next to HSDP's."""

    def cells(row: Row) -> list[str]:
        return [
            row["contender"],
            f"{1e3 * row['median_s']:.0f}",
            "{times_as_fast_as_hsdp:.2f} ({hsdp_low:.2f} to {hsdp_high:.2f})".format(**row),
            *(
                text_of(row, f"{name}_bytes", ",.0f", missing="")
                for name in ("inside_payload", "between_payload", "announced")
            ),
        ]

    heads = ["ms an iteration", "times as fast as HSDP (interval)", "bytes inside", "between", "announced"]
    return _by_title("bench_islands", heads, cells)


def island_accuracies() -> str:
    """Return a table of the accuracy on islands next to HSDP's: means over seeds, and the extremes of differences."""
    lines = [
        [
            f"{row['workload']}, {row['contender']}",
            f"{100 * row['accuracy_mean']:.2f}",
            f"{row['accuracy_to_hsdp_points']:+.2f} ({row['points_least']:+.2f} to {row['points_most']:+.2f})",
            f"{row['test_loss_mean']:.4f}",
        ]
        for row in figures.manifest("islands_accuracy")["summary"]
    ]
    return table(["", "test accuracy, %", "points above HSDP (extremes of seeds)", "test loss"], lines)


def weird_trick() -> str:
    """Return a table of the bytes and the accuracy of every plan of "One weird trick": means, and extremes of seeds."""
    rows = grouped(load(RESULTS / "one_weird_trick.csv"), "plan")
    data = [row["test_accuracy"] for row in rows["data"]]
    lines = []
    for plan, of_plan in rows.items():
        points = [100 * (row["test_accuracy"] - one) for row, one in zip(of_plan, data, strict=True)]
        lines.append(
            [
                f"`{plan}`",
                *(f"{mean(row[f'{what}bytes'] for row in of_plan) / 1e6:.1f}" for what in ("passed_", "gradient_", "")),
                f"{100 * mean(row['test_accuracy'] for row in of_plan):.2f}",
                "" if plan == "data" else f"{mean(points):+.2f} ({min(points):+.2f} to {max(points):+.2f})",
            ]
        )
    heads = ["MB passed", "MB of gradients", "MB in all", "test accuracy, %", "points above `data` (extremes of seeds)"]
    return table(["plan", *heads], lines)


def judged(name: str) -> str:
    """Return a table of the ratios of a result that have a target, with the heads of its manifest, if there are any."""
    targets = figures.manifest(name)["targets"]
    several = all("verdict" not in one for one in targets.values())
    lines = [
        [f"{head}: {ratio}" if head else ratio, _interval(one), str(one["target"]), _word(one)]
        for head, of_head in (targets if several else {"": targets}).items()
        for ratio, one in of_head.items()
    ]
    return table(["ratio", "found (interval)", "target", "open: only the interval reaches it"], lines)


def _word(one: Row) -> str:
    """Return the verdict; where only the interval reaches the target, and the median does not, it is "open"."""
    side, bound = one["target"][: len("at least")].strip(), one["target"].split()[-1]
    outside = {"at most": one["median"] > float(bound), "at least": one["median"] < float(bound)}.get(side, False)
    return "open" if one["verdict"] == "met" and outside else one["verdict"]


def _interval(one: Row) -> str:
    return f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def exchanged() -> str:
    """Return tables of what of gradients is exchanged: the bytes, the time, and what was predicted before."""

    def cells(row: Row) -> list[str]:
        text, told = partial(text_of, row, missing=""), row["predicted_s"]
        return [
            row["contender"],
            text("wire_bytes", ".2f", 1e-6),
            text("median_s", ".0f", 1e3),
            text("predicted_s", ".0f", 1e3),
            "" if told is None else f"{100 * (told / row['median_s'] - 1):+.1f}",
            _next_to_ddp(row),
        ]

    heads = ["MB sent by a rank", "ms an iteration", "predicted", "off by, %", "times as fast as DDP (interval)"]
    return _by_title("reduces", heads, cells)


def link_shared() -> str:
    """Return a table of training next to another program's download: both programs' speed."""
    lines = [
        [
            row["contender"],
            f"{1e3 * row['alone_s']:.0f}",
            f"{1e3 * row['median_s']:.0f}",
            f"{8e-6 * row['other_rate']:.0f}",
        ]
        for row in load(RESULTS / "shared_link.csv")
    ]
    heads = ["", "ms an iteration, alone", "next to the download", "Mbit/s of the download"]
    return table(heads, lines)


def hooks() -> str:
    """Return a table of iterations with and without the hooks of buckets."""
    lines = []
    for row in load(RESULTS / "bench_hooks.csv"):
        ratio = ""
        if row["against"] is not None:
            ratio = f"{row['ratio_median']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f}) of {row['against']}"
        lines.append([row["workload"], row["contender"], f"{1e3 * row['median_s']:.1f}", ratio])
    return table(["", "", "ms an iteration", "ratio (interval)"], lines)


def next_to_torchft() -> str:
    """Return a sentence about iterations with accelerators: without a network, ours, torchft's and DDP's."""
    rows = {row["contender"]: f"{1e3 * row['median_s']:.0f}" for row in load(RESULTS / "bench_torchft.csv")}
    cost = {row["workload"]: row for row in _whole_windows(4)}
    points = " and ".join(f"{-cost[one]['accuracy_to_sync_points']:.1f}" for one in ("mlp", "convnet"))
    return (
        f"On emulated accelerators (75 ms an iteration, four nodes at 200 Mbit/s), an iteration takes "
        f"{rows['no communication']} ms without a network, {rows['pipesgd, int4, H 1']} ms with pipesgd and int4, "
        f"{rows['pipesgd, int4, H 4']} ms if pipesgd exchanges every fourth iteration, and {rows['DDP']} ms with DDP. "
        f"Every fourth iteration costs accuracy, {points} points in two trainings of images and "
        f"{cost['transformer']['loss_to_sync_percent']:.0f} % of a transformer's loss. "
        f"torchft's DiLoCo takes {rows['torchft DiLoCo, H 8, delay 4']} ms: it has no codec here, exchanges every "
        "eighth iteration, and waits for the result four iterations later; its accuracy was not measured next to it."
    )


def _whole_windows(steps: int) -> list[Row]:
    """Return the rows on the accuracy of whole windows of local steps at width 2 with int4."""
    way = {"method": local_steps_accuracy.LOCAL_STEPS, "local_steps": steps, "width": 2, "codec": "int4"}
    rows = load(RESULTS / f"{local_steps_accuracy.NAME}_summary.csv")
    return [row for row in rows if way.items() <= row.items()]


def on_a_gpu() -> str:
    """Return sentences about the speed of width 2 with int4 where ranks share a GPU, and about what makes it."""
    ratios, share = [], ""
    for title, rows in grouped(load(RESULTS / "bench_gpu.csv"), "title").items():
        [rate] = re.findall(r"nodes at (.*) \(", title)
        seconds = {row["contender"]: row["median_s"] for row in rows}
        times = {name: f"{seconds['DDP'] / one:.1f}x" for name, one in seconds.items()}
        over_fp16 = seconds["DDP, fp16"] / seconds["width 2, int4"]
        ratios.append(f"{times['width 2, int4']} as fast as DDP's at {rate} ({over_fp16:.1f}x)")
        if rate == "1 Gbit/s":
            share = (
                f"at {rate}, width 2 without a codec is {times['width 2, fp32']} as fast as DDP, and int4 at width 1 "
                f"with buckets, where no gradient is late, {times['width 1, int4, buckets']}"
            )
    return (
        "Where the ranks compute on a GPU (ResNet-18, 128 samples a rank; four emulated nodes share an H100, so DDP "
        f"runs on gloo, not nccl), an iteration with int4 is {', '.join(ratios[:-1])} and {ratios[-1]}, in brackets "
        "next to DDP with its fp16 hook. DDP's times include its broadcast of the model's buffers. Most of the gain is "
        f"the codec's: {share}."
    )


LOOPS = (
    timed,
    island_bytes,
    island_accuracies,
    weird_trick,
    judged,
    exchanged,
    link_shared,
    hooks,
    next_to_torchft,
    on_a_gpu,
)
