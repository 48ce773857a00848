"""Tables of a TOML file, read field by field; an error is one line that names the field."""

from __future__ import annotations

import codecs
import json
import math
import re
import reprlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from timing_model.measured import MOST

MOST_COUNTED = 1 << 53
"""Largest count, which a float still holds exactly."""

Scalar = str | float | list[str] | list[float]


class Table:
    """One table of a file. Raises ``ValueError`` in one line that begins with the file and the field."""

    def __init__(self, where: str, name: str, values: Mapping[str, Any]):
        self._where = where
        self._name = name
        self._left = dict(values)

    def __contains__(self, field: str) -> bool:
        return self._left.get(field) is not None  # JSON has null

    def number(self, field: str, *, least: float = 0.0, most: float = MOST) -> float:
        """Take a finite number from ``least`` to ``most``."""
        return self._as_number(field, self._take(field), least, most)

    def count(self, field: str, *, least: int = 1) -> int:
        """Take a whole number of at least ``least``."""
        return self._as_count(field, self._take(field), least)

    def numbers(self, field: str, *, least: float = 0.0, most: float = MOST) -> tuple[float, ...]:
        """Take a list of numbers, which may be empty."""
        return tuple(self._as_number(field, value, least, most) for value in self._list(field))

    def counts(self, field: str, *, least: int = 1) -> tuple[int, ...]:
        """Take a list of at least one whole number."""
        values = tuple(self._as_count(field, value, least) for value in self._list(field))
        if not values:
            raise self.error(field, "have at least one number", [])
        return values

    def text(self, field: str) -> str:
        """Take a string of one line."""
        return self._as_text(field, self._take(field))

    def flag(self, field: str) -> bool:
        """Take true or false."""
        value = self._take(field)
        if not isinstance(value, bool):
            raise self.error(field, "be true or false", value)
        return value

    def table(self, field: str) -> Table:
        """Take a table below this one."""
        value = self._take(field)
        if not isinstance(value, dict):
            raise self.error(field, "be a table", value)
        return Table(self._where, self._path(field), value)

    def tables(self, field: str) -> list[Table]:
        """Take a list of tables."""
        values = self._list(field)
        for number, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.error(f"{field}[{number}]", "be a table", value)
        return [Table(self._where, f"{self._path(field)}[{number}]", value) for number, value in enumerate(values)]

    def quantity(self, field: str, parse: Callable[[str, str], float]) -> float:
        """Take a string with a unit, which ``parse`` reads, given a name for its errors."""
        return parse(f"{self._where}: {self._path(field)}", self.text(field))

    def is_list(self, field: str) -> bool:
        """Return True if the field is a list, of tables for example."""
        return isinstance(self._left.get(field), list)

    def names(self) -> list[str]:
        """Return the fields that were not taken yet."""
        return list(self._left)

    def scalars(self) -> dict[str, Scalar]:
        """Take all fields that are left, of any name: strings, numbers, and lists of them."""
        taken: dict[str, Scalar] = {}
        for field in self.names():
            value = self._take(field)
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, str):
                    self._as_text(field, one)
                elif isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
                    raise self.error(field, "be a string, a finite number, or a list of them", one)
            taken[field] = value
        return taken

    def done(self) -> None:
        """Raise ``ValueError`` if a field was not taken."""
        if self._left:
            raise ValueError(f"{self._where}: {self._path(min(self._left))} must not be there: there is no such field")

    def refused(self, error: ValueError) -> ValueError:
        """Return the error to raise where an object of this table's fields is refused, in a line that begins with one
        of them."""
        return ValueError(f"{self._where}: {self._name}{'.' if self._name else ''}{error}")

    def error(self, field: str, must: str, got: object) -> ValueError:
        """Return the error to raise where ``field`` must be or do something else."""
        return ValueError(f"{self._where}: {self._path(field)} must {must}; got {reprlib.repr(got)}")

    def _take(self, field: str) -> Any:
        if field not in self._left:
            raise ValueError(f"{self._where}: {self._path(field)} must be there; it is missing")
        return self._left.pop(field)

    def _list(self, field: str) -> list[Any]:
        value = self._take(field)
        if not isinstance(value, list):
            raise self.error(field, "be a list", value)
        return value

    def _path(self, field: str) -> str:
        shown = field if _BARE.fullmatch(field.split("[")[0]) else reprlib.repr(field)
        return f"{self._name}.{shown}" if self._name else shown

    def _as_number(self, field: str, value: object, least: float, most: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.error(field, f"be a number from {least:g} to {most:g}", value)
        return float(value)

    def _as_count(self, field: str, value: object, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_COUNTED:
            raise self.error(field, f"be a whole number of at least {least}", value)
        return value

    def _as_text(self, field: str, value: object) -> str:
        if not isinstance(value, str) or not value.isprintable():
            raise self.error(field, "be a string of one line", value)
        return value


def _decoded(content: bytes) -> str:
    """Return the text of a TOML file, without the mark that some editors put in front. Raises ``ValueError``."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:4]:
        raise ValueError("it is UTF-16 or UTF-32, and TOML must be saved as UTF-8")
    return content.decode("utf-8-sig")


def read_tables(path: Path) -> Table:
    """Read the tables of a TOML file. Raises ``ValueError`` in one line if it cannot be read."""
    try:
        return Table(path.name, "", tomllib.loads(_decoded(path.read_bytes())))
    except OSError as failure:
        raise ValueError(f"{path} must be a file to read, which pipesgd.calibrate writes; {failure.strerror}") from None
    except (ValueError, RecursionError) as failure:  # a byte that is not UTF-8 raises a ValueError, too
        reason = "it is nested too deeply" if isinstance(failure, RecursionError) else str(failure)
        raise ValueError(f"{path.name} must be whole and of TOML's form; {reason.splitlines()[0]}") from None


def format_tables(values: Mapping[str, Any], name: str = "") -> str:
    """Return nested mappings as TOML. Below a table, a mapping without mappings takes one line; None is left out.

    >>> print(format_tables({"format": 1, "link": {"alpha": {"value": 1e-5}}}))
    format = 1
    <BLANKLINE>
    [link]
    alpha = {value = 1e-05}
    """
    present = {field: value for field, value in values.items() if value is not None}
    lines = [f"{_key(field)} = {_value(value)}" for field, value in present.items() if not _is_section(value, name)]
    for field, value in present.items():
        if not _is_section(value, name):
            continue
        full = f"{name}.{_key(field)}" if name else _key(field)
        for section in value if isinstance(value, Sequence) else [value]:
            head = f"[[{full}]]" if isinstance(value, Sequence) else f"[{full}]"
            lines += ["", head, format_tables(section, full)]
    return "\n".join(lines)


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _is_section(value: object, name: str) -> bool:
    if isinstance(value, Mapping):
        return not name or any(isinstance(inner, Mapping) for inner in value.values())
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _key(field: str) -> str:
    return field if _BARE.fullmatch(field) else _value(field)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(field)} = {_value(inner)}" for field, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        # A path may hold bytes that are not UTF-8, which TOML cannot.
        value = value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(int(value)) if isinstance(value, Integral) else repr(float(value))  # numpy's numbers, too
