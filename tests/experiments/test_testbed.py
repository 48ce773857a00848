"""The emulated cluster: real namespaces and links, real kills. Skipped tests name the rights that they need."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st

from experiments import testbed
from experiments.testbed import InvalidInputError, delay_line, jobs, links
from experiments.testbed import __main__ as command
from experiments.testbed.namespaces import Namespaces, descendants, find_tools
from timing_model.presets import PAYLOAD_SHARE

pytestmark = pytest.mark.slow

COMMAND = ["-m", "experiments.testbed", "--nodes", "2", "--rate", "1gbit", "--"]
FOREVER = ["--no-python", "sh", "-c", "echo started; exec sleep 1000"]
FAST = testbed.Link(rate=1e9)


@functools.cache
def obstacle(delays: bool) -> str | None:
    """Return the reason that no testbed can run here; None if one can."""
    try:
        if delays:
            testbed.Testbed(nodes=2, link=testbed.Link(rate=1e9, latency=1e-3)).close()
        else:
            Namespaces().close()
    except InvalidInputError as failure:
        return str(failure)
    return None


@pytest.fixture
def cluster() -> Iterator[Callable[..., testbed.Testbed]]:
    """Yield a function that makes testbeds, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(nodes: int, link: testbed.Link, **options: dict[int, float]) -> testbed.Testbed:
            if reason := obstacle(link.delays):
                pytest.skip(reason)
            return stack.enter_context(testbed.Testbed(nodes=nodes, link=link, **options))

        yield make


def on(bed: testbed.Testbed, node: int, program: str, *arguments: object) -> subprocess.Popen[str]:
    """Start Python's ``program`` on a node, with its output in a pipe."""
    words = [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]
    return bed.start(node, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    """Wait until the process has ended without an error; return all that it printed."""
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return text


# ---- numbers and units ----


@given(st.integers(1, 1000), st.sampled_from(["kbit", "mbit", "gbit", "Mbit/s", " Gbit/s"]))
def test_a_rate_is_a_number_and_a_unit(number: int, unit: str) -> None:
    factor = {"k": 1e3, "m": 1e6, "g": 1e9}[unit.strip().lower()[0]]
    assert links.parse_rate(f"{number}{unit}") == number * factor
    assert links.parse_rate(links.rate_text(number * factor)) == pytest.approx(number * factor, rel=1e-3)


@given(st.integers(0, 10**4))
def test_a_latency_has_a_unit_and_a_loss_may_be_a_percentage(number: int) -> None:
    assert links.parse_latency(f"{number}us") == number * 1e-6
    assert links.parse_latency(f"{number}ms") == number * 1e-3
    assert links.parse_latency(f"{number} s") == number
    assert links.parse_loss(f"{number / 100}%") == pytest.approx(number / 10**4)
    assert links.parse_loss(str(number / 10**4)) == pytest.approx(number / 10**4)


def test_what_people_write_is_understood() -> None:
    assert links.parse_rate("9.6kbit") == 9600.0
    assert links.parse_slow_node("3:100mbit") == (3, 1e8)
    assert [links.time_text(seconds) for seconds in (5.12e-3, 7e-5, 2.0)] == ["5.12 ms", "70 us", "2 s"]


WRONG = [
    ("--rate 0mbit", "rate must be above 0, e.g. 200mbit; got '0mbit'"),
    ("--rate 0", "rate must be a number and a unit, kbit, mbit or gbit, e.g. 200mbit; got '0'"),
    ("--rate -5mbit", "--rate: expected one argument"),
    ("--rate=-5mbit", "rate must be a number and a unit, kbit, mbit or gbit, e.g. 200mbit; got '-5mbit'"),
    ("--rate 5mbits", "rate must be a number and a unit, kbit, mbit or gbit, e.g. 200mbit; got '5mbits' (did you "),
    ("--rate 200foo", "rate must be a number and a unit, kbit, mbit or gbit, e.g. 200mbit; got '200foo'"),
    ("--rate 1e400gbit", "rate must be a number and a unit"),
    ("--rate 1bit", "rate must be a number and a unit"),
    ("--rate 0.5kbit", "rate must be at least 1kbit; got 500 bit/s"),
    ("--rate 2000gbit", "rate must be at most 1000gbit; got 2e+12 bit/s"),
    ("--latency 5", "latency must be a number and a unit, us, ms or s, e.g. 5ms; got '5'"),
    ("--latency 5min", "latency must be a number and a unit"),
    ("--latency 99s", "latency must be from 0 to 10 s; got 99 s"),
    ("--loss 101%", "loss must be a percentage or a probability, e.g. 0.1% or 0.001; got '101%'"),
    ("--loss 2", "loss must be a percentage or a probability"),
    ("--nodes 0", "--nodes: must be a whole number of at least 2; got '0'"),
    ("--nodes 1", "--nodes: must be a whole number of at least 2; got '1'"),
    ("--nodes 255", "nodes must be from 2 to 254, the number of addresses of 10.77.0.0/24; got 255"),
    ("--nproc-per-node 0", "--nproc-per-node: must be a whole number of at least 1; got '0'"),
    ("--slow-node 4:1mbit", "slow-node must be from 0 to 3, the numbers of the nodes; got 4"),
    ("--slow-node 3", "slow-node must be the number of a node and a rate, e.g. 3:100mbit; got '3'"),
    ("--slow-node 3:9", "rate must be a number and a unit"),
    ("--slow-node 1:9mbit --slow-node 1:8mbit", "slow-node must name a node once; got node 1 twice"),
    ("--rat 1mbit", "unrecognized arguments"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    others = descendants(os.getpid())  # another test's helper processes may still be there
    code = command.main(["--nodes", "4", "--rate", "200mbit", *words.split(), "--", "-m", "pipesgd.train"])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {message}")
    assert set(descendants(os.getpid())) <= set(others)


@pytest.mark.parametrize(("words", "got"), [("", "no --"), ("--", "nothing after --")])
def test_what_torchrun_is_to_run_must_be_there(words: str, got: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--nodes", "4", "--rate", "200mbit", *words.split()]) == 2
    assert capsys.readouterr().err.endswith(f"got {got}\n")


def test_the_command_ends_with_that_line_too() -> None:
    words = [sys.executable, "-m", "experiments.testbed", "--nodes", "2", "--rate", "1mbit"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: what torchrun runs must follow after --")


def test_where_there_can_be_no_testbed_one_line_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.platform", "darwin")
        with pytest.raises(InvalidInputError, match=r"must run on Linux.*got darwin"):
            Namespaces()
    (tmp_path / "unshare").write_text("#!/bin/sh\necho unshare: not allowed here >&2; exit 1\n")
    (tmp_path / "unshare").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(InvalidInputError, match=r"cannot be made: unshare: not allowed here$"):
        Namespaces()
    monkeypatch.setattr("experiments.testbed.namespaces.search_path", lambda: str(tmp_path))
    with pytest.raises(
        InvalidInputError, match=r"missing: ip, tc, nsenter, setpriv, mount \(iproute2 and util-linux\)"
    ):
        find_tools()


# ---- links ----

ECHO = """
import socket, sys
with socket.create_server(("", 5000)) as listener:
    print("listening", flush=True)
    connection, _ = listener.accept()
    while received := connection.recv(1 << 16):
        connection.sendall(received[:1])
"""
ASK = """
import socket, sys, time
address, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
connection = socket.create_connection((address, 5000))
begin = time.perf_counter()
for _ in range(count):
    connection.sendall(bytes(size))
    connection.recv(1)
print(time.perf_counter() - begin)
"""
SINK = """
import socket
with socket.create_server(("", 5000)) as listener:
    print("listening", flush=True)
    connection, _ = listener.accept()
    received = 0
    while piece := connection.recv(1 << 16):
        received += len(piece)
    connection.sendall(b"x")
print(received)
"""
POUR = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
begin = time.perf_counter()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.perf_counter() - begin)
"""


def pour(bed: testbed.Testbed, node: int, to: int, nbytes: int) -> float:
    """Return the seconds until ``nbytes`` from one node have arrived on the other."""
    sink = on(bed, to, SINK)
    assert sink.stdout is not None
    assert sink.stdout.readline() == "listening\n"
    seconds = float(said(on(bed, node, POUR, bed.address(to), nbytes)))
    assert said(sink) == f"{nbytes}\n"
    return seconds


def test_a_node_has_its_own_interfaces_and_the_users_files(
    cluster: Callable[..., testbed.Testbed], tmp_path: Path
) -> None:
    bed = cluster(2, FAST)
    (tmp_path / "file").write_text("here")
    program = """
import os, socket
print(sorted(name for _, name in socket.if_nameindex()), sorted(os.listdir("/sys/class/net")), open("file").read())
print(os.path.ismount("/proc"), str(os.getpid()) in os.listdir("/proc"), os.access("/dev/shm", os.W_OK))
print(socket.gethostbyname("node1"), socket.getnameinfo(("::ffff:10.77.0.1", 1), socket.NI_NAMEREQD)[0])
"""
    words = [sys.executable, "-I", "-S", "-c", program]
    process = bed.start(1, words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    first, second, third = said(process).splitlines()
    assert first == "['eth0', 'lo'] ['eth0', 'lo'] here"
    assert second == "True True True"
    assert third == "10.77.0.2 node0"


def test_every_byte_on_a_link_is_counted(cluster: Callable[..., testbed.Testbed]) -> None:
    bed = cluster(3, FAST)
    nbytes = 1_000_000
    pour(bed, 0, 2, nbytes)
    sent, received = [[pair[end] for pair in bed.traffic()] for end in (0, 1)]
    full = nbytes / PAYLOAD_SHARE  # 4.5 % are headers; the last packet may be short, and a few are sent twice
    assert full * 0.999 <= sent[0] <= full * 1.05
    assert full * 0.999 <= received[2] <= full * 1.05
    assert 0 < sent[2] < nbytes / 10  # acknowledgements
    assert sent[1] < 1000
    assert received[1] < 1000


def test_a_token_bucket_limits_both_directions(cluster: Callable[..., testbed.Testbed]) -> None:
    nbytes = 150_000
    bed = cluster(3, FAST, slow_nodes={2: 8e6})

    def least(rate: float) -> float:
        """Return the fewest possible seconds; a bucket at each end of each link may be full when the stream begins."""
        return (nbytes - 4 * links.burst(rate)) / (rate / 8)

    assert pour(bed, 2, 0, nbytes) >= least(8e6) > 0
    assert pour(bed, 0, 2, nbytes) >= least(8e6)
    bed.set_rate(2, 80e6)
    bed.set_rate(1, 4e6)
    assert bed.rates == [1e9, 4e6, 80e6]
    assert pour(bed, 2, 0, nbytes) < pour(bed, 1, 0, nbytes)
    assert pour(bed, 0, 1, nbytes) >= least(4e6) > 0


def test_all_that_is_sent_to_one_node_passes_one_link(cluster: Callable[..., testbed.Testbed]) -> None:
    bed = cluster(3, testbed.Link(rate=8e6))
    program = ECHO.replace("connection, _ = listener.accept()\n", "pairs = [listener.accept()[0] for _ in 'xx']\n")
    program = program[: program.index("    while")] + "    print(sum(len(p.recv(1 << 22, 256)) for p in pairs))\n"
    sink = on(bed, 0, program)
    assert sink.stdout is not None
    assert sink.stdout.readline() == "listening\n"
    pourers = [on(bed, node, POUR, bed.address(0), 200_000) for node in (1, 2)]
    begin = time.perf_counter()
    assert said(sink) == "400000\n"
    assert time.perf_counter() - begin >= 0.3  # 0.4 s at this rate, less what flows before the clock starts
    for pourer in pourers:
        pourer.communicate()


def test_what_is_measured_is_what_was_asked_for(cluster: Callable[..., testbed.Testbed]) -> None:
    bed = cluster(2, testbed.Link(rate=20e6), slow_nodes={1: 10e6})
    for node, one in enumerate(bed.measure()):
        assert (one.node, one.address, one.rate_asked) == (node, f"10.77.0.{node + 1}", 10e6)
        assert one.rate is not None
        assert one.rate_with_headers is not None
        assert 0 < one.rate < one.rate_with_headers < 20e6
        assert one.latency > 0
        assert one.congestion_control in ("cubic", "reno")


def test_what_is_far_from_what_was_asked_for_is_said() -> None:
    link = testbed.Link(rate=100e6, latency=5e-3)

    def differences(rate: float | None, latency: float) -> list[str]:
        payload = None if rate is None else rate * PAYLOAD_SHARE
        one = testbed.Measured(
            node=0,
            address="10.77.0.1",
            rate_asked=100e6,
            rate=payload,
            latency=latency,
            congestion_control="cubic",
        )
        return command.differences(one, link)

    assert differences(81e6, 5.1e-3) == differences(119e6, 6.9e-3) == []
    assert differences(79e6, 5.1e-3) == ["79 Mbit/s instead of 100 Mbit/s"]
    assert differences(121e6, 5.1e-3) == ["121 Mbit/s instead of 100 Mbit/s"]
    assert differences(None, 5.1e-3) == ["no rate instead of 100 Mbit/s"]
    assert differences(100e6, 7.1e-3) == ["7.1 ms instead of 5 ms"]
    assert differences(100e6, 70e-6) == ["70 us instead of 5 ms"]


CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), float(sys.argv[2])).close()
    print("reached")
except ConnectionRefusedError:
    print("reached")
except OSError:
    print("not reached")
"""


def test_a_cut_node_is_unreachable_until_it_is_restored(cluster: Callable[..., testbed.Testbed]) -> None:
    bed = cluster(3, FAST)
    assert said(on(bed, 0, CONNECT, bed.address(1), 60)) == "reached\n"
    bed.cut(1)
    assert said(on(bed, 0, CONNECT, bed.address(1), 0.3)) == "not reached\n"
    assert said(on(bed, 1, CONNECT, bed.address(2), 0.3)) == "not reached\n"
    assert said(on(bed, 0, CONNECT, bed.address(2), 60)) == "reached\n"
    bed.restore(1)
    assert said(on(bed, 0, CONNECT, bed.address(1), 60)) == "reached\n"


def test_a_node_that_is_not_there_is_named(cluster: Callable[..., testbed.Testbed]) -> None:
    bed = cluster(2, FAST)
    for call in (bed.cut, bed.restore, lambda node: bed.set_rate(node, 1e6), lambda node: bed.start(node, ["true"])):
        with pytest.raises(InvalidInputError, match="node must be from 0 to 1, the numbers of the nodes; got 2"):
            call(2)
    with pytest.raises(InvalidInputError, match="rate must be at least 1kbit; got 0 bit/s"):
        bed.set_rate(0, 0.0)
    with pytest.raises(InvalidInputError, match="nproc-per-node must be at least 1; got 0"):
        bed.torchrun(["-m", "x"], nproc_per_node=0)


# ---- latency and loss ----


def large_piece(packets: int, size: int, last: int) -> bytes:
    """Return a piece as the kernel passes it on: TCP over IPv4, with an unfinished checksum and all relevant flags."""
    payload = bytes(index % 251 for index in range((packets - 1) * size + last))
    ethernet = bytes(12) + b"\x08\x00"
    length = 40 + len(payload)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, length, 65535, 0x4000, 64, 6, 0, bytes([10, 77, 0, 1]), bytes(4))
    flags = delay_line.FIN_AND_PUSH | delay_line.CWR | 0x10
    tcp = struct.pack("!HHIIBBHHH", 1, 2, 2**32 - 100, 7, 0x50, flags, 9, 0, 0)
    return delay_line.VIRTIO.pack(1, 1, 54, size, 34, 16) + ethernet + ip + tcp + payload


@given(st.integers(2, 44), st.integers(1, 1448), st.data())
def test_a_piece_without_some_packets_is_the_other_packets(packets: int, size: int, data: st.DataObject) -> None:
    piece = large_piece(packets, size, data.draw(st.integers(1, size)))
    payload = piece[64:]
    assert delay_line.packet_count(piece) == packets
    lost = sorted(data.draw(st.sets(st.integers(0, packets - 1), min_size=1)))
    arrived: dict[int, bytes] = {}
    for part in delay_line.without(piece, lost):
        _, kind, _, part_size, _, _ = delay_line.VIRTIO.unpack_from(part)
        ip, tcp, content = part[24:44], part[44:64], part[64:]
        assert (kind, part_size) == ((1, size) if len(content) > size else (0, 0))
        assert struct.unpack("!H", ip[2:4])[0] == 40 + len(content)
        assert sum(struct.unpack("!10H", ip)) % 0xFFFF == 0  # by the definition of the checksum
        pseudo_header = (*struct.unpack("!4H", ip[12:20]), 6, 20 + len(content))
        assert sum(pseudo_header) % 0xFFFF == struct.unpack("!H", tcp[16:18])[0] % 0xFFFF
        begin = (struct.unpack("!I", tcp[4:8])[0] + 100) % 2**32
        first = begin // size
        assert struct.unpack("!H", ip[4:6])[0] == (65535 + first) % 2**16
        assert bool(tcp[13] & delay_line.CWR) == (first == 0)
        assert bool(tcp[13] & delay_line.FIN_AND_PUSH) == (begin + len(content) == len(payload))
        for offset in range(0, len(content), size):
            arrived[first + offset // size] = content[offset : offset + size]
    expected = {index: payload[index * size : (index + 1) * size] for index in range(packets) if index not in lost}
    assert arrived == expected


@given(st.floats(0, 1), st.integers(0, 9), st.lists(st.integers(1, 44), min_size=1, max_size=20))
def test_packets_are_lost_alike_in_pieces_of_any_size(probability: float, seed: int, counts: list[int]) -> None:
    pieces, single = delay_line.Loss(probability, seed), delay_line.Loss(probability, seed)
    lost, begin = [], 0
    for count in counts:
        lost += [begin + index for index in pieces.lost(count)]
        begin += count
    assert lost == [index for index in range(begin) if single.lost(1)]
    if probability in (0.0, 1.0):
        assert len(lost) == begin * probability


def test_the_share_of_lost_packets_is_the_probability() -> None:
    count = 100_000
    assert len(delay_line.Loss(0.1, 0).lost(count)) == pytest.approx(0.1 * count, rel=0.05)


@pytest.mark.parametrize("loss", [0.0, 0.02])
def test_every_message_takes_the_latency_and_a_stream_arrives_whole(
    loss: float, cluster: Callable[..., testbed.Testbed]
) -> None:
    bed = cluster(2, testbed.Link(rate=1e9, latency=0.02, loss=loss))
    echo = on(bed, 1, ECHO)
    assert echo.stdout is not None
    assert echo.stdout.readline() == "listening\n"
    assert float(said(on(bed, 0, ASK, bed.address(1), 3, 100))) >= 3 * 2 * 0.02
    said(echo)
    pour(bed, 0, 1, 2_000_000)  # large pieces, some of whose packets are lost


COUNT = """
import socket, sys
listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener.bind(("", 5000))
print("listening", flush=True)
sys.stdin.read()
listener.setblocking(False)
count = 0
try:
    while listener.recv(2000):
        count += 1
except BlockingIOError:
    print(count)
"""
THROW = """
import socket, sys
thrower = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    thrower.sendto(b"packet", (sys.argv[1], 5000))
"""


def _reach(bed: testbed.Testbed) -> None:
    """Try until node 0 has reached node 1."""
    while said(on(bed, 0, CONNECT, bed.address(1), 60)) != "reached\n":
        pass


def test_packets_are_lost_as_often_as_asked(cluster: Callable[..., testbed.Testbed]) -> None:
    bed = cluster(2, testbed.Link(rate=1e8, loss=0.5))
    counter = on(bed, 1, COUNT)
    assert counter.stdout is not None
    assert counter.stdout.readline() == "listening\n"
    _reach(bed)  # addresses are asked for in packets too
    said(on(bed, 0, THROW, bed.address(1), 200))
    _reach(bed)  # so the packets before have arrived
    count = int(counter.communicate("")[0])
    assert 60 <= count <= 140  # of 200: five standard deviations


def test_nothing_passes_a_link_that_loses_everything(cluster: Callable[..., testbed.Testbed]) -> None:
    bed = cluster(2, testbed.Link(rate=1e9, loss=1.0))
    assert said(on(bed, 0, CONNECT, bed.address(1), 0.3)) == "not reached\n"
    assert bed.traffic()[1].bytes_received == 0


def test_what_makes_latency_and_loss_is_said(
    cluster: Callable[..., testbed.Testbed], capsys: pytest.CaptureFixture[str]
) -> None:
    bed = cluster(2, testbed.Link(rate=1e9, latency=0.001))
    command.show(bed, bed.measure())
    assert bed.delays_by is not None
    assert f"by {bed.delays_by}" in " ".join(capsys.readouterr().out.split())
    assert cluster(2, FAST).delays_by is None


# ---- jobs ----


def test_a_job_ends_with_an_exit_code_for_each_node(
    cluster: Callable[..., testbed.Testbed], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = cluster(2, FAST)
    assert jobs.Job([bed.start(node, ["sh", "-c", f"exit {node}"]) for node in (0, 1)]).wait() == [0, 1]
    job = jobs.Job([bed.start(0, ["sh", "-c", "exit 3"]), bed.start(1, ["sleep", "1000"])])
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.1)
    assert job.wait() == [3, -signal.SIGTERM]
    job = jobs.Job([bed.start(node, ["sleep", "1000"]) for node in (0, 1)])
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.05)
    assert len(job.running()) == 2
    job.terminate(signal.SIGINT)
    assert job.wait(0) == [-signal.SIGINT] * 2


def test_who_does_not_end_when_told_to_is_killed_with_all_its_children(
    cluster: Callable[..., testbed.Testbed], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = cluster(2, FAST)
    stubborn = "trap '' TERM; (while :; do sleep 1000; done) & echo deaf; while :; do sleep 1000; done"
    process = bed.start(0, ["sh", "-c", stubborn], stdout=subprocess.PIPE, text=True)
    stopped = bed.start(1, ["sleep", "1000"])
    stopped.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
    assert process.stdout is not None
    assert process.stdout.readline() == "deaf\n"
    handles = [os.pidfd_open(pid) for pid in descendants(process.pid)]
    assert len(handles) >= 2
    monkeypatch.setattr(jobs, "TERMINATE_SECONDS", 0.1)
    job = jobs.Job([process, stopped])
    job.terminate()
    assert job.wait(0) == [-signal.SIGKILL] * 2
    assert all_end(handles)


def test_training_runs_over_the_links(cluster: Callable[..., testbed.Testbed], tmp_path: Path) -> None:
    bed = cluster(2, testbed.Link(rate=400e6))
    words = "-m pipesgd.train --dataset digits --model mlp --hidden-sizes 64 --iterations 30 --output run"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with (tmp_path / "log").open("w") as log:
        job = bed.torchrun(
            words.split(), nproc_per_node=2, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        assert job.wait(120) == [0, 0], (tmp_path / "log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["iterations"], summary["replicas_identical"]) == (4, 30, True)
    # In a ring of four, one of the two ranks of a node sends to the other node.
    least = 30 * summary["wire_bytes_per_iteration"]
    for sent, received in bed.traffic():
        assert sent > least
        assert received > least


# ---- the end of a testbed ----


def all_end(handles: list[int]) -> bool:
    """Return True if all processes end within a minute; close their handles."""
    deadline = time.monotonic() + 60
    ended = [bool(select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]) for handle in handles]
    for handle in handles:
        os.close(handle)
    return all(ended)


def namespaces_of(pids: list[int]) -> set[str]:
    """Return the namespaces that these processes are in; a zombie, which nobody has waited for yet, is in none."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("net", "pid")}
    return found


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGKILL, -signal.SIGKILL, None),
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "error: told to stop (SIGTERM)"),
    ],
)
def test_however_it_is_ended_nothing_is_left(number: int, code: int, line: str | None, tmp_path: Path) -> None:
    if reason := obstacle(delays=False):
        pytest.skip(reason)
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *COMMAND, *FOREVER],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            start_new_session=True,
        )
    with process:
        assert process.stdout is not None
        while process.stdout.readline() != "started\n":
            assert process.poll() is None, (tmp_path / "err").read_text()
        family = descendants(process.pid)
        inside = namespaces_of(family) - namespaces_of([os.getpid()])
        assert len(inside) >= 3  # of the switch and at least one node, and the process namespace
        handles = [os.pidfd_open(pid) for pid in family]
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        assert process.wait(60) == code
    assert all_end(handles)
    everybody = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    assert not inside & namespaces_of(everybody)
    assert not Path("/sys/class/net/switch").exists()
    if line is not None:
        assert (tmp_path / "err").read_text().splitlines()[-1] == line


@pytest.mark.skipif(os.geteuid() != 0, reason="all other tests show it: they are run by an ordinary user")
def test_an_ordinary_user_can_have_one(tmp_path: Path) -> None:
    # Python, its packages and the project may be where an ordinary user has no access, so they are mounted elsewhere.
    folder = Path(tempfile.mkdtemp())
    sources = {"python": sys.base_prefix, "packages": sysconfig.get_path("purelib"), "project": str(REPOSITORY)}
    for name in sources:
        (folder / name).mkdir()
    try:
        folder.chmod(0o755)
        user = "setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs"
        trial = [*user.split(), "unshare", "--user", "--map-root-user", "true"]
        if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
            pytest.skip("ordinary users may not make namespaces here")
        python = f"{folder}/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        mount = " && ".join(f'mount --bind "{source}" "{folder}/{name}"' for name, source in sources.items())
        program = (
            "from experiments import testbed\n"
            "with testbed.Testbed(nodes=2, link=testbed.Link(rate=1e9)) as bed:\n"
            "    print(bed.measure()[0].rate > 0, bed.start(1, ['sh', '-c', 'exit 7']).wait(60))\n"
        )
        done = subprocess.run(
            [*["unshare", "--mount", "sh", "-c", f'{mount} && exec {user} "$@"', "sh"], python, "-B", "-c", program],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{folder}/project:{folder}/packages"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for name in sources:
            (folder / name).rmdir()
        folder.rmdir()
    assert (done.stdout, done.returncode) == ("True 7\n", 0), done.stderr
