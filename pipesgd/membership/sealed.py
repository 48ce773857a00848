"""A store whose values are sealed with the secret of the job, so that only its ranks can write them.

Anybody who reaches the store's port can read, write and delete its keys. With a secret, every value that goes through
the stores of pipesgd has a seal, an HMAC-SHA256 over the key, the writer, its count and the value. Keys contain the
session, so a value from another session or key is as wrong as a forged one; a value that its writer has replaced since
is a replay. Both count as missing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from pipesgd.membership.secret import Secret
from pipesgd.process import own_rank, say

SEAL = struct.Struct("<8s32s8sQ")
"""Beginning of each value: magic, HMAC, name of the writer, and its number among the values of that writer."""
MAGIC = b"pgd seal"

ABSENT = "pgd absent"
"""Value that no rank writes: a comparison with it returns it where there is none."""

T = TypeVar("T")

PAUSE_SECONDS = 0.01
"""Seconds between two looks at a key that somebody waits for."""
RENEW_SECONDS = 0.1
"""Shortest time between two looks at this process's own values, in seconds."""
COUNT_SECONDS = 2.0
"""Seconds in which wrong values are counted before they are reported."""
MOST_KEYS = 4096
"""Keys of which the newest value is remembered: those that were used last."""

_kept: list[Sealed] = []
"""All stores of this process: torch holds the C++ half alone, which calls methods of this one."""


class _Journal:
    """Knowledge of a process about the values of one store: those that it wrote, and those that are wrong."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.writer = os.urandom(8)
        self.count = 0
        self.own = OrderedDict[str, bytes]()
        """Sealed values that this process has written last."""
        self.wrong: dict[str, bytes] = {}
        """Values that are there and wrong, by key."""
        self.first = ""
        """Key of the first wrong value."""
        self.wrong_values = 0
        self.renewed = 0.0


class Sealed(dist.Store):
    """A client of a store that seals what it writes, and takes values without a valid seal for missing.

    torch's own code may use it, so that addresses of its process groups are sealed, too. Counters of ``add`` are the
    server's, and are not sealed. Who waits for a value also writes again what it has written itself, if that was
    overwritten or deleted meanwhile: so a value is not lost because a stranger was faster than its reader.

    Args:
        store: the store with these keys, for one thread.
        secret: the secret of the job.
        prefix: beginning of all keys.
    """

    def __init__(self, store: dist.Store, secret: Secret, prefix: str = "", *, _journal: _Journal | None = None):
        super().__init__()
        self.underlying_store = store
        self._secret = secret
        self._key = secret.key("values in the store")
        self._prefix = prefix
        self._journal = _journal or _Journal()
        self._checked: dict[str, bytes] = {}
        """Values that the last ``check`` has found."""
        self._newest = OrderedDict[str, dict[bytes, int]]()
        """Number of the newest value that this client has read of each writer, by key."""
        _kept.append(self)

    def part(self, name: str) -> Sealed:
        """Return the part of this store whose keys begin with ``name``."""
        return Sealed(self.underlying_store, self._secret, f"{self._prefix}{name}/", _journal=self._journal)

    def clone(self) -> Sealed:
        """Return another client of the same store."""
        other = self.underlying_store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        return Sealed(other, self._secret, self._prefix, _journal=self._journal)

    def set(self, key: str, value: str | bytes) -> None:
        name, journal = self._prefix + key, self._journal
        value = value.encode() if isinstance(value, str) else bytes(value)
        with journal.lock:
            journal.count += 1
            sealed = self._sealed(name, journal.writer, journal.count, value)
            _remember(journal.own, name, sealed)
        self.underlying_store.set(name, sealed)  # type: ignore[arg-type]  # bytes are taken, too

    def present(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those of ``keys`` that are there and valid."""
        names = [self._prefix + key for key in keys]
        values = stored(self.underlying_store, names)
        with self._journal.lock:
            found = {key: self._opened(name, values.get(name)) for key, name in zip(keys, names, strict=True)}
        self._renew_sometimes()
        return {key: value for key, value in found.items() if value is not None}

    def check(self, keys: Sequence[str]) -> bool:
        self._checked = self.present(keys)
        return len(self._checked) == len(set(keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if not self._checked.keys() >= set(keys):
            self._wait(keys, self._seconds)
        found, self._checked = self._checked, {}
        return [found[key] for key in keys]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self._seconds if timeout is None else timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        return self.underlying_store.add(self._prefix + key, amount)

    def delete_key(self, key: str) -> bool:
        with self._journal.lock:
            self._journal.own.pop(self._prefix + key, None)
        return self.underlying_store.delete_key(self._prefix + key)

    deleteKey = delete_key  # noqa: N815 (torch's name for what its C++ code calls)

    def forged(self, keys: Iterable[str]) -> list[str]:
        """Return those of ``keys`` that had a wrong value when they were last looked at. No input or output."""
        return [key for key in keys if self._prefix + key in self._journal.wrong]

    @property
    def _seconds(self) -> float:
        """Seconds that torch's own stores wait for a value, too, unless a call says otherwise."""
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # not in torch's stubs
        return timeout.total_seconds()

    def _wait(self, keys: Sequence[str], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() >= end:
                missing = [key for key in keys if key not in self._checked]
                forged = " (forged)" if self.forged(missing) else ""
                raise dist.DistStoreError(f"wait timed out after {seconds:g} s for {self._prefix}{missing[0]}{forged}")
            time.sleep(PAUSE_SECONDS)

    def _sealed(self, name: str, writer: bytes, count: int, value: bytes) -> bytes:
        return SEAL.pack(MAGIC, self._seal(name, writer, count, value), writer, count) + value

    def _seal(self, name: str, writer: bytes, count: int, value: bytes) -> bytes:
        key = name.encode()
        return hmac.digest(self._key, struct.pack("<I8sQ", len(key), writer, count) + key + value, hashlib.sha256)

    def _opened(self, name: str, sealed: bytes | None) -> bytes | None:
        """Return the value that was sealed; None if there is none, or a wrong one, which is counted then."""
        journal = self._journal
        if sealed is not None and len(sealed) >= SEAL.size:
            magic, seal, writer, count = SEAL.unpack_from(sealed)
            value = sealed[SEAL.size :]
            if magic == MAGIC and hmac.compare_digest(seal, self._seal(name, writer, count, value)):
                newest = self._newest.setdefault(name, {})
                if newest.get(writer, 0) <= count:
                    newest[writer] = count
                    _remember(self._newest, name, newest)
                    journal.wrong.pop(name, None)
                    return value
        if sealed is None:
            journal.wrong.pop(name, None)
        elif journal.wrong.get(name) != sealed:
            if len(journal.wrong) < MOST_KEYS:
                journal.wrong[name] = sealed
            self._count(name)
        return None

    def _count(self, name: str) -> None:
        """Count a wrong value, and report all of them after a moment if it is the first one."""
        journal = self._journal
        journal.wrong_values += 1
        if journal.wrong_values == 1:
            journal.first = name
            timer = threading.Timer(COUNT_SECONDS, _report, (journal,))
            timer.name, timer.daemon = "forged values", True
            timer.start()

    def _renew_sometimes(self) -> None:
        """Write again what this process has written, if it was overwritten by a stranger, or deleted."""
        journal = self._journal
        with journal.lock:
            if time.monotonic() < journal.renewed + RENEW_SECONDS:
                return
            journal.renewed = time.monotonic()
            names = list(journal.own)
        values = stored(self.underlying_store, names)
        with journal.lock:
            again = {
                name: journal.own[name]
                for name in names
                if name in journal.own and not self._may_stay(name, values.get(name))
            }
        for name, sealed in again.items():
            self.underlying_store.set(name, sealed)  # type: ignore[arg-type]

    def _may_stay(self, name: str, found: bytes | None) -> bool:
        """Return True if this value is the newest of this process, or another rank's."""
        own = self._journal.own[name]
        if found is None or found == own:
            return found == own
        return self._opened(name, found) is not None and SEAL.unpack_from(found)[2] != self._journal.writer


def sealed(store: dist.Store, secret: Secret | None) -> dist.Store:
    """Return the part of ``store`` that pipesgd uses, sealed if there is a secret."""
    return dist.PrefixStore("pipesgd", store) if secret is None else Sealed(store, secret, "pipesgd/")


def part(store: dist.Store, name: str) -> dist.Store:
    """Return the part of ``store`` whose keys begin with ``name``."""
    return store.part(name) if isinstance(store, Sealed) else dist.PrefixStore(name, store)


def forged(store: dist.Store, keys: Iterable[str]) -> list[str]:
    """Return those of ``keys`` that had a wrong value when they were last looked at; none without a secret."""
    return store.forged(keys) if isinstance(store, Sealed) else []


def is_of_another_secret(store: dist.Store, key: str) -> bool:
    """Return True if there is a value that was sealed with another secret than this rank's, or forged."""
    if isinstance(store, Sealed):
        return not store.check([key]) and bool(store.forged([key]))
    return store.check([key]) and store.get(key).startswith(MAGIC)


def stored(store: dist.Store, names: Sequence[str]) -> dict[str, bytes]:
    """Return the values of those of ``names`` that are in ``store``.

    torch waits for a key that is not there, also if somebody deletes it after it was found: so each is read by a
    comparison, which waits for nothing and changes nothing.
    """
    found = list(names) if store.check(list(names)) else [name for name in names if store.check([name])]
    values = {name: store.compare_set(name, ABSENT, ABSENT) for name in found}
    return {name: value for name, value in values.items() if value != ABSENT.encode()}


def _remember(known: OrderedDict[str, T], name: str, value: T) -> None:
    known[name] = value
    known.move_to_end(name)
    if len(known) > MOST_KEYS:
        known.popitem(last=False)


def _report(journal: _Journal) -> None:
    number, first = journal.wrong_values, journal.first
    values = "1 value was" if number == 1 else f"{number} values were"
    say(
        f"warning: rank {own_rank()}: {values} forged in the store of the job, first of {first!r}: sealed with "
        "another secret, or by somebody without one; they count as missing, and further ones are not reported"
    )
