"""Sockets of the store in which ranks meet, kept from strangers that connect and send nothing."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from pipesgd.errors import UserInputError
from pipesgd.process import at_port, say

QUIET_SECONDS = 3600
"""Seconds for which a connection that sends nothing stays with the kernel, which does not show it to the store."""

_LISTENING = "0A"
_PIDFD_GETFD = 438  # the same number on all architectures


def hold_back_silent_connections(port: int) -> None:
    """Keep connections that send nothing from the store of torchrun's agent, which is this process's parent.

    The agent's socket is changed in place. Linux allows that to root, and to others unless it restricts ptrace; where
    it does not, or where another machine's agent holds the store, nothing is done.
    """
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return
    agent = os.getppid()
    with suppress(OSError):
        wanted = {f"socket:[{inode}]" for inode in _listening_at(port)}
        pidfd = os.pidfd_open(agent)
        try:
            for one in Path(f"/proc/{agent}/fd").iterdir():
                if str(one.readlink()) in wanted:
                    shared = ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, int(one.name), 0)
                    if shared >= 0:
                        with socket.socket(fileno=shared) as listener:
                            _hold_back_silent(listener)
        finally:
            os.close(pidfd)


def listener_at(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at the address of ``host`` alone, and shows no connection that sent nothing (Linux).

    Returns:
        The socket; None if that address is none of this machine's, is taken, or may be another one for other machines.

    Raises:
        UserInputError: ``host`` is unknown.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as problem:
        text = f"MASTER_ADDR must be a name or an address of rank 0's machine; got {host!r} ({problem})"
        raise UserInputError(text) from None
    if not _is_loopback(host) and _is_loopback(str(place[0])):
        return None  # other machines may know the name by another address
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _hold_back_silent(listener)
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
    except OSError as problem:
        listener.close()
        if problem.errno == errno.EADDRNOTAVAIL:
            say(f"the store at {at_port(host, port)} listens at all addresses: that one is none of this machine's own")
        return None
    return listener


def _listening_at(port: int) -> list[str]:
    """Return the inodes of the TCP sockets that listen at ``port`` in this network namespace."""
    tables = [Path("/proc/net", name).read_text(encoding="ascii") for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [line[9] for line in lines if line[3] == _LISTENING and line[1].endswith(f":{port:04X}")]


def _hold_back_silent(listener: socket.socket) -> None:
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, QUIET_SECONDS)


def _is_loopback(host: str) -> bool:
    """Return True if ``host`` is loopback's on every machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
