"""A process whose parent, torchrun's agent, died before the process could look for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ORPHAN = """
import os, sys, time
while os.getppid() == int(os.environ["FORMER"]):
    time.sleep(0.01)
print(os.getppid(), flush=True)
from pipesgd import process
process.begin()
time.sleep(60)
print("alive")
"""


@pytest.mark.slow
def test_a_rank_whose_agent_died_before_it_could_look_ends_too() -> None:
    """The shell starts it and ends: only this test still reads its output."""
    script = 'FORMER=$$ "$0" -c "$1" 2>&1 & exit 0'
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1"}
    words = ["sh", "-c", script, sys.executable, ORPHAN]
    # run() returns when the last process that writes to the pipe has ended: the orphan.
    said = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=90).stdout.splitlines()
    if said[0] != "1":
        pytest.skip("here orphans are adopted by another process than the first")
    assert said[1:] == ["error: rank 1: torchrun's agent has died"]
