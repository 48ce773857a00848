"""Profile of a measured cluster, which ``pipesgd.calibrate`` writes to ``cluster.toml`` and the timing model reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from timing_model.buckets import WHOLE, Cut
from timing_model.measured import (
    LINK,
    MOST,
    MOST_PERSISTENCE,
    PARAMETER_SERVER,
    UNCOMPRESSED,
    Calibrated,
    CodecProfile,
    CodecRates,
    ComputeProfile,
    Corrections,
    Estimate,
    LinkProfile,
    MeasuredIteration,
    configuration,
)
from timing_model.params import PlacedLink
from timing_model.presets import ethernet
from timing_model.schedules import ALL_REDUCES
from timing_model.toml_io import Scalar, Table, format_tables, read_tables
from timing_model.units import parse_bandwidth, parse_seconds

FORMAT = 6
"""Version of the file's format, raised whenever an older reader would misunderstand a newer file."""
RING, HIERARCHICAL = "ring", "hierarchical"
BESIDE_RING = (*(name for name in ALL_REDUCES if name != RING), PARAMETER_SERVER)
"""Names of the all-reduces, and of the parameter server, that may have a link of their own."""
MOST_CV = 10.0
SMALLEST_BITS, SMALLEST_SHARE = 1e-6, 1e-6
"""Fewest bits of a value on the wire, and fewest ranks per core."""
ESTIMATES = (
    "forward",
    "backward",
    "update",
    "late_update",
    "compute_slowdown",
    "codec_compute_slowdown",
)
"""Fields of a ``ComputeProfile`` that are estimates."""
LATER = {
    "loading": MOST,
    "handover": MOST,
    "late_handover": MOST,
    "persistence": MOST_PERSISTENCE,
    "comm_cv": MOST_CV,
}
"""Estimates that files of this format may be without, which means 0, and their largest values. Those that are 0 are not
written, so that readers that do not know them can read the file, too."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A cluster, and the models on it."""

    calibrated: Calibrated
    link: LinkProfile
    """Link of a ring, and of all that is not in ``links``."""
    links: dict[str, LinkProfile] = field(default_factory=dict)
    """Links of other all-reduces by name, and of ``PARAMETER_SERVER``: the same network, as measured with each."""
    inner: LinkProfile | None = None
    """Link inside a node; its alpha and beta count."""
    placed: tuple[PlacedLink, ...] = ()
    """Links between the ranks, where not all are alike; ``link`` then has the largest alpha, beta and host of them."""
    codecs: dict[str, CodecProfile] = field(default_factory=dict)
    """Codecs by name, without fp32, which costs the link's gamma."""
    sharing: Estimate | None = None
    """Value of ``sharing`` in ``parameter_server.parameter_server_time``."""
    compute: tuple[ComputeProfile, ...] = ()
    provenance: dict[str, Scalar] = field(default_factory=dict)
    """Origin of the profile, for people; the model does not read it."""

    def with_measured(self, model: str, batch_size: int, measured: Sequence[MeasuredIteration]) -> Profile:
        """Return the profile with iterations of this model that were measured, in place of older ones."""

        def added(one: ComputeProfile) -> ComputeProfile:
            if (one.model, one.batch_size) != (model, batch_size):
                return one
            kept = {configuration(other): other for other in (*one.measured, *measured)}
            return dataclasses.replace(one, measured=tuple(kept.values()))

        return dataclasses.replace(self, compute=tuple(map(added, self.compute)))

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file that ``save`` wrote, or a person edited; or one of ``[[link]]`` tables, which a person wrote.

        Raises:
            ValueError: it cannot be read, is of another format, or a field is missing, unknown, or wrong.
        """
        file = read_tables(path)
        if file.is_list("link"):
            return _by_hand(file)
        version = file.count("format")
        if version != FORMAT:
            raise file.error("format", f"be {FORMAT}, the version that this program reads (calibrate again)", version)
        links, codecs = (file.table(name) if name in file else None for name in ("links", "codecs"))
        servers = file.table("servers") if "servers" in file else None
        sharing = _estimate(servers, "sharing", most=1.0) if servers else None
        profile = cls(
            provenance=file.table("provenance").scalars() if "provenance" in file else {},
            calibrated=_calibrated(file.table("calibrated")),
            link=_link(file.table("link")),
            links={name: _link(links.table(name)) for name in _names(links, BESIDE_RING)} if links else {},
            inner=_link(file.table("inner")) if "inner" in file else None,
            codecs={name: _codec(codecs.table(name)) for name in codecs.names()} if codecs else {},
            sharing=sharing,
            compute=tuple(map(_compute, file.tables("compute"))),
        )
        if servers:
            servers.done()
        file.done()
        if UNCOMPRESSED in profile.codecs:
            raise file.error("codecs", f"not have {UNCOMPRESSED}, which costs link.gamma", UNCOMPRESSED)
        measured = [(one.model, one.batch_size) for one in profile.compute]
        for twice in {pair for pair in measured if measured.count(pair) > 1}:
            raise file.error("compute", "have each model and batch_size once", twice)
        return profile

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises ``ValueError`` if it cannot be written."""
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        for link in (values["link"], values["inner"], *values["links"].values()):
            if link is not None:
                del link["overhead"], link["host"]  # are not measured
        ordered = {name: values[name] for name in ("format", "provenance", "calibrated", "link", "links", "inner")}
        ordered["codecs"] = {name: one | one.pop("rates") for name, one in values["codecs"].items()}
        ordered["servers"] = None if self.sharing is None else {"sharing": values["sharing"]}
        ordered["compute"] = values["compute"]
        for one, measured in zip(ordered["compute"], self.compute, strict=True):
            for name in LATER:
                one[name] = one[name] if getattr(measured, name).high > 0 else None
            one["accumulation"] = one["accumulation"] if measured.accumulation > 1 else None  # as with LATER
            one["released"] = one["released"] or None
            for each in one["measured"]:
                each["buckets"] = each["buckets"] if Cut.parse(each["buckets"]) != WHOLE else None
        aside = path.with_name(f".{path.name}.tmp")
        try:
            aside.write_text(format_tables(ordered) + "\n", encoding="utf-8")
            aside.replace(path)
        except OSError as failure:
            raise ValueError(f"{path} must be a file to write; {failure.strerror}") from None

    @property
    def named_ranks(self) -> int:
        """Ranks from 0 up to the last one that a link names; 0 if none names any."""
        return max((rank + 1 for one in self.placed for rank in (*one.senders, *one.receivers)), default=0)

    def link_of(self, name: str) -> LinkProfile:
        """Return the link of an all-reduce, or of ``PARAMETER_SERVER``."""
        return self.links.get(name, self.link)

    def corrections_of(self, name: str) -> Corrections | None:
        """Return the corrections of an all-reduce, or of ``PARAMETER_SERVER``; None if it was not measured itself."""
        link = self.link if name == RING else self.links.get(name)
        return None if link is None else link.corrections


def _by_hand(file: Table) -> Profile:
    """Read links that a person wrote, each with a latency and a bandwidth, and perhaps the CPU time of a byte and the
    ranks that it connects."""
    tables = file.tables("link")
    placed = tuple(map(_placed, tables))
    file.done()
    if not placed:
        raise file.error("link", "have at least one table", [])
    costs = {name: max(getattr(one.link, name) for one in placed) for name in ("alpha", "beta", "host")}
    slowest = dataclasses.replace(placed[0].link, **costs)
    return Profile(calibrated=Calibrated.nothing(), link=LinkProfile.exact(slowest), placed=placed)


def _placed(table: Table) -> PlacedLink:
    latency = table.quantity("latency", parse_seconds)
    if latency > MOST:
        raise table.error("latency", f"be at most {MOST:g} s", latency)
    rate = table.quantity("bandwidth", parse_bandwidth)
    if rate < 1 / MOST:
        raise table.error("bandwidth", f"be at least {1 / MOST:g} bytes a second", rate)
    link = ethernet(rate, latency)
    if "host" in table:
        link = dataclasses.replace(link, host=table.quantity("host", parse_seconds))
    senders, receivers = (table.counts(name, least=0) if name in table else () for name in ("from", "to"))
    node = table.count("node", least=2) if "node" in table else 0
    table.done()
    return PlacedLink(link=link, senders=senders, receivers=receivers, node=node)


def _estimate(table: Table, field: str, most: float = MOST) -> Estimate:
    numbers = table.table(field)
    value = numbers.number("value", most=most)
    low, high = numbers.number("low", most=value), numbers.number("high", least=value, most=most)
    numbers.done()
    return Estimate(value, low, high)


def _link(table: Table) -> LinkProfile:
    corrections = _corrections(table.table("corrections")) if "corrections" in table else None
    alpha, beta, gamma, sync = (_estimate(table, name) for name in LINK)
    table.done()
    return LinkProfile(alpha=alpha, beta=beta, gamma=gamma, sync=sync, corrections=corrections)


def _corrections(table: Table) -> Corrections:
    world_sizes = table.counts("world_sizes", least=2)
    nbytes = table.counts("nbytes")
    factors, errors = table.numbers("factors", least=SMALLEST_SHARE), table.numbers("errors")
    for name, values in (("nbytes", nbytes), ("factors", factors), ("errors", errors)):
        if len(values) != len(world_sizes):
            raise table.error(name, f"have {len(world_sizes)} numbers, as world_sizes has", list(values))
    table.done()
    return Corrections(world_sizes=world_sizes, nbytes=nbytes, factors=factors, errors=errors)


def _names(table: Table, known: Sequence[str]) -> list[str]:
    for name in table.names():
        if name not in known:
            raise table.error(name, f"not be there, but some of {', '.join(known)}", name)
    return table.names()


def _codec(table: Table) -> CodecProfile:
    codec = CodecProfile(
        bits=table.number("bits", least=SMALLEST_BITS),
        gathered=table.flag("gathered"),
        call=_estimate(table, "call"),
        rates=CodecRates(**{one.name: _estimate(table, one.name) for one in dataclasses.fields(CodecRates)}),
    )
    table.done()
    return codec


def _calibrated(table: Table) -> Calibrated:
    smallest, residuals = table.count("smallest_bytes"), table.table("residuals")
    calibrated = Calibrated(
        world_sizes=table.counts("world_sizes", least=2),
        smallest_bytes=smallest,
        largest_bytes=table.count("largest_bytes", least=smallest),
        residuals={name: residuals.number(name) for name in _names(residuals, (RING, *BESIDE_RING))},
        ranks_per_core=table.number("ranks_per_core", least=SMALLEST_SHARE),
    )
    table.done()
    return calibrated


def _by_all_reduce(table: Table, field: str) -> dict[str, Estimate]:
    if field not in table:
        return {}
    others = table.table(field)
    return {name: _estimate(others, name) for name in _names(others, BESIDE_RING)}


def _compute(table: Table) -> ComputeProfile:
    compute = ComputeProfile(
        model=table.text("model"),
        batch_size=table.count("batch_size"),
        accumulation=table.count("accumulation") if "accumulation" in table else 1,
        tensors=table.counts("tensors"),
        released=table.numbers("released", most=1.0) if "released" in table else (),
        samples=table.count("samples") if "samples" in table else None,
        cv=table.number("cv", most=MOST_CV),
        slow_ranks=table.numbers("slow_ranks", least=1.0),
        processor_share=table.number("processor_share", most=1.0) if "processor_share" in table else 1.0,
        local_update=_estimate(table, "local_update") if "local_update" in table else None,
        measured=tuple(map(_measured, table.tables("measured"))),
        late_handovers=_by_all_reduce(table, "late_handovers"),
        **{
            name: _estimate(table, name, most) if name in table else Estimate.exact(0.0) for name, most in LATER.items()
        },
        **{name: _estimate(table, name) for name in ESTIMATES},
    )
    table.done()
    if compute.released and len(compute.released) != len(compute.tensors):
        wanted = f"have {len(compute.tensors)} numbers, as tensors has"
        raise table.error("released", wanted, list(compute.released))
    return compute


def _measured(table: Table) -> MeasuredIteration:
    measured = MeasuredIteration(
        world_size=table.count("world_size", least=2),
        width=table.count("width"),
        codec=table.text("codec"),
        all_reduce=table.text("all_reduce"),
        segment_bytes=table.count("segment_bytes"),
        iteration=_estimate(table, "iteration"),
        iterations=table.count("iterations"),
        loader_workers=table.count("loader_workers", least=0) if "loader_workers" in table else None,
        buckets=table.text("buckets") if "buckets" in table else "1",
    )
    table.done()
    try:
        Cut.parse(measured.buckets)
    except ValueError:
        raise table.error("buckets", "be a number of buckets, or the largest size of one", measured.buckets) from None
    return measured
