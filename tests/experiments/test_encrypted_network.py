"""Packets in a tcpdump file are counted by protocol; the training itself needs root and is left to the experiment."""

from __future__ import annotations

import struct

import pytest

from experiments.encrypted_network import TOOLS, find_tools, packets
from pipesgd.errors import UserInputError


def recorded(*protocols: int, payload: bytes = b"") -> bytes:
    """Return a file of tcpdump with one IPv4 packet of each of these protocols."""
    file = struct.pack("=IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262144, 1)
    for protocol in protocols:
        packet = bytes(12) + b"\x08\x00" + bytes(9) + bytes([protocol]) + bytes(10) + payload
        file += struct.pack("=IIII", 0, 0, len(packet), len(packet)) + packet
    return file


def test_packets_are_counted_by_protocol() -> None:
    assert packets(recorded(6, 17, 17, 1, payload=b"x" * 1400)) == {"TCP": 1, "UDP": 2, "protocol 1": 1}
    assert packets(recorded()) == {}


def test_a_file_that_is_cut_off_ends_with_the_last_whole_packet_header() -> None:
    assert packets(recorded(6, 6)[:-40]) == {"TCP": 1}


def test_missing_tools_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserInputError) as caught:
        find_tools()
    assert str(caught.value) == (
        f"encrypted_network must have {', '.join(TOOLS)}; missing: {', '.join(TOOLS)} "
        "(apt-get install wireguard-go wireguard-tools tcpdump)"
    )
