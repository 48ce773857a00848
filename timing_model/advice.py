"""A plan in words: what to do, and why."""

from __future__ import annotations

import math

from timing_model.buckets import WHOLE
from timing_model.choices import TIE, Choice
from timing_model.costs import HIDDEN, workers_that_hide
from timing_model.iteration import IterationTime
from timing_model.job import Job
from timing_model.measured import UNCOMPRESSED
from timing_model.plan import Plan
from timing_model.schedules import SEGMENT_BYTES
from timing_model.units import format_bytes, format_bytes_up, format_seconds

NOTHING = 0.0005
"""Share that people would read as 0.0 %."""
MANY = 100
"""Speedup from which on decimals say nothing."""


def describe(job: Job) -> str:
    """Describe a configuration in a few words.

    "pipelined, width 2, int8, ring, segments of 256 KiB, 4 islands of 8 by fsdp2"
    """
    if job.strategy == "ps-sync":
        return "ps-sync"
    if job.mesh.is_one_island:
        return f"1 island of {job.members} by {job.split}"
    codec = "no codec" if job.codec == UNCOMPRESSED else job.codec
    if job.strategy == "ddp":
        return f"ddp, {codec}"
    name = "synchronous" if job.width == 1 else f"pipelined, width {job.width}"
    name += f", {job.local_steps} local steps" if job.local_steps > 1 else ""
    segment = "" if job.segment_bytes == SEGMENT_BYTES else f", segments of {job.segment_bytes >> 10} KiB"
    buckets = "" if job.cut == WHOLE else f", buckets {job.buckets}"
    islands = "" if job.members == 1 else f", {job.mesh.islands} islands of {job.members} by {job.split}"
    parts = f", {format_bytes(sum(one.nbytes for one in job.parts))} gathered" if job.parts else ""
    return f"{name}, {codec}, {job.all_reduce}{segment}{buckets}{islands}{parts}"


def reason(choice: Choice) -> str:
    """Return, in words, what the configuration waits for."""
    iteration = choice.iteration
    if iteration.exposed <= HIDDEN * iteration.total:
        return "computation hides all of the communication"
    waits = {"the network": iteration.wire, "the codec": iteration.codec, "the slowest rank": iteration.jitter}
    waits |= {"its batch": iteration.loading, "its island": iteration.inside}
    worst = max(waits, key=lambda name: waits[name])
    return f"waits {format_seconds(waits[worst])} for {worst}"


def advice(plan: Plan) -> list[str]:
    """Return sentences on what a person should know about a plan."""
    sentences = (_pipelining(plan), _wider(plan), _codec(plan), _servers(plan), *_islands(plan), _loading(plan))
    return [one for one in sentences if one]


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


def training_arguments(job: Job) -> str:
    """Return the options of ``pipesgd.train`` that run a configuration; with islands, the arguments of a loop."""
    if job.members > 1:
        return _loop_arguments(job)
    accumulation = f" --accumulation {job.micro_batches}" if job.micro_batches > 1 else ""
    limit = "" if job.rate_limit is None else f" --rate-limit {8e-6 * job.rate_limit:g}mbit"
    return _strategy_arguments(job) + accumulation + limit


def _loop_arguments(job: Job) -> str:
    if job.mesh.is_one_island:
        return f"{job.split} over all ranks, by torch alone"
    words = f'width={job.width}, codec="{job.codec}", all_reduce="{job.all_reduce}"'
    words += "" if job.segment_bytes == SEGMENT_BYTES else f", segment_bytes={job.segment_bytes}"
    words += "" if job.cut == WHOLE else f', buckets="{job.buckets}"'
    batches = f" and {job.micro_batches} micro-batches" if job.micro_batches > 1 else ""
    return f"Pipelined(..., {words}, mesh=mesh) with a mesh of ({job.mesh.islands}, {job.members}){batches}"


def _strategy_arguments(job: Job) -> str:
    if job.strategy == "ddp":
        return "--strategy ddp" + ("" if job.codec == UNCOMPRESSED else f" --ddp-hook {job.codec}")
    if job.strategy == "ps-sync":
        return f"--strategy ps-sync --servers {job.servers}"
    steps = f" --local-steps {job.local_steps}" if job.local_steps > 1 else ""
    words = f"--width {job.width}{steps} --codec {job.codec} --all-reduce {job.all_reduce}"
    words += "" if job.segment_bytes == SEGMENT_BYTES else f" --segment-bytes {job.segment_bytes}"
    return words + ("" if job.cut == WHOLE else f" --buckets {job.buckets}")


def _pipelining(plan: Plan) -> str | None:
    best, synchronous = plan.best, plan.synchronous
    if best.job.width > 1:
        if synchronous is None:
            return None
        times = f"{ratio(synchronous, best):.2f} times as fast as the best"
        coarser = next(one for one in plan.ranking if one.job.width == 1)
        if coarser.score >= synchronous.score:
            return f"The pipeline is {times} synchronous configuration ({describe(synchronous.job)})."
        return (
            f"The pipeline is {ratio(coarser, best):.2f} times as fast as the best synchronous configuration "
            f"({describe(coarser.job)}), and {times} with a codec that torch's DDP has ({describe(synchronous.job)})."
        )
    pipelined = next((one for one in plan.ranking if one.job.width > 1), None)
    if pipelined is None:
        return None
    gain = ratio(best, pipelined) - 1
    said = f"would gain {gain:.1%}, which is a tie" if gain >= 0 else f"takes {1 / (1 + gain) - 1:.1%} longer"
    return f"This method will not help you here: a pipeline ({describe(pipelined.job)}) {said}."


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
    compressed = next((one for one in plan.ranking if one.job.codec != UNCOMPRESSED), None)
    if uncompressed is None:
        return None
    if best.job.codec != UNCOMPRESSED:
        more = ratio(uncompressed, best)
        longer = "is a tie, and less simple" if more <= 1 + TIE else f"takes {more - 1:.1%} longer"
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
    times, number = ratio(servers, plan.best), servers.job.servers
    shown = f"{times:,.0f}" if times >= MANY else f"{times:.2f}"
    against = "one parameter server" if number == 1 else f"{number} parameter servers"
    return f"Against {against} for {servers.job.workers} workers, it is {shown} times as fast."


def _islands(plan: Plan) -> list[str]:
    """Return sentences on what islands gain, and on those for which a rank has not enough memory."""
    sentences = []
    best, meshes = plan.best, plan.meshes
    other = next((one for one in plan.ranking if one.job.members != best.job.members), None)
    if best.job.members == 1 and other is not None:
        more = ratio(other, best)
        longer = f"take {more - 1:.1%} longer" if more >= 1 + TIE else "are no faster, up to a tie"
        sentences.append(f"Use no islands: the best ones ({describe(other.job)}) {longer}.")
    elif best.job.members > 1 and 1 in meshes:
        times = ratio(meshes[1], best)
        sentences.append(f"Islands are {times:.2f} times as fast as the best without any ({describe(meshes[1].job)}).")
    if plan.too_large:
        said = ", ".join(f"{_of(members)} ({format_bytes_up(nbytes)})" for members, nbytes in plan.too_large.items())
        sentences.append(f"A rank has not enough memory for {said}, activations left out.")
    return sentences


def _of(members: int) -> str:
    return "no islands" if members == 1 else f"islands of {members}"
