"""Slow look-ups of names, noticed and reported with their cure.

torch's store looks up the name of every address that connects to it, by ``getnameinfo``, in the one thread that serves
all ranks; its clients look up the address of the store. While a name server is slow, so is the store, and whoever opens
connections to it, and sends nothing, holds up all ranks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from pipesgd.process import say, speaks_for_machine

SLOW_ANSWER_SECONDS = 1.0
"""Seconds of waiting for the store after which look-ups of names are suspected."""

SLOW_LOOKUP_SECONDS = 0.5
"""Seconds after which a look-up is called slow: an answer takes milliseconds."""

UNKNOWN_ADDRESS = "192.0.2.1"
"""Address that no machine has (RFC 5737), looked up as that of a stranger would be."""

_turn = threading.Lock()
"""Held by the thread that looks for a slow look-up, and forever once one was reported."""


@contextlib.contextmanager
def suspecting_lookups(host: str) -> Iterator[None]:
    """Report slow look-ups if what is done meanwhile with the store on ``host`` takes longer than it should."""
    timer = threading.Timer(SLOW_ANSWER_SECONDS, suspect_lookups, (host,))
    timer.name, timer.daemon = "pipesgd-lookups", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def suspect_lookups(host: str, *, strangers: bool = False) -> None:
    """Find out in another thread whether look-ups are slow, and report so once, on one rank of each machine.

    ``host`` holds the store. With ``strangers`` an address that this machine need not know is looked up as well.
    """
    if not speaks_for_machine() or not _turn.acquire(blocking=False):
        return

    def look() -> None:
        slow = next((what for what, lookup in _lookups(host, strangers) if _is_slow(lookup)), None)
        if slow is None:
            _turn.release()
        else:
            say(
                f"warning: a look-up of {slow} takes more than {SLOW_LOOKUP_SECONDS:g} s on this machine, and torch's "
                "store makes one for every connection, a stranger's too, while all ranks wait: list all machines in "
                '/etc/hosts and set "hosts: files" in /etc/nsswitch.conf, or start torchrun with RES_OPTIONS=attempts:0'
            )

    threading.Thread(target=look, name="pipesgd-lookups", daemon=True).start()


def _lookups(host: str, strangers: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what torch may look up, each with its name for messages."""
    found: list[str] = []
    yield f"the address of {host}", lambda: found.extend(_addresses(host))
    for address in [*found, *([UNKNOWN_ADDRESS] if strangers else [])]:
        yield f"the name of {address}", lambda address=address: _name_of(address)  # type: ignore[misc]


def _addresses(host: str) -> list[str]:
    """Return the address of ``host``, and that of this machine which is used to reach it."""
    with contextlib.suppress(OSError, UnicodeError):
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as unused:  # nothing is sent
            unused.connect(place)
            return list(dict.fromkeys([str(place[0]), str(unused.getsockname()[0])]))
    return []


def _name_of(address: str) -> None:
    """Look up the name of ``address`` in the form in which torch does: sockets of its store are those of IPv6."""
    with contextlib.suppress(OSError):
        socket.getnameinfo((address if ":" in address else f"::ffff:{address}", 0), 0)


def _is_slow(lookup: Callable[[], object]) -> bool:
    thread = threading.Thread(target=lookup, name="pipesgd-lookup", daemon=True)
    thread.start()
    thread.join(SLOW_LOOKUP_SECONDS)
    return thread.is_alive()
