"""Links with latency and loss where the kernel has no ``netem``: frames are held on their way between TAP devices.

    python delay_line.py NODES LATENCY LOSS      makes node<i> and n<i> for every node, says "ready", and works

Frames that the kernel sends into ``node<i>`` (which becomes the node's eth0) come out of ``n<i>``, a port of the
switch, LATENCY seconds later; each of their packets is lost with the probability LOSS. The other direction passes at
once.

As through a veth pair, many packets of a TCP stream pass in one piece, which makes this fast enough: a frame has a
virtio header that says how to cut it into packets, and the kernel counts it as those. A frame is cut only where a
packet in it is lost. One process serves all links, with only the standard library, so that it starts fast.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import select
import struct
import sys
from collections import deque
from collections.abc import Iterator
from time import monotonic

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
CHECKSUM_AND_TCP_SEGMENTS = 0x01 | 0x02 | 0x08
"""Flags for frames that we take from the kernel unfinished: without a checksum, and TCP over IPv4 (with ECN) uncut."""
LARGEST_FRAME = 10 + 14 + 4 + 65535
BATCH = 16
"""Frames read from one device before the other devices, and the frames that are due, get their turn."""

VIRTIO = struct.Struct("=BBHHHH")
"""Header: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset; a gso_type of 0 means one packet."""
IP = VIRTIO.size + 14
FIN_AND_PUSH, CWR = 0x09, 0x80


class Loss:
    """The losses among one node's packets: seeded with the node's number, so the same in every run."""

    def __init__(self, probability: float, seed: int):
        self._probability = probability
        self._random = random.Random(seed)
        self._passing = self._draw()
        """Packets that pass before the next one is lost."""

    def _draw(self) -> float:
        if self._probability in (0.0, 1.0):
            return math.inf if self._probability == 0.0 else 0
        passing = math.log(1.0 - self._random.random()) / math.log1p(-self._probability)
        return passing if passing == math.inf else int(passing)

    def lost(self, count: int) -> list[int]:
        """Return the indices of the lost ones among the next ``count`` packets."""
        indices = []
        while self._passing < count:
            indices.append(int(self._passing))
            self._passing += 1 + self._draw()
        self._passing -= count
        return indices


def packet_count(frame: bytes) -> int:
    """Return how many packets ``frame`` is on a real cable."""
    _, kind, _, size, transport, _ = VIRTIO.unpack_from(frame)
    return 1 if kind == 0 else -(-(len(frame) - _payload_at(frame, transport)) // size)


def without(frame: bytes, lost: list[int]) -> Iterator[bytes]:
    """Yield the frames that are left of ``frame`` without its ``lost`` packets, as the kernel would have cut it."""
    first = 0
    count = packet_count(frame)
    for end in (*lost, count):
        if end > first:
            yield _cut(frame, first, end, count)
        first = end + 1


def _payload_at(frame: bytes, transport: int) -> int:
    tcp = VIRTIO.size + transport
    return tcp + (frame[tcp + 12] >> 4) * 4


def _cut(frame: bytes, first: int, end: int, count: int) -> bytes:
    """Return packets ``first`` to ``end`` (not included) of the ``count`` in ``frame``."""
    if first == 0 and end == count:
        return frame
    flags, kind, length, size, transport, checksum = VIRTIO.unpack_from(frame)
    tcp, payload_at = VIRTIO.size + transport, _payload_at(frame, transport)
    payload = frame[payload_at + first * size : payload_at + end * size]
    head = bytearray(frame[:payload_at])
    if len(payload) <= size:
        kind = size = 0
    VIRTIO.pack_into(head, 0, flags, kind, length, size, transport, checksum)
    (identification,) = struct.unpack_from("!H", head, IP + 4)
    struct.pack_into("!H", head, IP + 2, payload_at - IP + len(payload))
    struct.pack_into("!H", head, IP + 4, (identification + first) & 0xFFFF)
    struct.pack_into("!H", head, IP + 10, 0)
    struct.pack_into("!H", head, IP + 10, ~_sum(head[IP:tcp]) & 0xFFFF)
    (sequence,) = struct.unpack_from("!I", head, tcp + 4)
    struct.pack_into("!I", head, tcp + 4, (sequence + first * VIRTIO.unpack_from(frame)[3]) & 0xFFFFFFFF)
    head[tcp + 13] &= ~((FIN_AND_PUSH if end < count else 0) | (CWR if first > 0 else 0))
    # The kernel will add the rest of the packet to this sum of addresses, protocol and length.
    pseudo_header = head[IP + 12 : IP + 20] + struct.pack("!HH", 6, payload_at - tcp + len(payload))
    struct.pack_into("!H", head, tcp + 16, _sum(pseudo_header))
    return bytes(head) + payload


def _sum(words: bytes | bytearray) -> int:
    """Return the ones' complement sum of 16-bit words, as in RFC 1071."""
    total = sum(struct.unpack(f"!{len(words) // 2}H", words))
    return (total - 1) % 0xFFFF + 1 if total else 0


def open_tap(name: str) -> int:
    """Return the file descriptor of a new TAP device."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, CHECKSUM_AND_TCP_SEGMENTS)
    return device


def send(device: int, frame: bytes) -> None:
    """Hand ``frame`` to the kernel; a frame that it refuses (the interface is down) is lost, as on a cable."""
    try:  # noqa: SIM105 (this is called for every frame, and a context manager takes as long as the rest)
        os.write(device, frame)
    except OSError:
        pass


def work(ends: list[tuple[int, int]], latency: float, probability: float) -> None:
    """Move frames forever between the two ends, the node's and the switch's, of every link."""
    other = dict(ends) | {switch: node for node, switch in ends}
    losses = {node: Loss(probability, index) for index, (node, _) in enumerate(ends)}
    held: deque[tuple[float, int, bytes]] = deque()  # all are held equally long: first in, first out
    while True:
        ready, _, _ = select.select(other, [], [], max(0.0, held[0][0] - monotonic()) if held else None)
        now = monotonic()
        while held and held[0][0] <= now:
            _, device, frame = held.popleft()
            send(device, frame)
        for device in ready:
            for _ in range(BATCH):
                try:
                    frame = os.read(device, LARGEST_FRAME)
                except BlockingIOError:
                    break
                if device not in losses:
                    send(other[device], frame)
                    continue
                lost = losses[device].lost(packet_count(frame)) if probability else ()
                for left in without(frame, lost) if lost else (frame,):
                    held.append((monotonic() + latency, other[device], left))


if __name__ == "__main__":
    try:
        pairs = [(open_tap(f"node{index}"), open_tap(f"n{index}")) for index in range(int(sys.argv[1]))]
    except OSError as failure:
        sys.exit(print(failure, flush=True))
    print("ready", flush=True)
    work(pairs, float(sys.argv[2]), float(sys.argv[3]))
