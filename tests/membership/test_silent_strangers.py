"""Connections that send nothing do not reach the store, and a job among them ends, with a slow name server; as root."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from _silent_connections import UNPERMITTED, play
from conftest import REPOSITORY

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a network and a name server of its own")


@pytest.mark.slow
@needs_root
def test_the_agents_socket_shows_it_no_silent_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as agents, socket.create_server(("127.0.0.1", 0)) as others:
        port = agents.getsockname()[1]
        code = f"from pipesgd.membership.listening import hold_back_silent_connections as f; f({port})"
        subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=60)
        option = (socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT)
        assert (agents.getsockopt(*option) > 1000, others.getsockopt(*option)) == (True, 0)


TRAINING = "--dataset digits --model mlp --hidden-sizes 16 --iterations 400 --checkpoint-iterations 20"


@needs_root
@pytest.mark.slow
def test_a_job_ends_among_silent_strangers_with_a_slow_name_server(tmp_path: Path) -> None:
    """The job used to come to the next checkpoint and no further: the store took 9 s to answer."""
    code, lines = play(tmp_path, "files dns", 2.0, TRAINING.split())
    text = "\n".join(line for _, line in lines)
    if code == UNPERMITTED:
        pytest.skip("needs namespaces of its own")
    assert code == 0, text
    assert text.count("warning: a look-up of the name of 127.0.0.1 takes more than") == 1
    assert text.count("RES_OPTIONS=attempts:0") == 1
    assert "connections of strangers: 1500" in text, "to the store's port, and two of each rank's gloo"
