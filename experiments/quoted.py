"""Quotes for README and documentation: tables and sentences from result files, equations from the code.

Each function returns Markdown; its arguments are the words after its name in the page (see quotes.py).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from statistics import mean

from experiments import figures
from experiments.kill_noticed import Noticed
from experiments.markdown import table
from experiments.quoted_loops import LOOPS
from experiments.quoted_reliability import RELIABILITY
from experiments.quoted_staleness import (
    accuracies,
    late_layers,
    local_steps,
    local_steps_hidden,
    local_steps_times,
    short_accuracies,
)
from experiments.quoted_systems import SYSTEMS
from experiments.results import RESULTS, Row, command_of, grouped, load
from experiments.validate_timing_model import accuracy
from experiments.validation_runs import EXTRAPOLATED, HELD_OUT, SHARED

SLOW = ("100mbit", "200mbit")
PROGRESS = re.compile(r"iteration \d+/|calibrating: |.* s left$")
"""Pattern of a line that shows progress."""


def made_by(*names: str) -> str:
    """Return the command, commit and machine that made each of these results, from its manifest."""
    lines = []
    for name in names:
        manifest = figures.manifest(name)
        machine, day = manifest["machine"], manifest["started"][:10]
        commits = manifest.get("runs_made_with") or manifest.get("made_with") or []
        lines.append(
            f"- `{name}`: `{command_of(manifest)}`, at commit `{manifest['git']['commit'][:7]}`"
            f"{f' from runs at {len(commits)} commits' if len(commits) > 1 else ''}, {day}, "
            f"on {machine['cores']} cores ({machine['cpu']}){' and a GPU' if 'gpu' in machine else ''}"
        )
    return "\n".join(["Made by (results and manifests are in `experiments/results/`):", "", *lines])


def codec_accuracies() -> str:
    """Return the points of accuracy that codecs cost in synchronous training, and the bits that they send."""
    lines = [
        [codec, f"{rows[0]['bits_per_value']:.1f}", *(f"{row['difference_to_fp32_points']:+.2f}" for row in rows)]
        for codec, rows in grouped(load(RESULTS / "codec_accuracy.csv"), "codec").items()
    ]
    return table(["codec", "bits a value", "points, MLP", "points, convnet"], lines)


def predictions() -> str:
    """Return how near the timing model came in each setting."""
    rows = load(RESULTS / "validate_timing_model.csv")
    lines = []
    for kind in (HELD_OUT, EXTRAPOLATED, SHARED):
        of_kind = [row for row in rows if row["kind"] == kind and row["counts"]]
        if not of_kind:
            continue
        names = dict.fromkeys(row["setting"] for row in of_kind)
        lines += [[name, *predicted([row for row in of_kind if row["setting"] == name])] for name in names]
        lines.append([f"**all {kind}**", *predicted(of_kind)])
        if kind == HELD_OUT:
            for name, words in (("the ring", "ring"), ("torch's own all-reduce", "native")):
                if own := [row for row in of_kind if row["words"].endswith(f"--all-reduce {words}")]:
                    lines.append([f"of these, {name}", *predicted(own)])
    heads = ["", "cells", "mean error, %", "95 % within, %", "two halves apart, %", "in the 90 % interval, %"]
    return table(heads, lines)


def chosen_by_auto() -> str:
    """Return what ``--width auto`` chose in each setting, how far its report was from the truth, and the regret."""
    rows = load(RESULTS / "validate_timing_model_auto.csv")
    lines = [
        [
            row["setting"],
            ", ".join(row["chosen"].split()[1::2]),
            f"{1e3 * row['measured_s']:.0f}",
            f"{100 * row['predicted_error']:+.1f}",
            f"{100 * row['reported_error']:+.1f}",
            f"{100 * row['regret']:+.1f}",
            f"{100 * row['regret_of_the_prediction']:+.1f}",
            f"{row['calibration_s'] + row['audition_s']:.1f}",
        ]
        for row in rows
    ]
    heads = ["", "chosen", "iteration, ms", "predicted, % off", "reported, % off", "regret, %"]
    return table([*heads, "regret of the prediction, %", "calibration and audition, s"], lines)


def third_width() -> str:
    """Return the predicted and the measured gain of width 3 over width 2 with the same codec and all-reduce."""
    cells = {(row["setting"], row["words"]): row for row in load(RESULTS / "validate_timing_model.csv")}
    pairs = [
        (cells[setting, words.replace("--width 3", "--width 2")], row)
        for (setting, words), row in cells.items()
        if row["kind"] == HELD_OUT and row["counts"] and "--width 3" in words
    ]
    gains = [
        tuple(100 * (narrow[name] / wide[name] - 1) for name in ("predicted_s", "measured_s")) for narrow, wide in pairs
    ]
    lines = []
    for title, least in (("all pairs", -100.0), ("predicted to gain more than 3 %", 3.0)):
        own = [pair for pair in gains if pair[0] > least]
        found = sum(measured > 3 for _, measured in own)
        means = [f"{mean(side):.1f}" for side in zip(*own, strict=True)] or ["-", "-"]
        lines.append([title, str(len(own)), *means, str(found)])
    heads = ["width 3 over width 2", "pairs", "predicted gain, %", "measured gain, %", "that gained more than 3 %"]
    return table(heads, lines)


def local_steps_predictions() -> str:
    """Return how near the timing model came with local steps, and with a rate limit, in each setting."""
    rows = load(RESULTS / "validate_local_steps.csv")
    lines = []
    for setting, own in grouped(rows, "setting").items():
        for name, in_windows in (("every iteration", False), ("local steps", True)):
            cells = [row for row in own if (row["local_steps"] > 1) == in_windows]
            errors = [100 * abs(row["error"]) for row in cells]
            inside = mean(row["low_s"] <= row["measured_s"] <= row["high_s"] for row in cells)
            figures_of = (f"{mean(errors):.1f}", f"{max(errors):.1f}", f"{100 * inside:.0f}")
            lines.append([f"{setting}: {name}", str(len(cells)), *figures_of])
    return table(["", "cells", "mean error, %", "largest error, %", "in the 90 % interval, %"], lines)


def predicted(rows: Sequence[Row]) -> list[str]:
    """Return the cells of one line of ``predictions``."""
    found = accuracy(rows)
    shares = [f"{100 * found[name]:.1f}" for name in ("mean_error", "p95_error", "repeatability")]
    return [str(len(rows)), *shares, f"{100 * found['coverage']:.0f}"]


def other_figures() -> str:
    """Return a table of all other figures, one line each."""
    pipelined = [
        row["ratio_to_ddp_median"]
        for row in load(RESULTS / "bench_pipelined.csv")
        if row["contender"].startswith("pipelined width 2")
    ]
    kills, testbeds = load(RESULTS / "kill_anywhere.csv"), load(RESULTS / "kill_testbed.csv")
    loading, noticed = load(RESULTS / "bench_loading.csv"), load(RESULTS / "kill_noticed.csv")
    same = sum(row["identical"] is True for row in kills)
    clean = sum(all(int(row[name]) == 0 for name in row if name.endswith("_left")) for row in testbeds)
    found = {
        "encode, decode or hop / a copy of the same float32 values in memory: bf16, int8, int4, ternary": (
            codec_speed("memory"),
            "bench_codecs",
        ),
        "the same in the second-level cache": (codec_speed("cache"), "bench_codecs"),
        "what the wire allows / our ring with int8 and int4, 1 to 40 MB, 4 nodes, 100 and 200 Mbit/s": (
            wire_share(),
            "bench_all_reduce",
        ),
        "our ring / torch's all-reduce, 1 to 40 MB, 3 to 5 nodes, 200 Mbit/s": (
            ring("bench_ring_200mbit.csv", 1_000_000),
            "bench_ring --all --rate 200mbit",
        ),
        "the same, 1 Gbit/s": (ring("bench_ring_1gbit.csv", 1_000_000), "bench_ring --all --rate 1gbit"),
        "the same on one machine, over loopback, 1 to 100 MiB, 2 to 4 ranks": (
            ring("bench_ring.csv", 1 << 20),
            "bench_ring --all",
        ),
        "width 2 / torch's DistributedDataParallel over loopback, 4 ranks, four workloads": (
            spread(pipelined),
            "bench_pipelined",
        ),
        "32 JPEGs a rank loaded by the rank itself / by one worker, 2 ranks on emulated accelerators of 60 ms": (
            f"{loading[1]['times_as_fast']:.2f}",
            "bench_loading",
        ),
        "the same / in memory already": (f"{loading[-1]['times_as_fast']:.2f}", "bench_loading"),
        "runs that lost a rank or all ranks at a random moment, and ended in the very same weights and losses": (
            f"{same} of {len(kills)}",
            "kill_anywhere",
        ),
        "kills of a rank at a random moment that all other ranks named within 3 s, with the default `--timeout`": (
            f"{sum(Noticed(**row).is_good for row in noticed)} of {len(noticed)}",
            "kill_noticed",
        ),
        "testbeds killed in the middle of a job that left nothing behind": (
            f"{clean} of {len(testbeds)}",
            "kill_testbed",
        ),
    }
    lines = [[what, figure, f"`experiments.{command}`"] for what, (figure, command) in found.items()]
    return table(["what", "figure", "made by"], lines)


def equation(name: str) -> str:
    """Return the equations in the docstring of a function of the timing model, "module.function"."""
    owner = importlib.import_module(f"timing_model.{name.partition('.')[0]}")
    for part in name.split(".")[1:]:
        owner = getattr(owner, part)
    blocks = re.findall(r"^\.\. math::(.*?)(?=^\S|\Z)", inspect.getdoc(owner) or "", re.DOTALL | re.MULTILINE)
    assert blocks, f"{name} has no equation"
    rows = [row for block in blocks for row in re.split(r",?\s*\\qquad\s*|\n\s*(?=\+ )", block.strip())]
    return "\n\n".join(f"$$\n{row}\n$$" for row in rows)


def output(step: str, first: str = "") -> str:
    """Return the output of a step of the tutorial without progress, from the line that begins with ``first``."""
    row = next(row for row in load(RESULTS / "tutorial.json") if row["step"] == step)
    lines = [line for line in row["output"] if not PROGRESS.match(line)]
    begins = [number for number, line in enumerate(lines) if line.lstrip().startswith(first)]
    assert begins, f"step {step} printed no line that begins with {first}"
    return "\n".join(["```text", *lines[begins[0] :], "```"])


QUOTES: dict[str, Callable[..., str]] = {
    quote.__name__: quote
    for quote in (
        made_by,
        codec_accuracies,
        accuracies,
        short_accuracies,
        late_layers,
        local_steps,
        local_steps_hidden,
        local_steps_times,
        other_figures,
        predictions,
        local_steps_predictions,
        chosen_by_auto,
        third_width,
        equation,
        output,
        *LOOPS,
        *RELIABILITY,
        *SYSTEMS,
    )
}


def codec_speed(where: str) -> str:
    """Return the ratios of the targeted operations to a copy."""
    rows = [row for row in load(RESULTS / "bench_codecs.csv") if row["size"] == where]
    ours = [row for row in rows if row["contender"] in ("bf16", "int8", "int4", "ternary")]
    hops = [row["ratio_median"] for row in ours if row["operation"] in ("encode", "decode", "hop")]
    assert len(hops) == 4 * 3
    return spread(hops)


def wire_share() -> str:
    """Return the ring's efficiency with a codec, relative to what the wire allows."""
    rows = [row for rate in SLOW for row in load(RESULTS / f"bench_all_reduce_{rate}.csv")]
    ours = [row for row in rows if row["algorithm"] == "ring" and row["codec"] in ("int8", "int4")]
    assert {row["nbytes"] for row in ours} >= {1_000_000, 40_000_000}
    return spread([row["efficiency"] for row in ours if row["nbytes"] >= 1_000_000])


def ring(name: str, from_nbytes: int) -> str:
    """Return the ratios of our ring's time to torch's."""
    return spread([row["ratio_median"] for row in load(RESULTS / name) if row["nbytes"] >= from_nbytes])


def spread(values: Sequence[float]) -> str:
    """Return the least and the largest value as text."""
    return f"{min(values):.2f} to {max(values):.2f}"
