"""A store without a server: every member keeps what the others share, for one generation of members."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from pipesgd.elastic.members import Members

PAUSE_SECONDS = 0.001
"""Seconds between two looks at a value that somebody waits for."""


class SharedValues(dist.Store):
    """Values that the members of a generation tell each other over their control connections.

    Every call raises ``Interrupted`` once a change of members has begun, since what is missing may never come then.
    """

    def __init__(self, members: Members, generation: int):
        super().__init__()
        self._members = members
        self._generation = generation

    def set(self, key: str, value: str | bytes) -> None:
        self._members.check()
        text = value if isinstance(value, str) else bytes(value).decode()
        self._members.share(self._generation, key, text)

    def check(self, keys: Sequence[str]) -> bool:
        if len(self._members.shared(self._generation, keys)) == len(set(keys)):
            return True  # also if a change has begun: who has shared the last value may have ended since
        self._members.check()
        return False

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        found = self._members.shared(self._generation, keys)
        return [found[key].encode() for key in keys]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout = timeout or self.timeout  # type: ignore[attr-defined]  # not in torch's stubs
        end = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() >= end:
                raise dist.DistStoreError(f"wait timed out for {keys}")
            time.sleep(PAUSE_SECONDS)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Return the value of ``key``, or what is ``expected`` if there is none; nothing is ever set."""
        return self._members.shared(self._generation, [key]).get(key, expected).encode()

    def delete_key(self, key: str) -> bool:
        self._members.share(self._generation, key, None)
        return True

    def clone(self) -> SharedValues:
        return SharedValues(self._members, self._generation)
