"""Silent connections to every port, and a slow or absent name server: what does a job notice of them?

    python -m experiments.silent_connections     silent_connections.csv; exit code 1 if a bound is missed; needs root

Two ranks train with emulated accelerators, in namespaces of their own with a name server of their own, which never
answers, answers late, or is not asked ("hosts: files", the cure). From the first checkpoint on, a stranger opens 300
connections to every port that listens and sends nothing. torch's store looks up the name of whoever connects, and
serves no rank meanwhile; see docs/troubleshooting.md. The bounds: no iteration that is not next to a checkpoint or an
evaluation, which exchange something through the store, takes longer than twice the median of all; the line that names
slow look-ups and their cure comes within 10 s of rank 0's first line, once; with the cure it does not come, and a value
is set in the store and read again within 0.1 s. Before its ranks start, torchrun itself waits for the name server.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import command
from experiments.results import REPOSITORY, save
from experiments.testbed_jobs import last_words
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

NEVER = -1.0
"""Delay of a name server that never answers."""
SCENES = {
    "a name server that never answers": ("files dns", NEVER),
    "one that answers after 2.5 s": ("files dns", 2.5),
    "the cure": ("files", 2.5),
}
"""The line ``hosts`` of nsswitch.conf, and the seconds after which the name server answers."""
STRANGERS = 300
"""Silent connections to every port."""
PASS, EVERY, ITERATIONS, QUICK_ITERATIONS = "75ms", 40, 400, 120
"""Time of the emulated passes, iterations from one checkpoint and evaluation to the next, and those of a run."""
PORT = 29733
MOST_TIMES_THE_MEDIAN = 2.0
WARNED_SECONDS = 10.0
SET_AND_GET_SECONDS = 0.1
DEADLINE_SECONDS = 400.0
"""Seconds within which a job must end."""
STARTING = "starting rank 0 of 2"
"""Beginning of rank 0's first line."""
WARNING = re.compile(r"warning: a look-up of .* takes more than .* RES_OPTIONS=attempts:0$")
UNPERMITTED = 99
"""Exit code of ``SCENE`` where namespaces cannot be set up."""

NAME_SERVER = """
import heapq, select, socket, sys, time
asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asked.bind(("127.0.0.9", 53))
delay, due = float(sys.argv[1]), []
while True:
    if select.select([asked], [], [], max(0.0, due[0][0] - time.monotonic()) if due else None)[0]:
        query, who = asked.recvfrom(999)
        if delay >= 0:
            heapq.heappush(due, (time.monotonic() + delay, query, who))
    while due and due[0][0] <= time.monotonic():
        _, query, who = heapq.heappop(due)
        asked.sendto(query[:2] + bytes([0x81, 0x83]) + query[4:6] + bytes(6) + query[12:], who)
"""
"""A name server that knows no name, and says so after this many seconds; below 0, it never answers."""

STRANGER = f"""
import socket, sys, time
from pathlib import Path
known, held = set(), []
while not list(Path(sys.argv[1]).glob("run/checkpoints/iteration-*")):
    time.sleep(0.1)
while True:
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    for port in {{int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"}} - known:
        known.add(port)
        held += [socket.create_connection(("127.0.0.1", port)) for _ in range({STRANGERS})]
        print("connections of strangers:", len(held), flush=True)
    time.sleep(0.2)
"""

ASKER = """
import sys, time
from pathlib import Path
import torch.distributed as dist
while not list(Path(sys.argv[1]).glob("run/checkpoints/iteration-*")):
    time.sleep(0.1)
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
while True:
    begin = time.monotonic()
    store.set("asked", "x")
    store.get("asked")
    print("set and get:", time.monotonic() - begin, flush=True)
    time.sleep(0.2)
"""

SCENE = """
ip link set lo up && ulimit -n 8192 && cd "$1" || exit 99
echo nameserver 127.0.0.9 > resolv.conf; mount --bind resolv.conf /etc/resolv.conf || exit 99
echo "hosts: $2" > nsswitch.conf; mount --bind nsswitch.conf /etc/nsswitch.conf || exit 99
python="$4" port="$6"
"$python" name_server.py "$3" & server=$!
"$python" stranger.py "$1" & stranger=$!
"$python" asker.py "$1" "$port" > asker.log 2>&1 & asker=$!
trap 'kill $server $stranger $asker' EXIT
cd "$5"
shift 6
"$python" -m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 --master-port "$port" \\
    -m pipesgd.train "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """Times of a job among silent connections, and the warnings that it printed."""

    scene: str
    """A key of ``SCENES``."""
    strangers: int
    """Silent connections that were held open at the end."""
    iterations: int
    median_ms: float
    """Median time of an iteration."""
    longest_ms: float
    """The longest iteration that is not next to an exchange through the store."""
    longest_next_to_store_ms: float
    """The longest one of the others, but for the first."""
    warnings: int
    """Lines that name slow look-ups and the cure."""
    started_s: float
    """Seconds from the start of torchrun to rank 0's first line."""
    warned_s: float | None
    """Seconds from there to the first line that names slow look-ups."""
    set_and_get_ms: float | None
    """The longest time in which a value was set in the store and read again; None if that never ended."""
    set_and_gets: int
    seconds: float
    """Duration of the job."""

    @property
    def missed(self) -> list[str]:
        """The bounds that do not hold."""
        is_cured = SCENES[self.scene][0] == "files"
        bounds = {
            f"iterations within {MOST_TIMES_THE_MEDIAN:g} medians": self.longest_ms
            <= MOST_TIMES_THE_MEDIAN * self.median_ms,
            "connections to the store's port and to the ranks'": self.strangers >= 5 * STRANGERS,
        }
        if is_cured:
            bounds["no warning"] = self.warnings == 0
            asked = self.set_and_get_ms is not None and self.set_and_get_ms <= 1e3 * SET_AND_GET_SECONDS
            bounds[f"set and get within {SET_AND_GET_SECONDS:g} s"] = asked
        else:
            in_time = self.warned_s is not None and self.warned_s <= WARNED_SECONDS
            bounds[f"one warning within {WARNED_SECONDS:g} s"] = self.warnings == 1 and in_time
        return [bound for bound, holds in bounds.items() if not holds]


def play(folder: Path, hosts: str, delay: float, words: Sequence[str]) -> tuple[int, list[tuple[float, str]]]:
    """Run ``pipesgd.train`` on two ranks among silent connections, in namespaces of its own, below ``folder``.

    Args:
        folder: an empty folder; the run's folder is ``folder/run``.
        hosts: the line of nsswitch.conf.
        delay: seconds after which the name server answers; below 0, it never does.
        words: options of the training.

    Returns:
        The exit code, ``UNPERMITTED`` without namespaces, and the lines, each with the seconds since the start.
    """
    for name, text in (("name_server.py", NAME_SERVER), ("stranger.py", STRANGER), ("asker.py", ASKER)):
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    own = ["unshare", "-n", "-m", "--propagation", "private", "timeout", "-k", "1", f"{DEADLINE_SECONDS:g}"]
    scene = ["bash", "-c", SCENE, "-", str(folder), hosts, str(delay), sys.executable, str(REPOSITORY), str(PORT)]
    training = [*words, "--output", str(folder / "run")]
    begin = time.monotonic()
    with subprocess.Popen(
        [*own, *scene, *training], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = [(time.monotonic() - begin, line.rstrip("\n")) for line in process.stdout]
    is_refused = any("unshare" in line and "Operation not permitted" in line for _, line in lines)
    return UNPERMITTED if is_refused else process.returncode, lines


def heard(scene: str, iterations: int) -> Heard:
    """Run a scene's job and read what it has left.

    Raises:
        UserInputError: there are no namespaces.
        RunError: the job failed.
    """
    hosts, delay = SCENES[scene]
    often = f"--checkpoint-iterations {EVERY} --evaluate-iterations {EVERY}"
    model = f"--model experiments.accelerators:synthetic={PASS} --hidden-sizes 64"
    words = f"--dataset digits {model} --width 2 --iterations {iterations} {often}".split()
    with tempfile.TemporaryDirectory(prefix="silent-connections-") as name:
        folder = Path(name)
        code, lines = play(folder, hosts, delay, words)
        if code == UNPERMITTED:
            raise UserInputError("silent_connections must be run as root, where namespaces can be made")
        text = "\n".join(line for _, line in lines)
        if code != 0:
            raise RunError(f"{scene}: the job ended with exit code {code}; it said: {last_words(text)}")
        metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        asked = re.findall(r"set and get: (\S+)", (folder / "asker.log").read_text())
    times = {line["iteration"]: 1e3 * line["seconds"]["iteration"] for line in metrics}
    next_to_store = {number for number in times if number % EVERY in (EVERY - 1, 0)} | {max(times)}
    started = next(at for at, line in lines if line.startswith(STARTING))
    warned = [at - started for at, line in lines if WARNING.match(line)]
    strangers = [int(number) for number in re.findall(r"connections of strangers: (\d+)", text)]
    return Heard(
        scene=scene,
        strangers=max(strangers, default=0),
        iterations=len(times),
        median_ms=round(statistics.median(times.values()), 1),
        longest_ms=round(max(times[number] for number in times if number not in next_to_store), 1),
        longest_next_to_store_ms=round(max(times[number] for number in next_to_store - {0}), 1),
        warnings=len(warned),
        started_s=round(started, 1),
        warned_s=round(warned[0], 1) if warned else None,
        set_and_get_ms=round(1e3 * max(map(float, asked)), 1) if asked else None,
        set_and_gets=len(asked),
        seconds=round(lines[-1][0], 1),
    )


def show(rows: Sequence[Heard]) -> None:
    """Print a line for every scene."""
    command.show(
        f"{STRANGERS} silent connections to every port",
        [
            {
                "scene": row.scene,
                "median, ms": f"{row.median_ms:.0f}",
                "longest, ms": f"{row.longest_ms:.0f}",
                "next to the store, ms": f"{row.longest_next_to_store_ms:.0f}",
                "torchrun, s": f"{row.started_s:.1f}",
                "warned after, s": "-" if row.warned_s is None else f"{row.warned_s:.1f}",
                "set and get, ms": "-" if row.set_and_get_ms is None else f"{row.set_and_get_ms:.0f}",
                "missed": "; ".join(row.missed),
            }
            for row in rows
        ],
    )


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    arguments = command.parse(command.parser("silent_connections", __doc__), words)
    command.check_alone("silent_connections", by_torchrun, "it starts torchrun itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    iterations = QUICK_ITERATIONS if arguments.quick else ITERATIONS
    found = []
    for number, scene in enumerate(SCENES, start=1):
        say(console, f"[{number}/{len(SCENES)}] {scene}")
        found.append(heard(scene, iterations))
    rows: list[dict[str, Any]] = [dataclasses.asdict(one) for one in found]
    extra = {"strangers_per_port": STRANGERS, "pass": PASS, "iterations_between_checkpoints": EVERY, "scenes": SCENES}
    save("silent_connections", rows, extra=extra, folder=arguments.output)
    show(found)
    if missed := {one.scene: one.missed for one in found if one.missed}:
        raise RunError(f"bounds that do not hold: {missed}")


if __name__ == "__main__":
    command.run(main)
