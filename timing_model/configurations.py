"""A configuration in words: its name, the options of ``pipesgd.train`` that run it, and the call of a program."""

from __future__ import annotations

import math

from timing_model.buckets import WHOLE
from timing_model.job import Job
from timing_model.measured import UNCOMPRESSED
from timing_model.schedules import SEGMENT_BYTES
from timing_model.units import format_bytes

MIB = 1 << 20
"""Bytes in the unit of ``bucket_cap_mb``."""
HOOK = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook"


def describe(job: Job) -> str:
    """Describe a configuration in a few words.

    "pipelined, width 2, int8, ring, segments of 256 KiB, 4 islands of 8 by fsdp2"
    """
    if job.strategy == "ps-sync":
        return "ps-sync"
    if job.mesh.is_one_island:
        return f"1 island of {job.islands.members} by {job.islands.split}"
    codec = "no codec" if job.codec == UNCOMPRESSED else job.codec
    if job.strategy == "ddp":
        return f"ddp, {codec}"
    name = "synchronous" if job.width == 1 else f"pipelined, width {job.width}"
    name += f", {job.local_steps} local steps" if job.local_steps > 1 else ""
    segment = "" if job.segment_bytes == SEGMENT_BYTES else f", segments of {job.segment_bytes >> 10} KiB"
    buckets = "" if job.cut == WHOLE else f", buckets {job.buckets}"
    members, split = job.islands.members, job.islands.split
    islands = "" if members == 1 else f", {job.mesh.number} islands of {members} by {split}"
    parts = f", {format_bytes(sum(one.nbytes for one in job.parts))} gathered" if job.parts else ""
    return f"{name}, {codec}, {job.all_reduce}{segment}{buckets}{islands}{parts}"


def training_arguments(job: Job) -> str:
    """Return the options of ``pipesgd.train`` that run a configuration; with islands, the arguments of a loop."""
    if job.islands.members > 1:
        return with_mesh(job, "...")
    accumulation = f" --accumulation {job.micro_batches}" if job.micro_batches > 1 else ""
    return _strategy_arguments(job) + accumulation


def _strategy_arguments(job: Job) -> str:
    if job.strategy == "ddp":
        return "--strategy ddp" + ("" if job.codec == UNCOMPRESSED else f" --ddp-hook {job.codec}")
    if job.strategy == "ps-sync":
        return f"--strategy ps-sync --servers {job.servers.number}"
    steps = f" --local-steps {job.local_steps}" if job.local_steps > 1 else ""
    words = f"--width {job.width}{steps} --codec {job.codec} --all-reduce {job.all_reduce}"
    words += "" if job.segment_bytes == SEGMENT_BYTES else f" --segment-bytes {job.segment_bytes}"
    return words + ("" if job.cut == WHOLE else f" --buckets {job.buckets}")


def in_program(job: Job) -> str:
    """Return the call that runs a configuration in a program whose ``model`` is a DistributedDataParallel.

    Where such a program cannot run it, the call is that of another loop, or the words say what runs it.
    """
    if job.strategy == "ps-sync":
        return "none, since only pipesgd.train has parameter servers"
    if job.islands.members > 1:
        return ("" if job.mesh.is_one_island else "pipesgd.") + with_mesh(job, "model, optimizer")
    batches = f"; all but the last of {job.micro_batches} micro-batches in model.no_sync()"
    return _call(job) + (batches if job.micro_batches > 1 else "")


def with_mesh(job: Job, objects: str) -> str:
    """Return the arguments of a loop with islands after its ``objects``, and the mesh of the islands."""
    if job.mesh.is_one_island:
        return f"{job.islands.split} over all ranks, by torch alone"
    words = _joined(objects, f'width={job.width}, codec="{job.codec}"', _wire(job, buckets=True), "mesh=mesh")
    batches = f" and {job.micro_batches} micro-batches" if job.micro_batches > 1 else ""
    return f"Pipelined({words}) with a mesh of ({job.mesh.number}, {job.islands.members}){batches}"


def _call(job: Job) -> str:
    if job.strategy == "ddp":
        hook = "" if job.codec == UNCOMPRESSED else f" and model.register_comm_hook(None, {HOOK})"
        return f"model = DistributedDataParallel(layers){hook}, without pipesgd"
    compressed = job.width == 1 and not job.gathered  # whose parts no hook of DistributedDataParallel gathers
    exchange = _joined(f'codec="{job.codec}"', _wire(job, buckets=not compressed))
    if compressed:
        return f"pipesgd.ddp.compress(model, {exchange}){_own_buckets(job)}"
    if job.cut == WHOLE and job.width > 1:
        return f"pipesgd.ddp.attach(model, optimizer, width={job.width}, {exchange})"
    return (
        f"pipesgd.Pipelined(layers, optimizer, width={job.width}, {exchange}) in a loop without DistributedDataParallel"
    )


def _own_buckets(job: Job) -> str:
    """Return how a program makes the buckets of DistributedDataParallel about as large as those of the job."""
    cut = job.cut
    if cut == WHOLE:
        return ""
    size = (cut.nbytes if cut.nbytes is not None else job.nbytes / (cut.count or 1)) / MIB
    size = math.ceil(size) if size > 1 else math.ceil(1000 * size) / 1000
    return f" after model = DistributedDataParallel(layers, bucket_cap_mb={size:g}), whose own buckets it sums"


def _joined(*words: str) -> str:
    return ", ".join(filter(None, words))


def _wire(job: Job, *, buckets: bool) -> str:
    """Return the argument that says how gradients travel, empty for the defaults; in ``buckets`` only if that is so."""
    words = _joined(
        "" if job.all_reduce == "ring" else f'all_reduce="{job.all_reduce}"',
        "" if job.segment_bytes == SEGMENT_BYTES else f"segment_bytes={job.segment_bytes}",
        f'buckets="{job.buckets}"' if buckets and job.cut != WHOLE else "",
    )
    return f"wire=pipesgd.Wire({words})" if words else ""
