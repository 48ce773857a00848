"""A plan in words: what to do, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

from timing_model.choices import TIE, Choice
from timing_model.configurations import describe, training_arguments
from timing_model.costs import HIDDEN, workers_that_hide
from timing_model.iteration import IterationTime
from timing_model.job import Job
from timing_model.measured import UNCOMPRESSED
from timing_model.plan import Plan
from timing_model.units import format_bytes_up, format_seconds

NOTHING = 0.0005
"""Share that people would read as 0.0 %."""
HARDLY = 0.005
"""Difference of a ratio from 1 that two decimals hide."""
MANY = 100
"""Speedup from which on decimals say nothing."""


def reason(choice: Choice) -> str:
    """Return, in words, what the configuration waits for."""
    iteration = choice.iteration
    if iteration.exposed <= HIDDEN * iteration.total:
        return "computation hides all"
    parts = {"network": iteration.wire, "codec": iteration.codec, "slowest rank": iteration.jitter}
    parts |= {"batch": iteration.loading, "island": iteration.inside}
    worst = max(parts, key=lambda name: parts[name])
    return f"waits {format_seconds(parts[worst])}: {worst}"


def advice(plan: Plan, others: Sequence[str] = ()) -> list[str]:
    """Return sentences on what a person should know about a plan, above ``others``, as ``alternatives`` has them.

    The first one is about DDP. It says that this method will not help only if nothing that follows does.
    """
    loading = _loading(plan)
    helpless = not (loading or others or waits(plan.best.iteration)) and _is_no_faster_than_ddp(plan)
    first, late = _next_to_ddp(plan, helpless=helpless), _pipelining(plan, helpless=helpless)
    sentences = (first, *late, _wider(plan), _codec(plan), _servers(plan), *_islands(plan), loading)
    return [one for one in sentences if one]


def waits(iteration: IterationTime) -> bool:
    """Return True if the computation waits for communication."""
    return iteration.wire + iteration.codec > HIDDEN * iteration.total


def _is_no_faster_than_ddp(plan: Plan) -> bool:
    return plan.best.job.width == 1 and plan.ddp is not None and plan.ddp.score <= plan.best.score * (1 + TIE)


def loading_advice(job: Job, iteration: IterationTime) -> str | None:
    """Return a sentence on exposed loading, and the number of loader workers that hides it; None if it is hidden."""
    if iteration.loading <= HIDDEN * iteration.total:
        return None
    exposed = f"Loading adds {format_seconds(iteration.loading)} to an iteration"
    workers = workers_that_hide(job)
    if workers is not None:
        return f"{exposed}: --loader-workers {workers} hides it."
    return f"{exposed}, and no number of --loader-workers hides all of it: cores are the limit."


def ratio(one: Choice, other: Choice) -> float:
    """Return how many times as long ``one`` takes as ``other``."""
    if other.score > 0:
        return one.score / other.score
    return 1.0 if one.score == 0 else math.inf


def _next_to_ddp(plan: Plan, *, helpless: bool) -> str:
    """Return a sentence on what the choice gains over the DDP that people have; ``helpless`` if nothing does."""
    best, ddp, late = plan.best, plan.ddp, plan.late
    if best.job.world_size == 1:
        return "One rank exchanges nothing, so nothing gains over DDP: ask with the number of ranks that you want."
    if ddp is None:
        return f"No comparison with DDP: {_no_ddp(plan)}."
    if best.job == ddp.job or (helpless and late is not None):
        gain = "" if late is None else f"a pipeline ({describe(late.job)}) {_gain(best, late)}"
        if helpless and gain:
            ddps = format_seconds(ddp.iteration.total)
            return f"This method will not help you here: {gain}, and DDP takes {ddps} an iteration."
        return "DDP itself is the best choice of those searched" + (f": {gain}." if gain else ".")
    ours, theirs = format_seconds(best.iteration.total), format_seconds(ddp.iteration.total)
    times = _times(ddp, best)
    if abs(times - 1) < HARDLY:
        return f"As fast as DDP: {ours} an iteration."
    if times < 1:
        return (
            f"Slower than DDP, which is {_shown(1 / times)} times as fast as the best of those searched: {theirs} an "
            f"iteration in place of {ours}."
        )
    hook = next((one for one in plan.ranking if (one.job.strategy, one.job.codec) == ("ddp", "fp16")), None)
    than_hook = "" if hook is None or hook is best else f", {_shown(_times(hook, best))} times as with its fp16 hook"
    return f"{_shown(times)} times as fast as DDP{than_hook}: {ours} an iteration in place of {theirs}."


def _no_ddp(plan: Plan) -> str:
    """Return why the plan has no time of DDP."""
    job = plan.best.job
    if job.cluster.placed:
        return "its time on links of a file is not known"
    if job.islands.memory is not None:
        return "a rank has not enough memory for it"
    return "its time on this cluster is not known"


def _pipelining(plan: Plan, *, helpless: bool) -> list[str]:
    """Return sentences on what late gradients gain, and what it costs to have none."""
    best, synchronous, late = plan.best, plan.synchronous, plan.late
    if late is None or synchronous is None or best.job.world_size == 1:
        return []
    if best.job.width > 1:
        return [
            f"The pipeline is {_shown(ratio(synchronous, best))} times as fast as the best synchronous configuration "
            f"({describe(synchronous.job)}).",
            f"With no gradient late: {_slower(synchronous, best)}: {training_arguments(synchronous.job)}",
        ]
    if best.score > late.score * (1 + HARDLY):
        return [f"With no gradient late: {_slower(best, late)}, next to the fastest pipeline ({describe(late.job)})."]
    said_before = helpless or (plan.ddp is not None and best.job == plan.ddp.job)
    return [] if said_before else [f"A pipeline ({describe(late.job)}) {_gain(best, late)}."]


def _slower(one: Choice, other: Choice) -> str:
    """Return the time of ``one``, and how much longer that is than the time of ``other``.

    "311 ms (+4 %)"
    """
    more = _times(one, other)
    share = f"{more - 1:+.0%}".replace("%", " %") if more < 2 else f"{more:.1f} times as long"
    return f"{format_seconds(one.iteration.total)} ({share})"


def _gain(best: Choice, late: Choice) -> str:
    gain = ratio(best, late) - 1
    return f"would gain {gain:.1%}, which is a tie" if gain >= 0 else f"takes {1 / (1 + gain) - 1:.1%} longer"


def _times(one: Choice, other: Choice) -> float:
    """Return how many times as long an iteration of ``one`` takes as one of ``other``."""
    if other.iteration.total > 0:
        return one.iteration.total / other.iteration.total
    return 1.0 if one.iteration.total == 0 else math.inf


def _shown(times: float) -> str:
    return f"{times:,.0f}" if times >= MANY else f"{times:.2f}"


def _wider(plan: Plan) -> str | None:
    """Warn that a width of 3 or more gains only with jitter, and only if it does not last."""
    width = plan.best.job.width
    if width < 3:
        return None
    return (
        f"Width {width} gains over width 2 only where slow iterations come one at a time, not where a rank stays slow "
        "for longer; where both were measured, it was slower on average. Compare both before you rely on it."
    )


def _codec(plan: Plan) -> str | None:
    best, uncompressed = plan.best, plan.uncompressed
    coded = [one for one in plan.ranking if one.job.codec != UNCOMPRESSED]
    compressed = min(coded, key=lambda one: one.score, default=None)
    if uncompressed is None:
        return None
    if best.job.codec != UNCOMPRESSED:
        more = ratio(uncompressed, best)
        simpler = "but its gradients are late" if uncompressed.job.width > best.job.width else "and more complex"
        longer = f"is a tie, {simpler}" if more <= 1 + TIE else f"takes {more - 1:.1%} longer"
        longer = f"takes {more:.1f} times as long" if more >= 2 else longer
        without = f"the best without a codec ({describe(uncompressed.job)}) {longer}"
        return f"Use {best.job.codec}: {without}. It is lossy, which timing-model plan --accuracy-cost can weigh."
    if compressed is None:
        return "Use no codec: none of those searched could be faster."
    more = ratio(compressed, best) - 1
    if more > NOTHING:
        return f"Use no codec: with the best one ({compressed.job.codec}) it takes {more:.1%} longer."
    gain = max(0.0, ratio(best, compressed) - 1)
    return f"Use no codec: the best one ({compressed.job.codec}) would gain {gain:.1%}, which is a tie."


def _loading(plan: Plan) -> str | None:
    return loading_advice(plan.best.job, plan.best.iteration)


def _servers(plan: Plan) -> str | None:
    servers = next((one for one in plan.ranking if one.job.strategy == "ps-sync"), None)
    if servers is None or servers is plan.best or servers in plan.tied:
        return None
    shown, number = _shown(ratio(servers, plan.best)), servers.job.servers.number
    against = "one parameter server" if number == 1 else f"{number} parameter servers"
    return f"Against {against} for {servers.job.workers} workers, it is {shown} times as fast."


def _islands(plan: Plan) -> list[str]:
    """Return sentences on what islands gain, and on those for which a rank has not enough memory."""
    sentences = []
    best, meshes = plan.best, plan.meshes
    other = next((one for one in plan.ranking if one.job.islands.members != best.job.islands.members), None)
    if best.job.islands.members == 1 and other is not None:
        more = ratio(other, best)
        longer = f"take {more - 1:.1%} longer" if more >= 1 + TIE else "are no faster, up to a tie"
        sentences.append(f"Use no islands: the best ones ({describe(other.job)}) {longer}.")
    elif best.job.islands.members > 1 and 1 in meshes:
        times = ratio(meshes[1], best)
        sentences.append(f"Islands are {times:.2f} times as fast as the best without any ({describe(meshes[1].job)}).")
    if plan.too_large:
        said = ", ".join(f"{_of(members)} ({format_bytes_up(nbytes)})" for members, nbytes in plan.too_large.items())
        sentences.append(f"A rank has not enough memory for {said}, activations left out.")
    return sentences


def _of(members: int) -> str:
    return "no islands" if members == 1 else f"islands of {members}"
