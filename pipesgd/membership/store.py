"""torch's key-value store with a deadline on every call, and values that are checked before they are used."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from pipesgd.membership.listening import listener_at
from pipesgd.membership.lookups import SLOW_ANSWER_SECONDS, suspect_lookups
from pipesgd.membership.sealed import Sealed, stored
from pipesgd.process import at_port

T = TypeVar("T")

LONGEST_PAUSE = 0.02
"""Largest number of seconds between two looks into the store."""

LARGEST_VALUE = 16 * 1024 * 1024
"""Bytes of the largest value that a rank accepts from the store."""


class StoreSilent(dist.DistStoreError):
    """The store has not answered a call within its deadline."""


class MalformedValue(Exception):  # noqa: N818 (named after what it is, as DeadlineExceeded is)
    """A value in the store is not what pipesgd's ranks write there; the text says why."""


class BoundedStore:
    """A client of torch's store whose every call ends within ``seconds()`` seconds.

    torch's own client waits without a deadline for an answer to a request that it has sent: if the process that holds
    the store is stopped, or the link to it is cut, the call never returns. So each call runs in its own thread, which
    is left behind if it does not return. No later call is tried then, since torch's client answers them in turn.

    For the same reason two threads must not share a client: ``clone`` makes another one.
    """

    def __init__(self, store: dist.Store, seconds: Callable[[], float]):
        self._store = store
        self._seconds = seconds
        self._silent: StoreSilent | None = None

    def clone(self, seconds: Callable[[], float]) -> BoundedStore:
        """Return another client of the same store."""
        return BoundedStore(self._call(self._store.clone), seconds)  # type: ignore[attr-defined]  # not in torch's stubs

    def hurry(self, seconds: float) -> None:
        """Give every later call this deadline."""
        self._seconds = lambda: seconds

    def run(self, calls: Callable[[dist.Store], T]) -> T:
        """Return the result of ``calls``, which may use the store more than once."""
        return self._call(lambda: calls(self._store))

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if every key is there."""
        return self._call(lambda: self._store.check(list(keys)))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, all of which must be there."""
        return self._call(lambda: self._store.multi_get(list(keys)))

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(key))

    def _call(self, call: Callable[[], T]) -> T:
        if self._silent is not None:
            raise self._silent
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as failure:  # noqa: BLE001 (the caller gets it)
                answer.set_exception(failure)

        thread = threading.Thread(target=run, name="pipesgd-store", daemon=True)
        thread.start()
        seconds = self._seconds()
        thread.join(min(seconds, SLOW_ANSWER_SECONDS))
        if thread.is_alive() and (server := _server(self._store)) is not None:
            suspect_lookups(server.host, strangers=True)
        try:
            answer.exception(max(0.0, seconds - SLOW_ANSWER_SECONDS))
        except TimeoutError:
            where = address(self._store)
            self._silent = StoreSilent(f"the store that the ranks share{where} has not answered within {seconds:g} s")
            raise self._silent from None
        thread.join()
        return answer.result()


def host_store(host: str, port: int) -> dist.Store | None:
    """Hold a store at ``host`` alone, in a thread of torch's; later stores of this process at ``port`` share it.

    Left to itself, torch listens at all addresses of the machine. Returns None if torch must be, or shall say why the
    store cannot be held; the errors are those of ``listener_at``.
    """
    listener = listener_at(host, port)
    if listener is None:
        return None
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def poll(done: Callable[[], bool], timeout: float) -> bool:
    """Return True if ``done()`` became true within ``timeout`` seconds.

    torch's stores can wait by themselves, but write their own warnings to stderr when that takes long.
    """
    deadline = time.monotonic() + timeout
    pause = 0.0005
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def address(store: dist.Store) -> str:
    """Return the location of the process that holds the store, to be read after its name; empty if it is not known."""
    server = _server(store)
    return "" if server is None else f" ({at_port(server.host, server.port)}, rank 0's machine)"


def _server(store: dist.Store) -> dist.TCPStore | None:
    """Return the client of a server that is below ``store``; None if there is no server."""
    while isinstance(store, dist.PrefixStore | Sealed):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def present(store: dist.Store, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the values of those of ``keys`` that are in the store, and valid if it is sealed."""
    return store.present(keys) if isinstance(store, Sealed) else stored(store, keys)


def decode(value: bytes) -> Any:
    """Decode what another rank has written as JSON.

    Raises:
        MalformedValue: the value is too large, or not JSON. Anybody who reaches the store's port can write to it.
    """
    if len(value) > LARGEST_VALUE:
        raise MalformedValue(f"it must have at most {LARGEST_VALUE} bytes; got {len(value)}")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        raise MalformedValue(f"it must be JSON; got {value[:40]!r}") from problem


def same_kind(value: Any, own: Any) -> bool:
    """Return True if another rank's ``value`` is of the JSON type of this rank's ``own``, or one of them is null."""
    kinds = (bool | int | float, str, list | tuple, dict)
    return value is None or own is None or any(isinstance(value, kind) and isinstance(own, kind) for kind in kinds)


def decode_text(value: bytes) -> str:
    """Decode what another rank has written as text, cut short if it is long. It never raises an error."""
    return value[:2000].decode(errors="replace")
