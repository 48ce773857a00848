"""A job on a cluster: its fields, in groups, and the checks of what goes together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from timing_model.all_reduce import messages_meet, unconnected
from timing_model.arguments import option, options_in, whole
from timing_model.buckets import WHOLE, Cut
from timing_model.checks import check_at_least, check_count, check_one_of
from timing_model.cluster_profile import Profile
from timing_model.measured import (
    LOW_RANK,
    MOST,
    PARAMETER_SERVER,
    UNCOMPRESSED,
    WITH_BATCH,
    CodecProfile,
    ComputeProfile,
    LowRankProfile,
    MeasuredIteration,
    configuration,
)
from timing_model.mesh import Islands, Mesh, Nodes
from timing_model.own_schedules import check_all_reduce
from timing_model.parameter_server import Servers
from timing_model.params import FLOAT_BYTES, Noise, Parts
from timing_model.presets import CODECS
from timing_model.schedules import ALL_REDUCES, MOST_WIDTH, SEGMENT_BYTES
from timing_model.units import parse_price

STRATEGIES = ("pipelined", "ddp", "ps-sync")
NATIVE_CODECS = (UNCOMPRESSED, "bf16", "fp16")
"""Codecs that torch's own all-reduce can add up."""
DDP_CODECS = (UNCOMPRESSED, "fp16")
"""Codecs of ddp that are searched: those of its hooks that run everywhere."""
OWN_ALL_REDUCE = {"pipelined": "ring", "ddp": "native", "ps-sync": None}
"""Default all-reduce of each strategy."""
ON_NODES = ("ring", "native", "hierarchical")
"""All-reduces whose time is known where adjoining ranks share a node and its NIC. On a ring only one of these ranks
sends to another node, so nothing changes; with other all-reduces all of them would send at once."""
UNSIMULATED = ("native", "parameter servers", "a codec whose parts are gathered")
"""Ways of communicating whose messages cannot be simulated one by one."""
LARGEST_WORLD, LARGEST_SIMULATED = 1 << 16, 128
"""Most ranks, and most ranks of an all-reduce whose messages meet and so are simulated one by one."""
MOST_MICRO_BATCHES = 1 << 16
"""Most micro-batches of an iteration."""
MOST_SEGMENTS, MOST_SIMULATED = 200_000, 20_000
"""Most segments of a gradient, and most segments times ranks where messages are simulated: a second or so."""

TYPICAL_CODECS = {name: CodecProfile.exact(cost) for name, cost in CODECS.items()}
"""Typical costs of codecs that were not measured."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """Length of a job, and its price.

    Raises ``ValueError`` in one line that names the field, if the fields do not go together.
    """

    epochs: int | None = option(None, whole(), "N")
    """Length of the job in epochs."""
    iterations: int | None = option(None, whole(), "N")
    """Length of the job in iterations, instead of --epochs."""
    price: float | None = option(None, parse_price, "1.20/h")
    """Price of a rank, in any currency, for a time."""

    def __post_init__(self) -> None:
        for name in ("iterations", "epochs"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.epochs is not None and self.iterations is not None:
            raise ValueError(f"epochs must be left out where iterations are given; got {self.epochs}")
        if self.price is not None:
            check_at_least("price", self.price, 0)

    def check(self, job: Job) -> None:
        """Raise ``ValueError`` unless the time of ``job`` is known for this length."""
        if job.iterations_per_epoch == 0:
            batch = job.accumulated
            raise ValueError(
                f"samples must be at least {job.workers * batch.batch_size}, a batch of {batch.batch} for each of "
                f"{job.workers} ranks; got {batch.samples}"
            )
        if self.epochs is not None and job.iterations_per_epoch is None:
            raise ValueError(
                "epochs must be left out where the samples or the batch size are not known (give both, or iterations); "
                f"got {self.epochs}"
            )
        if self.price is not None and job.job_iterations is None and job.iterations_per_epoch is None:
            raise ValueError(
                "price must be left out where neither the job's iterations nor the samples and the batch size are "
                f"known (give --samples and --batch-size, or --iterations); got {3600 * self.price:g}/h"
            )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job: its computation, how gradients are reduced, and on how many ranks of which cluster."""

    cluster: Profile
    compute: ComputeProfile
    world_size: int
    strategy: str = option("pipelined", choices=STRATEGIES)
    """Strategy."""
    width: int = option(1, whole(), "K", says_default=True)
    """Iterations in flight; 1 is synchronous. The command has 2 in a pipeline by default."""
    local_steps: int = option(1, whole(), "H")
    """Iterations that each rank trains by itself before the ranks exchange their movements."""
    codec: str = option(UNCOMPRESSED)
    """Codec, one of the profile's."""
    all_reduce: str | None = option("ring", choices=(*ALL_REDUCES, "module:function"), says_default=True)
    """All-reduce: ring by default, but native with ddp, and none with ps-sync."""
    segment_bytes: int = option(SEGMENT_BYTES, whole(), "N")
    """Bytes of the largest message."""
    buckets: str = option("1", shown="N|SIZE")
    """Buckets in which gradients leave during the backward pass: a number, or the largest size of one."""
    parts: tuple[Parts, ...] = ()
    """Gradients of a pipeline whose parts are gathered, in place of an all-reduce of all their values."""
    loader_workers: int = option(0, whole(0), "W")
    """Processes of a rank that load batches; with 0, the rank loads them itself."""
    accumulation: int = option(1, whole(), "A")
    """Micro-batches of --batch-size, and of --compute, whose gradients are exchanged once."""
    nodes: Nodes = field(default_factory=Nodes)
    servers: Servers = field(default_factory=Servers)
    islands: Islands = field(default_factory=Islands)
    length: Length = field(default_factory=Length)

    def __post_init__(self) -> None:
        for name in ("world_size", "width", "segment_bytes", "local_steps", "accumulation"):
            check_count(name, getattr(self, name))
        check_at_least("loader_workers", self.loader_workers, 0)
        most = {"world_size": LARGEST_WORLD, "width": MOST_WIDTH}
        for name, number in (most | dict.fromkeys(("local_steps", "accumulation"), self.most_micro_batches)).items():
            if getattr(self, name) > number:
                raise ValueError(f"{name} must be at most {number}; got {getattr(self, name)}")
        if self.local_steps > 1 and self.accumulation > 1:
            raise ValueError(f"accumulation must be 1 with local_steps; got {self.accumulation}")
        check_one_of("strategy", self.strategy, STRATEGIES)
        for name in ("width", "local_steps"):
            if self.strategy != "pipelined" and getattr(self, name) != 1:
                raise ValueError(
                    f"{name} must be 1 with strategy {self.strategy}, which has no pipeline; got {getattr(self, name)}"
                )
        if self.strategy == "ps-sync":
            self.servers.check(self.world_size)
        self._check_all_reduce()
        self._check_nodes()
        self._check_placed()
        self._check_islands()
        self._check_codec()
        self._check_parts()
        self._check_buckets()
        self.length.check(self)

    def changed(self, **values: Any) -> Job:
        """Return the job with other values of its own fields, or of those of its groups, by the options' names.

        Raises ``ValueError`` as a ``Job`` does.
        """
        return dataclasses.replace(self, **in_groups(values, self))

    def values(self) -> dict[str, Any]:
        """Return the values of all fields but cluster and computation, by the options' names."""
        own = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name in ("cluster", "compute"):
            del own[name]
        groups = {name: own.pop(name) for name in GROUPS}
        return own | {
            name: getattr(group, item.name) for group in groups.values() for name, item in options_in(type(group))
        }

    def _check_nodes(self) -> None:
        g = self.nodes.ranks_per_node
        if self.world_size % g:
            raise ValueError(f"ranks_per_node must divide {self.world_size} ranks; got {g}")
        if g > 1 and self.all_reduce not in ON_NODES:
            raise ValueError(
                f"ranks_per_node must be 1 with {self.measured_as}, whose ranks would share their node's NIC, which "
                f"the model cannot tell; got {g}"
            )
        if self.cluster.placed and self.nodes.nics > 1:
            raise ValueError(f"nics must be left out where each rank has links of its own; got {self.nodes.nics}")

    def _check_placed(self) -> None:
        if self.cluster.placed and (self.all_reduce in (None, "native") or self.gathered):
            raise ValueError(
                "all_reduce must send messages that can be simulated where the cluster's file has a link for each of "
                f"them, so not {' or '.join(UNSIMULATED)}; got {self.codec if self.gathered else self.measured_as}"
            )

    def _check_islands(self) -> None:
        members, within_node = self.islands.members, self.mesh.within_node  # refuses what is no mesh
        if members == 1:
            return
        unknown = {
            f"strategy {self.strategy}": self.strategy != "pipelined",
            "all_reduce hierarchical": self.all_reduce == "hierarchical",
            f"codec {self.codec}": self.gathered or self.low_rank is not None,
            "local_steps": self.local_steps > 1,
        }
        for what in (what for what, is_used in unknown.items() if is_used):
            raise ValueError(f"members must be 1 with {what}, with which islands are not modelled; got {members}")
        if within_node and self.cluster.inner is None and not self.cluster.placed:
            raise ValueError(
                "members must be 1, or more than a node has, without a link inside nodes (--inner-latency and "
                f"--inner-bandwidth, or a table [inner] in the cluster's file); got {members}"
            )

    def _check_all_reduce(self) -> None:
        if self.all_reduce in (None, "native") and self.segment_bytes != SEGMENT_BYTES:
            raise ValueError(
                f"segment_bytes must be left out with {self.measured_as}, which has its own; got {self.segment_bytes}"
            )
        if self.strategy == "ps-sync":
            if self.all_reduce is not None:
                raise ValueError(f"all_reduce must be left out with strategy ps-sync; got {self.all_reduce}")
            return
        check_all_reduce("all_reduce", self.all_reduce or "none")
        if self.strategy == "ddp" and self.all_reduce != "native":
            raise ValueError(f"all_reduce must be native with strategy ddp; got {self.all_reduce}")
        if self.all_reduce == "hierarchical" and self.cluster.inner is None and not self.cluster.placed:
            raise ValueError(
                "all_reduce must not be hierarchical without an inner link (--inner-latency and --inner-bandwidth, or "
                "a table [inner] in the cluster's file); got hierarchical"
            )
        p = self.simulated_ranks
        if self.meets and p > LARGEST_SIMULATED:
            each = self.world_size // p  # ranks of an island, each with an all-reduce of its own
            powers = f"{each} times a power of 2, or " if each > 1 else "a power of 2, or "
            if self.cluster.placed or messages_meet(self.all_reduce, 2):
                powers = ""
            raise ValueError(
                f"world_size must be {powers}at most {each * LARGEST_SIMULATED}, with {self.all_reduce}, whose "
                f"messages are simulated; got {self.world_size}"
            )

    def check_messages(self) -> None:
        """Raise ``ValueError`` if the messages cannot be followed: no link leads where one is sent, or there are too
        many of them."""
        placed, p = self.cluster.placed, self.world_size
        if placed:
            g, members = self.nodes.ranks_per_node, self.islands.members
            apart = unconnected(str(self.all_reduce), p, g, placed, members)
            if apart is not None:
                raise ValueError(
                    f"link must lead from rank {apart[0]} to rank {apart[1]}, which {self.all_reduce} sends to; no "
                    "table [[link]] of the cluster's file connects them"
                )
        if self.all_reduce not in (None, "native") and self.segment_bytes < self.least_segment_bytes:
            raise ValueError(
                f"segment_bytes must be at least {self.least_segment_bytes} for {self.nbytes} bytes on {p} ranks, or "
                f"this would take too long; got {self.segment_bytes}"
            )

    def _check_codec(self) -> None:
        known = [UNCOMPRESSED, *self.cluster.codecs, *(name for name in CODECS if name not in self.cluster.codecs)]
        if self.codec == LOW_RANK and self.low_rank is None:
            raise ValueError(
                "codec must be another one where the factors of the model's matrices were not measured (by "
                f"pipesgd.calibrate); got {LOW_RANK}"
            )
        check_one_of("codec", self.codec, [*known, LOW_RANK])
        if self.strategy == "ps-sync" and self.codec != UNCOMPRESSED:
            raise ValueError(f"codec must be {UNCOMPRESSED} with strategy ps-sync; got {self.codec}")
        if self.all_reduce == "native" and self.codec not in NATIVE_CODECS:
            raise ValueError(f"codec must be one of {', '.join(NATIVE_CODECS)} with native; got {self.codec}")
        if self.gathered and self.all_reduce != "ring":
            raise ValueError(
                f"all_reduce must be ring with {self.codec}, whose parts are gathered; got {self.all_reduce}"
            )

    def _check_parts(self) -> None:
        if not self.parts:
            return
        unknown = {
            f"strategy {self.strategy}": self.strategy != "pipelined",
            "all_reduce native, which sums whole gradients": self.all_reduce == "native",
            f"codec {self.codec}, which compresses the gradient as a whole": self.gathered,
            f"codec {LOW_RANK}, whose factors are those of all gradients": self.low_rank is not None,
            "local_steps, whose movement is that of a whole window": self.local_steps > 1,
            "accumulation, since their size is that of one micro-batch": self.accumulation > 1,
            "links of single ranks": bool(self.cluster.placed),
            "islands, which exchange whole shares": self.islands.members > 1,
        }
        for what in (what for what, is_used in unknown.items() if is_used):
            raise ValueError(f"parts must be left out with {what}; got {len(self.parts)}")
        tensors = [tensor for one in self.parts for tensor in one.tensors]
        if len(set(tensors)) < len(tensors) or not all(0 <= one < len(self.compute.tensors) for one in tensors):
            raise ValueError(
                f"parts must be of different tensors, from 0 to {len(self.compute.tensors) - 1}; got {tensors}"
            )

    def _check_buckets(self) -> None:
        cut = self.cut
        if cut == WHOLE:
            return
        if self.strategy != "pipelined":
            raise ValueError(f"buckets must be left out with strategy {self.strategy}; got {self.buckets}")
        if self.gathered:
            raise ValueError(
                f"buckets must be 1 with {self.codec}, which compresses the gradient as a whole; got {self.buckets}"
            )
        if self.local_steps > 1:
            raise ValueError(f"buckets must be 1 with local_steps, whose movement is complete late; got {self.buckets}")
        cut([self.compute.tensors[number] for number in self.whole])

    @property
    def most_micro_batches(self) -> int:
        """Most micro-batches of an iteration, whose time could otherwise be too large a number."""
        slowest = max(getattr(self.compute, name).high for name in WITH_BATCH)
        return int(min(MOST_MICRO_BATCHES, MOST / max(slowest, 1.0)))

    @property
    def whole(self) -> list[int]:
        """Numbers of the tensors whose gradients are exchanged whole, in the order of the forward pass."""
        apart = {tensor for one in self.parts for tensor in one.tensors}
        return [number for number in range(len(self.compute.tensors)) if number not in apart]

    @cached_property
    def mesh(self) -> Mesh:
        """Islands of the ranks, and what a member of one has of the model."""
        return Mesh(world_size=self.world_size, islands=self.islands, nodes=self.nodes)

    @property
    def cut(self) -> Cut:
        """Cut of the gradient into buckets."""
        return Cut.parse(self.buckets)

    @property
    def cores_used(self) -> float:
        """Share of the machines' cores that the ranks use, at most 1; 0 if nothing was measured."""
        measured = self.cluster.calibrated
        return min(1.0, measured.ranks_per_core) if measured.world_sizes else 0.0

    @property
    def codec_profile(self) -> CodecProfile | None:
        """Costs of the codec: those that were measured, otherwise typical ones. None for fp32, also that of factors."""
        if self.codec in (UNCOMPRESSED, LOW_RANK):
            return None
        return self.cluster.codecs.get(self.codec) or TYPICAL_CODECS[self.codec]

    @property
    def measured(self) -> MeasuredIteration | None:
        """Time of an iteration of this very configuration that was measured in an audition; None if there is none."""
        if self.strategy != "pipelined" or self.nodes.ranks_per_node > 1 or self.islands.members > 1:
            return None
        if self.accumulation > 1 or self.local_steps > 1 or self.parts:
            return None
        own = configuration(self)
        return next((one for one in self.compute.measured if configuration(one) == own), None)

    @property
    def gathered(self) -> bool:
        """True if the codec's parts are gathered, not added up on the way."""
        return self.codec_profile is not None and self.codec_profile.gathered

    @property
    def low_rank(self) -> LowRankProfile | None:
        """Factors that are summed in place of the gradient; None if the codec is another one."""
        return self.compute.low_rank if self.codec == LOW_RANK else None

    @property
    def least_segment_bytes(self) -> int:
        """Bytes of the smallest segments with which an answer does not take too long."""
        most = MOST_SIMULATED // self.simulated_ranks if self.meets else MOST_SEGMENTS
        return -(-self.nbytes // most)

    @property
    def measured_as(self) -> str:
        """Name of the all-reduce, or of the parameter server, among the measurements of the cluster."""
        return self.all_reduce or PARAMETER_SERVER

    @property
    def meets(self) -> bool:
        """True if messages meet on the way, or on links that differ, so that they must be simulated one by one."""
        return bool(self.cluster.placed) or messages_meet(self.all_reduce, self.mesh.number)

    @property
    def simulated_ranks(self) -> int:
        """Number of ranks whose messages are simulated where they meet: those of one all-reduce, or all of them where
        each has links of its own."""
        return self.world_size if self.cluster.placed else self.mesh.number

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient in float32."""
        return FLOAT_BYTES * self.compute.numel

    @property
    def wire_bytes(self) -> float:
        """Bytes on the wire of an all-reduce that sends as much as all of this gradient's exchanges.

        On a ring each rank sends 2 (p-1)/p of an all-reduce's bytes, and p-1 times its part of what is gathered.
        """
        if self.low_rank is not None:
            return FLOAT_BYTES * self.low_rank.numel
        numel = sum(self.compute.tensors[number] for number in self.whole)
        bits = 8 * FLOAT_BYTES if self.codec_profile is None else self.codec_profile.bits
        return bits / 8 * numel + self.world_size / 2 * sum(one.nbytes for one in self.parts)

    @property
    def workers(self) -> int:
        """Ranks that compute."""
        apart = self.strategy == "ps-sync" and self.servers.placement == "dedicated"
        return self.world_size - self.servers.number if apart else self.world_size

    @property
    def noise(self) -> Noise:
        """Variation of the workers' computation."""
        compute = self.accumulated
        times = compute.times(self.width, self.all_reduce, self.codec, self.local_steps).window(self.local_steps)
        return Noise(
            cv=compute.cv,
            persistence=compute.persistence.value,
            comm_cv=self.compute.comm_cv.value,
            slow_ranks=tuple(times.slowness(factor) for factor in self.compute.slow_ranks[: self.workers]),
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an iteration."""
        return self.accumulation * self.compute.accumulation

    @property
    def accumulated(self) -> ComputeProfile:
        """Computation of a whole iteration of a rank: of all its micro-batches, and one update of what it holds."""
        compute, mesh = self.compute.accumulate(self.accumulation), self.mesh
        if self.islands.members == 1:
            return compute
        factors = {"forward": mesh.computed, "backward": mesh.computed, "loading": mesh.samples}
        factors |= {"update": mesh.held, "late_update": mesh.held}
        return dataclasses.replace(
            compute, **{name: getattr(compute, name).times(factor) for name, factor in factors.items()}
        )

    @property
    def job_iterations(self) -> int | None:
        """Iterations of the whole job; None if the job does not say how long it is."""
        length, per_epoch = self.length, self.iterations_per_epoch
        return length.iterations if length.epochs is None or per_epoch is None else length.epochs * per_epoch

    @property
    def iterations_per_epoch(self) -> int | None:
        """Iterations of an epoch, which drops the remaining samples. None if samples or batch size are not known."""
        if self.compute.samples is None or self.compute.batch_size == 0:
            return None
        return self.compute.samples // (self.workers * self.accumulation * self.compute.batch_size)

    def cost(self, seconds: float | None) -> float | None:
        """Return the price of all ranks for this time; None if the price, or the time, is not known."""
        price = self.length.price
        return None if price is None or seconds is None else price * self.world_size * seconds


GROUPS: dict[str, type] = {"nodes": Nodes, "servers": Servers, "islands": Islands, "length": Length}
"""Groups of fields of a ``Job``."""


def in_groups(values: Mapping[str, Any], job: Job | None = None) -> dict[str, Any]:
    """Return the fields of a ``Job`` that have these values, by the options' names.

    Other fields of the groups that are named have the values of ``job``, or their defaults.

    Raises ``ValueError`` as the groups do.

    >>> in_groups({"width": 2, "nics": 1})
    {'width': 2, 'nodes': Nodes(ranks_per_node=1, nics=1)}
    """
    fields = dict(values)
    for group, kind in GROUPS.items():
        own = {item.name: fields.pop(name) for name, item in options_in(kind) if name in fields}
        if own:
            fields[group] = dataclasses.replace(kind() if job is None else getattr(job, group), **own)
    return fields


def compute_of(cluster: Profile, model: str, batch_size: int | None = None) -> ComputeProfile:
    """Return the computation of a model that was measured, possibly with another batch size.

    Forward and backward are interpolated linearly between the two neighbouring batch sizes, or are proportional to
    those of the nearest one; the batch is then a single micro-batch.
    Raises ``ValueError`` if the model was not measured, or several batch sizes were measured and none is given.
    """
    check_one_of("model", model, sorted({one.model for one in cluster.compute}))
    measured = sorted((one for one in cluster.compute if one.model == model), key=lambda one: one.batch_size)
    if batch_size is None:
        if len(measured) > 1:
            sizes = ", ".join(str(one.batch_size) for one in measured)
            raise ValueError(f"batch_size must be given, since {sizes} were measured of {model}; got none")
        return measured[0]
    check_count("batch_size", batch_size)
    for one in measured:
        if one.batch_size == batch_size:
            return one
    for small, large in pairwise(measured):
        if small.batch_size < batch_size < large.batch_size:
            share = (batch_size - small.batch_size) / (large.batch_size - small.batch_size)
            between = {name: getattr(small, name).towards(getattr(large, name), share) for name in WITH_BATCH}
            return dataclasses.replace(small, batch_size=batch_size, accumulation=1, measured=(), **between)
    near = measured[0] if batch_size < measured[0].batch_size else measured[-1]
    more = batch_size / near.batch_size
    grown = {name: getattr(near, name).times(more) for name in WITH_BATCH}
    return dataclasses.replace(near, batch_size=batch_size, accumulation=1, measured=(), **grown)
