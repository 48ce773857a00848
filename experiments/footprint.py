"""Memory that this process takes, as Linux counts it: the same for every way to train."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Value that makes the kernel begin a new peak of the resident memory, as proc(5) says."""


class PeakMemory:
    """The most resident memory that this process has had since now, beyond what it has now.

    Memory that was freed before is first given back to the system, so that its use later counts.
    """

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        self._begin = _status_bytes("VmRSS")

    def nbytes(self) -> int:
        """Return the bytes so far."""
        return max(0, _status_bytes("VmHWM") - self._begin)


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None, f"Linux has no {name} in {STATUS}"
    return 1024 * int(found[1])
