"""Measure a link: a round trip of a small message, and the rate of one TCP stream. This runs on the nodes.

    python probe.py serve                 prints the port that it listens on; then one line of JSON: {"rate": ...}
    python probe.py ask ADDRESS PORT      prints one line of JSON, {"round_trip": ..., ...}, and sends until stopped

It uses only the standard library, so that it starts fast. Rates are bit/s of payload, times are seconds.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import struct
import sys
import time

MESSAGE = 64
FEWEST_ROUND_TRIPS, ROUND_TRIPS_SECONDS = 5, 0.05
STREAM_SECONDS = 0.2
SLOW_START_ROUND_TRIPS = 12
PATIENCE_SECONDS = 30.0
"""Seconds to wait for anything that must come from the other side."""
FEWEST_ARRIVALS, LONGEST_STREAM_SECONDS = 12, 5.0
"""Number of pieces to watch on a slow link, and the most seconds to wait for them."""


def serve() -> None:
    """Answer small messages, then measure the stream that follows on a second connection."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while message := connection.recv(MESSAGE):
                connection.sendall(message)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(PATIENCE_SECONDS)
            print(json.dumps({"rate": receive(connection)}), flush=True)
            # The sender is cut off, since the data that it has queued would keep the link busy for seconds.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def receive(connection: socket.socket) -> float | None:
    """Return the stream's rate, measured after the seconds that its first 8 bytes say; None if too little arrives."""
    (skipped,) = struct.unpack("d", connection.recv(8, socket.MSG_WAITALL))
    buffer = bytearray(1 << 20)
    begin = time.perf_counter()
    arrivals: list[tuple[float, int]] = []
    total = 0
    while True:
        count = connection.recv_into(buffer)
        now = time.perf_counter() - begin
        if not count:
            break
        if now >= skipped:
            # The first arrival only starts the clock: nobody knows how long it took.
            total += count if arrivals else 0
            arrivals.append((now, total))
        enough = now >= skipped + STREAM_SECONDS and len(arrivals) >= FEWEST_ARRIVALS
        if enough or now >= skipped + LONGEST_STREAM_SECONDS:
            break
    return 8 * total / (arrivals[-1][0] - arrivals[0][0]) if len(arrivals) > 1 else None


def ask(address: str, port: int) -> None:
    """Measure round trips, then send until stopped."""
    times: list[float] = []
    with socket.create_connection((address, port), PATIENCE_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin = time.perf_counter()
        while len(times) < FEWEST_ROUND_TRIPS or time.perf_counter() - begin < ROUND_TRIPS_SECONDS:
            sent = time.perf_counter()
            connection.sendall(bytes(MESSAGE))
            connection.recv(MESSAGE, socket.MSG_WAITALL)
            times.append(time.perf_counter() - sent)
        algorithm = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    round_trip = statistics.median(times)
    print(json.dumps({"round_trip": round_trip, "congestion_control": algorithm}), flush=True)
    with socket.create_connection((address, port), PATIENCE_SECONDS) as connection, contextlib.suppress(OSError):
        connection.sendall(struct.pack("d", 0.05 + SLOW_START_ROUND_TRIPS * round_trip))
        while True:
            connection.sendall(bytes(1 << 20))


if __name__ == "__main__":
    try:
        serve() if sys.argv[1] == "serve" else ask(sys.argv[2], int(sys.argv[3]))
    except OSError as failure:
        print(json.dumps({"error": str(failure)}), flush=True)
