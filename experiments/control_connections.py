"""Control connections of sixteen members: what their heartbeats cost, and what strangers change.

    python -m experiments.control_connections              control_connections.csv; exit code 1 if a stranger did harm

Sixteen processes, forked from this one, are members of an elastic run over loopback that trains nothing, with a secret.
First they are left alone. Then 10,000 connections that are no member's go to their listeners in turns: silent ones,
random bytes, the beginning of a greeting, whole greetings of another session, more bytes than a greeting has, and HTTP.
The processor's time is that of whole processes, so that it includes all that an idle member does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments import command
from experiments.forked_ranks import fork_rank, import_all, store
from experiments.results import Row, save, write_json
from pipesgd import elastic, keys
from pipesgd.comm.greeting import HELLO, MAGIC
from pipesgd.errors import RunError
from pipesgd.membership.generation import first_record
from pipesgd.ranks import Ranks

MEMBERS, SECONDS, CONNECTIONS = 16, 30.0, 10_000
QUICK_MEMBERS, QUICK_SECONDS, QUICK_CONNECTIONS = 3, 2.0, 60
HELD = 200
"""Connections of strangers that are open at the same time."""
SETTLED_SECONDS = 2.0
"""Seconds before the measurement in which nothing of the start is left to be done."""
DEADLINE_SECONDS = 300.0
POLL_SECONDS = 0.25
"""Seconds between two looks for a file: few, since they count as what a member costs."""
PHASES = "alone", "strangers"
SESSION_BYTES = 16
"""Bytes of a session's name in a greeting."""


def member(rank: int, world_size: int, folder: Path) -> int:
    """Be a member until the file "end" is there; write in each phase what this process costs; return the exit code."""
    ranks = elastic.join(least=1, secret_file=str(folder / "secret"))
    ranks.units.start(first_record(range(world_size)))
    place = ranks.members._control._listener.getsockname()  # what a stranger finds by trying all ports
    write_json(folder / f"{rank}.place", place)
    for phase in PHASES:
        wait_for(folder / f"{phase}.begins")
        begin, before = time.monotonic(), time.process_time()
        wait_for(folder / f"{phase}.ends")
        share = (time.process_time() - before) / (time.monotonic() - begin)
        found = {
            "core_share": share,
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "resident_bytes": resident_bytes(),
            "generation": ranks.members.record.number,
            "members": len(ranks.members.record.members),
        }
        write_json(folder / f"{rank}.{phase}", found)
    wait_for(folder / "end")
    ranks.close(in_order=True)
    return 0


def resident_bytes() -> int:
    """Return the bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_for(path: Path) -> None:
    """Return when there is a file at ``path``.

    Raises:
        RunError: it is not there within ``DEADLINE_SECONDS``.
    """
    end = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise RunError(f"{path.name} must be there within {DEADLINE_SECONDS:.0f} s; it is not")
        time.sleep(POLL_SECONDS)


def texts_of(chance: random.Random) -> list[bytes]:
    """Return what strangers send."""
    greeting = HELLO.pack(MAGIC, chance.randbytes(SESSION_BYTES), 1, bytes(32), bytes(32))
    return [
        b"",
        chance.randbytes(HELLO.size),
        greeting[:50],
        greeting,
        greeting + bytes(1000),
        b"GET / HTTP/1.1\r\n\r\n",
    ]


def strangers(places: Sequence[Sequence[Any]], number: int) -> None:
    """Make ``number`` connections to these places in turns, of which ``HELD`` are open at the same time."""
    texts = texts_of(random.Random(0))
    held: list[socket.socket] = []
    for one in range(number):
        host, port = places[one % len(places)][:2]
        sock = socket.create_connection((host, port), timeout=DEADLINE_SECONDS)
        with contextlib.suppress(ConnectionError):  # the member has refused it before all was sent
            sock.sendall(texts[one // len(places) % len(texts)])
        held.append(sock)
        if len(held) > HELD:
            held.pop(0).close()
    for sock in held:
        sock.close()


def measure(world_size: int, seconds: float, connections: int) -> list[Row]:
    """Return a row for each phase.

    Raises:
        RunError: a member has failed.
    """
    import_all()
    with tempfile.TemporaryDirectory() as name, store() as port:
        folder = Path(name)
        keys.make(folder / "secret")
        pids = [
            fork_rank(partial(member, rank, world_size, folder), rank, world_size, folder, port)
            for rank in range(world_size)
        ]
        try:
            for rank in range(world_size):
                wait_for(folder / f"{rank}.place")
            places = [json.loads((folder / f"{rank}.place").read_text("utf-8")) for rank in range(world_size)]
            rows = [_phase(phase, folder, places, seconds, connections) for phase in PHASES]
        finally:
            (folder / "end").touch()
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise RunError(f"all members must end in order; got codes {codes} after\n{(folder / 'log').read_text()}")
    return rows


def _phase(phase: str, folder: Path, places: Sequence[Sequence[Any]], seconds: float, connections: int) -> Row:
    time.sleep(SETTLED_SECONDS)
    (folder / f"{phase}.begins").touch()
    begin = time.monotonic()
    if phase == "strangers":
        strangers(places, connections)
    time.sleep(max(0.0, begin + seconds - time.monotonic()))
    took = time.monotonic() - begin
    (folder / f"{phase}.ends").touch()
    found: list[dict[str, Any]] = []
    for rank in range(len(places)):
        wait_for(folder / f"{rank}.{phase}")
        found.append(json.loads((folder / f"{rank}.{phase}").read_text("utf-8")))
    shares = [one["core_share"] for one in found]
    return {
        "phase": phase,
        "members": len(places),
        "seconds": round(took, 1),
        "connections": connections if phase == "strangers" else 0,
        "core_share_median": round(float(np.median(shares)), 5),
        "core_share_most": round(max(shares), 5),
        "descriptors_most": max(one["descriptors"] for one in found),
        "resident_mb_most": round(max(one["resident_bytes"] for one in found) / 1e6, 1),
        "changes": max(one["generation"] for one in found),
        "members_least": min(one["members"] for one in found),
    }


def harm_of(rows: Sequence[Row]) -> str:
    """Return what strangers have changed; empty if nothing."""
    alone, among = rows
    if among["changes"] or among["members_least"] < among["members"]:
        return f"{among['changes']} changes of members, of which {among['members_least']} are left"
    if among["descriptors_most"] > alone["descriptors_most"]:
        return f"{among['descriptors_most']} descriptors are open, {alone['descriptors_most']} before"
    return ""


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("control_connections", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    quick = arguments.quick
    rows = measure(
        QUICK_MEMBERS if quick else MEMBERS,
        QUICK_SECONDS if quick else SECONDS,
        QUICK_CONNECTIONS if quick else CONNECTIONS,
    )
    save("control_connections", rows, folder=arguments.output)
    command.show("control connections", [{name: str(value) for name, value in row.items()} for row in rows])
    if harm := harm_of(rows):
        raise RunError(f"strangers must change nothing; got {harm}")


if __name__ == "__main__":
    command.run(main)
