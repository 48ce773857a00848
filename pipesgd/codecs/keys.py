"""Keys of random numbers: the same on every machine."""

from __future__ import annotations

import hashlib
import struct


def mixed(*numbers: int) -> int:
    """32 bits that depend on all bits of ``numbers``, each below 2**64."""
    return int.from_bytes(hashlib.blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=4).digest(), "little")
