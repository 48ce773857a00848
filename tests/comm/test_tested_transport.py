"""The variable by which all exchanges are tested over another transport is heeded."""

from __future__ import annotations

import os

import pytest
from _ranks import run_ranks

from pipesgd.comm.connections import Connections
from pipesgd.comm.transport import TorchLinks
from pipesgd.ranks import Ranks
from pipesgd.sections import Wire

NAME = os.environ.get("PIPESGD_TESTED_TRANSPORT", "tcp")


def _kind(ranks: Ranks) -> bool:
    connections = Connections("ring", ranks, timeout=ranks.timeout)
    is_gloo = isinstance(connections._links, TorchLinks)
    connections.wait_for_all()  # else one may close before the other is connected
    connections.close()
    return is_gloo


@pytest.mark.slow
def test_ranks_are_connected_by_the_transport_that_is_tested() -> None:
    assert Wire().transport_on("cpu") == NAME
    assert run_ranks(2, _kind) == [NAME == "gloo"] * 2
