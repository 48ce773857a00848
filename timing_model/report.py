"""Answers and plans as text for a terminal."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Sequence

from timing_model.advice import advice, loading_advice, ratio, reason
from timing_model.choices import TIE, Choice
from timing_model.configurations import describe, in_program, training_arguments
from timing_model.job import Job
from timing_model.measured import Estimate
from timing_model.memory import rank_memory
from timing_model.plan import Plan
from timing_model.predict import BALANCE, CODEC, COMPUTATION, HOST, JITTER, LATENCY, LOADING, NETWORK, Answer
from timing_model.support import EXTRAPOLATED, GIVEN, INTERPOLATED, MEASURED, OUTSIDE, Support
from timing_model.units import format_bandwidth, format_bytes, format_cost, format_count, format_seconds

LEAST_NAME = 20
"""Fewest columns for the name of a configuration in a table."""
BAR = 30
"""Characters of a full bar."""
NAMED = 4
"""Number of configurations of a tie that are named."""
SHOWN = 0.01
"""Share by which lasting jitter must make an iteration longer to be mentioned."""
CHANGES = {
    COMPUTATION: "with computation twice as fast",
    NETWORK: "with a network twice as fast",
    LATENCY: "with half the latency",
    JITTER: "without jitter and slow ranks",
}
LIMIT_WORDS = {
    COMPUTATION: "the computation",
    NETWORK: "the network's bandwidth",
    HOST: "the cores, which send and receive",
    LATENCY: "latency",
    CODEC: "the codec and sums",
    JITTER: "jitter and slow ranks",
    LOADING: "the loading of batches",
    BALANCE: "several parts that take equally long",
}


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Return lines with aligned columns; those in ``right`` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def job_line(job: Job) -> str:
    """Return a line that describes the cluster and the model."""
    compute, link = job.compute, job.cluster.link
    batch = f", batch of {job.accumulated.batch} a rank" if compute.batch_size else ""
    if job.accumulation > 1 and not compute.batch_size:
        batch = f", {job.accumulation} micro-batches an iteration"
    rate = "no limit of bandwidth" if link.beta.value == 0 else f"{format_bandwidth(1 / link.beta.value)} of payload"
    rate += ","
    if job.cluster.placed:
        fastest = min(one.link.beta for one in job.cluster.placed)
        rate = f"links of {format_bandwidth(1 / link.beta.value)} to {format_bandwidth(1 / fastest)} of payload, up to"
    model = "a model" if compute.model == "given" else compute.model
    ranks = "1 rank" if job.world_size == 1 else f"{job.world_size} ranks"
    return (
        f"{model} of {format_count(compute.numel)} parameters ({format_bytes(job.nbytes)}){batch}, "
        f"on {ranks}: {rate} {_latency(link.alpha)}"
    )


def _latency(alpha: Estimate) -> str:
    """Return the latency in words; a fit cannot tell a very short one from none."""
    if alpha.value > 0 or alpha.high == 0:
        return f"{format_seconds(alpha.value)} latency"
    return f"latency of at most {format_seconds(alpha.high)}"


def answer_text(answer: Answer) -> str:
    """Return the answer as text for people."""
    iteration, job = answer.iteration, answer.job
    lines = [job_line(job), describe(job), ""]
    taken = f"{format_seconds(iteration.total)}"
    if answer.low < answer.high:
        taken += f"   (90 % between {format_seconds(answer.low)} and {format_seconds(answer.high)})"
    lines += [f"an iteration takes {taken}", ""]
    parts = [("computation", iteration.compute), ("waiting for the network", iteration.wire)]
    parts += [("waiting for codec and sums", iteration.codec), ("jitter and slow ranks", iteration.jitter)]
    parts += [("loading batches", iteration.loading)] if job.compute.loading.value else []
    parts += [("collectives inside islands", iteration.inside)] if job.islands.members > 1 else []
    rows = []
    for name, seconds in parts:
        share = seconds / iteration.total if iteration.total > 0 else 0.0
        rows.append((f"  {name}", format_seconds(seconds), f"{share:.1%}", "#" * round(BAR * share)))
    lines += [*table(rows, right=(1, 2)), ""]
    whole = "all communication" if job.local_steps == 1 else "all communication of a window"
    facts = [(f"{whole}, hidden or not", format_seconds(answer.collective.total))]
    if answer.samples_per_second is not None:
        rate = answer.samples_per_second
        facts.append(("samples a second", f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}"))
    if answer.lasting > iteration.total * (1 + SHOWN):
        facts.append(("an iteration, if slow phases of a rank last", format_seconds(answer.lasting)))
    facts.append(("scaling efficiency", f"{answer.efficiency:.1%} of {job.world_size} times one rank"))
    if answer.epoch is not None:
        facts.append(("an epoch", with_cost(job, answer.epoch)))
    if answer.total is not None:
        facts.append(("the whole job", with_cost(job, answer.total)))
    if answer.memory is not None and _counts_memory(job):
        facts.append(("memory of a rank, activations left out", format_bytes(answer.memory)))
    facts.append(("limited by", " and as much by ".join(LIMIT_WORDS[one] for one in answer.limits)))
    facts += [(words, f"{answer.gains[name]:.2f} times as fast as now") for name, words in CHANGES.items()]
    hint = loading_advice(job, iteration)
    return "\n".join([*lines, *table(facts), *([] if hint is None else [hint]), "", *support_lines(answer.support)])


def with_cost(job: Job, seconds: float) -> str:
    """Return a time, and what all ranks cost for it, if that is known."""
    cost = job.cost(seconds)
    return format_seconds(seconds) + ("" if cost is None else f", at a price of {format_cost(cost)}")


def support_lines(support: Support) -> list[str]:
    """Return lines that say how sure the answer is."""
    said = {
        GIVEN: "Based only on the numbers given; no network was measured.",
        MEASURED: "Measured: this very configuration ran.",
        INTERPOLATED: "Interpolated: within what was measured.",
        EXTRAPOLATED: "Extrapolated: beyond what was measured, so the interval may be too narrow.",
        OUTSIDE: "OUTSIDE of what was measured: the interval means nothing.",
    }
    return [said[support.kind], *[f"  - {reason}" for reason in support.reasons]]


def folded(text: str, columns: int) -> str:
    """Return the text with its sentences broken between words into lines of at most this many columns.

    Rows of a table of configurations are broken within the name; those of other tables stay as they are.
    """
    lines = list[str]()
    for is_table, block in itertools.groupby(text.splitlines(), lambda line: "  " in line.strip()):
        rows = list(block)
        lines += _fold_table(rows, columns) if is_table else [part for row in rows for part in _fold(row, columns)]
    return "\n".join(lines)


def _fold_table(rows: list[str], columns: int) -> list[str]:
    """Return the rows with names in lines so short that all fit, if these are configurations and one does not fit."""
    if "configuration  " not in rows[0] or max(map(len, rows)) <= columns:
        return rows
    mark = rows[0].index("configuration")
    found = [re.match(r"\S+(?: \S+)*", row[mark:]) for row in rows]
    end = mark + max(len(name[0]) for name in found if name)
    room = max(LEAST_NAME, columns - mark - max(len(row) - end for row in rows))
    folded_rows = []
    for row in rows:
        parts = row[mark:end].rstrip().replace(" ", "\0").replace(",\0", ", ")  # lines end between parts of a name
        first, *others = (part.replace("\0", " ") for part in _fold(parts, room))
        folded_rows += [row[:mark] + first.ljust(room) + row[end:], *(" " * (mark + 2) + other for other in others)]
    return folded_rows


def _fold(line: str, columns: int) -> list[str]:
    return textwrap.wrap(line, max(1, columns), break_long_words=False, break_on_hyphens=False) or [line]


def compared(one: Choice, best: Choice) -> str:
    """Return how much more ``one`` takes than ``best``: in percent, or as a multiple from 2 on."""
    more = ratio(one, best)
    return f"{more - 1:+.1%}" if more < 2 else f"{more:.1f} x"


def plan_text(plan: Plan, answer: Answer, top: int, others: Sequence[str] = ()) -> str:
    """Return the plan as text for people, with ``others`` to do, as ``alternatives`` has them.

    It begins with the choice next to DDP, and ends with the call that a program makes.
    """
    best = plan.best
    first, *rest = advice(plan, others)
    considered = f"{plan.considered:,} configurations searched"
    lines = [job_line(best.job), considered, ""]
    rows = [("", "configuration", "iteration", "", "why", "memory" if _counts_memory(best.job) else "")]
    for one in plan.shown(top):
        mark = "*" if one is best else ""
        slower = "" if one is best else "tie" if one in plan.tied else compared(one, best)
        memory = _memory(one.job)
        rows.append((mark, describe(one.job), format_seconds(one.iteration.total), slower, reason(one), memory))
    lines += [*table(rows, right=(2, 3, 5)), "", first]
    if plan.tied:
        named = [describe(one.job) for one in plan.tied]
        more = f"; and {len(named) - NAMED} more" if len(named) > NAMED else ""
        lines += [f"Equally fast (within {TIE:.0%}), but more complex: {'; '.join(named[:NAMED])}{more}."]
    lines += [f"Choose {describe(best.job)}: {training_arguments(best.job)}"]
    if answer.low < answer.high:
        lines += [f"An iteration will take {format_seconds(answer.low)} to {format_seconds(answer.high)} (90 %)."]
    if answer.epoch is not None and best.job.length.price is not None:
        lines += [f"An epoch will take {with_cost(best.job, answer.epoch)}."]
    if answer.total is not None:
        lines += [f"The whole job will take {with_cost(best.job, answer.total)}."]
    lines += [*rest, *others, "", *support_lines(answer.support), "", f"In a program: {in_program(best.job)}"]
    return "\n".join(lines)


def _counts_memory(job: Job) -> bool:
    """Return True if a person who asks about this job asks about memory, too."""
    return job.islands.split is not None or job.islands.memory is not None


def _memory(job: Job) -> str:
    """Return the memory of a rank in words; nothing if nobody asks, or it is not known."""
    needed = rank_memory(job) if _counts_memory(job) else None
    return "" if needed is None else format_bytes(needed)
