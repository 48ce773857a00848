"""Training through WireGuard: what a listener on the network can read without it and with it, and what it costs.

    python -m experiments.encrypted_network                two nodes at 200 Mbit/s, in turns: encrypted_network.csv

Without tls nothing is encrypted. The recipe in docs/machines.md puts a WireGuard tunnel below pipesgd. This program
follows the recipe on the testbed (Debian: wireguard-go wireguard-tools tcpdump), and records every packet on node 0's
network interface during a training run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from experiments import command
from experiments.results import Row, save
from experiments.testbed import Job, Link, Testbed, rate_name
from experiments.testbed.jobs import torchrun_environment, torchrun_words
from experiments.testbed_jobs import last_words
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

NODES = 2
ROUNDS, QUICK_ROUNDS = 5, 1
ITERATIONS, QUICK_ITERATIONS = 30, 5
JOB_SECONDS = 240.0
TRAINING = "-m pipesgd.train --dataset digits --hidden-sizes 1000 1000 --batch-size 64 --width 2"
PLAIN, TUNNEL = "no encryption", "WireGuard"
INTERFACES = {PLAIN: "eth0", TUNNEL: "wg0"}
PORT = 51820
"""WireGuard's default port."""
TOOLS = {"wireguard-go": "wireguard-go", "wg": "wireguard-tools", "tcpdump": "tcpdump"}
"""Tools that must be installed, each with the Debian package that has it."""
CLEAR_TEXT = b"pipesgd/"
"""Prefix of the keys of messages that ranks exchange through torch's store."""
PROTOCOLS = {6: "TCP", 17: "UDP"}

# The commands of docs/machines.md. The program looks for its socket below /var/run, which nodes of a testbed share.
TUNNEL_SCRIPT = """
mount -t tmpfs tmpfs /var/run
wireguard-go wg0 > /dev/null 2>&1
wg set wg0 listen-port {port} private-key {key} \
  peer {peer_key} allowed-ips {peer_inside}/32 endpoint {peer}:{port}
ip address add {inside}/24 dev wg0
ip link set wg0 mtu 1420 up
echo ready
sleep infinity
"""


def inside(node: int) -> str:
    """Return the address of ``node`` in the tunnel."""
    return f"10.78.0.{node + 1}"


def open_tunnel(testbed: Testbed, folder: Path) -> None:
    """Connect the two nodes by WireGuard, with a new key for each.

    Raises:
        RunError: a node did not come up.
    """
    keys = [folder / f"key-{node}" for node in range(NODES)]
    public = []
    for key in keys:
        key.write_bytes(subprocess.run(["wg", "genkey"], check=True, capture_output=True).stdout)
        key.chmod(0o600)
        answer = subprocess.run(["wg", "pubkey"], check=True, capture_output=True, input=key.read_bytes())
        public.append(answer.stdout.decode().strip())
    for node in range(NODES):
        peer = 1 - node
        script = TUNNEL_SCRIPT.format(
            port=PORT,
            key=keys[node],
            peer_key=public[peer],
            peer_inside=inside(peer),
            peer=testbed.address(peer),
            inside=inside(node),
        )
        words = ["unshare", "--mount", "sh", "-ec", script]
        process = testbed.start(node, words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RunError(f"node {node} must open a WireGuard tunnel; it ended with exit code {process.wait()}")


@contextlib.contextmanager
def recorded(testbed: Testbed, file: Path) -> Iterator[None]:
    """Record the packets that pass node 0's network interface during the context."""
    words = ["tcpdump", "-i", INTERFACES[PLAIN], "--immediate-mode", "-U", "-w", str(file), "ip"]
    tcpdump = testbed.start(0, words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert tcpdump.stderr is not None
    while "listening on" not in (line := tcpdump.stderr.readline()):
        if not line:
            raise RunError(f"tcpdump must record; it ended with exit code {tcpdump.wait()}")
    try:
        yield
    finally:
        tcpdump.terminate()
        tcpdump.communicate()


def packets(record: bytes) -> Counter[str]:
    """Count the IPv4 packets of each protocol in the contents of a file of tcpdump."""
    found: Counter[str] = Counter()
    place = 24  # after the header of the file
    while place + 16 <= len(record):
        (length,) = struct.unpack_from("=I", record, place + 8)
        ethernet = place + 16
        if length > 23:
            number = record[ethernet + 23]  # 14 bytes of Ethernet, then the tenth byte of IPv4
            found[PROTOCOLS.get(number, f"protocol {number}")] += 1
        place = ethernet + length
    return found


def train(testbed: Testbed, network: str, iterations: int) -> Row:
    """Train once over ``network``; return the time of an iteration and what a listener gets."""
    with tempfile.TemporaryDirectory() as name:
        run, log, record = Path(name) / "run", Path(name) / "log", Path(name) / "record"
        interface = INTERFACES[network]
        environment = torchrun_environment(os.environ) | {"GLOO_SOCKET_IFNAME": interface}
        words = [*TRAINING.split(), "--iterations", str(iterations), "--output", str(run)]
        with recorded(testbed, record), log.open("wb") as file:
            job = Job([])
            for node in range(NODES):
                line = torchrun_words(
                    words,
                    node=node,
                    nodes=NODES,
                    nproc_per_node=1,
                    address=inside(0) if network == TUNNEL else testbed.address(0),
                    options=[f"--local-addr={inside(node)}"] if network == TUNNEL else [],
                )
                streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
                job.processes.append(testbed.start(node, line, env=environment, **streams))
            try:
                codes = job.wait(JOB_SECONDS)
            finally:
                job.terminate()
        if any(codes):
            raise RunError(f"training over {network} must succeed; got {last_words(log.read_text())}")
        heard = record.read_bytes()
        summary = json.loads((run / "summary.json").read_text())
    count = packets(heard)
    return {
        "network": network,
        "iteration_median_s": round(summary["seconds"]["iteration"]["median"], 4),
        "tcp_packets": count["TCP"],
        "udp_packets": count["UDP"],
        "other_packets": count.total() - count["TCP"] - count["UDP"],
        "keys_in_clear": heard.count(CLEAR_TEXT),
    }


def find_tools() -> None:
    """Check that the tools are installed.

    Raises:
        UserInputError: tools are missing; the message names them and their packages.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages_of = " ".join(TOOLS[tool] for tool in missing)
        raise UserInputError(
            f"encrypted_network must have {', '.join(TOOLS)}; missing: {', '.join(missing)} "
            f"(apt-get install {packages_of})"
        )


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("encrypted_network", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    find_tools()
    rounds, iterations = (QUICK_ROUNDS, QUICK_ITERATIONS) if arguments.quick else (ROUNDS, ITERATIONS)
    link = Link(rate=200e6)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as name,
        Testbed(nodes=NODES, link=link) as testbed,
        command.progress(console, "trainings", rounds * len(INTERFACES)) as advance,
    ):
        open_tunnel(testbed, Path(name))
        for number in range(rounds):
            for network in INTERFACES:
                rows.append({"round": number, **train(testbed, network, iterations)})
                advance(1, network)
    extra = {"link": rate_name(link.rate), "iterations": iterations, "training": TRAINING}
    save("encrypted_network", rows, extra=extra, folder=arguments.output)
    shown = [{key.replace("_", " "): str(value) for key, value in row.items()} for row in rows]
    command.show("What a listener gets", shown)
    leaks = [row for row in rows if row["network"] == TUNNEL and (row["tcp_packets"] or row["keys_in_clear"])]
    if leaks:
        raise RunError(f"all traffic must pass through the tunnel; got {leaks[0]}")
    pairs = zip(rows[::2], rows[1::2], strict=True)
    ratio = statistics.median(tunnel["iteration_median_s"] / plain["iteration_median_s"] for plain, tunnel in pairs)
    say(
        console,
        f"an iteration takes {ratio:.2f} times as long through the tunnel (median of {rounds} rounds); encryption "
        "shares the cores of this machine with both ranks",
    )


if __name__ == "__main__":
    command.run(main)
