"""Profile of a measured cluster, which ``pipesgd.calibrate`` writes to ``cluster.toml`` and the timing model reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from timing_model.measured import (
    BESIDE_RING,
    MOST,
    RING,
    UNCOMPRESSED,
    Calibrated,
    CodecProfile,
    ComputeProfile,
    Corrections,
    Estimate,
    LinkProfile,
    MeasuredIteration,
    configuration,
)
from timing_model.params import PlacedLink
from timing_model.presets import ethernet
from timing_model.toml_io import Scalar, Table, format_tables, read_tables
from timing_model.units import parse_bandwidth, parse_seconds

FORMAT = 7
"""Version of the file's format, raised whenever an older reader would misunderstand a newer file."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A cluster, and the models on it."""

    provenance: dict[str, Scalar] = field(default_factory=dict)
    """Origin of the profile, for people; the model does not read it."""
    calibrated: Calibrated
    link: LinkProfile
    """Link of a ring, and of all that is not in ``links``."""
    links: dict[str, LinkProfile] = field(default_factory=dict, metadata={"names": BESIDE_RING})
    """Links of other all-reduces by name, and of ``PARAMETER_SERVER``: the same network, as measured with each."""
    inner: LinkProfile | None = None
    """Link inside a node; its alpha and beta count."""
    placed: tuple[PlacedLink, ...] = ()
    """Links between the ranks, where not all are alike; ``link`` then has the largest alpha, beta and host of them."""
    codecs: dict[str, CodecProfile] = field(default_factory=dict)
    """Codecs by name, without fp32, which costs the link's gamma."""
    sharing: Estimate | None = field(default=None, metadata={"most": 1.0})
    """Value of ``sharing`` in ``parameter_server.parameter_server_time``."""
    compute: tuple[ComputeProfile, ...] = ()

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
        profile = _read(file, cls)
        if UNCOMPRESSED in profile.codecs:
            raise file.error("codecs", f"not have {UNCOMPRESSED}, which costs link.gamma", UNCOMPRESSED)
        measured = [(one.model, one.batch_size) for one in profile.compute]
        for twice in {pair for pair in measured if measured.count(pair) > 1}:
            raise file.error("compute", "have each model and batch_size once", twice)
        return profile

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all, without fields that have their defaults.

        Raises ``ValueError`` if it cannot be written.
        """
        text = format_tables({"format": FORMAT} | _plain(self))
        aside = path.with_name(f".{path.name}.tmp")
        try:
            aside.write_text(text + "\n", encoding="utf-8")
            aside.replace(path)
        except OSError as failure:
            raise ValueError(f"{path} must be a file to write; {failure.strerror}") from None

    def limited_to(self, rate: float) -> Profile:
        """Return the profile of the same cluster if each rank sends at most ``rate`` bytes of payload a second: the
        bandwidth of its links is the smaller one of theirs and of this.

        What was measured at a higher rate is left out, and the computation is slower by as much less as the bandwidth
        is smaller: a rank's cores have the same work for a collective, in a longer time.
        """
        share = min(1.0, rate * self.link.params().byte_seconds())
        if share == 1:
            return self
        slower = ("compute_slowdown", "codec_compute_slowdown")
        return dataclasses.replace(
            self,
            link=self.link.limited_to(rate),
            links={name: one.limited_to(rate) for name, one in self.links.items()},
            compute=tuple(
                dataclasses.replace(one, measured=(), **{name: getattr(one, name).times(share) for name in slower})
                for one in self.compute
            ),
        )

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


def _read(table: Table, kind: type[T]) -> T:
    """Read a dataclass from a table, field by field; fields with a default may be missing."""
    hints = get_type_hints(kind)
    values = {
        item.name: _value(table, item.name, hints[item.name], item.metadata)
        for item in dataclasses.fields(cast(Any, kind))
        if item.name in table or item.default is item.default_factory is dataclasses.MISSING
    }
    table.done()
    try:
        return kind(**values)
    except ValueError as error:
        raise table.refused(error) from None


def _value(table: Table, name: str, hint: Any, bounds: Mapping[str, Any]) -> Any:
    """Take a field of this type from a table, with the ``bounds`` of its metadata."""
    arguments = get_args(hint)
    if type(None) in arguments:
        return _value(table, name, arguments[0], bounds)
    if hint is Estimate:
        return _estimate(table, name, **bounds)
    if hint is bool:
        return table.flag(name)
    if hint is str:
        return table.text(name)
    if hint in (int, float):
        return (table.count if hint is int else table.number)(name, **bounds)
    if get_origin(hint) is tuple:
        if arguments[0] in (int, float):
            return (table.counts if arguments[0] is int else table.numbers)(name, **bounds)
        return tuple(_read(one, arguments[0]) for one in table.tables(name))
    if get_origin(hint) is dict:
        if arguments[1] == Scalar:
            return table.table(name).scalars()
        inner = table.table(name)
        for one in inner.names():
            if one not in bounds.get("names", (one,)):
                raise inner.error(one, f"not be there, but some of {', '.join(bounds['names'])}", one)
        return {one: _value(inner, one, arguments[1], {}) for one in inner.names()}
    return _read(table.table(name), hint)


def _estimate(table: Table, name: str, most: float = MOST) -> Estimate:
    numbers = table.table(name)
    value = numbers.number("value", most=most)
    low, high = numbers.number("low", most=value), numbers.number("high", least=value, most=most)
    numbers.done()
    return Estimate(value, low, high)


def _plain(value: Any) -> Any:
    """Return a dataclass as nested mappings, without fields that have their defaults; ``Estimate`` has none."""
    if dataclasses.is_dataclass(value):
        kept = [item for item in dataclasses.fields(value) if getattr(value, item.name) != _default(item)]
        return {item.name: _plain(getattr(value, item.name)) for item in kept}
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _default(item: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; ``dataclasses.MISSING`` if it has none."""
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
