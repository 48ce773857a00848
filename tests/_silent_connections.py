"""A job among silent connections to every port, with a name server of its own; Linux and root only."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conftest import REPOSITORY

STRANGERS = 300
"""Silent connections to every port."""
PORT = 29733
DEADLINE_SECONDS = 400.0
"""Seconds within which a job must end."""
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
        heapq.heappush(due, (time.monotonic() + delay, query, who))
    while due and due[0][0] <= time.monotonic():
        _, query, who = heapq.heappop(due)
        asked.sendto(query[:2] + bytes([0x81, 0x83]) + query[4:6] + bytes(6) + query[12:], who)
"""
"""A name server that knows no name, and says so after this many seconds."""

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

SCENE = """
ip link set lo up && ulimit -n 8192 && cd "$1" || exit 99
echo nameserver 127.0.0.9 > resolv.conf; mount --bind resolv.conf /etc/resolv.conf || exit 99
echo "hosts: $2" > nsswitch.conf; mount --bind nsswitch.conf /etc/nsswitch.conf || exit 99
python="$4" port="$6"
"$python" name_server.py "$3" & server=$!
"$python" stranger.py "$1" & stranger=$!
trap 'kill $server $stranger' EXIT
cd "$5"
shift 6
"$python" -m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 --master-port "$port" \\
    -m pipesgd.train "$@"
"""


def play(folder: Path, hosts: str, delay: float, words: Sequence[str]) -> tuple[int, list[tuple[float, str]]]:
    """Run ``pipesgd.train`` on two ranks among silent connections, in namespaces of its own, below ``folder``.

    Args:
        folder: an empty folder; the run's folder is ``folder/run``.
        hosts: the line of nsswitch.conf.
        delay: seconds after which the name server answers.
        words: options of the training.

    Returns:
        The exit code, ``UNPERMITTED`` without namespaces, and the lines, each with the seconds since the start.
    """
    for name, text in (("name_server.py", NAME_SERVER), ("stranger.py", STRANGER)):
        (folder / name).write_text(text, encoding="utf-8")
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
