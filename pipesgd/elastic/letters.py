"""Messages between members as bytes: JSON, and behind it the bytes of tensors where there are any.

    bytes of the JSON 4 | bytes behind it 8 | JSON | bytes

little-endian. Whoever can send one has proved to be a member; what it sends is checked all the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipesgd.membership import messages
from pipesgd.membership.generation import Ballot, Lost, Record, Span
from pipesgd.membership.messages import Results
from pipesgd.membership.store import MalformedValue, decode

HEAD = struct.Struct("<IQ")
"""Beginning of each letter: bytes of its JSON, and of what is behind that."""
MOST_TEXT = 16 << 20
"""Bytes of the largest JSON."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value that the sender shares with all members of a generation under ``key``; None deletes it."""

    generation: int
    key: str
    value: str | None


@dataclass(frozen=True, slots=True)
class Wish:
    """Message that the sender was asked to stop, by a signal, and so were the members ``asked``, as it knows."""

    signal: str
    asked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Message that the sender has done its work: its end, which may come now, is no loss."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a unit as it travels: what JSON holds of it, and the bytes of its tensors."""

    text: Any
    parts: Sequence[memoryview | bytes] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece ``number`` of what the codec of the sender, which leaves, has left out of its sums."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class More:
    """Answer that a piece has arrived."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Message that all pieces were sent: the receiver's next gradient gets them, parts of these ``lengths`` (bytes)."""

    lengths: tuple[int, ...]

    def parts_of(self, data: bytes) -> list[bytes] | None:
        """Return the parts of ``data``; None if it is not of these lengths."""
        ends = list(itertools.accumulate(self.lengths, initial=0))
        return [data[a:b] for a, b in itertools.pairwise(ends)] if ends[-1] == len(data) else None


@dataclass(frozen=True, slots=True)
class Taken:
    """Message that member ``by`` has what ``member``, which leaves, has left out."""

    member: int
    by: int


OfLeaving = Wish | Piece | More | LeftOut | Taken
"""Letters about members that were asked to stop."""

_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (*typing.get_args(messages.Message), *typing.get_args(OfLeaving), Value, Goodbye)
}
_PARTS = (Record, Span, Lost)


def encode(letter: Any) -> list[bytes | memoryview]:
    """Return the buffers of ``letter``, which are to be sent one after the other."""
    behind: list[bytes | memoryview] = []
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(letter):
        value = getattr(letter, field.name)
        if isinstance(letter, Results) and field.name == "results":
            value = {}
            for unit, result in letter.results.items():
                assert isinstance(result, Result)
                value[unit] = [result.text, [len(part) for part in result.parts]]
                behind += result.parts
        if isinstance(value, bytes):
            behind.append(value)
            value = len(value)
        fields[field.name] = dataclasses.asdict(value) if isinstance(value, _PARTS) else value
    text = json.dumps([type(letter).__name__, fields]).encode()
    return [HEAD.pack(len(text), sum(map(len, behind))) + text, *behind]


def decoded(text: bytes, behind: bytes) -> Any:
    """Return the letter that ``encode`` has made these bytes of.

    Raises:
        MalformedValue: they are none.
    """
    try:
        name, fields = decode(text)
        kind = _KINDS[name]
        if kind is Results:
            fields["results"] = _results(fields["results"], behind)
        elif kind is Piece:
            if fields["data"] != len(behind):
                raise ValueError(f"{fields['data']} bytes must be behind it; got {len(behind)}")
            fields["data"] = behind
        hints = _hints(kind)
        return kind(**{key: _read(hints[key], value) for key, value in fields.items()})
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as problem:
        raise MalformedValue(f"it must be a member's message; got {text[:40]!r} ({problem})") from problem


def _results(found: Mapping[str, Any], behind: bytes) -> dict[int, Result]:
    results, position = {}, 0
    for unit, (text, lengths) in found.items():
        parts = []
        for length in lengths:
            parts.append(memoryview(behind)[position : position + length])
            position += length
        results[int(unit)] = Result(text, parts)
    if position != len(behind):
        raise ValueError(f"{position} bytes must be behind it; got {len(behind)}")
    return results


def _hints(kind: type, known: dict[type, dict[str, Any]] = {}) -> dict[str, Any]:  # noqa: B006 (made once)
    if kind not in known:
        known[kind] = typing.get_type_hints(kind)
    return known[kind]


def _read(hint: Any, value: Any) -> Any:
    """Return ``value``, as JSON holds it, as what ``hint`` says."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        if value is None and type(None) in typing.get_args(hint):
            return None
        return _read(next(one for one in typing.get_args(hint) if one is not type(None)), value)
    if hint is Ballot:
        number, member = value
        return Ballot(_read(int, number), _read(int, member))
    if hint in _PARTS:
        hints = _hints(hint)
        return hint(**{key: _read(hints[key], one) for key, one in value.items()})
    if origin is tuple:
        (of, _) = typing.get_args(hint)
        return tuple(_read(of, one) for one in value)
    simple: dict[Any, Callable[[Any], bool]] = {
        int: lambda one: type(one) is int,
        float: lambda one: type(one) in (int, float),
        bool: lambda one: type(one) is bool,
        str: lambda one: type(one) is str,
    }
    if hint in simple and not simple[hint](value):
        raise ValueError(f"{hint.__name__} expected; got {value!r}")
    return value
