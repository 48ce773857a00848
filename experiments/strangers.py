"""Strangers on the network of a job with a secret: can they change a value, end the job, or accuse a healthy rank?

    python -m experiments.strangers        strangers.csv; exit code 1 if one of them did harm

Three ranks on this machine's loopback, forked from this process, train with an emulated accelerator each, over gloo
with a sealed store, over tcp, and over tls. The strangers know no secret. They are:

    nobody        the run that the others are compared with, for as long as the connections take
    connections   10,000 connections to every port that pipesgd opens, 500 a second in all: in turns silent ones, random
                  bytes, half a greeting, greetings of another session, too much, HTTP, half a TLS handshake. Gloo's own
                  ports are left out: each connection takes some of its memory, and thousands end it (docs/security.md)
    forger        writes random bytes and older values over every key of the store, deletes them, and puts there that a
                  rank has failed and that all are to stop, for 12 s while the ranks train
    early forger  writes over every key from before the ranks start, for 8 s

A run is right if all ranks end with code 0 and the weights that they have without strangers, no rank is called lost or
silent, and each rank warns of forged values once at most. The early forger may also keep a job from starting, in a line
of each rank that says "forged". Then come ranks with another secret, or another certificate, of which both sides must
say so within 2 s.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from experiments import command
from experiments.control_connections import HELD, texts_of
from experiments.forked_ranks import fork_rank, import_all, store, trained, training
from experiments.results import Row, save
from experiments.watched_ranks import WatchedRanks
from pipesgd import keys
from pipesgd.errors import RunError
from pipesgd.membership.watcher import FAILURE, STOPPING, report_key
from pipesgd.ranks import Ranks

RANKS = 3
TRANSPORTS = ("gloo", "tcp", "tls")
NOBODY, CONNECTIONS, FORGER, EARLY = "nobody", "connections", "forger", "early forger"
KINDS = (NOBODY, CONNECTIONS, FORGER, EARLY)
ITERATIONS, QUICK_ITERATIONS = 1800, 200
WORDS = (
    "--dataset digits --model experiments.accelerators:at_least=40ms --batch-size 8 --width 2 --codec int8 "
    "--timeout 20 --checkpoint-iterations 100"
)
BEGIN = 60
"""Iteration in which strangers come."""
NUMBER, QUICK_NUMBER, PER_SECOND = 10_000, 600, 500.0
FORGED_SECONDS, QUICK_SECONDS, EARLY_SECONDS = 12.0, 2.0, 8.0
ROUND_SECONDS, MEMORY_SECONDS = 0.02, 1.0
START_SECONDS, DEADLINE_SECONDS = 60.0, 180.0
MOST_BYTES, MOST_TIMES, MOST_WORD_SECONDS = 5_000_000, 1.1, 2.0
COMPLAINT = re.compile(r"(lost|silent|no heartbeat|has failed|stopped by|all ranks write a checkpoint)")
REFUSED = re.compile(r"(secret-file must be|another certificate|another secret)")

Attack = Callable[["Job"], object]


@dataclass
class Ended:
    """End of a run, and what was measured until then."""

    codes: list[int]
    text: str
    """Output of all ranks."""
    weights: str
    """Hash of the weights; empty if it did not end."""
    seconds: float
    """Median of an iteration of rank 0 while the strangers were there; NaN if there was none."""
    grown_bytes: int
    """Bytes by which a rank has grown meanwhile, at most."""
    cut_short: str = ""
    """Words that say so if not all strangers came."""


class Job(WatchedRanks):
    """Forked ranks in ``folder``, and the port of their store. ``words`` are those of each rank."""

    def __init__(self, words: Sequence[str], folder: Path, port: int):
        self.folder, self.port = folder, port
        self.bytes: dict[int, int] = {}
        """Bytes of each rank's memory that no other process shares, as they were seen last."""
        self._look_again = 0.0
        super().__init__(folder, len(words), lambda rank: _fork(words[rank], rank, folder, port))

    def done(self) -> list[float]:
        """Return the times at which rank 0 has completed its iterations."""
        path = self.folder / "iterations"
        return [float(line) for line in path.read_text().split()] if path.exists() else []

    def runs(self) -> bool:
        """Return True if all ranks run."""
        if (now := time.monotonic()) >= self._look_again:
            self._look_again = now + MEMORY_SECONDS
            self.look_at_memory()
        self.look(0.0)
        return not self.codes

    def look_at_memory(self) -> None:
        """Look at the memory of all ranks that run."""
        for rank, pid in self.pids.items():
            with contextlib.suppress(OSError):  # it has ended
                self.bytes[rank] = private_bytes(pid)


def private_bytes(pid: int) -> int:
    """Return the bytes of a process's memory that no other process shares."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return 1024 * sum(int(number) for number in re.findall(r"^Private_\w+: +(\d+) kB$", text, re.MULTILINE))


def _fork(words: str, rank: int, folder: Path, port: int) -> int:
    def train_here() -> object:
        listen, ports = socket.socket.listen, (folder / "ports").open("a", buffering=1)

        def told(own: socket.socket, backlog: int) -> None:
            listen(own, backlog)
            ports.write(f"{own.getsockname()[1]}\n")

        socket.socket.listen = told  # type: ignore[method-assign, assignment]  # gloo does not listen by it
        if rank == 0:
            iterate = training.Run._iterate
            file = (folder / "iterations").open("a", buffering=1)

            def noted(self: Any, *arguments: Any) -> Any:
                found = iterate(self, *arguments)
                file.write(f"{time.monotonic()}\n")
                return found

            training.Run._iterate = noted
        return trained(words, folder)

    return fork_rank(train_here, rank, RANKS, folder, port)


def play(words: str | Sequence[str], attack: Attack, *, at_once: bool = False) -> Ended:
    """Run ranks with these words, or words of each, and attack them when they train, or ``at_once``."""
    with tempfile.TemporaryDirectory() as name, store() as port:
        folder = Path(name)
        begin, grown = time.monotonic(), 0
        with Job([words] * RANKS if isinstance(words, str) else words, folder, port) as job:
            if not at_once:
                job.wait(lambda: bool(job.codes) or len(job.done()) >= BEGIN, START_SECONDS)
            cut_short = ""
            if job.runs():
                job.look_at_memory()
                before, begin = dict(job.bytes), time.monotonic()
                attack(job)
                cut_short = "" if job.runs() else "the ranks ended before the strangers did"
                job.look_at_memory()
                grown = max(job.bytes[rank] - then for rank, then in before.items())
            attacked = time.monotonic()
            job.wait_for_all(DEADLINE_SECONDS)
        summary = folder / "run" / "summary.json"
        times = [(b, b - a) for a, b in itertools.pairwise(job.done())]
        return Ended(
            codes=[job.codes[rank] for rank in range(RANKS)],
            text=(folder / "log").read_text(encoding="utf-8", errors="replace"),
            weights=json.loads(summary.read_text())["weights_sha256"] if summary.exists() else "",
            seconds=statistics.median([one for when, one in times if begin <= when < attacked] or [float("nan")]),
            grown_bytes=grown,
            cut_short=cut_short,
        )


# ---- Strangers


def come_not(seconds: float) -> Attack:
    """Return nobody, for some seconds."""
    return lambda job: job.wait(lambda: not job.runs(), seconds)


def connect(number: int) -> Attack:
    """Return strangers who make ``number`` connections to each port at which a rank listens."""

    def attack(job: Job) -> None:
        ports = {*map(int, (job.folder / "ports").read_text(encoding="ascii").split())}
        places = [place for pid in job.pids.values() for place in listening(pid) if place[1] in ports]
        assert len(places) >= RANKS
        texts = [*texts_of(random.Random(0)), random.Random(1).randbytes(1 << 16), half_a_handshake()]
        held: list[socket.socket] = []
        begin = time.monotonic()
        for one in range(number * len(places)):
            if not job.runs():
                break
            time.sleep(max(0.0, begin + one / PER_SECOND - time.monotonic()))
            with contextlib.suppress(OSError):  # it was refused, or what it sent was
                held.append(socket.create_connection(places[one % len(places)], timeout=5.0))
                held[-1].settimeout(0.2)
                held[-1].sendall(texts[one // len(places) % len(texts)])
            if len(held) > HELD:
                held.pop(0).close()
        for sock in held:
            sock.close()

    return attack


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the places at which a process of this machine listens, of IPv4."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink())):
                inodes.add(found[1])
    places = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            address, port = words[1].split(":")
            places.append((socket.inet_ntoa(int(address, 16).to_bytes(4, "little")), int(port, 16)))
    return places


def half_a_handshake() -> bytes:
    """Return the first message of a TLS handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def forge(seconds: float) -> Attack:
    """Return a stranger who writes over all keys of the store for some seconds."""

    def attack(job: Job) -> None:
        chance = random.Random(0)
        client = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=5))
        older: dict[str, bytes] = {}
        end = time.monotonic() + seconds
        while time.monotonic() < end and job.runs():
            names = client.list_keys()
            for name in names:
                if (value := _value(client, name)) is not None:
                    older.setdefault(name, value)
            places = {name.rpartition("/")[0] for name in names}
            for place in places:
                for key in (FAILURE, STOPPING, *map(report_key, range(RANKS))):
                    client.set(f"{place}/{key}", "SIGTERM")
            for name in names:
                match chance.randrange(4):
                    case 0:
                        client.set(name, chance.randbytes(60))  # type: ignore[arg-type]  # bytes are taken, too
                    case 1 if name in older:
                        client.set(name, older[name])  # type: ignore[arg-type]
                    case 2:
                        client.delete_key(name)
            time.sleep(ROUND_SECONDS)

    return attack


def _value(client: dist.Store, name: str) -> bytes | None:
    """Return a value; None if it was deleted meanwhile."""
    value = client.compare_set(name, "a stranger's", "a stranger's")
    return None if value == b"a stranger's" else value


# ---- Runs


def harm(kind: str, ended: Ended, of_nobody: Ended) -> str:
    """Return what strangers have done; empty if nothing."""
    if kind == EARLY and any(ended.codes):
        speakers = {int(found) for found in re.findall(r"error: rank (\d)\b.*forged", ended.text)}
        kept = 0 not in ended.codes and (len(speakers) == RANKS or "forged" in ended.text)
        return "" if kept and "Traceback" not in ended.text else f"exit codes {ended.codes} without the word"
    if any(ended.codes):
        return f"exit codes {ended.codes}: {' / '.join(ended.text.splitlines()[-3:])[:300]}"
    if ended.cut_short and kind in (CONNECTIONS, FORGER):
        return ended.cut_short
    if ended.weights != of_nobody.weights:
        return "other weights"
    if line := next((line for line in ended.text.splitlines() if COMPLAINT.search(line)), ""):
        return line[:200]
    warnings = re.findall(r"warning: rank (\d+): \d+ values? w\w+ forged", ended.text)
    if len(warnings) > len(set(warnings)):
        return f"{len(warnings)} warnings of forged values"
    as_usual = of_nobody.grown_bytes if kind == CONNECTIONS else 0  # the others take less time
    if kind != EARLY and (more := ended.grown_bytes - as_usual) > MOST_BYTES:
        return f"a rank has grown by {more / 1e6:.1f} MB more"
    return ""


def rows_of(transport: str, secret: Path, quick: bool, advance: Callable[[float, str], None]) -> Iterator[Row]:
    """Yield a row for each kind of strangers over this transport."""
    iterations = QUICK_ITERATIONS if quick else ITERATIONS
    words = f"{WORDS} --iterations {iterations} --transport {transport} --secret-file {secret}"
    number = QUICK_NUMBER if quick else NUMBER
    attacks: Mapping[str, Attack] = {
        NOBODY: come_not(number * RANKS / PER_SECOND),  # at least: a rank has a port, or more
        CONNECTIONS: connect(number),
        FORGER: forge(QUICK_SECONDS if quick else FORGED_SECONDS),
        EARLY: forge(EARLY_SECONDS),
    }
    of_nobody: Ended | None = None
    for kind in KINDS:
        ended = play(words, attacks[kind], at_once=kind == EARLY)
        of_nobody = of_nobody or ended
        problem = harm(kind, ended, of_nobody)
        times = ended.seconds / of_nobody.seconds
        if not problem and kind in (CONNECTIONS, FORGER) and not times <= MOST_TIMES:
            problem = f"an iteration took {times:.2f} times as long"
        advance(1, f"{transport}, {kind}: {problem or 'no harm'}")
        yield {
            "transport": transport,
            "strangers": kind,
            "trained": not any(ended.codes),
            "same_weights": ended.weights == of_nobody.weights,
            "times_as_long": None if times != times else round(times, 3),
            "grown_mb": round(ended.grown_bytes / 1e6, 2),
            "warnings": ended.text.count("forged in the store"),
            "harm": problem,
        }


def refusals(text: str) -> list[str]:
    """Return the lines that tell of another secret or certificate."""
    return [line for line in text.splitlines() if REFUSED.search(line)]


def others(transport: str, folder: Path) -> Row:
    """Return what comes of a rank with another secret, over tls with another certificate."""
    files = [folder / f"{transport}-{number}.key" for number in range(2)]
    for file in files:
        keys.make(file, certificate=transport == "tls")
    if transport == "tls":  # the same secret, and another certificate
        secret, certificate = (file.read_text(encoding="ascii").split("\n", 1)[part] for part, file in enumerate(files))
        files[1].write_text(f"{secret}\n{certificate}", encoding="ascii")
    words = [
        f"{WORDS} --iterations 50 --transport {transport} --secret-file {files[rank == 1]}" for rank in range(RANKS)
    ]
    took = float("inf")

    def wait_for_both(job: Job) -> None:
        """Note when both sides have said so."""
        nonlocal took
        begin, log = time.monotonic(), job.folder / "log"
        if job.wait(lambda: len(refusals(log.read_text("utf-8", "replace"))) > 1, MOST_WORD_SECONDS):
            took = time.monotonic() - begin

    ended = play(words, wait_for_both, at_once=True)
    said = refusals(ended.text)
    is_well = took < MOST_WORD_SECONDS and 0 not in ended.codes and "Traceback" not in ended.text
    problem = "" if is_well else f"codes {ended.codes}, said after {took:.1f} s: {said}"
    return {
        "transport": transport,
        "strangers": "another certificate" if transport == "tls" else "another secret",
        "trained": not any(ended.codes),
        "same_weights": False,
        "times_as_long": None,
        "grown_mb": 0.0,
        "warnings": 0,
        "harm": problem,
        "lines": len(said),
        "seconds": round(took, 2),
    }


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("strangers", __doc__)
    options.add_argument(
        "--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS, help="transports of the ranks (all)"
    )
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    command.check_alone("strangers", ranks.by_torchrun, "it forks its ranks itself")
    import_all()
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as name,
        command.progress(console, "runs", (len(KINDS) + 1) * len(arguments.transports)) as advance,
    ):
        secret = Path(name) / "job.key"
        keys.make(secret, certificate=True)
        for transport in arguments.transports:
            rows += [
                {**row, "lines": None, "seconds": None} for row in rows_of(transport, secret, arguments.quick, advance)
            ]
            rows.append(others(transport, Path(name)))
            advance(1, f"{transport}, {rows[-1]['strangers']}: {rows[-1]['harm'] or 'refused'}")
    save("strangers", rows, extra={"options": WORDS, "connections": NUMBER}, folder=arguments.output)
    command.show("Strangers", [{name: str(value) for name, value in row.items()} for row in rows])
    if harmed := [f"{row['transport']}, {row['strangers']}: {row['harm']}" for row in rows if row["harm"]]:
        raise RunError(f"strangers must do no harm; they did: {'; '.join(harmed)}")


if __name__ == "__main__":
    command.run(main)
