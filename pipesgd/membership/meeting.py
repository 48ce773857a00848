"""The meeting of a job's machines before their ranks start: torch's rendezvous at the first machine, with words.

torch waits for the machines in calls that print nothing and that no signal can end.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from pipesgd.errors import RunError, UserInputError
from pipesgd.process import at_port, say

BACKEND = "pipesgd"
"""Name by which torch knows this rendezvous."""
PATIENCE_SECONDS = 2.0
"""Seconds after which a machine says which others it waits for: those that start together meet sooner."""
LOOK_SECONDS = 0.2
"""Seconds between two looks for the missing machines."""
CONNECT_SECONDS = 2.0
"""Seconds that one attempt to reach the first machine may take."""


class Meeting(StaticTCPRendezvous):
    """Torch's static rendezvous, at the start of which a machine says whom it waits for until all are there."""

    lines: Sequence[str] = ()
    """Lines to print once somebody is waited for, such as the missing machines' commands."""

    def get_backend(self) -> str:
        """Return the name by which torch has asked for this rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store in which the agents of all machines meet, and this machine's number among them.

        Raises:
            RunError: a machine did not come in time, or the first one ended the job.
            UserInputError: another machine has the same number.
        """
        if self._store is None:
            self._store = self._meet()
        return super().next_rendezvous()

    def _meet(self) -> dist.TCPStore:
        until = time.monotonic() + self.timeout.total_seconds()
        if self.rank > 0:
            self._wait(self._first_is_missing, until)
        place = at_port(self.master_addr, self.master_port)
        try:
            store = dist.TCPStore(
                self.master_addr,
                self.master_port,
                is_master=self.rank == 0,
                timeout=self.timeout,
                wait_for_workers=False,
                multi_tenant=True,  # torch's agent opens it again
            )
        except dist.DistError as failure:
            why = str(failure).partition("\n")[0]
            raise RunError(f"the store at {place} cannot be opened (is another job there?): {why}") from failure
        here = dist.PrefixStore(f"machines of {self.run_id}", store)
        own = f"{socket.gethostname()}, process {os.getpid()}"

        def missing() -> str:
            found = here.get(str(self.rank)).decode()
            if found != own:
                raise UserInputError(f"node-rank must differ between machines; got {self.rank} here and on {found}")
            away = [number for number in range(self.world_size) if not here.check([str(number)])]
            names = ", ".join(map(str, away[:8])) + (", ..." if len(away) > 8 else "")
            return f"{len(away)} of {self.world_size} machines at {place} (--node-rank {names})" if away else ""

        try:
            here.set(str(self.rank), own)
            self._wait(missing, until)
        except dist.DistError as failure:
            raise RunError(f"the machine at {place} has ended the job, or cannot be reached any more") from failure
        return store

    def _first_is_missing(self) -> str:
        """Return the first machine's place if it cannot be reached yet."""
        try:
            socket.create_connection((self.master_addr, self.master_port), CONNECT_SECONDS).close()
        except OSError:  # nobody listens, or the name is not known yet
            return f"the first of {self.world_size} machines at {at_port(self.master_addr, self.master_port)}"
        return ""

    def _wait(self, missing: Callable[[], str], until: float) -> None:
        """Wait until nothing is missing, and say what is after a while and whenever that changes."""
        said, speak = "", time.monotonic() + PATIENCE_SECONDS
        while what := missing():
            if what != said and time.monotonic() >= speak:
                for line in (f"waiting for {what}", *(() if said else self.lines)):
                    say(line)
                said = what
            if time.monotonic() >= until:
                raise RunError(f"waited {self.timeout.total_seconds():g} s in vain for {what}")
            time.sleep(LOOK_SECONDS)


def meeting(parameters: RendezvousParameters) -> Meeting:
    """Return the rendezvous that torch asks for by these ``parameters``."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    own = Meeting(
        host,
        port,
        int(parameters.config["rank"]),
        parameters.max_nodes,
        parameters.run_id,
        int(parameters.config["timeout"]),
    )
    own.lines = parameters.config["lines"]
    return own
